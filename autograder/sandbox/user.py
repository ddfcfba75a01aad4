"""Choose the user of a student's process in a sandbox, which is never root.

If root opens the sandbox, each such process runs under an unprivileged uid that only its cell has,
because the real uid 0 has no limit on processes. If an ordinary user opens it, the process runs in
a user namespace.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from autograder.errors import SandboxUnavailable
from autograder.sandbox.mounts import Mount

# These are between the ranges that Debian and systemd use, and within a container's 65536 ids.
UIDS = range(60706, 61184)


def is_root() -> bool:
    """Return whether root opens the sandbox."""
    return os.geteuid() == 0


@contextlib.contextmanager
def own_uid() -> Iterator[int]:
    """Reserve the uid of a cell; under root, no other cell of this machine has the same uid.

    The lock is a name in the abstract socket namespace, which the kernel frees when we die.

    Raises:
        SandboxUnavailable: all uids are in use.
    """
    if not is_root():  # as seen from outside, each cell runs as our own user
        yield UIDS[0]
        return
    with socket.socket(socket.AF_UNIX) as lock:
        for uid in UIDS:
            with contextlib.suppress(OSError):
                lock.bind(f"\0sgd-to-ddp-sandbox-{uid}")
                break
        else:
            raise SandboxUnavailable(
                f"{len(UIDS)} student processes run on this machine already: wait until one ends."
            )
        yield uid


def make_sure_of_uids() -> None:
    """Make sure that this root may become each user of `UIDS`.

    Raises:
        SandboxUnavailable: this root belongs to a user namespace that lacks these users.

    """
    for kind, option in (("uid", "--add-subuids"), ("gid", "--add-subgids")):
        with contextlib.suppress(OSError):  # the kernel may have no user namespaces
            lines = Path(f"/proc/self/{kind}_map").read_text().splitlines()
            spans = [
                range(int(first), int(first) + int(count))
                for first, _, count in map(str.split, lines)
            ]
            if not all(any(uid in span for span in spans) for uid in UIDS):
                raise SandboxUnavailable(
                    f"Here, root is in a user namespace without the {kind}s {UIDS[0]}-{UIDS[-1]}, "
                    "but each student process needs one of these. Start the container with 65536 "
                    f"{kind}s (on the host, usermod {option} 100000-165535 USER allows that), or "
                    "grade outside the container as an ordinary user."
                )


def rights_to_make_cells() -> list[str]:
    """Return bubblewrap's options for our process, which gives each of its children namespaces.

    It runs no student code. If an ordinary user opens the sandbox, it has rights only in the
    sandbox's user namespace. If root opens it, it stays root in the sandbox's namespaces, with the
    few rights that it needs to make cells and to become another user.
    """
    rights = ["CAP_SYS_ADMIN", "CAP_NET_ADMIN"]
    if is_root():
        rights += ["CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP", "CAP_KILL", "CAP_SYS_RESOURCE"]
    else:
        rights += ["CAP_SETFCAP"]  # Linux 5.12 needs it to map this namespace's 0
    # With uid 0. Otherwise bubblewrap enters a second user namespace, which does not own its pid
    # namespace.
    options = [] if is_root() else ["--unshare-user", "--uid", "0", "--gid", "0"]
    return [*options, "--cap-drop", "ALL", *(p for right in rights for p in ("--cap-add", right))]


def accounts() -> list[Mount]:
    """Return the files by which programs find a name for their user and for their host."""
    users = (f"student:x:{uid}:{uid}:student:/tmp:/bin/sh\n" for uid in UIDS)
    groups = (f"student:x:{uid}:\n" for uid in UIDS)
    return [
        Mount("/etc/passwd", text="".join(users)),
        Mount("/etc/group", text="".join(groups)),
        Mount("/etc/hosts", text="127.0.0.1 localhost sandbox\n::1 localhost\n"),
    ]
