"""A solution in a `mutants.py` is submitted as a student would have written it."""

from pathlib import Path

import pytest
import torch

from course_lib.checking.local import load_module
from course_lib.checking.mutants import EVERYWHERE, VIRTUAL, Mutant, fails, mutants_of


@torch.no_grad()
def step__counts_calls(x):
    step__counts_calls.calls = getattr(step__counts_calls, "calls", 0) + 1
    return x * step__counts_calls.calls


def test_the_source_keeps_other_decorators_and_calls_itself_by_the_task_s_name() -> None:
    function = fails("expected")(step__counts_calls)
    source = Mutant("step", "counts_calls", function, "expected").source
    cell = {"torch": torch}
    exec(source, cell)
    one = torch.ones(1, requires_grad=True)
    step = cell["step"]
    assert [step(one).item(), step(one).item()] == [1, 2]
    assert not step(one).requires_grad


def test_the_source_is_without_its_mark() -> None:
    @fails("expected")
    def step__doubles(x):
        return 2 * x

    mutant = Mutant("step", "doubles", step__doubles, "expected")
    assert mutant.source == "def step(x):\n    return 2 * x"


RIGHT = """
from course_lib.checking.mutants import edits_of, passes


@passes
def total__in_turn(numbers):
    found = 0
    for number in numbers:
        if number:
            found += number
    return found


"""


def written(tmp_path: Path, text: str) -> list[Mutant]:
    """Return the mutants of a file that says those of the text as edits."""
    path = tmp_path / "mutants.py"
    path.write_text(f"{RIGHT}edits_of(total__in_turn)({text!r})\n", encoding="utf-8")
    return mutants_of(load_module(path))


def test_edits_say_what_a_mutant_changes_where_it_fails_and_why(tmp_path: Path) -> None:
    text = """
largest (simulated, grader): the largest
    found += number → found = max(found, number)
counts: one for each
    if number:
        found += number
  → found += 1
from_one passes
    found = 0 → …; found += 1
    return found → return found - 1
"""
    right, *mutants = written(tmp_path, text)
    assert [(each.task, each.mistake, each.reason, each.where) for each in mutants] == [
        ("total", "largest", "the largest", VIRTUAL),
        ("total", "counts", "one for each", EVERYWHERE),
        ("total", "from_one", None, EVERYWHERE),
    ]
    assert [each.function([3, 0, 4]) for each in (right, *mutants)] == [7, 4, 3, 7]
    assert right.source.replace("found += number", "found = max(found, number)") == (
        mutants[0].source
    )


def test_two_mutants_may_have_the_same_edits(tmp_path: Path) -> None:
    text = "one (cpu): here\nother (grader): there\n    found = 0 → found = 1"
    _, one, other = written(tmp_path, text)
    assert one.source == other.source
    assert (one.reason, one.where) == ("here", ("cpu",))
    assert (other.reason, other.where) == ("there", ("grader",))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("one\n    found = 0 → found = 1", "'one': expected ‘mistake: words of the report’"),
        ("one (home): here\n    found = 0 → found = 1", "expected ‘mistake: words"),
        ("    found = 0 → found = 1", "expected ‘mistake: words"),
        ("one: here\n    found = 2 → found = 1", "the source of total__in_turn has no 'found = 2'"),
        ("one: here\n    = 0\n  → = 1\n  → pass", "the source of total__in_turn has no '= 0'"),
        ("one: here\n    found = 0", "'found = 0': expected a →"),
        ("in_turn: here\n    found = 0 → found = 1", "there is already a mutant total__in_turn"),
    ],
)
def test_a_text_that_says_no_mutant_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        written(tmp_path, text)
