"""``autograder doctor``: test what grading needs: a sandbox, a limit on memory, right grades."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from autograder.sandbox.bubblewrap import SandboxUnavailable, probe
from autograder.sandbox.look import ready
from autograder.sandbox.memory import MemoryGroup
from autograder.sandbox.mounts import beside_packages
from autograder.sandbox.place import SandboxedPlace
from course_lib.installed import PACKAGE, find_course
from course_lib.learner.doctor import Finding, findings, text_of

DESCRIPTION = (
    "Check whether this machine can grade: start a sandbox, and grade three solutions whose points "
    "are known. Say what to do if not. Exit status: 0 if grading works, else 1."
)

_SETTINGS = {
    "kernel.unprivileged_userns_clone": ("0", "1"),
    "kernel.apparmor_restrict_unprivileged_userns": ("1", "0"),
    "user.max_user_namespaces": ("0", "10000"),
}
"""Kernel settings: the value that forbids user namespaces, and one that allows them."""
_SELF_TEST_SECONDS = 900.0
"""Time limit for grading three solutions: more than they take on a busy machine."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options: none."""


def run(root: Path, arguments: argparse.Namespace) -> int:
    """Run all tests, print the results, and return the exit status."""
    wrong = []
    for finding in findings((namespaces, bubblewrap, control_groups, graded)):
        print(text_of(finding), flush=True)
        wrong += [] if finding.fine or finding.needed_for == "nothing" else [finding.name]
    print(f"\nGrading does not work: {', '.join(wrong)}." if wrong else "\nGrading works here.")
    return int(bool(wrong))


def namespaces() -> Finding:
    """Test whether the kernel lets ordinary users create user namespaces; root needs none."""
    if sys.platform != "linux":
        advice = "grade on Linux, in WSL 2 or in a Linux container; everything else works here"
        return Finding("namespaces", f"there are none on {sys.platform}", advice)
    for name, (forbids, allows) in _SETTINGS.items():
        path = Path("/proc/sys", *name.split("."))
        try:
            value = path.read_text().strip()
        except OSError:
            continue
        if value == forbids:
            advice = f"ask the administrator to run: sysctl -w {name}={allows}"
            if os.geteuid() == 0:
                return Finding("namespaces", f"{name} is {value}, which does not matter for root")
            return Finding("namespaces", f"{name} is {value}", advice)
    return Finding("namespaces", "the kernel lets users create them")


def bubblewrap() -> Finding:
    """Start a sandbox, as the autograder does, and test whether it has what grading needs."""
    if sys.platform != "linux":
        return Finding("sandbox", "only on Linux", "see namespaces above")
    try:
        started = f"it starts, with {probe()}"
        with SandboxedPlace() as place:
            ready(place)
        return Finding("sandbox", started)
    except SandboxUnavailable as error:
        advice = "`autograder --version` says what to do on each system; only grading needs this"
        return Finding("sandbox", " ".join(error.reason.split()), advice)


def control_groups() -> Finding:
    """Test whether the kernel can limit a submission's memory; otherwise the grader watches it."""
    if sys.platform != "linux":
        return Finding("control groups", "only on Linux", "see namespaces above", "nothing")
    group = MemoryGroup.make(limit=2**30, processes=10)
    if group is None:
        return Finding("control groups", "not available: the grader watches the memory instead")
    group.close()
    return Finding("control groups", "they limit the memory of a submission")


def graded() -> Finding:
    """Grade solutions whose points are known, in a process like the autograder's."""
    name = "graded"
    if sys.platform != "linux":
        return Finding(name, "only on Linux", "see namespaces above")
    root = find_course()
    if not any(root.glob("instructor/*/hidden.py")):
        told = "not tested: this copy of the course has no hidden cases"
        return Finding(name, told)
    paths = [str(PACKAGE.parent)] * beside_packages(PACKAGE)
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    command = [sys.executable, "-P", "-m", "autograder.passes.self_test", "--course", str(root)]
    advice = "do not grade here before this is fixed: the grades would be wrong"
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SELF_TEST_SECONDS,
        )
        said = json.loads(done.stdout.splitlines()[-1])
        wrong, told = said["wrong"], said["told"]
    except subprocess.TimeoutExpired:
        wrong, told = f"three solutions took more than {_SELF_TEST_SECONDS:.0f} s", ""
    except (ValueError, LookupError, TypeError):
        wrong, told = f"the grader ended: {done.stderr.strip()[-300:] or done.returncode}", ""
    return Finding(name, wrong, advice) if wrong else Finding(name, told)
