"""The memory of all processes of a submission: limited by a control group, else counted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from autograder.sandbox import memory
from autograder.sandbox.cores import cores_of
from autograder.sandbox.memory import MemoryGroup, descendants, exact_memory, held_memory


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make files like those of a cgroup v2 whose group ``/mine`` this user may divide."""
    (tmp_path / "cgroup.controllers").write_text("memory pids")
    (tmp_path / "mine").mkdir()
    make = Path.mkdir

    def with_its_files(path: Path, *arguments: object, **options: object) -> None:
        make(path, *arguments, **options)
        if path.name.startswith("sgd-to-ddp"):
            for name in ("cgroup.procs", "memory.max", "memory.swap.max", "pids.max"):
                (path / name).touch()
            (path / "memory.events.local").write_text("low 0\noom 3\noom_kill 9\n")

    monkeypatch.setattr(Path, "mkdir", with_its_files)
    monkeypatch.setattr(memory, "_GROUPS", tmp_path)
    monkeypatch.setattr(memory, "_own_group", lambda: "/mine")
    return tmp_path


def test_a_group_is_made_where_it_may_be(cgroups: Path) -> None:
    group = MemoryGroup.make(1000, 7)
    assert group is not None and group.path.parent == cgroups / "mine"
    assert (group.path / "memory.max").read_text() == "1000"
    assert (group.path / "pids.max").read_text() == "7"
    assert (group.path / "memory.swap.max").read_text() == "0"
    group.add([42])
    assert (group.path / "cgroup.procs").read_text() == "42"
    # Nine of its processes were killed for want of memory, and three times its own limit was met.
    assert group.times_over() == 3
    for file in list(group.path.iterdir()):
        file.unlink()  # a real group's files go with it
    group.close()
    assert not group.path.exists() and group.times_over() == 0


@pytest.mark.parametrize("group", ["/mine", "/no/such"])
def test_where_none_may_be_made_nothing_is_left(tmp_path, monkeypatch, group):
    (tmp_path / "cgroup.controllers").touch()
    (tmp_path / "mine").mkdir()  # without a kernel's files, as where version 2 has no controllers
    monkeypatch.setattr(memory, "_GROUPS", tmp_path)
    monkeypatch.setattr(memory, "_own_group", lambda: group)
    assert MemoryGroup.make(1000, 7) is None
    assert {path.name for path in tmp_path.rglob("*/")} <= {"mine", "cgroup.controllers"}


def test_memory_that_processes_share_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import mmap, os\nshared = mmap.mmap(-1, 80 << 20)\nshared.write(bytes(80 << 20))\n"
        "os.fork()\nlen(shared[:])\nos.write(1, b'ready\\n')\ninput()"  # print may write twice
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as process:
        assert [process.stdout.readline() for _ in range(2)] == [b"ready\n"] * 2
        pids = [process.pid, *descendants(process.pid)]
        monkeypatch.setattr(os.path, "exists", lambda path: False)
        assert descendants(process.pid) == pids[1:]  # also if the kernel keeps no lists of children
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)  # until it is stopped, not by anybody outside
        times = cores_of([*pids, 2**22])  # the last one has ended
        os.kill(process.pid, signal.SIGCONT)
        assert times.keys() == {*pids} and not any(cores.stopped for cores in times.values())
        held, exact = sum(map(held_memory, pids)), sum(map(exact_memory, pids))
        process.communicate(b"\n\n")
    assert held > 160 << 20
    assert 80 << 20 < exact < 140 << 20
