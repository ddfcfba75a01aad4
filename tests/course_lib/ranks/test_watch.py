"""Jobs of ``torchrun`` that hang or fail, watched: the cause is named as in a notebook."""

import os
import re
import selectors
import socket
import sys
import time

import pytest

from tests.helpers.student_bugs import BUGS, NOT_UNDER_TORCHRUN
from tests.helpers.torchrun import end, start

TOLD = "reported by course_lib.ranks.watch"
NAMES = [re.sub(r"\W+", "_", bug.what) for bug in BUGS]
JOIN = "import sys\nimport torch, torch.distributed as dist\n"
BUG = f"""{JOIN}
from tests.helpers.student_bugs import BUGS

dist.init_process_group("gloo")
BUGS[int(sys.argv[1])].fn()
"""


def output_of(*jobs, until=lambda text: TOLD in text):
    """Return what jobs print until all have ended, or `until` and half a second is over.

    Those that still run are then ended as ``torchrun`` ends them.
    """
    printed = b""
    end_at = time.monotonic() + 240
    with selectors.DefaultSelector() as selector:
        for job in jobs:
            selector.register(job.stdout, selectors.EVENT_READ)
        while selector.get_map() and time.monotonic() < end_at:
            for key, _ in selector.select(0.1):
                data = os.read(key.fd, 1 << 16)
                if not data:
                    selector.unregister(key.fileobj)
                printed += data
                if until(printed.decode("utf-8", "replace")):
                    end_at = min(end_at, time.monotonic() + 0.5)
    printed += b"".join(map(end, jobs))
    return printed.decode("utf-8", "replace")


def told_by(text: str) -> str:
    """Return what the watch told, without the rest of a job's output; empty if it told nothing."""
    before, marker, after = text.partition(TOLD)
    if not marker:
        return ""
    kind = before.rpartition("\n")[2].split(",")[0]
    return f"{kind}{after}"


def watched(folder, script: str, *arguments: str, ranks: int = 3):
    """Start a job that the watch looks after."""
    (folder / "train.py").write_text(script)
    return start(folder, "-m", "course_lib.ranks.watch", "train.py", *arguments, ranks=ranks)


# All bugs run on ranks of ours, which are explained by the same code; here are some of them.
HERE = [index for index, bug in enumerate(BUGS) if bug.what not in NOT_UNDER_TORCHRUN][::5]


@pytest.mark.every_case
@pytest.mark.parametrize(
    "index",
    [
        pytest.param(index, id=NAMES[index], marks=pytest.mark.large if index else ())
        for index in HERE
    ],
)
def test_the_cause_is_named(index: int, tmp_path) -> None:
    bug = BUGS[index]
    # Two ranks suffice for the first.
    printed = output_of(watched(tmp_path, BUG, str(index), ranks=4 if index else 2))
    report = told_by(printed)
    assert report.startswith(f"{bug.error.__name__}:"), printed
    for word in bug.words:
        assert word.lower() in report.lower(), report
    assert printed.count(TOLD) == 1
    assert not list(tmp_path.glob("board-*"))


TRAIN = f"""{JOIN}
import os, time
from torch import nn

dist.init_process_group(backend="gloo")
rank, k = dist.get_rank(), dist.get_world_size()
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
for _ in range(3):
    model(torch.ones(2, 4)).sum().backward()
half = dist.new_group([0, 1], backend="gloo")
x = torch.full((3,), float(rank))
if rank < 2:
    dist.all_reduce(x, group=half)
    assert x[0].item() == 1
dist.all_reduce(x := torch.full((3,), float(rank)))
assert x[0].item() == k * (k - 1) / 2
time.sleep(3 * rank)  # a slow rank is none that hangs
dist.barrier()
dist.destroy_process_group()
# In one piece: several ranks write to one pipe.
told = f"done {{sys.argv[1:]}} {{__name__}} {{dist.is_initialized()}}\\n"
os.write(1, told.encode())
"""


@pytest.mark.large
def test_a_right_script_is_left_alone(tmp_path) -> None:
    job = watched(tmp_path, TRAIN, "--lr", "0.1")
    printed = output_of(job)
    assert printed.count("done ['--lr', '0.1'] __main__ False") == 3, printed
    assert TOLD not in printed
    assert job.returncode == 0


HURRIED = f"""import os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (2048, 2048))
files = [open(os.devnull) for _ in range(1100)]  # the watch's own descriptors are above 1024
import course_lib.ranks.watch as watch
{JOIN}
watch._EVERY = 0.0  # so that every rank ends while its watch is inside the store
dist.init_process_group("gloo")
dist.barrier()
"""


@pytest.mark.large
def test_the_watch_ends_before_python_does(tmp_path) -> None:
    (tmp_path / "train.py").write_text(HURRIED)
    job = start(tmp_path, "train.py", ranks=4)
    printed = output_of(job)
    assert job.returncode == 0 and "Traceback" not in printed, printed


KILLED = f"""{JOIN}
import os, signal, time
dist.init_process_group()
if dist.get_rank() == 1:
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
"""


def line_of(script: str, text: str) -> str:
    """Return how a report calls the last line of a script that has this text in it."""
    lines = [n for n, line in enumerate(script.splitlines(), 1) if text in line]
    return f"train.py, line {lines[-1]}"


@pytest.mark.large
def test_a_killed_rank_is_named_with_its_last_line(tmp_path) -> None:
    printed = output_of(watched(tmp_path, KILLED))
    report = told_by(printed)
    assert "Rank 1's process ended" in report, printed
    assert f"process ended        {line_of(KILLED, 'time.sleep')}" in report, report
    assert printed.count(TOLD) == 1


LIMITED = f"""import course_lib.ranks.watch
{JOIN}
from datetime import timedelta
dist.init_process_group("gloo", timeout=timedelta(seconds=8))
rank = dist.get_rank()
if sys.argv[1] == "collective":
    if rank == 0:
        dist.all_reduce(torch.ones(3))
elif rank == 0:
    dist.recv(torch.ones(3), 1)
if rank == 1:
    import time
    time.sleep(60)
"""


@pytest.mark.large
@pytest.mark.parametrize("operation", ["collective", "message"])
def test_after_the_groups_limit_pytorch_ends_the_job(operation: str, tmp_path) -> None:
    (tmp_path / "train.py").write_text(LIMITED)
    began = time.monotonic()
    job = start(tmp_path, "train.py", operation, ranks=2)
    printed = output_of(job)
    assert time.monotonic() - began < 300  # PyTorch's own limit is half an hour
    assert "Rank 0 raised RuntimeError" in told_by(printed), printed
    assert line_of(LIMITED, "time.sleep") in told_by(printed), printed


@pytest.mark.large
def test_a_job_on_two_nodes_runs_and_is_not_watched(tmp_path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    jobs = []
    for node in range(2):
        options = ["--nnodes", "2", "--node-rank", str(node), "--master-addr", "127.0.0.1"]
        options += ["--master-port", str(port), "-m", "course_lib.ranks.watch", "train.py"]
        jobs.append(start(tmp_path, *options, ranks=2, GLOO_SOCKET_IFNAME="lo"))
    printed = output_of(*jobs)
    assert printed.count("this job is not watched") == 1, printed
    assert printed.count("done") == 4, printed


LOCKED = f"""{JOIN}
import fcntl, time
dist.init_process_group("gloo")
rank = dist.get_rank()
file = open("lock", "w")
if rank == 1:
    fcntl.flock(file, fcntl.LOCK_EX)
dist.barrier()
if rank == 0:
    fcntl.flock(file, fcntl.LOCK_EX)  # rank 1 holds it, and waits in the barrier
dist.barrier()
"""


@pytest.mark.large
def test_a_rank_that_waits_outside_of_communication_is_named(tmp_path) -> None:
    report = told_by(output_of(watched(tmp_path, LOCKED)))
    assert "Rank 0 is in no communication" in report and report.startswith("Note")
    assert line_of(LOCKED, "rank 1 holds it") in report, report
    assert report.count("waits in barrier #2") == 2, report


WORKS = f"""{JOIN}
import time
dist.init_process_group("gloo")
while True:
    dist.all_reduce(torch.ones(3))
    print("works", flush=True)
    time.sleep(1 + dist.get_rank())
"""


@pytest.mark.large
def test_a_job_that_is_cancelled_is_no_failure(tmp_path) -> None:
    job = watched(tmp_path, WORKS)
    printed = output_of(job, until=lambda text: text.count("works") > 6)
    assert printed.count("works") > 6, printed
    assert TOLD not in printed
    assert "signal: 15" in printed  # torchrun has said so, so all that it printed is here


if sys.platform != "linux":
    pytest.skip("jobs are looked after through /proc", allow_module_level=True)
