"""A table of submissions that try something, or are odd but honest, and the score of each.

Each is the right solution of an assignment, with cells of its own in front and perhaps another
function in a task's place. An attack costs what it breaks, and nothing else.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import Any

import nbformat
import pytest

from autograder.commands.demo import ASSIGNMENT, replace_tasks
from autograder.examination.budget import Limits
from autograder.examination.submission import Submission
from autograder.examination.verdict import Verdict
from autograder.passes.examine import examine_cells
from autograder.sandbox.sandbox import Sandbox
from course_lib.checking.loading import load_checks, load_module
from tests.helpers.course_folders import RELEASED, SOURCES, needs_sources

pytestmark = needs_sources

ALL = {"shard_bounds", "average_gradients", "data_parallel_step", "is_right"}
AVERAGE = """
def average_gradients(params, group=None):
    world_size = dist.get_world_size(group)
    for param in params:
        if param.grad is not None:
            dist.all_reduce(param.grad, group=group)
            param.grad /= world_size
"""
BOUNDS = """
    size, rest = divmod(length, world_size)
    start = rank * size + min(rank, rest)
    return start, start + size + (rank < rest)
"""


@dataclass(frozen=True)
class Attack:
    """A submission: the cells in front, the tasks that it changes, the tasks that count."""

    passes: frozenset[str]
    cells: tuple[str, ...] = ()
    tasks: dict[str, str] = field(default_factory=dict)
    last: str = ""
    """A cell at the end; the test looks at its output."""


def honest(*cells: str, **tasks: str) -> Attack:
    return Attack(frozenset(ALL), cells, tasks)


def loses(task: str, source: str, *cells: str, last: str = "") -> Attack:
    return Attack(frozenset(ALL - {task}), cells, {task: source}, last)


def bounds(body: str) -> str:
    return f"def shard_bounds(length, world_size, rank):\n    {body}\n{BOUNDS}"


def average(body: str) -> str:
    return f"import os, torch\ndef average_gradients(params, group=None):\n    {body}\n"


def step(body: str) -> str:
    return f"def data_parallel_step(model, loss_fn, x, y, lr, group=None):\n    {body}\n"


ATTACKS = {
    # Honest, and odd.
    "magics of a kernel": honest("%load_ext autoreload\n%autoreload 2\n%gui qt"),
    "pip install": honest("%pip install nothing\n!pip install nothing"),
    "a helper with writefile": honest(
        "%%writefile helper.py\ndef half(length, world_size): return divmod(length, world_size)",
        shard_bounds="from helper import half\n"
        "def shard_bounds(length, world_size, rank):\n    import helper\n"
        "    size, rest = helper.half(length, world_size)\n" + BOUNDS.split("\n", 2)[2],
    ),
    "a helper in a folder on the path": honest(
        "import os, sys\nos.makedirs('lib/deep')\nsys.path.append('lib')\nos.chdir('lib/deep')",
        "open('../other.py', 'w').write('TWO = 2')\nopen('data.txt', 'w').write('1')",
        shard_bounds="import sys\nsys.path.append('..')\n"
        "def shard_bounds(length, world_size, rank):\n"
        "    import other\n    assert other.TWO == 2 and open('data.txt').read() == '1'" + BOUNDS,
    ),
    "its own threads and warnings": honest(
        "import threading, warnings, time\nwarnings.warn('careful')\n"
        "threading.Thread(target=time.sleep, args=(100,)).start()"
    ),
    # Answers of an unexpected form.
    "None": loses("shard_bounds", bounds("return None")),
    "too large for a float": loses("data_parallel_step", step("return 2**1024 - 1")),
    "grad of another kind": loses(
        "average_gradients", average("for p in params: p.grad = torch.zeros(7).to_sparse()")
    ),
    # Answers that were lying about.
    "a later module": loses(
        "average_gradients", "from course_lib.gradient_sync import *\naverage_gradients = average"
    ),
    "the oracle": loses(
        "data_parallel_step",
        "import glob, runpy\nfor p in glob.glob('/exam/**/*.py', recursive=True):\n"
        "    if 'big_batch_steps' in open(p).read(): raise SystemExit('found')\n"
        "from course_lib.checking import expect_close\n" + step("return 0.0"),
    ),
    # Attacks that kill, stop or starve.
    "kills all it sees": honest("import os, signal\nos.kill(-1, 9)\nos.kill(os.getppid(), 9)"),
    "ends the notebook": honest("import os\nos._exit(0)"),
    "stops the notebook": honest("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)"),
    "a fork bomb": honest(
        "import os, time\nwhile True:\n    try:\n        if os.fork() == 0: time.sleep(1000)\n"
        "    except OSError: break"
    ),
    "a full disk": honest(
        "try:\n    for i in range(99): open(f'/tmp/{i}', 'wb').write(bytes(60 << 20))\n"
        "except OSError: pass\n"
        "try:\n    for i in range(99): open(f'/dev/shm/{i}', 'wb').write(bytes(60 << 20))\n"
        "except OSError: pass"
    ),
    "a rank forks without end": loses(
        "average_gradients",
        average(
            "while True:\n        try: os.fork() or __import__('time').sleep(99)\n"
            "        except OSError: pass"
        ),
    ),
    "a rank stops itself": loses("average_gradients", average("os.kill(os.getpid(), 19)")),
    "an endless loop": loses("average_gradients", average("while True: pass")),
    # Other ways from rank to rank than the network.
    "through files and shared memory": loses(
        "average_gradients",
        average(
            "import glob, time\n    r = dist.get_rank()\n"
            "    torch.save(r, f'/tmp/from{r}'); torch.save(r, f'/dev/shm/from{r}')\n"
            "    time.sleep(0.3)\n"
            "    seen = glob.glob('/tmp/from*') + glob.glob('/dev/shm/from*')\n"
            "    assert len(seen) > 2, 'alone'\n    " + AVERAGE.strip().replace("\n", "\n    ")
        ),
    ),
    "through an abstract socket": loses(
        "average_gradients",
        average(
            "import socket, time\n    s = socket.socket(socket.AF_UNIX)\n"
            "    r = dist.get_rank()\n    s.bind(f'\\0rank{r}'); s.listen()\n    time.sleep(0.3)\n"
            "    if dist.get_world_size() > 1:\n"
            "        socket.socket(socket.AF_UNIX).connect(f'\\0rank{1 - r % 2}')"
        ),
    ),
    # A check that looks at the solution and not at its results.
    "counts the solutions": loses(
        "is_right",
        "import os\ndef is_right(average):\n    open('/tmp/count', 'a').write('x')\n"
        "    seen = os.path.getsize('/tmp/count')\n"
        "    assert seen == 1, 'the second one'\n    return True",
    ),
    "reads the solution": loses(
        "is_right",
        "import gc, sys\ndef is_right(average):\n"
        "    texts = [x for x in gc.get_objects() if isinstance(x, dict) and 'source' in x]\n"
        "    found = [str(x['source']) for x in texts if 'all_' in str(x['source'])]\n"
        "    f = sys._getframe()\n"
        "    while f := f.f_back:\n"
        "        found += [str(v) for v in f.f_locals.values() if 'all_gather(' in str(v)]\n"
        "    assert found, 'nothing to read'\n    return '.mean(0)' in found[0]",
    ),
    "is on the other ranks": loses(
        "is_right",
        "class Spy:\n    def __reduce__(self): return eval, (\"__import__('torch')."
        "distributed.get_rank() and open('/dev/shm/spy', 'w') and 1/0 or 0\",)\n"
        "spy = Spy()\ndef is_right(average):\n    assert spy == 0\n"
        "    return bool(__import__('glob').glob('/dev/shm/spy'))",
    ),
    # Hidden inputs that come back.
    "saved for a later cell": Attack(
        frozenset(ALL),
        (),
        {"shard_bounds": bounds("open('/tmp/seen', 'a').write(f'secret{length} ')")},
        last="import os\nprint(os.listdir('/tmp'), open('/tmp/seen').read())",
    ),
    "in an exception": loses(
        "shard_bounds",
        bounds("if length > 100: raise type(f'E{length}', (Exception,), {})(f'secret{length}')"),
    ),
}


def notebook_of(attack: Attack) -> Any:
    """Return the submitted notebook."""
    released = nbformat.read(RELEASED / ASSIGNMENT / f"{ASSIGNMENT}.ipynb", as_version=4)
    solution = nbformat.read(SOURCES / ASSIGNMENT / f"{ASSIGNMENT}.ipynb", as_version=4)
    notebook = nbformat.reads(nbformat.writes(replace_tasks(released, solution, [])), as_version=4)
    at = 1 + next(i for i, cell in enumerate(notebook.cells) if cell.cell_type == "code")
    for cell in notebook.cells:
        task = cell.metadata.get("nbgrader", {}).get("grade_id", "").removeprefix("write_")
        if task in attack.tasks and cell.metadata.nbgrader.solution:
            cell.source = attack.tasks[task]
    notebook.cells[at:at] = [nbformat.v4.new_code_cell(cell) for cell in attack.cells]
    notebook.cells.append(nbformat.v4.new_code_cell(attack.last))
    return notebook


def graded(place: Sandbox, attack: Attack, seed: str = "seed") -> tuple[Verdict, Any, Submission]:
    """Grade the submission as the pass does; return the verdict and the notebook."""
    source, notebook = SOURCES / ASSIGNMENT, notebook_of(attack)
    verdict = Verdict(ASSIGNMENT, "somebody", ASSIGNMENT, seed, "")
    checks = load_checks(RELEASED / ASSIGNMENT / "checks.py")
    hidden = load_module(source / "hidden.py", RELEASED / ASSIGNMENT).HIDDEN
    if "is_right" not in attack.tasks:  # its cases take longest: one is enough
        less = replace(checks["is_right"], cases=checks["is_right"].cases[:1], worth={})
        checks, hidden = {**checks, "is_right": less}, {**hidden, "is_right": ()}
    with Submission(place, Limits(cell=10, case=4)) as submission:
        examine_cells(notebook, checks, hidden, submission, verdict, logging.getLogger())
    return verdict, notebook, submission


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_it_costs_what_it_breaks(assignment_place: Sandbox, attack: Attack) -> None:
    verdict, notebook, submission = graded(assignment_place, attack)
    passed = {check.task for check in verdict.checks if check.score}
    told = str([cell.get("outputs") for cell in notebook.cells])
    assert passed == attack.passes, told[-6000:]
    assert len(verdict.checks) == len(ALL)
    for length in (60_000, 1_281_167):  # of hidden cases
        assert f"secret{length}" not in told and f"E{length}" not in told
    assert submission.budget.used < submission.budget.limits.submission + 5


def test_one_student_takes_a_minute_at_most(assignment_place: Sandbox) -> None:
    with Submission(assignment_place, Limits(submission=3)) as submission:
        assert "took longer than 3 s" in submission.run_cell("while True: pass").error
        assert "used up its time limit of 3 s" in submission.run_cell("x = 1").error
    assert submission.budget.left <= 0
