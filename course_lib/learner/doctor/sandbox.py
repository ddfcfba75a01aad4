"""What grading needs besides, on Linux: a sandbox, and a bound on its memory."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from course_lib.learner.doctor.finding import Finding

_SETTINGS = {
    "kernel.unprivileged_userns_clone": ("0", "1"),
    "kernel.apparmor_restrict_unprivileged_userns": ("1", "0"),
    "user.max_user_namespaces": ("0", "10000"),
}
"""Of the kernel: the value that forbids user namespaces, and one that allows them."""


def namespaces() -> Finding:
    """Look at what the kernel lets ordinary users do; root needs no user namespace."""
    if sys.platform != "linux":
        advice = "grade on Linux, in WSL 2 or in a Linux container; all else works here"
        return Finding("namespaces", f"there are none on {sys.platform}", advice, "grading")
    for name, (forbids, allows) in _SETTINGS.items():
        path = Path("/proc/sys", *name.split("."))
        try:
            value = path.read_text().strip()
        except OSError:
            continue
        if value == forbids:
            advice = f"ask the administrator for: sysctl -w {name}={allows}"
            if os.geteuid() == 0:
                return Finding("namespaces", f"{name} is {value}, which does not bind root")
            return Finding("namespaces", f"{name} is {value}", advice, "grading")
    return Finding("namespaces", "the kernel lets users make them")


def bubblewrap() -> Finding:
    """Start a sandbox, as the autograder does, and look whether it has what grading needs."""
    if sys.platform != "linux":
        return Finding("sandbox", "only on Linux", "see namespaces", "grading")
    try:
        from autograder.sandbox.bubblewrap import SandboxUnavailable, probe
        from autograder.sandbox.look import ready
        from autograder.sandbox.place import SandboxedPlace
    except ImportError as error:
        return Finding("sandbox", f"{error.name} is missing", "see packages", "grading")
    try:
        started = f"starts, with {probe()}"
        with SandboxedPlace() as place:
            ready(place)
        return Finding("sandbox", started)
    except SandboxUnavailable as error:
        advice = "`autograder --version` lists what can be done, by system; only grading needs it"
        return Finding("sandbox", " ".join(error.reason.split()), advice, "grading")


def control_groups() -> Finding:
    """Look whether the kernel can bound a submission's memory; else the grader watches it."""
    if sys.platform != "linux":
        return Finding("control groups", "only on Linux", "see namespaces", "nothing")
    from autograder.sandbox.memory import MemoryGroup

    group = MemoryGroup.make(limit=2**30, processes=10)
    if group is None:
        return Finding("control groups", "cannot be made: the grader watches the memory instead")
    group.close()
    return Finding("control groups", "bound the memory of a submission")
