"""Any submission becomes the released notebook with the student's words, in the student's order."""

import base64
import copy

import nbformat
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nbformat import v4
from nbgrader.nbgraderformat import MetadataValidator

from course_lib.learner import what_counts as module
from course_lib.learner.what_counts import is_run, rebuild

STUB = "def double(x):\n    raise NotImplementedError"
RIGHT = "def double(x):\n    return 2 * x"
TEST = "assert double(two) == 4"
WRITTEN = {"grade": True, "solution": True, "points": 1}


def tracked(grade_id: str, **kind):
    flags = {"grade": False, "solution": False, "locked": False, "task": False, "schema_version": 3}
    return {"nbgrader": {**flags, "grade_id": grade_id, **kind}}


def notebook(solution: str = STUB):
    """Return an assignment, or with ``STUB`` its released version."""
    return v4.new_notebook(
        metadata={"kernelspec": {"name": "python3", "display_name": "P", "language": "python"}},
        cells=[
            v4.new_markdown_cell("Welcome", id="intro", metadata=tracked("intro", locked=True)),
            v4.new_code_cell("two = 2", id="setup"),
            v4.new_code_cell(solution, id="write", metadata=tracked("write", solution=True)),
            v4.new_code_cell(
                TEST, id="test", metadata=tracked("test", grade=True, locked=True, points=2)
            ),
            v4.new_markdown_cell("Your answer", id="why", metadata=tracked("why", **WRITTEN)),
            v4.new_markdown_cell("The end", id="end"),
        ],
    )


def answered(code: str = RIGHT):
    nb = notebook(code)
    nb.cells[4].source = "Because"
    return nb


def sources(nb) -> list[str]:
    return [cell.source for cell in nb.cells]


def insert(nb, index: int, *cells):
    nb.cells[index:index] = cells
    return nb


def test_answers_are_taken_over_and_nothing_else_is() -> None:
    submitted = answered()
    submitted.metadata = {"kernelspec": {"name": "evil"}, "extra": 1}
    for cell in submitted.cells:
        cell.metadata["tags"] = ["skip-execution"]
        cell.metadata["editable"] = True
    submitted.cells[3].outputs = [v4.new_output("execute_result", {"text/plain": "3"})]
    released, before = notebook(), copy.deepcopy(submitted)
    rebuilt = rebuild(released, submitted)
    expected = notebook(RIGHT)
    expected.cells[4].source = "Because"
    assert rebuilt == expected
    assert submitted == before and released == notebook()


@pytest.mark.parametrize("at", range(7))
def test_added_cells_keep_their_place(at: int) -> None:
    added = [v4.new_code_cell("help = 1", id="help"), v4.new_markdown_cell("note", id="note")]
    added[0].metadata = tracked("mine", grade=True, solution=False, points=99)
    added[0].outputs = [v4.new_output("stream", text="noise")]
    added[1].attachments = {"a.png": {"image/png": "AAAA"}}
    rebuilt = rebuild(notebook(), insert(answered(), at, *copy.deepcopy(added)))
    assert sources(rebuilt) == sources(insert(answered(), at, *added))
    for cell in rebuilt.cells[at : at + 2]:
        assert cell.metadata == {} and "attachments" not in cell and not cell.get("outputs")
        assert cell.id not in ("help", "note")
    nbformat.validate(rebuilt)


def test_a_stub_that_comes_back_overrides_nothing() -> None:
    submitted = insert(answered(), 3, v4.new_code_cell(RIGHT))
    del submitted.cells[2]  # the solution cell
    rebuilt = rebuild(notebook(), submitted)
    assert sources(rebuilt)[2:5] == [STUB, RIGHT, TEST], "it comes back above"
    (note,) = rebuilt.metadata["rebuild"]
    assert note == "the cell write is missing, so the released cell is back"
    for stub in ([], notebook().cells[2:3]):  # deleted, or left below
        submitted = insert(notebook(), 1, v4.new_code_cell(RIGHT))
        submitted.cells[3:4] = stub
        rebuilt = rebuild(notebook(), submitted)
        assert sources(rebuilt)[1:5] == [RIGHT, "two = 2", "", TEST]


def test_a_deleted_check_runs_at_the_end() -> None:
    submitted = insert(answered(), 6, v4.new_code_cell(RIGHT))
    del submitted.cells[3]
    assert sources(rebuild(notebook(), submitted))[-2:] == [RIGHT, TEST]


@pytest.mark.parametrize("same_id", [True, False])
def test_a_split_solution_and_its_copies_count_in_their_places(same_id: bool) -> None:
    submitted = answered("def helper(x):\n    return 2 * x")
    half = copy.deepcopy(submitted.cells[2])
    half.source = "def double(x):\n    return helper(x)"
    if not same_id:
        half.id = "half"
    rebuilt = rebuild(notebook(), insert(submitted, 3, half))
    assert sources(rebuilt) == sources(submitted)
    (note,) = rebuilt.metadata["rebuild"]
    assert note.startswith("cell 4 is another copy of write, so it counts")


def test_a_split_answer_is_joined() -> None:
    submitted = answered()
    half = copy.deepcopy(submitted.cells[4])
    half.source = "of this."
    rebuilt = rebuild(notebook(), insert(submitted, 5, half))
    assert rebuilt.cells[4].source == "Because\n\nof this."
    assert len(rebuilt.cells) == 6
    same = copy.deepcopy(submitted.cells[4])
    assert rebuild(notebook(), insert(answered(), 5, same)).cells[4].source == "Because"
    submitted.cells[4].source = notebook().cells[4].source  # the copy was written in
    assert rebuild(notebook(), submitted).cells[4].source == "of this."


@pytest.mark.parametrize("at", [4, 5])
@pytest.mark.parametrize("new", [v4.new_markdown_cell, v4.new_code_cell])
def test_an_answer_in_a_cell_beside_is_left_for_a_person(at: int, new) -> None:
    rebuilt = rebuild(notebook(), insert(notebook(RIGHT), at, new("It is linear.")))
    (answer,) = (cell for cell in rebuilt.cells if cell.id == "why")
    assert answer.source.startswith("Your answer\n\n*The student left this cell as it was.")
    elsewhere = insert(notebook(RIGHT), 0, new("It is linear."))
    assert rebuild(notebook(), elsewhere).cells[5].source == "Your answer"


def test_what_became_of_a_locked_cell_is_kept_behind_it() -> None:
    released = notebook()
    released.cells[1].metadata = tracked("setup", locked=True)
    submitted = copy.deepcopy(released)
    submitted.cells[1].source = "two = 2\nimport math"
    submitted.cells[3].source = "print(2)"
    rebuilt = rebuild(released, submitted)
    assert sources(rebuilt)[1:5] == ["two = 2", "two = 2\nimport math", STUB, TEST]
    assert [note[:6] for note in rebuilt.metadata["rebuild"]] == ["cell 2", "cell 4"]


PNG = b"\x89PNG\r\n\x1a\n and so on"


def test_pictures_in_answers_are_kept_and_others_are_named() -> None:
    text = base64.b64encode(PNG).decode()
    submitted = answered()
    submitted.cells[4].source = "![a](attachment:a.png) ![b](<my sketch.jpg>) <img src='c.png'>"
    submitted.cells[4].attachments = {
        "a.png": {"image/png": text},
        "d.svg": {"image/svg+xml": "<svg onload='alert(1)'/>"},
        "e.png": {"image/png": base64.b64encode(b"<script>").decode()},
    }
    beside = {"c.png": PNG, "my sketch.jpg": b"\xff\xd8\xff"}
    rebuilt = rebuild(notebook(), submitted, beside)
    assert rebuilt.cells[4].source == (
        "![a](attachment:a.png) ![b](attachment:my_sketch.jpg) ![](attachment:c.png)"
    )
    assert sorted(rebuilt.cells[4].attachments) == ["a.png", "c.png", "my_sketch.jpg"]
    assert rebuilt.cells[4].attachments["c.png"] == {"image/png": text}
    assert "a picture in cell 5 was left out" in rebuilt.metadata["rebuild"][0]
    nbformat.validate(rebuilt)


def test_a_name_that_only_a_cell_to_explore_defines_is_told() -> None:
    released = insert(notebook(), 2, v4.new_code_cell("", id="explore"))
    released.cells[2].metadata = {"tags": ["explore"]}
    submitted = copy.deepcopy(released)
    submitted.cells[2].source = "def helper(x): return 2 * x"
    submitted.cells[3].source = "def double(x): return helper(x)"
    rebuilt = rebuild(released, submitted)
    assert not is_run(rebuilt.cells[2])
    (note,) = rebuilt.metadata["rebuild"]
    assert "what only it defines: helper." in note
    submitted.cells[3].source = "def double(x):\n    helper = x\n    return helper * 2"
    assert "rebuild" not in rebuild(released, submitted).metadata


def test_the_students_order_counts() -> None:
    submitted = answered()
    submitted.cells.reverse()
    assert sources(rebuild(notebook(), submitted)) == sources(submitted)


def test_of_two_checks_the_last_counts_and_a_copy_of_a_stub_goes() -> None:
    submitted = answered()
    check, stub = copy.deepcopy(submitted.cells[3]), notebook().cells[2]
    check.id, stub.id = "again", "pasted"
    rebuilt = rebuild(notebook(), insert(submitted, 6, stub, check))
    assert sources(rebuilt) == ["Welcome", "two = 2", RIGHT, "Because", "The end", TEST]
    assert "rebuild" not in rebuilt.metadata


@pytest.mark.parametrize("lost", ["nbgrader", "grade_id"])
def test_a_solution_that_lost_its_name_is_known_by_its_cell_id(lost: str) -> None:
    submitted = answered()
    for cell in submitted.cells:
        if lost == "nbgrader":
            cell.metadata.pop("nbgrader", None)
        elif "nbgrader" in cell.metadata:
            cell.metadata.nbgrader.grade_id += "_renamed"
    assert rebuild(notebook(), submitted) == rebuild(notebook(), answered())


def test_without_ids_and_names_the_words_are_kept_and_released_ones_not_repeated() -> None:
    submitted = answered()
    for cell in submitted.cells:
        cell.metadata = {}
        del cell["id"]
    submitted.nbformat_minor = 4
    rebuilt = rebuild(notebook(), submitted)
    assert sources(rebuilt) == [
        *("Welcome", "two = 2", STUB, RIGHT, TEST),
        *("Your answer" + module._ELSEWHERE, "Because", "The end"),
    ]
    nbformat.validate(rebuilt)


def test_a_released_cell_that_is_free_to_edit_is_taken_over_by_id() -> None:
    submitted = answered()
    submitted.cells[1].source = "two = 2\nimport math"
    assert sources(rebuild(notebook(), submitted)) == sources(submitted)
    submitted.cells[1] = v4.new_markdown_cell("two = 2", id="setup")
    rebuilt = rebuild(notebook(), submitted)  # as text it would not run
    assert [(c.cell_type, c.source) for c in rebuilt.cells[1:3]] == [
        ("code", "two = 2"),
        ("markdown", "two = 2"),
    ]


def test_a_cell_to_play_with_takes_what_was_tried_and_keeps_its_tag() -> None:
    released = insert(notebook(), 3, v4.new_code_cell("double(1)", id="explore"))
    released.cells[3].metadata = {"tags": ["explore"]}
    submitted = copy.deepcopy(released)
    submitted.cells[3].source = "double(7)"
    submitted.cells[3].metadata = {}
    rebuilt = rebuild(released, submitted)
    assert sources(rebuilt) == sources(submitted)
    assert rebuilt.cells[3].metadata == {"tags": ["explore"]}  # or the grader would run it
    del submitted.cells[3]
    assert rebuild(released, submitted) == released


def test_what_is_too_much_is_left_out_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CELLS", 3)
    monkeypatch.setattr(module, "MAX_SOURCE", 100)
    monkeypatch.setattr(module, "MAX_TOTAL", 240)
    submitted = answered("x" * 101)
    insert(submitted, 6, *(v4.new_code_cell(f"n = {n}") for n in range(5)))
    rebuilt = rebuild(notebook(), submitted)
    assert sources(rebuilt) == [*sources(notebook())[:4], "Because", *sources(submitted)[5:9]]
    assert rebuilt.metadata["rebuild"] == [
        "cell 3 is longer than 100 bytes, so it was left out",
        "cell 10 exceeds the limit of 3 added cells, so it was left out",
        "cell 11 exceeds the limit of 3 added cells, so it was left out",
    ]
    submitted = insert(answered(), 6, *(v4.new_code_cell(char * 99) for char in "ab"))
    submitted.cells += [v4.new_code_cell("é" * 49), v4.new_raw_cell("raw"), v4.new_code_cell(" \n")]
    rebuilt = rebuild(notebook(), submitted)
    assert sources(rebuilt) == sources(submitted)[:7]
    assert [note.partition(" ")[2] for note in rebuilt.metadata["rebuild"]] == [
        "8 exceeds the limit of 240 bytes in all cells together, so it was left out",
        "9 exceeds the limit of 240 bytes in all cells together, so it was left out",
        "10 is neither code nor Markdown, so it was left out",
    ]


def test_notes_are_few_and_in_our_own_words() -> None:
    evil = "<script>alert(1)</script>"
    submitted = answered()
    for _ in range(200):
        cell = copy.deepcopy(submitted.cells[3])
        cell.source = cell.id = cell.metadata.nbgrader.extra = evil
        submitted.cells.append(cell)
    rebuilt = rebuild(notebook(), submitted)
    assert len(rebuilt.metadata["rebuild"]) == module.MAX_NOTES + 1
    assert rebuilt.metadata["rebuild"][-1] == "and 180 more"
    assert evil not in nbformat.writes(rebuilt)


def test_text_that_no_file_can_hold_is_made_harmless() -> None:
    submitted = answered("x = '\ud800\0'")
    rebuilt = rebuild(notebook(), submitted)
    assert rebuilt.cells[2].source == "x = '??'"
    nbformat.writes(rebuilt).encode()


json = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
names = st.sampled_from(["intro", "setup", "write", "test", "why", "end", "added-1", "other", ""])
texts = st.sampled_from([STUB, RIGHT, TEST, "two = 2", "The end", "Because", "mine", "", " "])
cells = st.fixed_dictionaries(
    {},
    optional={
        "cell_type": st.one_of(st.sampled_from(["code", "markdown", "raw"]), json),
        "id": st.one_of(names, json),
        "source": st.one_of(texts, st.text(max_size=5), json),
        "metadata": st.one_of(
            st.just({}),
            json,
            st.builds(tracked, names, grade=st.booleans(), solution=st.booleans()),
            st.fixed_dictionaries({"nbgrader": json}),
        ),
        "outputs": json,
        "attachments": json,
    },
)
submissions = st.one_of(
    st.fixed_dictionaries({"cells": st.one_of(st.lists(cells, max_size=10), json)}),
    st.dictionaries(st.text(max_size=5), json, max_size=2),
    # Shuffled and partly repeated versions of a real one, between arbitrary cells.
    st.builds(
        lambda picked, others: {
            "cells": [c for pair in zip(picked, others, strict=False) for c in pair]
        },
        st.lists(st.sampled_from(answered().cells), max_size=10),
        st.lists(cells, max_size=10),
    ),
)


@settings(max_examples=60)
@given(submissions)
def test_anything_becomes_a_valid_notebook_of_the_released_structure(submitted) -> None:
    released = notebook()
    rebuilt = rebuild(released, nbformat.from_dict(submitted))
    nbformat.validate(rebuilt)
    MetadataValidator().validate_nb(rebuilt)
    added = {cell.id for cell in rebuilt.cells} - {cell.id for cell in released.cells}
    kept = {cell.id: cell for cell in rebuilt.cells if cell.id not in added}
    assert len(kept) == len(released.cells) == len(rebuilt.cells) - len(added)
    for old in released.cells:
        new = kept[old.id]
        assert (old.id, old.cell_type, old.metadata) == (new.id, new.cell_type, new.metadata)
        if old.id in ("intro", "test"):
            assert old.source == new.source
    assert all(not c.metadata and c.source.strip() for c in rebuilt.cells if c.id in added)
    assert "rebuild" not in rebuilt.metadata or all(rebuilt.metadata["rebuild"])
    again = rebuild(released, rebuilt)
    assert again.cells == rebuilt.cells
