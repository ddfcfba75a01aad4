"""A Slurm with two nodes on this machine; each has its own name and its own processes."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

NODES = ("n1", "n2")
NEEDED = ("munged", "slurmctld", "slurmd", "srun", "unshare")
AT_REST = {"unshare", "sh", "slurmd"}
"""The processes of a node that runs no job."""
CONF = """ClusterName=tests
SlurmctldHost={host}
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=8192
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=8192
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Cluster:
    environment: dict[str, str]
    daemons: list[subprocess.Popen[bytes]]

    def slurm(self, *command: str) -> list[str]:
        """Run one of Slurm's commands; return the lines that it prints."""
        options = {"env": self.environment, "check": True, "capture_output": True, "text": True}
        return subprocess.run(command, timeout=60, **options).stdout.splitlines()

    def job_on(self, node: str) -> str:
        (job,) = self.slurm("squeue", "-h", "-o", "%i", "-t", "RUNNING", "-w", node)
        return job

    def working(self) -> list[str]:
        """Return the names of all processes on the nodes that are there because of a job."""
        names = []
        for daemon in self.daemons[-len(NODES) :]:
            for process in psutil.Process(daemon.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    names.append(process.name())
        return [name for name in names if name not in AT_REST]


def free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as resources:
        sockets = [resources.enter_context(socket.socket()) for _ in range(number)]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in sockets]


@contextlib.contextmanager
def two_nodes(folder: Path) -> Iterator[Cluster]:
    """Start the cluster, or skip the test."""
    absent = [name for name in NEEDED if shutil.which(name) is None]
    if absent or os.geteuid() != 0:
        pytest.skip(f"Slurm with two nodes needs root, and {', '.join(absent or NEEDED)}")
    for name in ("state", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir()
    host, ports = socket.gethostname().partition(".")[0], free_ports(3)
    (folder / "slurm.conf").write_text(CONF.format(host=host, folder=folder, ports=ports))
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o400)
    munge = [f"--key-file={folder}/key", f"--socket={folder}/munge.socket"]
    munge += [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")]
    machine = ["unshare", "--pid", "--uts", "--mount-proc", "--fork", "--kill-child", "sh", "-c"]
    commands = [["munged", "-F", "-f", *munge], ["slurmctld", "-D"]]
    commands += [[*machine, f"hostname {node}; slurmd -D -N {node} & wait"] for node in NODES]
    cluster = Cluster({**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}, [])
    with (folder / "log").open("wb") as log:
        quiet = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        try:
            for command in commands:
                cluster.daemons.append(subprocess.Popen(command, env=cluster.environment, **quiet))
                time.sleep(1)
            cluster.slurm("srun", "--nodes", "2", "true")
            yield cluster
        finally:
            for daemon in reversed(cluster.daemons):
                daemon.kill()
                daemon.wait(60)
