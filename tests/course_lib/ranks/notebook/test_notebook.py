"""The ranks in a real Jupyter kernel: cells, magics, displays, interrupts, sudden ends."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import ROOT
from tests.helpers.kernels import Kernel, alive, descendants, kernel, wait_until_gone


@pytest.fixture(scope="module")
def shared() -> Iterator[Kernel]:
    """A kernel with two ranks, for tests that leave it in order."""
    with kernel() as made:
        assert not made.run("%load_ext course_lib.ranks.notebook.magic\n%ranks 2 --on cpu").error
        # Each worker of pytest has its own kernel, and no test knows which others came before it.
        made.run("import os, time, torch, torch.distributed as dist")
        # On a busy machine two ranks may print the same line far apart.
        made.run("from course_lib.ranks.output import printer\nprinter.LINE_WINDOW = 5.0")
        yield made


def pids(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


# Cells ---------------------------------------------------------------------------------------


def test_prints_stream(shared: Kernel, tmp_path: Path) -> None:
    """The ranks do not go on before somebody has seen what they printed."""
    seen = tmp_path / "seen"
    request = shared.start(
        "def program():\n"
        "    print('begun')\n"
        f"    while not os.path.exists({str(seen)!r}):\n"
        "        time.sleep(0.01)\n"
        "    print('seen')\n"
        "ranks.run(program);"
    )
    shared.wait_for_text(request, "[ranks 0-1] begun")
    seen.touch()
    assert shared.finish(request).text == "[ranks 0-1] seen\n"


def test_a_long_call_shows_its_progress_and_removes_it(shared: Kernel) -> None:
    request = shared.start("ranks.run(lambda: time.sleep(1.7))", watched=True)
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
    assert request


def test_a_long_call_of_an_executed_notebook_leaves_no_output(shared: Kernel) -> None:
    outcome = shared.run("ranks.run(lambda: time.sleep(1.2));")
    assert outcome.bundles == []
    assert outcome.text == outcome.error == ""


def test_figures_and_rich_values_appear_per_rank(shared: Kernel) -> None:
    outcome = shared.run(
        "import matplotlib.pyplot as plt\n"
        "from IPython.display import display, HTML\n"
        "def program():\n"
        "    plt.plot([0, dist.get_rank()])\n"
        "    plt.show()\n"
        "    display(HTML('<b>both</b>'))\n"
        "ranks.run(program);"
    )
    assert not outcome.error
    assert [set(bundle) & {"image/png", "text/html"} for bundle in outcome.bundles] == [
        {"image/png"},
        {"image/png"},
        {"text/html"},
    ]
    assert outcome.text.splitlines() == ["[rank 0]", "[rank 1]", "[ranks 0-1]"]


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
def test_a_trace_is_drawn_once_also_before_a_semicolon(
    shared: Kernel, written: str, shown: int
) -> None:
    shared.run("from course_lib.figures import show\nranks.run(lambda: dist.barrier())")
    bundles = shared.run(written).bundles
    assert sum("image/png" in bundle for bundle in bundles) == shown


# %%ranks -------------------------------------------------------------------------------------


def test_a_plain_cell_that_uses_a_name_of_the_ranks_gets_a_hint(shared: Kernel) -> None:
    outcome = shared.run("x = 1\nprint(rank)")
    assert "NameError" in outcome.error
    assert "begin the cell with %%ranks" in outcome.text
    assert "%%ranks" not in shared.run("nowhere").text


def test_the_kernelspec_offers_the_magics() -> None:
    folder = ROOT / "course_lib" / "ranks" / "notebook" / "kernelspec"
    spec = json.loads((folder / "kernel.json").read_text())
    assert spec["display_name"] == "Data Parallel (multi-rank)"
    assert (folder / "logo-svg.svg").exists()
    with kernel(extra_arguments=spec["argv"][5:]) as made:
        assert made.run("%%ranks\nrank").text.count("[rank ") == 4
        before = pids(made.run("print(ranks.processes())").text)
        assert "2: CPU processes" in made.run("%ranks 2 --on cpu").bundles[0]["text/plain"]
        assert wait_until_gone(before) == []
        made.run("%ranks off")
        assert "closed" in made.run("print(ranks)").text
        assert "%ranks K" in made.run("%ranks many").error


# Ends ----------------------------------------------------------------------------------------


def test_an_interrupt_ends_the_call_and_the_ranks_stay(shared: Kernel) -> None:
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


def test_a_kernel_that_restarts_or_dies_leaves_nothing(tmp_path: Path) -> None:
    with kernel(env={**os.environ, "TMPDIR": str(tmp_path)}) as fresh:
        for end in ("restart", "kill"):
            fresh.run("from course_lib.ranks import Ranks\nimport time\nranks = Ranks(3, on='cpu')")
            request = fresh.start("ranks.run(lambda: print('on') or time.sleep(100))")
            fresh.wait_for_text(request, "on")
            below = descendants(fresh.pid)
            assert len([pid for pid in below if alive(pid)]) >= 4
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
def test_a_script_interrupted_twice_leaves_nothing(tmp_path: Path) -> None:
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
    assert process.stdout is not None
    assert "on" in process.stdout.readline()
    below = descendants(process.pid)
    assert len(below) >= 3
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert "KeyboardInterrupt" in errors
    assert wait_until_gone(below) == []
