"""The ranks in a real Jupyter kernel: cells, magics, displays, interrupts, sudden ends."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from autograder.sandbox.memory import descendants
from tests.helpers import ROOT
from tests.helpers.kernels import kernel, wait_until_gone

KERNELSPEC = ROOT / "course_lib" / "ranks" / "notebook" / "kernelspec"


@pytest.fixture(scope="module")
def shared():
    """A kernel with two ranks, for tests that leave it in order: to start one takes seconds."""
    spec = json.loads((KERNELSPEC / "kernel.json").read_text())
    assert spec["display_name"] == "Data Parallel (multi-rank)"
    with kernel(extra_arguments=spec["argv"][5:]) as notebook:
        assert not notebook.run("%ranks 2 --on cpu").error
        # Each worker of pytest has its own kernel, and no test knows which others came before it.
        notebook.run("import os, time, torch, torch.distributed as dist")
        # On a busy machine two ranks may print the same line far apart.
        notebook.run("from course_lib.ranks.output import printer\nprinter.LINE_WINDOW = 5.0")
        yield notebook


@pytest.fixture(scope="module", params=["cpu", "simulated"])
def pair(request: pytest.FixtureRequest, shared):
    """The kernel with two ranks of each kind."""
    assert not shared.run(f"%ranks 2 --on {request.param}").error
    yield shared
    assert not shared.run("%ranks 2 --on cpu").error


def pids(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


# Cells ---------------------------------------------------------------------------------------


def test_a_long_call_shows_its_progress_and_removes_it(shared) -> None:
    shared.start("ranks.run(lambda: time.sleep(1.7))", watched=True)
    message = None
    while message is None or message["msg_type"] != "display_data":
        message = shared.client.get_iopub_msg(timeout=300)
    assert re.match(r"\d s · 2 × running", message["content"]["data"]["text/plain"])
    name = message["content"]["transient"]["display_id"]
    last = None
    while message["msg_type"] != "status" or message["content"]["execution_state"] != "idle":
        message = shared.client.get_iopub_msg(timeout=300)
        if message["msg_type"] == "update_display_data":
            assert message["content"]["transient"]["display_id"] == name
            last = message["content"]["data"]
    assert last == {}


def test_a_long_call_of_an_executed_notebook_leaves_no_output(shared) -> None:
    outcome = shared.run("ranks.run(lambda: time.sleep(1.2));")
    assert outcome.bundles == []
    assert outcome.text == outcome.error == ""


def test_figures_and_rich_values_appear_per_rank(pair) -> None:
    """Also figures that are left open at the end of a cell."""
    outcome = pair.run(
        "%%ranks\n"
        "import matplotlib.pyplot as plt\n"
        "from IPython.display import display, HTML\n"
        "plt.plot([0, rank])\n"
        "plt.show()\n"
        "display(HTML('<b>both</b>'))\n"
        "plt.plot([1, rank])\n"
        "print('drawn');"
    )
    assert not outcome.error
    kinds = [set(bundle) & {"image/png", "text/html"} for bundle in outcome.bundles]
    assert kinds == [{"image/png"}, {"image/png"}, {"text/html"}, {"image/png"}, {"image/png"}]
    assert sorted(outcome.text.splitlines()) == [
        *["[rank 0]", "[rank 0]", "[rank 1]", "[rank 1]"],
        *["[ranks 0-1]", "[ranks 0-1] drawn"],
    ]


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("ranks.trace.plot()", 1),
        ("ranks.trace.plot();", 1),
        ("for _ in range(2): ranks.trace.plot()", 2),
        ("raise_it = ranks.trace.plot(); raise KeyError", 1),
        ("1 + 1", 0),
    ],
)
def test_a_trace_is_drawn_once_also_before_a_semicolon(shared, written, shown):
    shared.run("from course_lib.figures import show\nranks.run(lambda: dist.barrier())")
    bundles = shared.run(written).bundles
    assert sum("image/png" in bundle for bundle in bundles) == shown


# %%ranks -------------------------------------------------------------------------------------


def test_a_plain_cell_that_uses_a_name_of_the_ranks_gets_a_hint(shared) -> None:
    outcome = shared.run("x = 1\nprint(rank)")
    assert "NameError" in outcome.error
    assert "begin the cell with %%ranks" in outcome.text
    assert "%%ranks" not in shared.run("nowhere").text


def test_the_kernelspec_offers_the_magics(shared) -> None:
    """The shared kernel has loaded no extension but its own."""
    assert (KERNELSPEC / "logo-svg.svg").exists()
    shared.run("%ranks off")
    assert "closed" in shared.run("print(ranks)").text
    assert shared.run("%%ranks\nrank").text.count("[rank ") == 4
    before = pids(shared.run("print(ranks.processes())").text)
    assert "2: CPU processes" in shared.run("%ranks 2 --on cpu").bundles[0]["text/plain"]
    assert wait_until_gone(before) == []
    assert "%ranks K" in shared.run("%ranks many").error
    assert not shared.run("%load_ext course_lib").error


def number_of_the_next(pair) -> int:
    return int(pair.run("print(len(In) - 1)").text) + 1


def test_every_error_names_its_own_cell(pair) -> None:
    cell = number_of_the_next(pair)
    assert f"Cell In[{cell}], line 3" in pair.run("%%ranks\n\nrank / 0").error
    stuck = pair.run("%%ranks\nif rank == 0:\n    dist.barrier()").error
    assert f"waits in barrier #1  Cell In[{cell + 1}], line 3" in stuck


def test_a_cell_that_runs_again_has_its_new_number(pair) -> None:
    """The ranks stay, and know the cell's lines from its first run."""
    define = "def fail():\n    if torch.distributed.get_rank() == 1:\n        raise ValueError"
    pair.run("import torch")
    for _ in range(2):
        defined = number_of_the_next(pair)
        pair.run(define)
        assert f"Cell In[{defined}], line 3" in pair.run("ranks.run(fail)").error


def test_variables_travel_between_notebook_and_ranks(pair) -> None:
    pair.run("import torch\nfrom course_lib.ranks import per_rank\nlr = 0.5")
    name_error = pair.run("%%ranks\nlr").error
    assert "NameError: name 'lr' is not defined" in name_error
    assert "ranks.push(lr=lr)" in name_error
    assert not pair.run("ranks.push(lr=lr, shard=per_rank([torch.ones(2), torch.ones(3)]))").error
    pair.run("%%ranks\nloss = lr * shard.sum().item()\ndist.barrier()")
    pulled = pair.run("print(ranks.pull('loss', 'lr'), len(ranks.trace.operations))").text
    assert pulled == "[[1.0, 1.5], [0.5, 0.5]] 2\n"  # a pull leaves the trace of the cell
    pull_error = pair.run("ranks.pull('momentum')").error
    assert "no variable 'momentum'" in pull_error


def test_an_exception_of_one_rank_leaves_the_variables_of_all(pair) -> None:
    pair.run("%%ranks\nkept = 10 + rank")
    assert "ZeroDivisionError" in pair.run("%%ranks\nif rank == 1:\n    1 / 0").error
    assert pair.run("print(ranks.pull('kept'))").text == "[10, 11]\n"


def test_some_of_the_ranks_run_a_cell(pair) -> None:
    assert pair.run("%%ranks 1\nalone = rank\nalone").text == "[rank 1] 1\n"
    assert "no variable 'alone'" in pair.run("ranks.pull('alone')").error
    error = pair.run("%%ranks 0\ndist.barrier()").error
    assert "Rank 0 waits for rank 1, which ended without taking part" in error
    assert "must be 0 to 1" in pair.run("%%ranks 2\nrank").error


def test_shell_commands_magics_and_await_inside(pair) -> None:
    outcome = pair.run(
        "%%ranks\n\n"
        "import asyncio\n"
        "!echo from {rank}\n"
        "words = !echo a; echo b\n"
        "async def later():\n"
        "    await asyncio.sleep(0)\n"
        "    return words\n"
        "await later()"
    )
    assert not outcome.error
    assert outcome.text.splitlines() == [
        "[rank 0] from 0",
        "[rank 1] from 1",
        "[ranks 0-1] ['a', 'b']",
    ]
    assert "%%time does not work below %%ranks" in pair.run("%%ranks\n%%time\n1").error
    assert "put %run into a cell without %%ranks" in pair.run("%%ranks\n%run x.py").error
    assert "SyntaxError" in pair.run("%%ranks\nawait await").error


def test_names_that_cells_start_with_are_what_they_say_in_every_cell(pair) -> None:
    """A loop over `rank` made every rank the last one, in all later cells."""
    bound = pair.run("%%ranks\ndevice = 1\nworld_size = 2\nfor rank in range(9): pass")
    assert "[ranks 0-1] This cell has changed rank and device." in bound.text
    assert pair.run("%%ranks\nrank, device.type").text.count("'cpu')") == 2
    failed = pair.run("%%ranks\ntorch = 0\ndel rank\n1 / 0")
    assert "ZeroDivisionError" in failed.error and "changed torch" in failed.text
    assert "under another name" in pair.run("ranks.push(rank=7)").error
    assert pair.run("%%ranks 1\ntorch.ones(rank);rank").text == "[rank 1] 1\n"


@pytest.mark.parametrize(
    "question", ["breakpoint()", "import pdb; pdb.set_trace()", "dist.breakpoint()", "input('?')"]
)
def test_nobody_can_answer_a_rank(pair, question: str) -> None:
    outcome = pair.run("%%ranks\n" + question)
    assert "nobody can answer on a rank" in outcome.error and "Cell In[" in outcome.error
    assert "BdbQuit" not in outcome.error and "(Pdb)" not in outcome.text


def test_a_mistake_in_the_options_leaves_the_ranks(pair) -> None:
    pair.run("%%ranks\nprecious = 1")
    for line in ("3 --onn cpu", "3 --on moon", "-1", "a"):
        error = pair.run(f"%ranks {line}").error
        assert "UsageError" in error and "Traceback" not in error, line
        assert pair.run("print(ranks.pull('precious'))").text == "[1, 1]\n"


# Ends ----------------------------------------------------------------------------------------


def test_an_interrupt_ends_the_call_and_the_ranks_stay(shared) -> None:
    shared.run("%ranks 2 --on cpu")
    before = pids(shared.run("print(ranks.run(__import__('os').getpid))").text)
    request = shared.start(
        "def program():\n"
        "    print('asleep')\n"
        "    dist.barrier() if dist.get_rank() else time.sleep(100)\n"
        "ranks.run(program)"
    )
    shared.wait_for_text(request, "asleep")
    shared.manager.interrupt_kernel()
    outcome = shared.finish(request)
    assert "KeyboardInterrupt" in outcome.error
    assert len(outcome.error.splitlines()) == 1  # the table says the rest
    assert "Interrupted" in outcome.text
    assert "waits in barrier" in outcome.text
    assert re.search(r"running +Cell In\[\d+\], line 3", outcome.text)
    assert pids(shared.run("print(ranks.run(__import__('os').getpid))").text) == before


@pytest.mark.large
def test_an_interrupt_while_the_ranks_start() -> None:
    with kernel() as fresh:
        fresh.run("from course_lib.ranks import Ranks")
        for seconds in (0.05, 1.0):
            request = fresh.start("ranks = Ranks(2, on='cpu')\nprint('go')\nranks.run(lambda: 1)")
            fresh.wait_for_text(request, "go")
            time.sleep(seconds)
            fresh.manager.interrupt_kernel()
            fresh.finish(request)
        assert "[1, 1]" in fresh.run("print(Ranks(2, on='cpu').run(lambda: 1))").text
        below = descendants(fresh.pid)
    assert wait_until_gone(below) == []


def test_a_kernel_that_restarts_or_dies_leaves_nothing(tmp_path) -> None:
    with kernel(env={**os.environ, "TMPDIR": str(tmp_path)}) as fresh:
        for end in ("restart", "kill"):
            fresh.run("import course_lib.ranks")
            server = descendants(fresh.pid)[0]  # it starts at once
            fresh.run("from course_lib.ranks import Ranks\nimport time\nranks = Ranks(3, on='cpu')")
            request = fresh.start("ranks.run(lambda: print('on') or time.sleep(100))")
            fresh.wait_for_text(request, "on")
            below = descendants(fresh.pid)
            assert below[0] == server
            assert len(descendants(server)) == 4  # the ranks, and what cleans up after them
            assert len(below) == 5
            if end == "kill":
                os.kill(fresh.pid, signal.SIGKILL)
            else:
                fresh.manager.restart_kernel(now=True)
                fresh.client.wait_for_ready(timeout=300)
            assert wait_until_gone(below) == []
    # Importing PyTorch's compiler makes its cache folder, whoever does it.
    left = [path.name for path in tmp_path.iterdir()]
    assert [name for name in left if not name.startswith(("ipykernel", "torchinductor"))] == []


@pytest.mark.large
def test_a_script_interrupted_twice_leaves_nothing(tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import signal, time\n"
        "from course_lib.ranks import Ranks\n"
        # A shell starts what runs in its background with interrupts ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "ranks = Ranks(2, on='cpu')\n"
        "ranks.run(lambda: print('on') or time.sleep(100))\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert "on" in process.stdout.readline()
    below = descendants(process.pid)
    assert len(below) >= 3
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert "KeyboardInterrupt" in errors
    assert wait_until_gone(below) == []
