"""Copies are found under any names; released code, and code that all wrote, is not reported."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autograder.__main__ import main
from autograder.commands.similar import similar
from autograder.similarity.compare import K, W, compare, passages, read_solution, winnow
from autograder.similarity.normalise import Symbol, normalise
from tests.helpers.course_folders import RELEASED, ROOT

pytestmark = pytest.mark.filterwarnings("ignore")

NAME = "02_data_parallel_sgd"

AVERAGE = """
def average_gradients(params, group=None):
    size = dist.get_world_size(group)
    for param in params:
        if param.grad is not None:
            dist.all_reduce(param.grad, group=group)
            param.grad /= size
"""
COPIED = '''
# all mine
def average_gradients(p: list, group = None) -> None:
    """I wrote this."""
    k = dist.get_world_size( group )
    for   q in p:


        if q.grad is not None: # sum up
            dist.all_reduce(q.grad,
                            group=group)
            q.grad /= k
'''
OTHER = """
def average_gradients(params, group=None):
    grads = [p.grad for p in params if p.grad is not None]
    if not grads:
        return
    flat = torch.cat([g.reshape(-1) for g in grads])
    dist.all_reduce(flat, op=dist.ReduceOp.SUM, group=group)
    flat.div_(dist.get_world_size(group))
    for grad, part in zip(grads, flat.split([g.numel() for g in grads])):
        grad.copy_(part.view_as(grad))
"""
HELPER = """
def helper(tensor, peers):
    pending = [dist.isend(tensor, peer) for peer in peers]
    while pending:
        pending.pop().wait()
    return {peer: tensor.sum().item() for peer in peers}
"""


def texts(source: str) -> list[list[str]]:
    return [[symbol.text for symbol in part] for part in normalise(source)]


def test_names_comments_layout_and_docstrings_do_not_count() -> None:
    assert texts(AVERAGE) == texts(COPIED)
    assert texts(AVERAGE) != texts(OTHER)


def test_order_of_functions_does_not_count() -> None:
    def prints(source: str) -> set[int]:
        return set(read_solution("a", {"cell": source}, set()).prints)

    assert prints(AVERAGE + HELPER) == prints(HELPER + COPIED)


@given(st.text())
def test_any_text_is_normalised(source: str) -> None:
    for part in normalise(source):
        assert all(symbol.line >= 1 for symbol in part)


def test_what_is_no_python_counts_by_its_tokens() -> None:
    broken = AVERAGE + "def ("
    assert len(texts(broken)[0]) > 20
    assert texts(broken) == texts(COPIED.replace('    """I wrote this."""\n', "").replace(
        ": list", "").replace(" -> None", "") + "def (")  # fmt: skip


words = st.lists(st.sampled_from("abcdefgh"), max_size=30)


@given(words, words, words, words, st.lists(st.sampled_from("ABCDEFGH"), min_size=K + W - 1))
def test_a_long_passage_is_always_found(a: list, b: list, c: list, d: list, same: list) -> None:
    """Schleimer's guarantee holds, and no hash is shared without a common passage of K symbols."""

    def prints(parts: list[str]) -> set[int]:
        found = passages([Symbol(text, 1) for text in parts])
        return {found[i][0] for i in winnow([each[0] for each in found])}

    assert prints([*a, *same, *b]) & prints([*c, *same, *d])
    if len(a) >= K and len(c) >= K:
        grams = [{tuple(x[i : i + K]) for i in range(len(x) - K + 1)} for x in (a, c)]
        if not grams[0] & grams[1]:
            assert not prints(a) & prints(c)


def test_what_many_wrote_counts_little() -> None:
    """Ten write the task alike; two of them share a helper that nobody else has."""
    sources = {f"s{i}": AVERAGE for i in range(10)}
    sources["s3"] = COPIED + HELPER
    sources["s7"] = AVERAGE + HELPER.replace("pending", "todo").replace("peers", "them")
    released: set[int] = set()
    solutions = [read_solution(s, {"cell": source}, released) for s, source in sources.items()]
    found = compare(solutions, at_least=0)
    assert (found.pairs[0].first, found.pairs[0].second) == ("s3", "s7")
    assert found.pairs[0].rare > 5
    others = [read_solution(s, {"c": x}, released) for s, x in (("a", AVERAGE), ("b", OTHER))]
    assert compare(others, at_least=0).pairs[0].alike < 0.3


def test_nothing_to_compare() -> None:
    assert compare([]).pairs == []
    short = [read_solution(name, {"c": "x = 1"}, set()) for name in "ab"]
    assert compare(short).too_short == ["a", "b"]


@pytest.fixture
def course(tmp_path: Path) -> Path:
    root = tmp_path / "course"
    shutil.copytree(RELEASED / NAME, root / "assignments" / NAME)
    shutil.copy(ROOT / "nbgrader_config.py", root)
    return root


def hand_in(course: Path, student: str, answer: str) -> None:
    notebook = json.loads((course / "assignments" / NAME / f"{NAME}.ipynb").read_text())
    for cell in notebook["cells"]:
        if cell["metadata"].get("nbgrader", {}).get("grade_id") == "write_average_gradients":
            cell["source"] = answer.splitlines(keepends=True)  # as Jupyter writes it
    folder = course / "grading/submitted" / student / NAME
    folder.mkdir(parents=True)
    (folder / f"{NAME}.ipynb").write_text(json.dumps(notebook))


def test_the_command(
    course: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def autograder(*arguments: str) -> int:
        monkeypatch.setattr("sys.argv", ["autograder", *arguments, "--course", str(course)])
        return main()

    assert autograder("similar", NAME) == 2
    assert "nobody has submitted" in capsys.readouterr().err
    hand_in(course, "ada", AVERAGE + HELPER)
    hand_in(course, "bob", COPIED + HELPER.replace("peers", "them") + "# <script>alert(1)</script>")
    hand_in(course, "eve", OTHER)
    hand_in(course, "untouched", "# YOUR CODE HERE\nraise NotImplementedError")
    for name, data in (("torn", b'{"cells": ['), ("list", b"[]")):
        folder = course / "grading/submitted" / name / NAME
        folder.mkdir(parents=True)
        (folder / f"{NAME}.ipynb").write_bytes(data)
    assert autograder("similar", NAME) == 0
    out = capsys.readouterr().out
    assert "This list is no proof" in out
    assert "3 solutions" in out or "untouched" in out
    assert "ada" in out and "bob" in out
    assert "torn: the notebook cannot be read" in out
    assert "list: the notebook cannot be read" in out
    assert "Too little code to compare: untouched" in out
    page = (course / "grading/similar" / f"{NAME}.html").read_text()
    assert "<script" not in page and "&lt;script&gt;" in page
    assert page.count("<mark>") > 10
    assert autograder("similar", NAME, "--at-least", "7") == 2


@pytest.mark.large
def test_a_class_of_300(course: Path) -> None:
    """This only tests that it ends within pytest's limit; see --durations."""
    rng = random.Random(0)
    for number in range(300):
        extra = "\n".join(
            f"def f{i}(x):\n    return x.{rng.choice('abcdef')}({rng.randint(0, 99)}) + "
            f"[y ** {rng.randint(0, 9)} for y in x][{rng.randint(0, 9)}]"
            for i in range(20)
        )
        hand_in(course, f"s{number:03}", (AVERAGE if number % 2 else OTHER) + extra)
    comparison, _, damaged = similar(course, NAME)
    assert comparison.compared == 300
    assert not damaged
