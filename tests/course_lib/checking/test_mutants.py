"""A solution in a `mutants.py` is submitted as a student would have written it."""

import pytest
import torch

from course_lib.checking.mutants import (
    EVERYWHERE,
    VIRTUAL,
    Mutant,
    edits_of,
    fails,
    passes,
)


@fails("expected")
@torch.no_grad()
def step__counts_calls(x):
    step__counts_calls.calls = getattr(step__counts_calls, "calls", 0) + 1
    return x * step__counts_calls.calls


@passes
def total__in_turn(numbers):
    found = 0
    for number in numbers:
        if number:
            found += number
    return found


def test_the_source_keeps_other_decorators_and_calls_itself_by_the_task_s_name() -> None:
    cell = {"torch": torch}
    exec(step__counts_calls.source, cell)
    one = torch.ones(1, requires_grad=True)
    for step in (cell["step"], step__counts_calls.function):
        assert [step(one).item(), step(one).item()] == [1, 2]
        assert not step(one).requires_grad


def test_a_mutant_is_an_edit_that_says_where_it_fails_and_why() -> None:
    """Pieces of one line, whole lines at any depth, and two edits of the same text."""
    found = edits_of(
        total__in_turn,
        Mutant("largest", "the largest", "+= number", "= max(found, number)", VIRTUAL),
        Mutant(
            "counts",
            "one for each",
            """
            if number:
                found += number
            """,
            "found += 1",
        ),
        Mutant("from_one", None, "= 0", "= 1", also=(("return found", "return found - 1"),)),
    )
    assert [(each.task, each.mistake, each.reason, each.where) for each in found] == [
        ("total", "largest", "the largest", VIRTUAL),
        ("total", "counts", "one for each", EVERYWHERE),
        ("total", "from_one", None, EVERYWHERE),
    ]
    right = total__in_turn.function([3, 0, 4])
    assert [right, *(each.function([3, 0, 4]) for each in found)] == [7, 4, 3, 7]


@pytest.mark.parametrize("old", ["found = 2", "", "= 0\n= 1", "ound = 0\nfor number in numbers:"])
def test_an_edit_of_what_is_not_there_is_refused(old: str) -> None:
    with pytest.raises(ValueError, match="one: the text of total__in_turn has no"):
        edits_of(total__in_turn, Mutant("one", "here", old, "pass"))
