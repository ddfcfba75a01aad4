"""What macOS lacks or does differently, imitated on Linux in every Python that has this folder on
its path: Python imports a module of this name when it starts.

Imitated: functions of Linux, ``/proc``, small socket and pipe buffers, short socket paths, spawn as
the way to start processes, EPERM for a group of zombies, and gloo that cannot connect later. Only
the course's own modules read "darwin": other packages would load what only a Mac has.

Not imitated, because native code stays Linux's: libuv's transport, DNS, and what Accelerate, Metal
and Objective-C do after a fork. A job of continuous integration runs on a Mac.
"""

import builtins
import ctypes
import fcntl
import importlib.machinery
import io
import multiprocessing.context
import os
import select
import selectors
import signal
import socket
import sys
import tempfile
import types

LACKING = {
    os: "memfd_create sched_getaffinity sched_setaffinity pidfd_open eventfd pipe2 posix_fadvise"
    " posix_fallocate splice copy_file_range setns unshare fdatasync O_TMPFILE O_PATH MFD_CLOEXEC",
    signal: "pidfd_send_signal sigwaitinfo sigtimedwait SIGRTMIN SIGRTMAX",
    select: "epoll",
    socket: "SO_PEERCRED SOCK_CLOEXEC SOCK_NONBLOCK MSG_CMSG_CLOEXEC",
}
if sys.version_info < (3, 13):
    LACKING[os] += " waitid waitid_result P_ALL P_PID P_PGID WEXITED WNOWAIT"
pipe, pipe_size = os.pipe, fcntl.F_SETPIPE_SZ
for module, names in LACKING.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)

GONE = ("/proc/", "/sys/", "/dev/shm/")
MAY_READ = ("/psutil/", "/site-packages/torch/", "/sitecustomize.py")


def is_gone(path: object) -> bool:
    """Return whether a path is one that macOS lacks, and no package of Linux's asks for it."""
    if not isinstance(path, str | os.PathLike) or not f"{os.fspath(path)}/".startswith(GONE):
        return False
    frame = sys._getframe(2)
    while frame is not None:
        if any(part in frame.f_code.co_filename for part in MAY_READ[:2]):
            return False
        frame = frame.f_back
    return True


def hiding(function):
    """Return a function of a path that finds nothing at a path that is gone."""

    def hidden(path=".", *args, **kwargs):
        if is_gone(path):
            raise FileNotFoundError(2, "No such file or directory", path)
        return function(path, *args, **kwargs)

    for several in (os.supports_fd, os.supports_dir_fd, os.supports_follow_symlinks):
        if function in several:
            several.add(hidden)
    return hidden


builtins.open = io.open = hiding(io.open)
real_listdir, real_open = os.listdir, os.open
for name in ("open", "listdir", "scandir", "stat", "lstat", "readlink", "statvfs"):
    setattr(os, name, hiding(getattr(os, name)))


class Sys(types.ModuleType):
    """`sys`, whose platform is "darwin" for the course."""

    @property
    def platform(self) -> str:
        names = sys._getframe(1).f_globals
        spec = names.get("__spec__")
        name = spec.name if names.get("__name__") == "__main__" and spec else names.get("__name__")
        return "darwin" if f"{name}".startswith(("course_lib", "autograder")) else "linux"

    def __new__(cls, *args):  # importlib makes every module as ``type(sys)(name)``
        return types.ModuleType(*args)


def small_pipe():
    ends = pipe()
    fcntl.fcntl(ends[1], pipe_size, 1 << 14)
    return ends


def small_pair(family=None, kind=socket.SOCK_STREAM, proto=0, pair=socket.socketpair):
    ends = pair(family, kind, proto)
    for end in ends:
        for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, buffer, 1 << 12)  # Linux doubles it
    return ends


class Socket(socket.socket):
    """A socket whose path in the file system has at most 103 bytes."""

    def bind(self, address):
        if self.family == socket.AF_UNIX and len(os.fsencode(address)) > 103:
            raise OSError("AF_UNIX path too long")
        return super().bind(address)


def killpg(group, number, kill=os.killpg):
    states = []
    for pid in filter(str.isdigit, real_listdir("/proc")):
        try:
            fd = real_open(f"/proc/{pid}/stat", os.O_RDONLY)
            fields = os.read(fd, 4096).rpartition(b")")[2].split()
            os.close(fd)
        except OSError:
            continue
        states += [fields[0]] if int(fields[2]) == group else []
    if states and set(states) <= {b"Z", b"X"}:
        raise PermissionError(1, "Operation not permitted")
    kill(group, number)


class Library(ctypes.CDLL):
    """A C library without what only Linux has."""

    def __getattr__(self, name):
        if self._name is None and name in ("prctl", "unshare", "gettid"):
            raise AttributeError(f"dlsym(RTLD_DEFAULT, {name}): symbol not found")
        return super().__getattr__(name)


os.pipe, os.killpg, socket.socketpair = small_pipe, killpg, small_pair
socket.socket, ctypes.CDLL, tempfile._O_TMPFILE_WORKS = Socket, Library, False
selectors.DefaultSelector = selectors.PollSelector
contexts = multiprocessing.context._concrete_contexts
multiprocessing.context._default_context._default_context = contexts["spawn"]
sys.__class__ = Sys


class GlooOfMac:
    """Changes PyTorch's gloo as soon as it is imported."""

    @staticmethod
    def find_spec(name, path, target=None):
        if name != "torch.distributed.distributed_c10d":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            gloo = module.ProcessGroupGloo
            for name in ("create_device", "create_default_device"):
                setattr(gloo, name, staticmethod(connecting_at_once(getattr(gloo, name))))

        spec.loader.exec_module = exec_module
        return spec


def connecting_at_once(create):
    def create_device(*args, lazy_init=None, **kwargs):
        if lazy_init:
            raise RuntimeError("UV transport does not support lazy init")
        return create(*args, lazy_init=None, **kwargs)

    return create_device


sys.meta_path.insert(0, GlooOfMac)
