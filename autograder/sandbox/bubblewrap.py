"""A sandbox for student code: bubblewrap (https://github.com/containers/bubblewrap).

Inside there is no network, no other process, no home and no repository. A command inside sees only
the mounts, read only, and a private ``/tmp`` of limited size, which is the working directory.
``Sandbox.close`` ends everything inside. So does the end of the process that opened the sandbox,
for any reason.

``HardLimits`` limit each process and the number of processes; `memory` limits the sum of their
memory. When memory runs out, the kernel kills the sandbox first, because the sandbox requests this.
`seccomp` says which calls to the kernel are refused.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

from autograder.sandbox import first_process
from autograder.sandbox._tree import memory_file, prepare, programs, tree
from autograder.sandbox.binary import Bubblewrap, choose, tool
from autograder.sandbox.mounts import Mount
from autograder.sandbox.seccomp import seccomp_filter
from autograder.sandbox.unavailable import SandboxUnavailable
from autograder.sandbox.user import (
    UIDS,
    accounts,
    drop_privileges,
    is_root,
    make_sure_of_uids,
    own_uid,
    rights_to_make_cells,
    user_namespace,
)
from autograder.settings import Settings

__all__ = ["HardLimits", "Sandbox", "SandboxUnavailable", "probe"]

START_SECONDS = 10.0
_JAIL = "/sandbox"


class Sandbox:
    """A command that runs in a sandbox, from construction to ``close``. A context manager.

    The thread that opens the sandbox must outlive it. Linux ends the sandbox when its parent ends,
    and treats the end of that thread as the end of the parent.

    Args:
        command: the program, as a path inside the sandbox, and its arguments.
        mounts: files that the command needs to see in addition to the system, in any order.
        writable: directories of the host to which the command may write, at the same path; see
            ``Mount``. A socket in ``pass_fds`` is safer.
        env: the environment, in addition to PATH, HOME and LANG. Nothing of ours is inherited.
        limits: see ``HardLimits``.
        stderr: where standard output and error go: appended to the file at a path, written to an
            open file, or discarded. ``limits.file_size`` limits the file.
        pass_fds: descriptors that stay open inside, such as one end of a socket pair.
        bubblewrap: the program; by default the one that ``probe`` returns.
        cells: whether the command is ours and makes a cell for every student process, as
            `inside.cell` does. It keeps the rights that this needs, and sets the limits itself.

    Attributes:
        pid: bubblewrap's process, a child of this one. If it is killed, everything inside dies.
        uid: the user of the command, as seen from inside.

    Raises:
        SandboxUnavailable: bubblewrap is missing or did not start.
        FileNotFoundError: a source does not exist.
        PermissionError: opened by root, and other users may not read a source.
        ValueError: a target is not an absolute path.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        mounts: Sequence[Mount] = (),
        writable: Sequence[str | Path] = (),
        env: Mapping[str, str] | None = None,
        limits: HardLimits | None = None,
        stderr: str | Path | IO[bytes] | None = None,
        pass_fds: Sequence[int] = (),
        bubblewrap: Bubblewrap | None = None,
        cells: bool = False,
    ) -> None:
        program = (bubblewrap or probe()).path
        limits = limits or HardLimits()
        env = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", **(env or {})}
        with contextlib.ExitStack() as kept, contextlib.ExitStack() as opened:
            self.uid = kept.enter_context(own_uid())
            seen = [
                *accounts(self.uid),
                *mounts,
                *(Mount(path, path, writable=True) for path in writable),
            ]
            for mount in seen:
                prepare(mount, self.uid if is_root() else None)
            info, info_sink = opened.enter_context(_pipe())
            fds = [info_sink.fileno(), *pass_fds]

            def file_of(content: str | bytes) -> int:
                fds.append(opened.enter_context(memory_file(content)))
                return fds[-1]

            words = [
                *(program, "--info-fd", str(info_sink.fileno())),
                *("--seccomp", str(file_of(seccomp_filter(namespaces=cells)))),
                *_isolation(self.uid, seen, limits, env, file_of, cells),
                *([] if cells else limits.prelude()),
                *command,
            ]
            if isinstance(stderr, str | Path):
                stderr = opened.enter_context(open(stderr, "ab"))
            self._process = _start(words, stderr or subprocess.DEVNULL, fds)
            self.pid = self._process.pid
            info_sink.close()
            self._init = _first_process(self._process, info)
            self._kept = kept.pop_all()

    def poll(self) -> int | None:
        """Return the command's exit status, 128 + n if signal n ended it; None while it runs."""
        return self._process.poll()

    def wait(self, timeout: float) -> int:
        """Wait for the command's end and return its exit status as ``poll`` does.

        Raises:
            subprocess.TimeoutExpired: it still runs after ``timeout`` seconds.
        """
        return self._process.wait(timeout)

    def close(self) -> None:
        """Kill everything inside, wait until it is gone, and free the uid. May be repeated."""
        if self._init is not None:
            first_process.kill(self._init, START_SECONDS)
            self._init = None
        self._process.kill()
        self._process.wait()
        self._kept.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@functools.cache
def probe() -> Bubblewrap:
    """Return a bubblewrap program that really starts a sandbox. It is tried out once per process.

    Raises:
        SandboxUnavailable: none works here; the message contains bubblewrap's own reason.
    """
    if not sys.platform.startswith("linux"):
        raise SandboxUnavailable("The sandbox needs Linux.")
    # Every bubblewrap needs these tools. Here a failure is reported once, as no bubblewrap's fault.
    HardLimits().prelude()
    if is_root():
        make_sure_of_uids()
        drop_privileges(UIDS[0], _JAIL)
    return choose(_start_one)


def _start_one(bubblewrap: Bubblewrap) -> None:
    """Run a command in a sandbox, with all the options that any sandbox has.

    Raises:
        SandboxUnavailable: this does not work; the reason contains bubblewrap's own message.
    """
    alone = ["--pid", "--fork", "--mount", "--net", "--ipc", "--uts", "--mount-proc"]
    with tempfile.TemporaryFile() as log:
        try:
            command = ["/bin/sh", "-c", 'test "$(id -u)" != 0']
            with Sandbox(command, stderr=log, bubblewrap=bubblewrap) as sandbox:
                status = sandbox.wait(START_SECONDS)
            if status == 0:
                command = [tool("unshare"), *alone, "/bin/true"]
                with Sandbox(command, stderr=log, bubblewrap=bubblewrap, cells=True) as sandbox:
                    status = sandbox.wait(START_SECONDS)
            if status == 0:
                return
            reason = f"exit status {status}."
        except (SandboxUnavailable, subprocess.TimeoutExpired) as error:
            reason = error.reason if isinstance(error, SandboxUnavailable) else f"{error}."
        log.seek(0)
        raise SandboxUnavailable(f"{reason} {log.read(4000).decode(errors='replace')}")


def _isolation(
    uid: int,
    mounts: Sequence[Mount],
    limits: HardLimits,
    env: Mapping[str, str],
    file_of: Callable[[str | bytes], int],
    cells: bool,
) -> list[str]:
    """Return bubblewrap's arguments up to the command: namespaces, files, environment, user.

    If root opens the sandbox, the files are one level down, in ``_JAIL``; see ``drop_privileges``.
    """
    arguments = [
        *("--die-with-parent", "--new-session", "--clearenv"),
        *("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"),
        *("--unshare-cgroup-try", "--hostname", "sandbox"),
        *(part for item in env.items() for part in ("--setenv", *item)),
    ]
    if cells:
        arguments += [*rights_to_make_cells(), *tree("", mounts, limits.tmp, file_of)]
        return [*arguments, "--chdir", "/tmp", "--"]
    if is_root():
        arguments += [*programs(""), *tree(_JAIL, mounts, limits.tmp, file_of)]
        return [*arguments, "--chdir", "/", "--", *drop_privileges(uid, _JAIL)]
    arguments += [*user_namespace(uid), "--disable-userns", *tree("", mounts, limits.tmp, file_of)]
    return [*arguments, "--chdir", "/tmp", "--"]


def _start(
    words: Sequence[str], output: IO[bytes] | int, fds: Sequence[int]
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={},
            pass_fds=fds,
            process_group=0,  # so that Ctrl-C reaches only us, and does not end bubblewrap
        )
    except OSError as error:
        raise SandboxUnavailable(f"bubblewrap cannot be run: {error}.") from None


def _first_process(bubblewrap: subprocess.Popen[bytes], info: IO[bytes]) -> int | None:
    """Return a descriptor of the sandbox's process 1; see ``first_process.hold``."""
    try:
        return first_process.hold(info, bubblewrap.pid, START_SECONDS)
    except OSError as error:
        bubblewrap.kill()
        bubblewrap.wait()
        raise SandboxUnavailable(f"bubblewrap did not start a sandbox: {error}.") from None


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    read_end, write_end = os.pipe()
    with open(read_end, "rb", buffering=0) as source, open(write_end, "wb", buffering=0) as sink:
        yield source, sink


@dataclass(frozen=True)
class HardLimits:
    """Hard limits, set inside the sandbox before the command runs; nothing inside can raise them.

    Attributes:
        processes: number of processes and threads together. Before Linux 5.14, if an ordinary user
            opens the sandbox, that user's other processes count too.
        address_space: bytes of virtual memory of each process, far more than it uses. ``None``
            with CUDA, which reserves all available addresses.
        file_size: bytes of the largest file that a process may write.
        open_files: number of descriptors of each process.
        tmp: bytes in ``/tmp``. In a sandbox without cells, ``/dev/shm`` gets the same size.
        shm: bytes in a cell's ``/dev/shm``.
        memory: bytes that all processes of a submission may use together.
    """

    processes: int = 256
    address_space: int | None = 8 * 2**30
    file_size: int = 64 * 2**20
    open_files: int = 1024
    tmp: int = 256 * 2**20
    shm: int = 64 * 2**20
    memory: int = int(Settings.memory_gib * 2**30)

    def of_a_cell(self) -> dict[str, int]:
        """Return the limits of each process in a cell, by their names in `resource`."""
        limits = {
            "nproc": self.processes,
            "as": self.address_space,
            "fsize": self.file_size,
            "nofile": self.open_files,
            "core": 0,
        }
        return {name: value for name, value in limits.items() if value is not None}

    def prelude(self) -> list[str]:
        """Return the start of a command line that sets the limits and runs the rest of the line.

        Raises:
            SandboxUnavailable: a program that sets them is missing.
        """
        options = []
        for name, value in self.of_a_cell().items():
            hard = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))[1]
            options.append(f"--{name}={value if hard < 0 else min(value, hard)}")  # more would fail
        return [tool("choom"), "-n", "1000", "--", tool("prlimit"), *options, "--"]
