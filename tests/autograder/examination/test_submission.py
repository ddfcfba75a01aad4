"""Student code under examination, in its sandbox: honest, broken, stuck and hostile."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from autograder.examination.budget import Limits
from autograder.examination.submission import Submission
from autograder.sandbox import sandbox as sandbox_module
from autograder.sandbox.sandbox import MachineFailure, Sandbox
from course_lib.checking import Case, Check, CheckReport, Wrong, run_check

RIGHT = """
import torch.distributed as dist

def total(mine):
    dist.all_reduce(mine)
    return mine
"""


SLEEP = 10**6 + os.getpid()
"""Seconds that a forgotten process sleeps: they tell it from those of another test run."""


def inputs(case: Case, generator: torch.Generator) -> list[torch.Tensor]:
    return [torch.randint(100, (3,), generator=generator) for _ in range(case.world_size)]


def judge(case: Case, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    for rank, output in enumerate(outputs):
        if not isinstance(output, torch.Tensor) or not torch.equal(output, sum(inputs)):
            raise Wrong(f"rank {rank}: wrong sum")


def program(function: Any, mine: Any) -> Any:
    return function(mine)


def check(*world_sizes: int, seconds: float = 20.0) -> Check:
    cases = tuple(Case(f"{k} ranks", k) for k in world_sizes)
    return Check("total", program, inputs, judge, cases, seconds)


@pytest.fixture
def examination(place: Sandbox) -> Iterator[Submission]:
    with Submission(place, Limits(cell=5)) as examination:
        yield examination


def report(
    examination: Submission, source: str, *world_sizes: int, seconds: float = 20.0
) -> CheckReport:
    examination.run_cell(source)
    return run_check(
        "t/total", check(*world_sizes, seconds=seconds), examination.runner(), seed="s"
    )


def test_a_right_function_passes_on_every_world_size(examination: Submission) -> None:
    assert report(examination, RIGHT, 1, 2, 3, 4).passed


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("def total(mine):\n    return mine +", "SyntaxError: invalid syntax"),
        ("while True: pass\ndef total(mine):\n    return mine", "took longer than 5 s"),
        ("import no_such_module\ndef total(mine):\n    return mine", "ModuleNotFoundError"),
        ("import os; os._exit(1)\ntotal = 1", "ended the Python process"),
    ],
)
def test_a_cell_that_did_not_define_its_function_is_named(
    examination: Submission, cell: str, words: str
) -> None:
    examination.run_cell("x = 1")
    result = report(examination, cell, 1).results[0]
    assert "total is not defined" in result.reason
    assert "Cell 2 contains this name, but did not run to its end: " in result.reason
    assert words in result.reason


def test_an_answer_module_cannot_be_imported(examination: Submission) -> None:
    outcome = examination.run_cell("from course_lib.sharding import shard_bounds")
    assert "this assignment asks you to write course_lib.sharding" in outcome.error


def test_what_cannot_be_handed_over_is_told_with_the_reason_and_not_asked_for_in_every_case(
    examination: Submission, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    start = Submission._start_notebook
    monkeypatch.setattr(
        Submission, "_start_notebook", lambda *given: (started.append(given), start(*given))[1]
    )
    ends = "class Ends:\n    def __reduce__(self):\n        import os; os._exit(5)\nends = Ends()\n"
    body = "def total(mine):\n    return ends\n"
    reason = report(examination, ends + body, 1, 2, 3, 4).reason
    assert (
        "total could not be read from the notebook: reading the function ended the Python process"
        in reason
    )
    assert "exit with status 5. All global names that the function uses" in reason
    assert len(started) == 1
    # After a later cell, which may mend it, it is asked for again.
    assert report(examination, RIGHT, 2).passed


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return mine", "rank 0: wrong sum"),
        ("raise ValueError('no')", "raised ValueError: no  (Cell In[1], line 3)"),
        ("import os; os._exit(7)", "process ended: it called exit with status 7"),
        ("import ctypes; ctypes.string_at(0)", "signal SIGSEGV"),
        ("raise SystemExit(0)", "raised SystemExit: 0"),
        ("dist.recv(mine, src=1 - dist.get_rank())", "Rank 0 waits in recv from rank 1 (24 B)"),
        ("dist.get_rank() or dist.all_reduce(mine); return mine", "Rank 0 waits in all_reduce #1"),
        ("import time; time.sleep(60)", "longer than its limit of 3 s"),
        ("while True:\n        pass", "longer than its limit of 3 s"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", "killed or stopped itself"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed or stopped itself"),
        ("return object()", "return tensors, numbers, text"),
        ("dist.all_reduce(mine); dist.destroy_process_group(); return mine", "was destroyed"),
        ("dist.all_reduce(mine, async_op=True); return mine", "never waits for the handle"),
        ("dist.recv(mine, src=dist.get_rank())", "cannot send to itself"),
        ("return mine.double()", "rank 0: wrong sum"),
        ("return bytearray(10**9)", ""),
    ],
)
def test_a_failure_is_explained_and_costs_only_its_own_case(
    examination: Submission, body: str, words: str
) -> None:
    source = (
        "import torch.distributed as dist\n"
        f"def wrong(mine):\n    {body}\n"
        "def right(mine):\n    dist.all_reduce(mine); return mine\n"
        "def total(mine):\n    return (wrong if dist.get_world_size() == 2 else right)(mine)\n"
    )
    result = report(examination, source, 1, 2, 3, seconds=3.0)
    assert [case.passed for case in result.results] == [True, False, True], str(result)
    assert words in result.reason


def test_a_cell_that_ends_or_hangs_its_process_costs_itself_only(examination: Submission) -> None:
    examination.run_cell(RIGHT)
    assert "ended the Python process" in examination.run_cell("import os; os._exit(1)").error
    assert "longer than 5 s" in examination.run_cell("while True: pass").error
    assert examination.run_cell("print(total.__name__)").stdout == "total\n"
    assert report(examination, "", 2).passed


def test_killing_everything_in_reach_reaches_nothing(examination: Submission) -> None:
    source = """
import os, signal, contextlib
import torch.distributed as dist
def total(mine):
    for pid in (-1, *range(2, 400)):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    dist.all_reduce(mine)
    return mine
"""
    result = report(examination, source, 1, 2, 3)
    assert [case.passed for case in result.results] == [True, True, True], str(result)


def test_a_flood_of_prints_is_capped(examination: Submission) -> None:
    outcome = examination.run_cell("for i in range(300_000): print('flood')")
    assert len(outcome.stdout) < 100_000
    assert "more characters" in outcome.stdout


def test_nothing_is_left_when_it_closes(place: Sandbox) -> None:
    with Submission(place) as examination:
        examination.run_cell(
            f"import subprocess; subprocess.Popen(['sleep', '{SLEEP}'], start_new_session=True)"
        )
        assert _sleepers() == 1
    deadline = time.monotonic() + 60
    while _sleepers() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _sleepers() == 0


def _sleepers() -> int:
    count = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            count += path.read_bytes() == f"sleep\0{SLEEP}\0".encode()
        except OSError:
            continue
    return count


def test_a_grader_that_cannot_start_is_not_a_zero_and_says_why(monkeypatch: Any) -> None:
    monkeypatch.setattr(sandbox_module, "_path", lambda: "/nowhere")
    with (
        Sandbox() as place,
        Submission(place) as examination,
        pytest.raises(MachineFailure, match="No module named"),
    ):
        examination.run_cell("x = 1")


def test_a_cell_that_cannot_start_is_not_a_zero_either(monkeypatch: Any) -> None:
    """Without a filter for calls, nothing is run."""
    monkeypatch.setattr(sandbox_module, "seccomp_filter", lambda **_: b"")
    with (
        Sandbox() as place,
        Submission(place) as examination,
        pytest.raises(MachineFailure, match="a cell did not start"),
    ):
        examination.run_cell("x = 1")


def test_exploration_has_a_time_of_its_own_and_is_interrupted(place: Sandbox) -> None:
    slow = "import time\nseen = [*globals().get('seen', []), 1]\ntime.sleep(60)"
    with Submission(place, Limits(cell=1, submission=3)) as submission:
        assert submission.run_cell("x = 20").error == ""
        told = [submission.run_cell(slow, exploring=True) for _ in range(4)]
        assert [each.limit for each in told] == ["time"] * 4
        assert all("was interrupted" in each.error for each in told)
        assert submission.exploration.left == 0
        assert submission.run_cell("print(x, len(seen))", exploring=True).stdout == "20 4\n"
        assert report(submission, RIGHT, 2).passed
