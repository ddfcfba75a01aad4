"""A rank in the sandbox asks the examiner; what the answer needs stays outside."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autograder.examination.submission import Submission, examine
from autograder.sandbox.sandbox import Sandbox
from course_lib.checking import Case, Expectation, Wrong, by_judge
from course_lib.checking.cases import Observed
from course_lib.ranks import Network, Trace

K, SECRET = 2, 4_815_162_342


def inputs(case: Case, generator: torch.Generator) -> list[Any]:
    return [{"shown": torch.ones(2), "secret": SECRET + rank} for rank in range(K)]


def answer(rank_input: Any, question: Any) -> tuple[Any, float]:
    if not isinstance(question, int):
        raise ValueError("ask with a whole number")
    return rank_input["secret"] * question, 0.25 * question


def program(function: Any, rank_input: Any, case_inputs: Any) -> Any:
    return {"told": function(rank_input, case_inputs.ask)}


def judge(case: Case, inputs: Any, values: Any) -> None:
    if [value["told"] for value in values] != [5 * (SECRET + rank) for rank in range(K)]:
        raise Wrong(f"got {values}")


def takes_its_time(case: Case, observed: Observed, trace: Trace) -> None:
    if trace.makespan != pytest.approx(1.25):
        raise Wrong(f"{trace.makespan} s")


CHECK = by_judge(
    "f",
    inputs=inputs,
    program=program,
    judge=judge,
    cases=[Case("a case", K, network=Network(1e-3, 1e6))],
    expects=[Expectation(takes_its_time)],
    answers=answer,
    withheld=["secret"],
)


SEARCH = """
def f(mine, ask):
    import gc
    seen = [repr(each) for each in gc.get_objects() if type(each) in (dict, tuple, list)]
    secret = "".join(["4815", "1623"])  # not to find this line itself
    return sum(secret in text for text in seen) + len(mine)
"""
CELLS = {
    "asks": ("def f(mine, ask):\n    return ask(2) + ask(3)", ""),
    "asks_once": ("def f(mine, ask):\n    return 2.5 * ask(2)", "0.5 s"),
    "searches": (SEARCH, "got [{'told': 1}, {'told': 1}]"),
    "asks_wrongly": ("def f(mine, ask):\n    return ask('the secret')", "ask with a whole number"),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", CELLS)
def test_the_examiner_answers_and_the_secret_stays_outside(place: Sandbox, name: str) -> None:
    cell, reason = CELLS[name]
    with Submission(place) as submission:
        submission.run_cell(cell)
        (result,) = examine("t/f", CHECK, submission, seed="s").results
    assert result.passed == (not reason), result
    assert reason in result.reason
    if name == "asks":
        assert result.cost["computed"] == pytest.approx(1.25)
