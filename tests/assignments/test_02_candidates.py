"""The solutions that 02's `is_right` must accept are right for all inputs that it may give them."""

import pytest
import torch
import torch.distributed as dist

from course_lib.checking import CheckFailed, check
from course_lib.checking.loading import load_module
from course_lib.checking.testing import Candidate
from course_lib.ranks import Ranks, per_rank
from tests.helpers.course_folders import RELEASED, SOURCES
from tests.helpers.solutions import hidden_of

NAME = "02_data_parallel_sgd"
CHECKS = load_module(RELEASED / NAME / "checks.py")
INPUTS = {
    "two dtypes": [(3,), (2, 2)],
    "no gradient at all": [None, None],
    "an empty one, a number, a frozen one": [(0,), (), None, (3, 1)],
}


def draw(rank: int, name: str) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(rank)
    shapes = INPUTS[name]
    drawn = [s if s is None else torch.randn(s, generator=generator) for s in shapes]
    return [g.double() if name == "two dtypes" and i == 1 else g for i, g in enumerate(drawn)]


def right_candidates() -> list[Candidate]:
    hidden = hidden_of(SOURCES / NAME).CANDIDATES if SOURCES.is_dir() else []
    return [candidate for candidate in (*CHECKS.CANDIDATES, *hidden) if candidate.right]


def test_a_timeline_of_messages_that_no_student_sent_is_not_shown() -> None:
    with pytest.raises(CheckFailed) as failed:
        check(f"{NAME}/is_right", lambda run: True)
    assert failed.value.report.picture is None


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("candidate", right_candidates(), ids=lambda each: each.kind)
def test_a_right_candidate_is_right(candidate: Candidate, name: str) -> None:
    parameters, namespace = candidate.case().parameters, {"torch": torch, "dist": dist}
    exec(parameters["source"], namespace)
    solution, average_of = namespace[parameters["name"]], CHECKS.average_of
    for k in (1, 2, 3):
        inputs = [draw(rank, name) for rank in range(k)]
        with Ranks(k, on="simulated") as ranks:
            results = ranks.run(average_of, solution, per_rank(inputs), None)
        for result in results:
            for mean, *terms in zip(result, *inputs, strict=True):
                if terms[0] is None:
                    assert mean is None
                else:
                    assert mean.dtype == terms[0].dtype
                    torch.testing.assert_close(mean, sum(terms) / k)
