"""For every test: one thread per process, no deadline, and no process left behind."""

import contextlib
import gc
import importlib
import os
import signal
import sys
import time
import uuid
from pathlib import Path

# Before torch is imported anywhere, and inherited by every rank and kernel the tests start: four
# ranks with a thread pool each, on two cores, spend their time waiting for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Triton decides when it is imported, by whomever: without a GPU, kernels are interpreted.
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

import psutil
import pytest
from hypothesis import HealthCheck, settings

from course_lib._later import without

without("rfc3987_syntax")

# Imports and the list of tests free nothing: without the collector they take a sixth less.
gc.disable()

# Hundreds of processes import the course, and each would compile it anew: what is compiled is kept,
# whatever the shell says.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A busy machine is no failure: what a test may take is pytest's timeout.
settings.register_profile(
    "course",
    deadline=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("course")

# The files that take longest, in this order: workers begin with them.
LONG = (
    "test_class.py",
    "test_lectures.py",
    "test_further_pages.py",
    "test_handed_in.py",
    "test_assignments.py",
    "test_learner.py",
    "test_demo.py",
    "test_every_carrier.py",
    "test_node.py",
    "test_notebook.py",
    "test_kills.py",
    "test_repair.py",
)

MARK = "SGD_TO_DDP_TEST"
GRACE_SECONDS = 3.0
# Of a process that its parent has not yet collected.
DEAD = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


# Started in the background of a script, a shell's commands ignore Ctrl-C, as all that they start
# would; the tests of interrupts are about a terminal's.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def orphans(mark: str, ancestor: int) -> dict[int, str]:
    """Return the live processes that carry ``mark`` but no longer descend from ``ancestor``.

    The mark is an environment variable set in the ancestor: the environment a process was started
    with is inherited through forks and stays readable after its parent has gone. Walking up the
    parents finds orphans also where they are adopted by a session manager instead of process 1.
    Not seen: what was forked from ``ancestor`` and never ran another program, and what was started
    with an emptied environment.
    """
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it is gone, or not ours
            environment = process.environ()
            if environment.get(MARK) != mark or process.status() in DEAD:
                continue
            if ancestor not in [process.pid, *(parent.pid for parent in process.parents())]:
                started_in = environment.get("PYTEST_CURRENT_TEST", "outside any test")
                command = " ".join(process.cmdline())[:160].strip()
                found[process.pid] = f"pid {process.pid}, started during {started_in}: {command}"
    return found


# So many cases of a parametrized test run by default; `make test-all` runs every case.
EXAMPLES = 3


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is marked large
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as large what is one more of many; let workers begin with the files that take longest.

    A parametrized test with more than three cases runs its first, middle and last case by default;
    marked `every_case`, it runs all of them. Without a GPU, tests marked gpu are skipped.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if "[" in item.name and not {"large", "every_case"} & item.keywords.keys():
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for several in cases.values():
        last = len(several) - 1
        kept = {0, last // 2, last} if last >= EXAMPLES else set(range(last + 1))
        for number, item in enumerate(several):
            if number not in kept:
                item.add_marker(pytest.mark.large)
    if "PYTEST_XDIST_WORKER" in os.environ:
        place = {name: number for number, name in enumerate(LONG)}
        items.sort(key=lambda item: place.get(item.path.name, len(LONG)))
    if any("gpu" in item.keywords for item in items):
        import torch

        if not torch.cuda.is_available():
            for item in items:
                if item.get_closest_marker("gpu"):
                    item.add_marker(pytest.mark.skip(reason="there is no NVIDIA GPU"))


def pytest_collection_finish() -> None:
    """Let the garbage collector look at what the tests make, and not at what was imported."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def kernels_have_an_address_of_their_own():
    """Beside other workers, give kernels an address at which nobody else takes ports.

    A kernel is told five ports that are free when it is started. Until it takes them, a second
    later, the ranks of another worker's tests could have got one of them.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if not worker or sys.platform != "linux":  # where all of 127.0.0.0/8 is the loopback
        yield
        return
    from jupyter_client import localinterfaces

    address = f"127.0.1.{1 + int(worker.removeprefix('gw'))}"
    known = localinterfaces.local_ips()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(localinterfaces, "LOCAL_IPS", [*known, address])
        patch.setattr(localinterfaces, "LOCALHOST", address)
        yield


@pytest.fixture(scope="session")
def ddp_is_imported() -> None:
    """Import what DDP imports when it is first used: that takes seconds of some limit."""
    importlib.import_module("torch._dynamo")


@pytest.fixture
def fresh_matplotlib():
    """Draw on no screen and in matplotlib's own style, whatever a notebook's cell set before."""
    import matplotlib
    import matplotlib.pyplot as plt

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.use("agg")
        yield
        plt.close("all")


@pytest.fixture(scope="session", autouse=True)
def no_process_left_behind():
    """Fail the run when a process that a test started outlives whoever was to end it.

    Only orphans count here. Multiprocessing's fork server and resource tracker are descendants of
    pytest, as are ranks that wait for the next test. They end with pytest, and .ci/run looks
    whether they did. Each parallel worker has a mark of its own and looks after its own tests.
    """
    if not Path("/proc/self/environ").exists():  # macOS
        yield
        return
    mark = os.environ[MARK] = uuid.uuid4().hex
    yield
    # A sandbox that dies with its parent needs some milliseconds to do so.
    deadline = time.monotonic() + GRACE_SECONDS
    while (left := orphans(mark, os.getpid())) and time.monotonic() < deadline:
        time.sleep(0.05)
    if left:
        pytest.fail("these processes outlived the tests:\n  " + "\n  ".join(left.values()))
