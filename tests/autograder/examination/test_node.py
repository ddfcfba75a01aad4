"""Real ranks in the grader: the verdict of the fabric's cases, and failures on real ranks."""

from __future__ import annotations

import sys

import pytest
import torch

from autograder.__main__ import main
from autograder.commands.demo import ASSIGNMENT
from autograder.examination.budget import Limits
from autograder.examination.case import On
from autograder.examination.gpus import GpusUnavailable, gpu_access
from autograder.examination.submission import Submission, examine
from autograder.sandbox.sandbox import Sandbox
from course_lib.checking import CheckReport
from course_lib.checking.loading import load_checks, load_module
from course_lib.checking.mutants import Solution, mutants_of
from tests.helpers.course_folders import RELEASED, SOURCES, needs_sources

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


def mutants() -> list[Solution]:
    folder = SOURCES / ASSIGNMENT
    found = mutants_of(load_module(folder / "mutants.py")) if folder.is_dir() else []
    some = [mutant for mutant in found if "grader" in mutant.where][::4]
    # The order of a set changes from run to run, and with it the first collective that disagrees.
    return [mutant for mutant in some if mutant.mistake != "in_any_order"]


def examined(
    place: Sandbox, source: str, task: str, on: On | None, limits: Limits | None = None
) -> CheckReport:
    folder = SOURCES / ASSIGNMENT
    check = load_checks(RELEASED / ASSIGNMENT / "checks.py")[task]
    hidden = load_module(folder / "hidden.py", RELEASED / ASSIGNMENT).HIDDEN[task]
    with Submission(place, limits) as submission:
        submission.run_cell(NEEDED)
        outcome = submission.run_cell(source)
        assert not outcome.error, outcome
        return examine(f"{ASSIGNMENT}/{task}", check, submission, seed="1", hidden=hidden, on=on)


@pytest.mark.parametrize("mutant", mutants(), ids=lambda mutant: f"{mutant.task}__{mutant.mistake}")
def test_the_verdict_is_the_same(place: Sandbox, mutant: Solution) -> None:
    carried = examined(place, mutant.source, mutant.task, None)
    real = examined(place, mutant.source, mutant.task, "cpu")
    assert real.fraction == carried.fraction
    assert real.reason == carried.reason
    assert real.passed == (mutant.reason is None), str(real)


ON_REAL_RANKS_ALONE = [
    (
        "if on_gloo and dist.get_rank(group) == 1: raise ValueError('here')",
        "Rank 1 raised ValueError: here (Cell In[2], line",
    ),
    ("world_size = 1 if on_gloo else world_size", "the sum over the ranks"),
    ("if on_gloo: __import__('os')._exit(3)", "it called exit with status 3"),
    ("if on_gloo: __import__('ctypes').string_at(0)", "process ended: signal SIGSEGV"),
    ("if on_gloo: dist.destroy_process_group()", "RuntimeError"),
]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ON_REAL_RANKS_ALONE[0],
        *(pytest.param(*each, marks=pytest.mark.large) for each in ON_REAL_RANKS_ALONE[1:]),
    ],
)
def test_what_fails_on_real_ranks_alone_fails_there(place: Sandbox, line: str, words: str) -> None:
    body = "    world_size = dist.get_world_size(group)\n"
    source = RIGHT.replace(body, f"{body}    {line}\n")
    assert examined(place, source, "average_gradients", None).passed
    report = examined(place, source, "average_gradients", "cpu")
    assert report.fraction == 0
    assert report.places == ("CPU ranks",)
    assert words in " ".join(str(report).split()), str(report)


def test_a_deadlock_of_real_ranks_alone_runs_out_of_time_twice(place: Sandbox) -> None:
    source = RIGHT.replace(
        "    for param", "    if on_gloo and dist.get_rank(group) == 0: return\n    for param"
    )
    report = examined(place, source, "average_gradients", "cpu", Limits(case=2.0))
    reasons = [result.reason for result in report.results]
    assert "The case on CPU ranks took longer than its limit of 2 s" in reasons[1]
    assert "not run, because 2 earlier cases" in reasons[3]


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there are GPUs")
def test_where_there_is_no_gpu_it_says_so_before_anything_is_graded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(GpusUnavailable, match="PyTorch sees no GPU here"):
        gpu_access()
    command = ["autograder", "demo", "--on", "gpu", "--course", str(SOURCES.parent)]
    monkeypatch.setattr(sys, "argv", command)
    assert main() != 0
    said = capsys.readouterr()
    assert "PyTorch sees no GPU here" in said.err
    assert not said.out
