"""Ranks that lie: the examiner believes only what it knows by itself.

A student's code owns the process of its rank, with all of our code that runs in it. Each of these
lies once earned points.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autograder.examination.case import CaseRanks
from autograder.examination.submission import Submission, examine
from autograder.examination.verdict import notes_on
from autograder.passes.examine import masked_from
from autograder.sandbox.memory import descendants
from autograder.sandbox.sandbox import Sandbox
from course_lib.checking import Case, Check, CheckReport, by_judge, expect_equal, sends_at_most
from course_lib.checking.on_ranks.given import Given
from course_lib.ranks import compute
from tests.helpers.course_folders import SOURCES, needs_sources
from tests.helpers.sandbox_processes import processes
from tests.helpers.solutions import checks_of, hidden_of

SETUP = (
    "import ctypes, fcntl, gc, mmap, os, subprocess, sys, time, torch, torch.distributed as dist"
)


def examined(place: Sandbox, check: Check, *cells: str) -> CheckReport:
    with Submission(place) as submission:
        for cell in (SETUP, *cells):
            assert not submission.run_cell(cell).error
        report = examine("forged/f", check, submission, seed="forged")
    assert not notes_on(report)
    return report


def check_of(k: int, program: Any, right: Callable[[Sequence[Any], int], Any], **options: Any):
    """Return a check with one case, in which each of k ranks must give ``right(inputs, rank)``."""

    def judge(case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> None:
        for rank, value in enumerate(values):
            expect_equal(value, right(inputs, rank), f"rank {rank}")

    cases = [Case(f"{k} ranks", k, {"below": 5000})]
    return by_judge("f", inputs=drawn, judge=judge, program=program, cases=cases, **options)


def drawn(case: Case, generator: torch.Generator) -> list[dict[str, Any]]:
    below, k = case.parameters["below"], case.world_size
    numbers = torch.randint(1, below, (k,), generator=generator).tolist()
    return [{"number": n, "x": torch.randn(5, generator=generator)} for n in numbers]


# The clock ------------------------------------------------------------------------------------


TOLD = check_of(
    2,
    lambda f, rank_input, case_inputs: {"rank 0's number": f(rank_input["number"])},
    lambda inputs, me: {"rank 0's number": inputs[0]["number"]},
    expects=[sends_at_most(0)],
)
"""Rank 1 must learn a value of rank 0, and nobody may send a byte."""

FIND = """
def client():
    return next(o for o in gc.get_objects() if type(o).__name__ == "FabricClient")

"""
IN_TIME = {
    "spend": """
def f(number):
    if dist.get_rank() == 0:
        client().spend(number * 1e-3)
    dist.barrier()
    return number if dist.get_rank() == 0 else round(client().now() * 1e3)
""",
    "polls": """
def f(number):
    x = torch.zeros(0)
    if dist.get_rank() == 0:
        client().spend(number * 1e-3)
        dist.send(x, 1)
        return number
    work, polls = dist.irecv(x, 0), 0
    while not work.is_completed():
        polls += 1
    return polls - 9
""",
}
BIT_BY_BIT = """
def f(number):
    x = torch.zeros(0)
    for bit in range(40):
        one = number >> bit & 1
        if dist.get_rank() == 0:
            dist.send(x, 1, tag=one), dist.send(x, 1, tag=2)
            dist.recv(x, 1), dist.send(x, 1, tag=1 - one)
            continue
        works = [dist.irecv(x, 0, tag=tag) for tag in (0, 1)]
        dist.recv(x, 0, tag=2)
        seen = works[1].is_completed()
        number = number & ~(1 << bit) | seen << bit
        dist.send(x, 0), [work.wait() for work in works]
    return number
"""
"""How rank 1 sees a bit, and how rank 0 says it. `test_the_kernel_refuses_what_cells_share` has the
calls themselves."""


REFUSED = """
def f(number):
    libc, refused = ctypes.CDLL(None, use_errno=True), []
    file = open(torch.__file__, "rb")
    def tried(call):
        try:
            return call() == -1
        except OSError:
            return True
    page = mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE)
    at = torch.frombuffer(page, dtype=torch.uint8).data_ptr()
    word = int.from_bytes(page[:4], "little")
    wait = ctypes.c_char_p(bytes(16))
    calls = [
        lambda: fcntl.flock(file, 5), lambda: fcntl.lockf(file, 5),
        lambda: fcntl.fcntl(file, 37, bytes(32)), lambda: fcntl.fcntl(file, 1024, 0),
        lambda: fcntl.fcntl(file, 1026, 2), lambda: fcntl.fcntl(file, 1036, bytes(8)),
        lambda: libc.inotify_init(), lambda: libc.inotify_init1(0), lambda: os.memfd_create("x"),
        lambda: libc.shmget(0, 4096, 0o1600), lambda: libc.semget(0, 1, 0o1600),
        lambda: libc.msgget(0, 0o1600), lambda: libc.mq_open(b"/x", 66, 0o600, None),
        lambda: libc.socket(40, 1, 0), lambda: libc.socket(38, 5, 0), lambda: libc.socket(2, 1, 0),
        lambda: libc.mincore(ctypes.c_void_p(at), 4096, bytes(1)), lambda: libc.sysinfo(bytes(200)),
        lambda: libc.syscall(202, ctypes.c_void_p(at), 1, 1, None, None, 0),
        lambda: os.preadv(file.fileno(), [bytearray(9)], 0, os.RWF_NOWAIT),
        lambda: os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED),
        lambda: libc.readahead(file.fileno(), ctypes.c_long(0), 4096), lambda: page.madvise(20),
        lambda: page.madvise(21),
        lambda: libc.syscall(239, bytes(4), None, 0, ctypes.c_void_p(at), 3),
        lambda: libc.syscall(279, 0, 1, ctypes.byref(ctypes.c_void_p(at)), None, bytes(4), 0),
        lambda: subprocess.run(["true"], start_new_session=True),
        lambda: libc.syscall(206, 1, bytes(8)), lambda: libc.syscall(425, 1, bytes(120)),
        lambda: fcntl.fcntl(os.pipe()[0], fcntl.F_SETPIPE_SZ, 4096),
    ]
    return {"refused": [tried(call) for call in calls], "still": still()}

def still():
    names = [name for name in os.listdir("/proc") if not name.isdigit()]
    before = [open(f"/proc/{name}").read() for name in names if os.path.isfile(f"/proc/{name}")]
    time.sleep(0.1 + sum(range(10**6)) * 0)
    after = [open(f"/proc/{name}").read() for name in names if os.path.isfile(f"/proc/{name}")]
    return before == after and not os.listdir("/proc/sys") and os.cpu_count() > 0
"""
SHARED = check_of(
    1,
    lambda f, rank_input, case_inputs: f(rank_input["number"]),
    lambda inputs, me: {"refused": [True] * 30, "still": True},
)


def test_the_kernel_refuses_what_cells_share(place: Sandbox) -> None:
    report = examined(place, SHARED, REFUSED)
    assert report.passed, str(report)


def test_ranks_have_no_notebook_to_talk_to(place: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    cells: list[int] = []
    run = CaseRanks.run

    def counted(self: CaseRanks, deadline: Any) -> Any:
        cells.append(len(processes(place._process.pid)["cells"]))
        return run(self, deadline)

    monkeypatch.setattr(CaseRanks, "run", counted)
    source = "import subprocess\nsubprocess.Popen(['sleep', '99'])\ndef f():\n    pass"
    assert examined(place, TIMED, source).passed
    assert cells == [2] * len(TIMED.cases)


def test_what_a_rank_leaves_ends_before_the_case(place, monkeypatch):
    """Others on this machine need the cores: those that are graded at the same time, and next."""
    running: list[int] = []
    close = CaseRanks.__exit__

    def counted(self: CaseRanks, *error: object) -> None:
        below = descendants(place._process.pid)
        running.append(sum(Path(f"/proc/{n}/cmdline").read_bytes() != b"" for n in below))
        close(self, *error)

    monkeypatch.setattr(CaseRanks, "__exit__", counted)
    body = "for _ in range({} - 9 * dist.get_rank()):\n  if os.fork() == 0: time.sleep(99)\n "
    assert examined(place, TIMED, f"def f():\n {body.format(9)}").passed
    assert running == [4]  # bubblewrap's, the fork server, and two ranks
    crowded = examined(place, TIMED, f"def f():\n {body.format(60)}")
    assert "Resource temporarily unavailable" in crowded.reason


EFFECTS = check_of(
    2,
    lambda f, rank_input, case_inputs: {"twice": f(rank_input["x"])},
    lambda inputs, me: {"twice": 2 * inputs[me]["x"]},
)


WITHOUT_VALUES = """
def f(x):
    me, big = dist.get_rank(), torch.zeros(10**6)
    empty = torch.empty(10**6, device='meta')
    {}
    return 2 * x
"""
"""Would bring memory of the examiner, which receives for the others."""
NOISY = """
class Noise:
    def __reduce__(self):
        said = {!r}
        return exec, ("import os\\nfor fd in range(3, 32):\\n    try: os.write(fd, " + said + ")\\n"
                      "    except OSError: pass",)
noise = Noise()
def f(x):
    return noise and x
"""
"""Sends right after the start of its rank."""


def timed_program(f: Any, rank_input: Any, case_inputs: Given) -> Any:
    compute(1e-3)
    f()
    compute(2e-3)
    return {"done": True}


TIMED = replace(
    check_of(2, timed_program, lambda inputs, me: {"done": True}),
    computes=lambda case, inputs: [{1e-3: 1, 2e-3: 1} for _ in inputs],
)
LAZY = """
def f():
    from course_lib.ranks.costs import computation
    computation._local.compute = lambda *_: None
    dist.barrier()
"""


LATE = """
def hook_buckets(buckets, group=None):
    def finish():
        works = []
        for params in buckets:
            for param in params:
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
            flat = torch.cat([param.grad.flatten() for param in params])
            works.append((params, flat, dist.all_reduce(flat, group=group, async_op=True)))
        for seconds in owed:
            client().spend(seconds)
        for params, flat, work in works:
            work.wait()
            flat /= dist.get_world_size(group)
            for param, part in zip(params, flat.split([p.numel() for p in params])):
                param.grad.copy_(part.view_as(param))
    from course_lib.ranks.costs import computation
    owed = []
    computation._local.compute = owed.append
    return finish
"""


@needs_sources
def test_computation_is_judged_in_the_order_of_the_program() -> None:
    """Buckets launched after backward earn no points for overlap, whenever a rank computes."""
    folder = SOURCES / "05_bucketing_and_overlap"
    check = checks_of(folder)["hook_buckets"]
    long = "layers that take time"
    timed = [case for case in check.cases if long in case.name and not case.after]
    check = replace(check, cases=tuple(timed))
    with Sandbox(masked_from(hidden_of(folder).MASKED)) as masked:
        report = examined(masked, check, FIND + LATE)
    assert report.fraction == check.worth["values"] / sum(check.worth.values()), str(report)


# Effects --------------------------------------------------------------------------------------


def with_parameter(f: Any, rank_input: Any, case_inputs: Given) -> Any:
    parameter = torch.nn.Parameter(rank_input["x"])
    case_inputs.watch.add_parameters("the parameters", [parameter])
    return {"twice": f(parameter)}


WITH_PARAMETER = replace(EFFECTS, program=replace(EFFECTS.program, program=with_parameter))
SILENT = """
def silence():
    effects = sys.modules["course_lib.checking.on_ranks.effects"]
    for name, member in list(vars(effects.Watch).items()):
        if not name.startswith(("__init__", "__", "add_")) and callable(member):
            setattr(effects.Watch, name, lambda *a, **k: {})

def f(x):
    silence()
    y = 2 * x
    x.zero_()
    return y
"""
"""Nobody says of himself that he has no effects: `{}` is what the watch then answers."""
HIDES = """
def hide():
    from course_lib.checking.on_ranks import effects, given
    import __main__
    __main__.encode = lambda value: effects.encode({{}})
    effects._digest = lambda state: ""
    effects._hooks_on = lambda parameter: 0
    given = sys.modules["course_lib.checking.on_ranks.given"]
    given.Watch.report = lambda *_: {{}}

def f(x):
    hide()
    {}
    return (2 * x).detach()
"""
"""Patches our code in the process of its rank."""

# Each lie: the check, the function's cell, and the words of the report.
NOT_READ = "cannot be read|Rank 0 ended"
NO_VALUES = "on the device meta has no values|Rank 0 raised"
LIES: dict[str, tuple[Check, str, str]] = {
    **{
        f"a number in time: {name}": (TOLD, FIND + source, "^rank 1: rank 0's number: expected")
        for name, source in IN_TIME.items()
    },
    "a number bit by bit": (
        replace(TOLD, cases=(Case("2 ranks", 2, {"below": 2**40}),)),
        BIT_BY_BIT,
        "operations that carry nothing",
    ),
    "computation left out": (TIMED, FIND + LAZY, "^rank 0 computes for only 1 of the 3 ms"),
    **{
        f"no values: {call.partition('(')[0]}": (EFFECTS, WITHOUT_VALUES.format(call), NO_VALUES)
        for call in (
            "dist.send(empty, 1) if me == 0 else dist.recv(big, 0)",
            "dist.all_reduce(empty if me == 0 else big)",
        )
    },
    "noise at the start": (EFFECTS, NOISY.format("b'garbage of many bytes'"), NOT_READ),
    "a silent watch: {}": (EFFECTS, SILENT, ""),
    "a silent watch: []": (EFFECTS, SILENT.replace("{}", "[]"), ""),
    **{
        f"hides: {reason}": (WITH_PARAMETER, HIDES.format(line), reason)
        for line, reason in (
            ("torch.rand(1)", "random numbers of the torch generator"),
            ("import random; random.random()", "random numbers of the Python generator"),
            ("x.register_hook(lambda g: g)", "leaves hooks on the parameters"),
        )
    },
}


@pytest.mark.parametrize(("check", "source", "reason"), LIES.values(), ids=LIES)
def test_a_lie_earns_nothing(place: Sandbox, check: Check, source: str, reason: str) -> None:
    report = examined(place, check, source)
    assert not report.passed
    assert re.search(reason, report.reason), report.reason
