"""Real ranks in the grader: the verdict of the fabric's cases, and failures on real ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from autograder.commands.demo import ASSIGNMENT
from autograder.course import Settings
from autograder.errors import SandboxUnavailable
from autograder.examination.gpus import gpu_access
from autograder.examination.submission import Submission, examine
from autograder.sandbox.sandbox import Sandbox
from tests.helpers.course_folders import SOURCES, needs_sources
from tests.helpers.solutions import checks_of, hidden_cases

pytestmark = needs_sources

NEEDED = "import torch\nimport torch.distributed as dist\nimport torch.nn.functional as F"
RIGHT = """
def average_gradients(params, group=None):
    on_gloo = "Simulated" not in type(dist.group.WORLD).__name__
    world_size = dist.get_world_size(group)
    for param in params:
        if param.grad is not None:
            dist.all_reduce(param.grad, group=group)
            param.grad /= world_size
"""


TASK = "average_gradients"


def examined(place, source, on="cpu", limits=None):
    """Return the report of four public cases and a hidden one."""
    check = checks_of(SOURCES / ASSIGNMENT)[TASK]
    check = replace(check, cases=check.cases[:4])
    hidden = hidden_cases(SOURCES / ASSIGNMENT, TASK)[:1]
    with Submission(place, limits) as submission:
        submission.run_cell(NEEDED)
        outcome = submission.run_cell(source)
        assert not outcome.error, outcome
        return examine(f"{ASSIGNMENT}/{TASK}", check, submission, seed="1", hidden=hidden, on=on)


def test_a_right_solution_runs_on_both_and_a_wrong_one_on_the_network_alone(place: Sandbox) -> None:
    report = examined(place, RIGHT)
    assert report.fraction == 1, str(report)
    assert report.places == ("the grader's network", "CPU ranks")
    wrong = RIGHT.replace("/= world_size", "/= 1")
    report = examined(place, wrong)
    assert report.fraction == 0 and report.places == ("the grader's network",)


@pytest.mark.large
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (
            "if on_gloo and dist.get_rank(group) == 1: raise ValueError('here')",
            "Rank 1 raised ValueError: here (Cell In[2], line",
        ),
        ("world_size = 1 if on_gloo else world_size", "the sum over the ranks"),
        ("if on_gloo: __import__('os')._exit(3)", "it called exit with status 3"),
    ],
)
def test_what_fails_on_real_ranks_alone_fails_there(place: Sandbox, line: str, reason: str) -> None:
    source = RIGHT.replace("    for param", f"    {line}\n    for param")
    assert examined(place, source, None).passed
    report = examined(place, source)
    assert report.fraction == 0 and report.places == ("CPU ranks",)
    assert reason in " ".join(str(report).split()), str(report)


@pytest.mark.large
def test_a_deadlock_of_real_ranks_alone_runs_out_of_time_twice(place: Sandbox) -> None:
    source = RIGHT.replace(
        "    for param", "    if on_gloo and dist.get_rank(group) == 0: return\n    for param"
    )
    report = examined(place, source, limits=Settings(case_seconds=2.0))
    reasons = [result.reason for result in report.results]
    assert "The case on CPU ranks took longer than its limit of 2 s" in reasons[1]
    assert "not run, because 2 earlier cases" in reasons[3]


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there are GPUs")
def test_where_there_is_no_gpu_it_says_so_before_anything_is_graded(autograder: Any) -> None:
    with pytest.raises(SandboxUnavailable, match="PyTorch sees no GPU here"):
        gpu_access()
    status, output = autograder(SOURCES.parent, "demo", "--on", "gpu")
    assert status != 0
    assert output.startswith("autograder demo: GPU ranks were asked for, but PyTorch sees no GPU")
