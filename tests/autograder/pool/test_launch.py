"""Workers on other machines: two nodes of a Slurm, and one that is reached by ssh."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from autograder.commands.demo import ASSIGNMENT
from autograder.examination.verdict import Verdict
from tests.helpers.course_folders import needs_sources
from tests.helpers.slurm import NODES, Cluster, free_ports, two_nodes
from tests.helpers.whole_class import Course, booked, hand_in, small_class, unexpected

pytestmark = [
    needs_sources,
    pytest.mark.large,
    pytest.mark.timeout(3600),
    pytest.mark.filterwarnings("ignore"),  # nbgrader's, and what it stands on
]
LAUNCH = "srun -n1 -c2 --mem 8G --exclusive"


@dataclass
class Grading:
    """`autograder grade`, while it runs.

    Attributes:
        hosts: student → the machine on which they were graded, of those who are.

    """

    course: Course
    process: subprocess.Popen[bytes]
    log: Path

    @classmethod
    def start(cls, course: Course, jobs: int, launch: str, environment: dict[str, str]) -> Grading:
        options = ["--jobs", str(jobs), "--launch", launch, "--course", str(course.root)]
        command = [sys.executable, "-m", "autograder", "grade", ASSIGNMENT, *options]
        log = course.root / "log.txt"
        with log.open("wb") as output:
            streams = {"stdout": output, "stderr": output, "stdin": subprocess.DEVNULL}
            return cls(course, subprocess.Popen(command, env=environment, **streams), log)

    @property
    def hosts(self) -> dict[str, str]:
        return {name: Verdict.read(paths[0]).host for name, paths in self.course.verdicts().items()}

    def until_graded_on(self, *hosts: str) -> None:
        while not set(hosts) <= set(self.hosts.values()):
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.1)

    def as_locally(self) -> str:
        """Wait until it ends, see that all have their points, and return what it said."""
        status, output = self.process.wait(), self.log.read_text()
        assert status == 0, output
        assert unexpected(self.course.members, booked(self.course.root)) == [], output
        return output


# Slurm -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with two_nodes(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def grading(released_course: Path, tmp_path: Path, cluster: Cluster) -> Iterator[Grading]:
    """A class of twenty that has been graded on both nodes, and is not done."""
    root = shutil.copytree(released_course, tmp_path / "course", symlinks=True)
    ten = small_class(root)
    members = {f"{name}-{number}": member for name, member in ten.items() for number in (1, 2)}
    hand_in(root, members)
    grading = Grading.start(Course(root, members), 3, LAUNCH, cluster.environment)
    try:
        grading.until_graded_on(*NODES)
        yield grading
    finally:
        grading.process.kill()
        grading.process.wait()


def test_a_job_is_cancelled(grading: Grading, cluster: Cluster) -> None:
    cluster.slurm("scancel", cluster.job_on("n1"))
    output = grading.as_locally()
    assert "tried again, because the machine had failed: 1 (" in output
    assert "of 3 workers wait for the cluster" in output
    assert set(grading.hosts.values()) == set(NODES)
    assert not cluster.slurm("squeue", "-h")


def test_a_node_is_drained(grading: Grading, cluster: Cluster) -> None:
    cluster.slurm("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=a test")
    cluster.slurm("scancel", cluster.job_on("n2"))
    before = grading.hosts
    output = grading.as_locally()
    cluster.slurm("scontrol", "update", "NodeName=n2", "State=RESUME")
    assert "tried again, because the machine had failed: 1 (" in output
    assert {host for name, host in grading.hosts.items() if name not in before} == {"n1"}


def test_the_command_is_killed(grading: Grading, cluster: Cluster) -> None:
    assert "bwrap" in cluster.working()
    before = grading.course.times()
    grading.process.kill()
    until = time.monotonic() + 60
    while cluster.working():
        assert time.monotonic() < until, cluster.working()
        time.sleep(0.1)
    Grading.start(grading.course, 3, LAUNCH, cluster.environment).as_locally()
    assert before.items() <= grading.course.times().items()


# ssh ---------------------------------------------------------------------------------------------


@pytest.fixture
def ssh(tmp_path: Path) -> Iterator[str]:
    """Return the command that runs another one through a server for ssh on this machine."""
    server = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if server is None or shutil.which("ssh") is None:
        pytest.skip("ssh to this machine needs sshd and ssh")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # without it sshd does not start as root
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-N", "", "-f", tmp_path / key], check=True)
    (port,) = free_ports(1)
    options = {
        "ListenAddress": f"127.0.0.1:{port}",
        "HostKey": tmp_path / "host",
        "AuthorizedKeysFile": tmp_path / "user.pub",
        "PidFile": "none",
        "StrictModes": "no",
    }
    (tmp_path / "sshd").write_text("".join(f"{name} {value}\n" for name, value in options.items()))
    (tmp_path / "ssh").write_text(
        f"Host node7\nHostName 127.0.0.1\nPort {port}\nIdentityFile {tmp_path / 'user'}\n"
        "StrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nBatchMode yes\n"
    )
    process = subprocess.Popen(
        [server, "-D", "-e", "-f", tmp_path / "sshd"], stderr=subprocess.PIPE
    )
    assert b"listening" in process.stderr.readline()
    yield f"ssh -F {tmp_path / 'ssh'} node7"
    process.terminate()
    process.communicate(timeout=60)


def test_through_ssh(released_course: Path, tmp_path: Path, ssh: str) -> None:
    root = shutil.copytree(released_course, tmp_path / "course", symlinks=True)
    members = {
        name: member for name, member in small_class(root).items() if name in ("sum", "late")
    }
    hand_in(root, members)
    grading = Grading.start(Course(root, members), 1, ssh, dict(os.environ))
    grading.as_locally()
    assert set(grading.hosts.values()) == {socket.gethostname()}
