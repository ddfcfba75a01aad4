"""A real Slurm with two nodes on this machine, from Debian's package slurm-wlm; as root only."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
NODES = ("n1", "n2")
_CONF = """
ClusterName=class
SlurmctldHost={host}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldPort=17000
SlurmdTimeout=20
ReturnToService=2
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[17001-17002] CPUs=1 RealMemory=6000
PartitionName=all Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
"""


def can_run() -> bool:
    return os.geteuid() == 0 and all(shutil.which(name) for name in PROGRAMS)


class Slurm:
    """The running cluster.

    Attributes:
        environment: with which its commands find it.

    """

    def __init__(self, folder: Path, kept: ExitStack) -> None:
        self._folder, self._kept = folder, kept
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        with (self._folder / f"{Path(command[0]).name}.out").open("ab") as out:
            process = subprocess.Popen(
                command, stdout=out, stderr=out, env=self.environment, start_new_session=True
            )
        self._kept.callback(_end, process.pid)
        return process

    def start_node(self, name: str) -> None:
        self._nodes[name] = self.start("slurmd", "-D", "-N", name)

    def kill_node(self, name: str) -> int:
        """End a node at once, and all that runs on it, as when its power fails."""
        ran = [p for p in psutil.process_iter() if self._ran_on(p, name)]
        steps = [step for p in ran if (step := self._step(p)) is not None]
        for process in (self._nodes[name], *steps, *ran):
            with suppress(psutil.Error):
                process.kill()
        self._nodes[name].wait()
        return len(ran)

    def _ran_on(self, process: psutil.Process, name: str) -> bool:
        with suppress(psutil.Error):
            node: str | None = process.environ().get("SLURMD_NODENAME")
            return node == name
        return False

    def _step(self, process: psutil.Process) -> psutil.Process | None:
        """Return the slurmstepd that started it, which reports its end to the controller."""
        with suppress(psutil.Error):
            parent = process.parent()
            if parent is not None and "slurmstepd" in " ".join(parent.cmdline()):
                return parent
        return None

    def idle(self) -> int:
        asked = subprocess.run(
            ["sinfo", "-h", "-N", "-t", "idle", "-o", "%N"],
            env=self.environment,
            capture_output=True,
            text=True,
        )
        return len(asked.stdout.split())


def _end(pid: int) -> None:
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        process.terminate()
        try:
            process.wait(300)
        except psutil.TimeoutExpired:
            process.kill()


@contextmanager
def real_slurm(folder: Path) -> Iterator[Slurm]:
    """Start it in `folder`, an empty one with a short path; end it afterwards."""
    for name in ("state", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir()
    host = socket.gethostname().partition(".")[0]
    (folder / "slurm.conf").write_text(_CONF.format(host=host, folder=folder))
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    with ExitStack() as kept:
        slurm = Slurm(folder, kept)
        slurm.start(
            *("munged", "-F", "-f", f"--key-file={folder}/munge.key"),
            *(f"--socket={folder}/munge.socket", f"--pid-file={folder}/munged.pid"),
            *(f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed"),
        )
        time.sleep(1)
        slurm.start("slurmctld", "-D")
        for name in NODES:
            slurm.start_node(name)
        until = time.monotonic() + 300
        while slurm.idle() < len(NODES):
            if time.monotonic() > until:
                raise RuntimeError((folder / "slurmctld.out").read_text()[-2000:])
            time.sleep(0.5)
        yield slurm
