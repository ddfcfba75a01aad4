"""A sandbox for student code: bubblewrap (https://github.com/containers/bubblewrap).

Inside there is no network, no other process, no home and no repository: only what is mounted,
read only, and a private ``/tmp`` of limited size, the working directory. Everything inside dies
with ``Sandbox.close``, and with the process that opened it, however that one ends.

Opened by root, the sandbox runs under an unprivileged uid of its own: the real uid 0 would be
exempt from the limit on processes. Opened by an ordinary user, it runs in a user namespace.

``Limits`` bound each process and the number of processes, not the sum of their memory. Instead
the sandbox volunteers to be the first that the kernel kills when memory runs out.
"""

import contextlib
import functools
import json
import os
import resource
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

from autograder.sandbox.mounts import Mount

# Between the ranges that Debian and systemd give to users; inside the 65536 ids of a container.
UIDS = range(60706, 61184)
START_SECONDS = 10.0
_JAIL = "/sandbox"
_HELP = """Student code is never run without a sandbox. To get one:
  Debian, Ubuntu:  apt-get install bubblewrap                (0.8 or later)
  Fedora, RHEL:    dnf install bubblewrap
  macOS, Windows:  grade on a Linux machine, in WSL2 or in a Linux container
If bubblewrap is installed but may not start, allow user namespaces:
  sysctl -w kernel.unprivileged_userns_clone=1               (older Debian)
  sysctl -w kernel.apparmor_restrict_unprivileged_userns=0   (Ubuntu 24.04 and later)
  docker run --privileged ...                                (in a container)"""


class SandboxUnavailable(RuntimeError):
    """Student code cannot be run safely here; the message says why and what to do."""

    def __init__(self, reason: str) -> None:
        self.reason = reason.strip()
        super().__init__(f"{self.reason}\n{_HELP}")


@dataclass(frozen=True)
class Limits:
    """Hard limits, set inside the sandbox before the command runs; nothing inside can raise them.

    Attributes:
        processes: processes and threads together. Before Linux 5.14, where an ordinary user opens
            the sandbox, that user's other processes count as well.
        address_space: bytes of virtual memory of each process, far more than it touches. ``None``
            where CUDA is used, which reserves all there is.
        file_size: bytes of the largest file a process may write.
        open_files: descriptors of each process.
        tmp: bytes in ``/tmp``, and as many again in ``/dev/shm``.
    """

    processes: int = 256
    address_space: int | None = 8 * 2**30
    file_size: int = 64 * 2**20
    open_files: int = 1024
    tmp: int = 256 * 2**20

    def prelude(self) -> list[str]:
        """Return the start of a command line that sets the limits and runs what follows."""
        wanted = {
            "nproc": (resource.RLIMIT_NPROC, self.processes),
            "as": (resource.RLIMIT_AS, self.address_space),
            "fsize": (resource.RLIMIT_FSIZE, self.file_size),
            "nofile": (resource.RLIMIT_NOFILE, self.open_files),
            "core": (resource.RLIMIT_CORE, 0),
        }
        options = []
        for name, (number, value) in wanted.items():
            if value is not None:
                hard = resource.getrlimit(number)[1]  # asking for more would fail
                options.append(f"--{name}={value if hard < 0 else min(value, hard)}")
        return [_tool("choom"), "-n", "1000", "--", _tool("prlimit"), *options, "--"]


class Sandbox:
    """A command that runs in a sandbox, from construction to ``close``. A context manager.

    The thread that opens it must outlive it: Linux takes the end of that thread for the end of
    the parent, with which the sandbox dies.

    Args:
        command: program, as a path inside the sandbox, and arguments.
        mounts: what the command needs to see besides the system, in any order.
        writable: directories of the host that the command may fill, at the same path; see
            ``Mount``. A socket in ``pass_fds`` is safer.
        env: the environment, on top of PATH, HOME and LANG. Nothing of ours is inherited.
        limits: see ``Limits``.
        stderr: where standard output and error go: appended to the file at a path, written to an
            open file, or lost. ``limits.file_size`` bounds the file.
        pass_fds: descriptors that stay open inside, such as one end of a socket pair.

    Attributes:
        pid: bubblewrap's process, a child of this one. Kill it, and everything inside dies.
        uid: the user that the command runs as, seen from inside.

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
        limits: Limits | None = None,
        stderr: str | Path | IO[bytes] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        if not sys.platform.startswith("linux"):
            raise SandboxUnavailable("The sandbox needs Linux.")
        limits = limits or Limits()
        env = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", **(env or {})}
        as_root = os.geteuid() == 0
        with contextlib.ExitStack() as kept, contextlib.ExitStack() as opened:
            self.uid = kept.enter_context(_own_uid()) if as_root else UIDS[0]
            if isinstance(stderr, str | Path):
                stderr = opened.enter_context(open(stderr, "ab"))
            read_end, write_end = os.pipe()
            info = opened.enter_context(open(read_end, "rb", buffering=0))
            info_sink = opened.enter_context(open(write_end, "wb", buffering=0))
            fds = [info_sink.fileno()]

            def file_of(text: str) -> int:
                fds.append(opened.enter_context(_memory_file(text)))
                return fds[-1]

            all_mounts = [
                *_accounts(self.uid),
                *mounts,
                *(Mount(path, path, writable=True) for path in writable),
            ]
            for mount in all_mounts:
                _prepare(mount, self.uid if as_root else None)
            self._process = subprocess.Popen(
                [
                    *(_tool("bwrap"), "--die-with-parent", "--new-session", "--clearenv"),
                    *("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"),
                    *("--unshare-cgroup-try", "--hostname", "sandbox"),
                    *([] if as_root else _user_namespace(self.uid)),
                    *("--info-fd", str(info_sink.fileno())),
                    *(_programs("") if as_root else []),
                    *_tree(_JAIL if as_root else "", all_mounts, limits.tmp, file_of),
                    *(part for item in env.items() for part in ("--setenv", *item)),
                    *("--chdir", "/" if as_root else "/tmp", "--"),
                    *(_drop_privileges(self.uid) if as_root else []),
                    *limits.prelude(),
                    *command,
                ],
                stdin=subprocess.DEVNULL,
                stdout=stderr or subprocess.DEVNULL,
                stderr=stderr or subprocess.DEVNULL,
                env={},
                pass_fds=[*fds, *pass_fds],
                process_group=0,  # Ctrl-C is for us; bubblewrap would die of it
            )
            self.pid = self._process.pid
            info_sink.close()
            try:
                self._init = _open_child(_read_child_pid(info), self.pid)
            except OSError as error:
                self._process.kill()
                self._process.wait()
                raise SandboxUnavailable(f"bubblewrap did not start a sandbox: {error}.") from None
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
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._init, signal.SIGKILL)
            # Readable once process 1 is dead, and it cannot die before all the others have.
            select.select([self._init], [], [], START_SECONDS)
            os.close(self._init)
            self._init = None
        self._process.kill()
        self._process.wait()
        self._kept.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@functools.cache
def probe() -> None:
    """Run a command in a sandbox, once per process.

    Raises:
        SandboxUnavailable: it does not work here; the message holds bubblewrap's own reason.
    """
    reason = "The sandbox does not work here: "
    with tempfile.TemporaryFile() as log:
        try:
            with Sandbox(["/bin/sh", "-c", 'test "$(id -u)" != 0'], stderr=log) as sandbox:
                status = sandbox.wait(START_SECONDS)
            if status == 0:
                return
            reason += f"exit status {status}. "
        except (SandboxUnavailable, subprocess.TimeoutExpired) as error:
            reason += f"{error.reason if isinstance(error, SandboxUnavailable) else error} "
        log.seek(0)
        reason += log.read(4000).decode(errors="replace")
    raise SandboxUnavailable(reason)


def _tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise SandboxUnavailable(f"The program {name!r} is missing.")
    return path


@contextlib.contextmanager
def _own_uid() -> Iterator[int]:
    """Hold a uid that no other sandbox of this machine holds.

    The lock is a name in the abstract socket namespace: the kernel frees it when we die.
    """
    with socket.socket(socket.AF_UNIX) as lock:
        for uid in UIDS:
            with contextlib.suppress(OSError):
                lock.bind(f"\0sgd-to-ddp-sandbox-{uid}")
                break
        else:
            raise SandboxUnavailable(f"{len(UIDS)} sandboxes are open on this machine already.")
        yield uid


def _user_namespace(uid: int) -> list[str]:
    return ["--unshare-user", "--uid", str(uid), "--gid", str(uid), "--disable-userns"]


def _drop_privileges(uid: int) -> list[str]:
    """Return the start of a command line that makes root an ordinary user for good.

    That user could make a user namespace, and be root in it enough to mount a ``/tmp`` without a
    limit. The kernel refuses one to whoever has another root directory than its mount namespace.
    """
    options = ["--clear-groups", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
    return [
        *(_tool("chroot"), _JAIL, _tool("env"), "--chdir=/tmp", "PWD=/tmp"),
        *(_tool("setpriv"), "--reuid", str(uid), "--regid", str(uid), *options, "--"),
    ]


def _accounts(uid: int) -> list[Mount]:
    """Return the files by which programs find a name for their user and for their host."""
    return [
        Mount("/etc/passwd", text=f"student:x:{uid}:{uid}:student:/tmp:/bin/sh\n"),
        Mount("/etc/group", text=f"student:x:{uid}:\n"),
        Mount("/etc/hosts", text="127.0.0.1 localhost sandbox\n::1 localhost\n"),
    ]


def _prepare(mount: Mount, uid: int | None) -> None:
    """Check that user ``uid`` can use the mount; ``None`` is the user we are."""
    if not Path(mount.target).is_absolute():
        raise ValueError(f"the mount's target {mount.target} is not an absolute path")
    if mount.source is None:
        return
    mode = os.stat(mount.source).st_mode
    if uid is None:
        return
    if mount.writable:
        os.chown(mount.source, uid, uid)
    elif not mode & stat.S_IROTH or (stat.S_ISDIR(mode) and not mode & stat.S_IXOTH):
        raise PermissionError(
            f"the sandbox's user may not read {mount.source}; chmod -R o+rX {str(mount.source)!r}"
        )


def _programs(root: str) -> list[str]:
    arguments = []
    for path in ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"):
        if os.path.islink(path):
            arguments += ["--symlink", os.readlink(path), root + path]
        elif os.path.isdir(path):
            arguments += ["--ro-bind", path, root + path]
    return arguments


def _tree(root: str, mounts: Sequence[Mount], tmp: int, file_of: Callable[[str], int]) -> list[str]:
    """Return bubblewrap's arguments for all that is seen; ``file_of`` puts a text in a file."""
    arguments = [*_parents(f"{root}/usr"), *_programs(root)]
    arguments += ["--proc", f"{root}/proc", "--dev", f"{root}/dev"]
    for path in ("/tmp", "/dev/shm"):
        arguments += ["--perms", "1777", "--size", str(tmp), "--tmpfs", root + path]
    for path in ("/etc/ld.so.cache", "/etc/alternatives", "/sys/devices/system/cpu"):
        arguments += [*_parents(root + path), "--ro-bind-try", path, root + path]
    read_only = [f"{root}/dev"]
    # Parents first, so that nothing is hidden by what is mounted later.
    for mount in sorted(mounts, key=lambda mount: len(Path(mount.target).parts)):
        target = f"{root}{mount.target}"
        arguments += _parents(target)
        if mount.text is not None:
            fd = file_of(mount.text)
            arguments += ["--perms", "0444", "--ro-bind-data", str(fd), target]
        elif mount.source is not None:
            arguments += ["--bind" if mount.writable else "--ro-bind", str(mount.source), target]
        else:
            arguments += ["--perms", "0755", "--tmpfs", target]
            read_only.append(target)
    return arguments + [part for path in (*read_only, "/") for part in ("--remount-ro", path)]


def _parents(target: str) -> list[str]:
    """Return the arguments that make the directories above ``target`` where they do not exist.

    Left to itself, bubblewrap 0.8 makes them for root only.
    """
    parents = reversed(Path(target).parents[:-1])
    return [part for path in parents for part in ("--perms", "0755", "--dir", str(path))]


@contextlib.contextmanager
def _memory_file(text: str) -> Iterator[int]:
    with open(os.memfd_create("mount"), "w+b", buffering=0) as file:
        file.write(text.encode())
        file.seek(0)
        yield file.fileno()


def _read_child_pid(info: IO[bytes]) -> int:
    """Return the pid of process 1 of the sandbox, once bubblewrap reports it."""
    said, deadline = b"", time.monotonic() + START_SECONDS
    while select.select([info], [], [], max(0.0, deadline - time.monotonic()))[0]:
        piece = info.read(4096)
        if not piece:
            raise OSError("it ended at once, and its output says why")
        said += piece
        with contextlib.suppress(ValueError):
            return int(json.loads(said)["child-pid"])
    raise TimeoutError(f"no sign of life for {START_SECONDS:.0f} s")


def _open_child(pid: int, parent: int) -> int | None:
    """Return a descriptor of a child of ``parent``, or None when it is gone already.

    When process 1 of a namespace dies, the kernel kills all the others. It is held by a
    descriptor because its number may come to mean another process.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
        if f"\nPPid:\t{parent}\n" in status:
            return descriptor
    os.close(descriptor)
    return None
