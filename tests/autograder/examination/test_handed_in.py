"""What may be handed in, what it earns, and what must not happen meanwhile: one table.

Each row changes the right solution of a small assignment with two tasks, ``f`` and ``g``. It costs
what it breaks and nothing else: one case of ``f``, or all of them where the function is not there.
Nothing of a hidden case is shown, and the examiner outside the sandbox stays small.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from nbformat.v4 import new_code_cell, new_notebook

from autograder.course import Settings
from autograder.examination.submission import Submission
from autograder.examination.verdict import Verdict, verdict_path
from autograder.passes.examine import Exam, examine_cells, with_hidden
from autograder.passes.tell import tell
from autograder.sandbox.sandbox import Sandbox
from course_lib.checking import Case, Check, Wrong
from tests.course_lib.ranks.test_large_arguments import forget_peak, memory

MEMORY = 700 * 2**20
"""Bytes that the examiner may take for a row, beyond what it has."""
PROCESSOR = 25.0
"""Seconds that it may compute for one."""
WRITTEN = 300_000
"""Characters that a notebook with its outputs may have."""
HIDDEN = Case("quokka", 3, {"number": 8.25})
SECRETS = ("quokka", "8.25", "9.25", "27.75")
"""The hidden case's name, two ranks' numbers, and the right sum."""


def inputs(case: Case, generator: torch.Generator) -> list[torch.Tensor]:
    return [torch.full((3,), case.parameters["number"] + k) for k in range(case.world_size)]


def judge(case: Case, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    for rank, output in enumerate(outputs):
        right = isinstance(output, torch.Tensor) and output.dtype == torch.float32
        if not right or not torch.equal(output, sum(inputs)):
            raise Wrong(f"rank {rank}: wrong sum: expected {sum(inputs)}, got {output}")


def total(name: str, seconds: float, *world_sizes: int) -> Check:
    """Return the check of a function that returns the sum of all ranks' tensors."""
    cases = tuple(Case(f"{k} ranks", k, {"number": 1.5}) for k in world_sizes)
    return Check(name, lambda function, tensor: function(tensor), inputs, judge, cases, seconds)


@dataclass(frozen=True)
class Row:
    """A submission, and what is to become of it.

    Attributes:
        f: the source of the task's function.
        reason: a pattern that the reason of a failed case has; none: the row earns all points.
        cells: cells in front.
        last: a cell at the end.
        fails: the names of the cases that fail.
        shows: a pattern that the notebook's outputs have.
        seconds: the limit of a case.
        spares_g: whether the other task earns its points.

    """

    f: str
    reason: str = ""
    cells: tuple[str, ...] = ()
    last: str = ""
    fails: tuple[str, ...] = ()
    shows: str = ""
    seconds: float = 3.0
    spares_g: bool = True


SETUP = """
import ctypes, gc, glob, os, resource, signal, socket, sys, time
import torch, torch.distributed as dist
def right(x):
    dist.all_reduce(x)
    return x
def g(x):
    return right(x)
"""
F = """
def f(x):
    if dist.get_world_size() != {world_size}:
        return right(x)
    {body}
"""


def honest(body: str, *cells: str, **options: Any) -> Row:
    return Row(F.format(world_size=2, body=body), cells=cells, **options)


def loses(body: str, reason: str, *cells: str, **options: Any) -> Row:
    """Return a row whose function fails on two ranks."""
    return Row(F.format(world_size=2, body=body), reason, cells, fails=("2 ranks",), **options)


def in_hidden(body: str, reason: str) -> Row:
    """Return a row whose function fails in the hidden case."""
    return Row(F.format(world_size=3, body=body), reason, fails=(HIDDEN.name,))


def undefined(source: str, ending: str) -> Row:
    """Return a row whose cell does not define the function."""
    reason = "f is not defined.*Cell 2 contains this name, but did not run to its end: .*"
    return Row(source, reason + ending, fails=("1 ranks", "2 ranks", HIDDEN.name))


RIGHT = "return right(x)"
STUCK = r"longer than its limit of \d+ s"
HONEST = {
    # Odd.
    "a helper with writefile": honest(
        "import helper\n    assert helper.ONE == 1\n    return right(x)",
        "%%writefile helper.py\nONE = 1",
    ),
    "another f in a later cell": honest(RIGHT, last="def f(x): pass"),
    "functions that carry much": honest(
        "return right(x) + load.sum()", "load = torch.zeros(15_000_000)"
    ),
    "a rank prints without end": honest("print('x' * 10**7)\n    return right(x)"),
    "a cell prints without end": honest(
        RIGHT, "for i in range(300_000): print('flood')", shows="more characters"
    ),
    # Cells that kill, stop or starve.
    "kills all it sees": honest(RIGHT, "os.kill(-1, 9)\nos.kill(os.getppid(), 9)"),
    "ends the notebook": honest(RIGHT, "os._exit(0)", shows="ended the Python process"),
    "stops the notebook": honest(RIGHT, "os.kill(os.getpid(), signal.SIGSTOP)"),
    "a cell without end": honest(RIGHT, "while True: pass", shows="was interrupted"),
    "closes what it has open": honest(RIGHT, "os.closerange(3, 64)"),
    "a fork bomb": honest(
        RIGHT,
        "while True:\n    try:\n        if os.fork() == 0: time.sleep(1000)\n"
        "    except OSError: break",
    ),
    "ranks kill all in reach": honest(
        "for pid in (-1, *range(2, 400)):\n        try: os.kill(pid, signal.SIGKILL)\n"
        "        except OSError: pass\n    return right(x)"
    ),
}

ANSWERS = {
    "another dtype": loses("return right(x).double()", "rank 0: wrong sum"),
    "an object": loses("return object()", "return tensors, numbers, text"),
    "much memory": loses("return bytearray(10**9)", ""),
    "a tensor that lies": loses(
        "return x.as_subclass(Liar)",
        "",
        "class Liar(torch.Tensor):\n"
        "    @classmethod\n    def __torch_function__(cls, *a, **k): return True",
    ),
    "an exception": loses("raise ValueError('no')", r"raised ValueError: no +\(Cell In\[2\], line"),
    "an exception that will not be told": loses(
        "raise Mute",
        "raised Mute",
        "class Mute(Exception):\n    def __str__(self): raise self\n    __repr__ = __str__",
    ),
    "SystemExit": loses("raise SystemExit(0)", "raised SystemExit: 0"),
}

ENDS = {
    "exit": loses("os._exit(125)", "process ended: it called exit with status 125"),
    "SIGSEGV": loses("ctypes.string_at(0)", "process ended: signal SIGSEGV"),
    "SIGKILL": loses("os.kill(os.getpid(), signal.SIGKILL)", "it killed or stopped itself"),
    "SIGSTOP": loses("os.kill(os.getpid(), signal.SIGSTOP)", "it killed or stopped itself"),
    "hangs up": loses("os.closerange(3, 64); time.sleep(60)", "it closed its connection"),
    "a circle of waiting": loses(
        "dist.recv(x, src=1 - dist.get_rank())", r"Rank 0 waits in recv from rank 1 \(12 B\)"
    ),
    "an endless loop": loses("while True: pass", STUCK),
    "no wait": loses("dist.all_reduce(x, async_op=True); return x", "never waits for the handle"),
}

UNDEFINED = {
    "not Python": undefined("def f(x):\n    return x +", "SyntaxError: invalid syntax"),
    "ends before": undefined("import os; os._exit(1)\nf = 1", "ended the Python process"),
}

BESIDE = {
    "through files and shared memory": loses(
        "r = dist.get_rank()\n"
        "    torch.save(r, f'/tmp/from{r}'); torch.save(r, f'/dev/shm/from{r}')\n"
        "    time.sleep(0.3)\n"
        "    assert len(glob.glob('/tmp/from*') + glob.glob('/dev/shm/from*')) > 2, 'alone'\n"
        "    return right(x)",
        "AssertionError: alone",
    ),
    "through an abstract socket": loses(
        "s, r = socket.socket(socket.AF_UNIX), dist.get_rank()\n"
        "    s.bind(f'\\0rank{r}'); s.listen(); time.sleep(0.3)\n"
        "    socket.socket(socket.AF_UNIX).connect(f'\\0rank{1 - r}')\n    return right(x)",
        "ConnectionRefusedError",
    ),
    "a frame of its own": loses(
        "answer = encode({'value': {'f': 2**1000}, 'left': [[1]]})\n"
        "    for fd in range(3, 64):\n"
        "        try: os.write(fd, encode(('output', answer)))\n        except OSError: pass",
        "",
        "from course_lib.ranks.wire import encode",
    ),
}

OF_HIDDEN = {
    "waits": in_hidden("dist.recv(torch.zeros(1), (dist.get_rank() + 1) % 3)", "waits in recv"),
    "raises": in_hidden("raise type(f'E{x}', (Exception,), {})(f'{x.tolist()}')", "8.25"),
    "ends": in_hidden("os._exit(3)", "exit with status 3"),
    "is wrong": in_hidden("return [x, str(globals())]", "wrong sum"),
    "is saved for a later cell": Row(
        F.format(world_size=3, body="open('/tmp/seen', 'w').write(f'{x}')\n    return right(x)"),
        last="print(os.listdir('/tmp'), open('/tmp/seen').read())",
    ),
}

CLIENT = """
def found(name):
    return next(o for o in gc.get_objects() if type(o).__name__ == name)
def lines(n, text="x" * 4000):
    context = found("SimulatedRank")
    context.locate = lambda: text
    context.handles._watched = False
def raw(*data):
    try:
        for each in data: found("FabricClient")._channel.sendall(each)
    except OSError:
        time.sleep(99)
def encode(kind, value):
    from course_lib.ranks import wire
    wire.MAX_KEY = 10**9
    return wire.encode((kind, value))
def says(kind, value):
    for fd in range(3, 64):
        try: socket.socket(fileno=os.dup(fd)).sendall(encode(kind, value))
        except OSError: pass
"""


def bomb(body: str, reason: str, *cells: str, seconds: float = 30.0) -> Row:
    """Return a row that would use up the examiner; a busy machine needs time until a limit is met.

    The code of ours that runs in the student's process does as the student says.
    """
    body = f"other = 1 - dist.get_rank()\n    {body}"
    return loses(body, reason, CLIENT, *cells, seconds=seconds)


BOMBS = {
    "messages that are under way": bomb(
        "big = torch.zeros(60_000_000)\n"
        "    works = [dist.isend(big, other) for _ in range(4)]\n"
        "    [work.wait() for work in works]",
        "bytes is too large; the limit is",
    ),
    "half a frame": bomb(
        "raw(encode('post', torch.zeros(8_000_000))[:-1])\n    time.sleep(99)", STUCK, seconds=3
    ),
    "what it does not read": bomb(
        "lines(0)\n    big = torch.zeros(8_000_000)\n"
        "    for i in range(5):\n"
        "        work = dist.isend(big, 1) if other else dist.irecv(big, 0)\n"
        "        raw(encode('wait', i + 1)), time.sleep(2.5)\n"
        "        other and found('FabricClient')._receive()\n"
        "    time.sleep(99)",
        "under way at once; the limit for a rank is",
    ),
    "handles": bomb(
        "lines(9990)\n    none = torch.zeros(0)\n"
        "    for i in range(9990): dist.isend(none, other, tag=i)\n"
        "    dist.recv(none, other, tag=-5)",
        "that it has not waited for; the limit for a rank is",
    ),
    "empty collectives": bomb(
        "lines(0)\n    none = torch.zeros(0)\n    for _ in range(20_000): dist.all_reduce(none)",
        r"it would have started [\d,]+ operations; the limit for a rank is",
    ),
    "questions": bomb(
        "lines(0)\n    work = dist.irecv(x, other)\n    while True: work.is_completed()",
        r"sent [\d,]+ requests to the network",
    ),
    "large answers": bomb("return torch.zeros(20_000_000)", "an answer that cannot be read"),
    "a message of no protocol": bomb(
        "dist.get_rank() and says('shout', 1); return right(x)",
        "Rank 1 ended: these bytes are not a message of the protocol",
    ),
    "a key that is long, with many items": bomb(
        "says('touched', {'k' * 10_000: [0] * 200_000})\n    time.sleep(99)",
        "a dict with a bad, long or repeated key",
    ),
    "buffers that were touched": bomb(
        "misuses = found('SimulatedRank').handles.misuses\n"
        "    Misuse = sys.modules['course_lib.ranks.simulated.handles'].Misuse\n"
        "    for i in range(1500):\n"
        "        misuses.append(Misuse(0, f'{i} ' + 'w' * 500, 'read', 'l' * 50, 'h' * 50))\n"
        "    return right(x)",
        r"before its wait\(\)",
    ),
    "a cell that says too much": Row(
        F.format(world_size=2, body=RIGHT),
        "f could not be read from the notebook",
        (CLIENT, "says('ran', {'stdout': 'o' * 900_000, 'stderr': '', 'error': None})"),
        fails=("1 ranks", "2 ranks", HIDDEN.name),
        spares_g=False,
    ),
}

TABLE = HONEST | ANSWERS | ENDS | UNDEFINED | BESIDE | OF_HIDDEN | BOMBS
ALWAYS = {
    *("a helper with writefile", "kills all it sees", "ends the notebook"),
    *("a fork bomb", "a rank prints without end", "ranks kill all in reach"),
    *("another dtype", "a tensor that lies", "an exception", "exit", "SIGSTOP", "hangs up"),
    *("a circle of waiting", "an endless loop", "no wait", "not Python"),
    *("through files and shared memory", "a frame of its own"),
    *("raises", "is wrong", "is saved for a later cell"),
    *("messages that are under way", "handles", "a key that is long, with many items"),
}
"""Rows of each kind, which run by default; the whole table takes minutes."""


@contextmanager
def examiner_stays_small() -> Iterator[None]:
    before, processor = forget_peak(), time.process_time()
    yield
    assert memory("VmHWM") - before < MEMORY
    assert time.process_time() - processor < PROCESSOR


def graded_by(name: str) -> Any:
    role = {"grade_id": name, "grade": True, "solution": False, "points": 3, "locked": True}
    return new_code_cell("", metadata={"nbgrader": {**role, "schema_version": 3}})


def submitted(row: Row) -> Any:
    solution = {"grade_id": "write_f", "grade": False, "solution": True, "schema_version": 3}
    return new_notebook(
        cells=[
            new_code_cell(SETUP),
            *(new_code_cell(cell) for cell in row.cells),
            new_code_cell(row.f, metadata={"nbgrader": solution}),
            *(graded_by("f"), graded_by("g"), new_code_cell(row.last)),
        ]
    )


@pytest.mark.every_case
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=name, marks=() if name in ALWAYS else pytest.mark.large)
        for name, row in TABLE.items()
    ],
)
def test_it_costs_what_it_breaks_and_harms_nobody(place: Sandbox, tmp_path: Path, row: Row) -> None:
    notebook = submitted(row)
    verdict = Verdict("02", "ada", "02", "5eed", "0")
    f = with_hidden(total("f", row.seconds, 1, 2), [HIDDEN])
    checks = {"f": f, "g": total("g", row.seconds, 2)}
    with examiner_stays_small(), Submission(place, Settings(cell_seconds=5)) as submission:
        examine_cells(notebook, Exam(checks, ()), submission, verdict)
    of_f, of_g = verdict.checks
    assert [case["passed"] for case in of_g.cases] == [row.spares_g], of_g.cases
    failed = tuple(case["name"] for case in of_f.cases if not case["passed"])
    assert failed == row.fails, of_f.cases
    for case in of_f.cases:
        assert case["passed"] or re.search(row.reason, case["reason"], re.DOTALL), case["reason"]
    assert not verdict.notes
    assert submission.budget.used < submission.budget.settings.submission_seconds
    verdict.write(verdict_path(tmp_path, "02", "ada", "02"))
    tell(notebook, tmp_path, "02", "ada", "02")
    shown = nbformat.writes(notebook)
    assert not [secret for secret in SECRETS if secret in shown], shown
    assert re.search(row.shows, json.dumps([cell.get("outputs") for cell in notebook.cells]))
    assert len(shown) < WRITTEN + len(row.f)
