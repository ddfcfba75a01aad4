"""Who the command in a sandbox runs as: never root, and for root a uid of each sandbox's own.

Opened by root, the sandbox runs under an unprivileged uid of its own: the real uid 0 would be
exempt from the limit on processes. Opened by an ordinary user, it runs in a user namespace.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from autograder.sandbox.binary import tool
from autograder.sandbox.mounts import Mount
from autograder.sandbox.unavailable import SandboxUnavailable

# Between the ranges that Debian and systemd give to users; inside the 65536 ids of a container.
UIDS = range(60706, 61184)


def is_root() -> bool:
    """Return whether it is root who opens the sandbox."""
    return os.geteuid() == 0


@contextlib.contextmanager
def own_uid() -> Iterator[int]:
    """Hold the uid that the command has; opened by root, no other sandbox of this machine holds it.

    The lock is a name in the abstract socket namespace: the kernel frees it when we die.

    Raises:
        SandboxUnavailable: all are held.
    """
    if not is_root():  # seen from outside it is the user we are, in each sandbox
        yield UIDS[0]
        return
    with socket.socket(socket.AF_UNIX) as lock:
        for uid in UIDS:
            with contextlib.suppress(OSError):
                lock.bind(f"\0sgd-to-ddp-sandbox-{uid}")
                break
        else:
            raise SandboxUnavailable(f"{len(UIDS)} sandboxes are open on this machine already.")
        yield uid


def make_sure_of_uids() -> None:
    """Look whether this root may become each user of `UIDS`.

    Raises:
        SandboxUnavailable: it is root of a user namespace that lacks them.

    """
    for kind, option in (("uid", "--add-subuids"), ("gid", "--add-subgids")):
        with contextlib.suppress(OSError):  # a kernel without user namespaces
            lines = Path(f"/proc/self/{kind}_map").read_text().splitlines()
            spans = [
                range(int(first), int(first) + int(count))
                for first, _, count in map(str.split, lines)
            ]
            if not all(any(uid in span for span in spans) for uid in UIDS):
                raise SandboxUnavailable(
                    f"This root is in a user namespace without the {kind}s {UIDS[0]}-{UIDS[-1]}, "
                    "of which each sandbox takes one. Start the container with 65536 of them (on "
                    f"the host, usermod {option} 100000-165535 USER allows that), or grade outside "
                    "of it as an ordinary user.",
                    advice="",
                )


def user_namespace(uid: int) -> list[str]:
    """Return bubblewrap's options with which an ordinary user seems to be ``uid`` inside."""
    return ["--unshare-user", "--uid", str(uid), "--gid", str(uid)]


def rights_to_make_cells() -> list[str]:
    """Return bubblewrap's options for a command that gives each of its children namespaces.

    Such a command is ours, and runs no student's code. Opened by an ordinary user, its rights end
    with the sandbox's user namespace; opened by root, it stays root in the sandbox's namespaces,
    with the few rights that making cells and becoming another user need.
    """
    rights = ["CAP_SYS_ADMIN", "CAP_NET_ADMIN"]
    if is_root():
        rights += ["CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP", "CAP_KILL", "CAP_SYS_RESOURCE"]
    else:
        rights += ["CAP_SETFCAP"]  # Linux 5.12 asks for it where this namespace's 0 is mapped
    # As 0, or bubblewrap enters a second user namespace, which does not own its pid namespace.
    options = [] if is_root() else user_namespace(0)
    return [*options, "--cap-drop", "ALL", *(p for right in rights for p in ("--cap-add", right))]


def drop_privileges(uid: int, root: str) -> list[str]:
    """Return the start of a command line that makes root an ordinary user in ``root`` for good.

    That user could make a user namespace, and be root in it enough to mount a ``/tmp`` without a
    limit. The kernel refuses one to whoever has another root directory than its mount namespace.

    Raises:
        SandboxUnavailable: a program that does it is missing.
    """
    options = ["--clear-groups", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
    return [
        *(tool("chroot"), root, tool("env"), "--chdir=/tmp", "PWD=/tmp"),
        *(tool("setpriv"), "--reuid", str(uid), "--regid", str(uid), *options, "--"),
    ]


def accounts(uid: int) -> list[Mount]:
    """Return the files by which programs find a name for their user and for their host."""
    return [
        Mount("/etc/passwd", text=f"student:x:{uid}:{uid}:student:/tmp:/bin/sh\n"),
        Mount("/etc/group", text=f"student:x:{uid}:\n"),
        Mount("/etc/hosts", text="127.0.0.1 localhost sandbox\n::1 localhost\n"),
    ]
