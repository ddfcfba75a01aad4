"""The solutions that 02's `is_right` has to accept are right for all inputs that it may give."""

import pytest
import torch
import torch.distributed as dist

from course_lib.checking import CheckFailed, check
from course_lib.checking.loading import load_module
from course_lib.ranks import Ranks, per_rank
from tests.helpers.course_folders import RELEASED

NAME = "02_data_parallel_sgd"
CHECKS = load_module(RELEASED / NAME / "checks.py")
RIGHT = [candidate for candidate in CHECKS.CANDIDATES if candidate.right]
INPUTS = {
    "two dtypes": lambda: [torch.randn(3), torch.randn(2, 2).double()],
    "no gradient at all": lambda: [None, None],
    "an empty one, a number, a frozen one": lambda: [torch.randn(0), torch.randn(()), None],
    "transposed": lambda: [torch.randn(2, 3).T],
}


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("candidate", RIGHT, ids=lambda candidate: candidate.kind)
def test_a_right_candidate_is_right(candidate, name: str) -> None:
    torch.manual_seed(0)
    parameters, namespace = candidate.case().parameters, {"torch": torch, "dist": dist}
    exec(parameters["source"], namespace)
    for k in (1, 2, 3):
        gradients = [INPUTS[name]() for _ in range(k)]
        with Ranks(k, on="simulated") as ranks:
            solution = namespace[parameters["name"]]
            results = ranks.run(CHECKS.average_of, solution, per_rank(gradients), None)
        means = [
            None if parts[0] is None else sum(parts) / k for parts in zip(*gradients, strict=True)
        ]
        for result in results:
            torch.testing.assert_close(result, means)


def test_a_timeline_of_messages_that_no_student_sent_is_not_shown() -> None:
    with pytest.raises(CheckFailed) as failed:
        check(f"{NAME}/is_right", lambda run: True)
    assert failed.value.report.picture is None
