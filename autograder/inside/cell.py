"""A cell: one student process, isolated with its own files, processes and network.

The sandbox's fork server runs our code only. It forks each student process into separate
namespaces. There the process sees no other process, has its own ``/tmp``, ``/dev/shm`` and
loopback, and has no right to change these namespaces. So ranks and notebook cannot see, signal or
write to one another. The student process is process 1 of its cell: when it dies, all processes that
it started die too.

This file needs Linux, the standard library and `scratch` only.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib
import os
import resource
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import Any

from autograder.inside import scratch
from autograder.inside.scratch import call

_DUMPABLE, _SECCOMP, _BOUNDING_DROP, _NO_NEW_PRIVILEGES = 4, 22, 24, 38
_NEW_MOUNTS, _NEW_UTS, _NEW_IPC, _NEW_USER, _NEW_PIDS, _NEW_NET = (
    *(0x00020000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000),
)
_NOSUID, _NODEV, _NOEXEC, _REC, _PRIVATE = 2, 4, 8, 0x4000, 1 << 18


class Forker:
    """Forks children, each as process 1 of a new pid namespace; called like `os.fork`."""

    def __init__(self) -> None:
        self._own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)

    def __call__(self) -> int:
        call("unshare", _NEW_PIDS)  # affects our children, not ourselves
        try:
            pid = os.fork()
        except OSError:
            call("setns", self._own, _NEW_PIDS)
            raise
        if pid:
            call("setns", self._own, _NEW_PIDS)
        else:
            os.close(self._own)
        return pid


def serve(fds: list[int], config: dict[str, Any]) -> None:
    """Make a cell and run ``config["run"]`` in it, given as ``module:function``.

    A child that `Forker` forked calls this. `config` also has ``uid``, the user to become;
    ``root``, whether we are root; ``limits``, for `resource.setrlimit`; ``tmp`` and ``shm``, sizes
    in bytes; and ``seccomp``, the filter as bytes.
    """
    try:
        call("unshare", _NEW_MOUNTS | _NEW_UTS | _NEW_IPC | _NEW_NET)
        _mount_own_files(config)
        _loopback_up()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _give_up_everything(config)
    except BaseException as error:
        print(f"a cell did not start: {error!r}", file=sys.stderr, flush=True)
        os._exit(125)
    status = 1
    try:
        module, function = config["run"].split(":")
        getattr(importlib.import_module(module), function)(fds, config)
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException as error:
        print(f"a student's process ended: {error!r}"[:2000], file=sys.stderr, flush=True)
    finally:
        # Skip the interpreter's shutdown, because student code could hang in it.
        os._exit(status & 0xFF)


def _mount_own_files(config: dict[str, Any]) -> None:
    scratch.mount(b"none", b"/", None, _REC | _PRIVATE, None)
    scratch.mount(b"proc", b"/proc", b"proc", _NOSUID | _NODEV | _NOEXEC, None)
    scratch.hide_machine()
    scratch.mount_own(config)
    os.chdir(scratch.HOME)


def _loopback_up() -> None:
    """Start the loopback of the cell's network namespace, because code may use local sockets."""
    get_flags, set_flags, up = 0x8913, 0x8914, 0x1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack_from("16sH", fcntl.ioctl(any_socket, get_flags, request))[1]
        fcntl.ioctl(any_socket, set_flags, struct.pack("16sH14x", b"lo", flags | up))


def _give_up_everything(config: dict[str, Any]) -> None:
    uid = config["uid"]
    call("prctl", _DUMPABLE, 1, 0, 0, 0)  # without this, its /proc entries would belong to root
    Path("/proc/self/oom_score_adj").write_text("1000")  # killed first when memory runs out
    if not config["root"]:  # an ordinary user opened the sandbox, so there is no other uid
        _own_user_namespace(uid)
    with contextlib.suppress(OSError):  # the kernel knows no further capability
        for capability in range(64):
            call("prctl", _BOUNDING_DROP, capability, 0, 0, 0)
    if config["root"]:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    for name, value in config["limits"].items():
        number = getattr(resource, f"RLIMIT_{name.upper()}")
        hard = resource.getrlimit(number)[1]
        value = value if hard < 0 else min(value, hard)
        resource.setrlimit(number, (value, value))
    _drop_capabilities()
    call("prctl", _DUMPABLE, 1, 0, 0, 0)
    call("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    _filter_calls(config["seccomp"])
    _make_sure()


def _own_user_namespace(uid: int) -> None:
    """Enter a new user namespace as `uid`.

    It counts its own processes (since Linux 5.14), and owns no other namespace.
    """
    user, group = os.geteuid(), os.getegid()
    call("unshare", _NEW_USER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{uid} {group} 1")


def _drop_capabilities() -> None:
    header = struct.pack("=II", 0x20080522, 0)  # version 3, this process
    call("capset", header, bytes(24))


def _filter_calls(program: bytes) -> None:
    code = ctypes.create_string_buffer(program, len(program))
    described = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    call("prctl", _SECCOMP, 2, described, 0, 0)


def _make_sure() -> None:
    """Check this process's rights in the kernel; stop if any right is left that should be gone.

    Raises:
        RuntimeError: some right is left.

    """
    status = dict(
        line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines()
    )
    required = {"CapPrm": 0, "CapEff": 0, "CapBnd": 0, "CapAmb": 0, "NoNewPrivs": 1, "Seccomp": 2}
    for name, value in required.items():
        if int(status[name].strip(), 16) != value:
            raise RuntimeError(f"{name} of the process is {status[name]}, but must be {value:x}")
    if 0 in (*os.getresuid(), *os.getresgid()):
        raise RuntimeError(
            f"the process is still root: user {os.getresuid()}, group {os.getresgid()}"
        )
