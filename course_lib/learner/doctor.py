"""Check whether this machine has what the course needs, and say what to do if not.

Exit status: 0 if lectures and checks will work, else 1. What grading needs: autograder doctor.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from course_lib.cores import usable_cores

GIB = 2**30
ENOUGH_MEMORY = 2 * GIB
"""In bytes. Four ranks share PyTorch's own memory, and need about half of this."""
SECONDS = 60.0
"""The time that ranks may take to start and to work."""
NAME = "sgd-to-ddp"
COMPLETE = "complete the installation: `make .venv/ready`, or `pip install -e .` in the course"


@dataclass(frozen=True)
class Finding:
    """One property of the machine, and whether it is fine.

    Attributes:
        name: the name of what was tested.
        summary: what was found, in one line.
        advice: what to do, in one sentence; empty if all is fine.
        needed: whether nothing works without it; otherwise only comfort or speed suffers.

    """

    name: str
    summary: str
    advice: str = ""
    needed: bool = True


Look = Callable[[], Finding]
"""A test of the machine."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options: none."""


def run(arguments: argparse.Namespace) -> int:
    """Run all tests, print the results, and return the exit status."""
    problems = print_all(LOOKS)
    if problems:
        print(f"\nNot ready: {', '.join(problems)}. The arrows show what to do.")
    else:
        print("\nReady: lectures and checks work here. `autograder doctor` tests grading.")
    return int(bool(problems))


def print_all(looks: Iterable[Look]) -> list[str]:
    """Print the result of each test, and return the names of those that found a real problem.

    If a test itself raises an error, this is also a result.
    """
    problems = []
    for look in looks:
        name = look.__name__.replace("_", " ")
        try:
            finding = look()
        except ImportError as error:
            finding = Finding(name, str(error).splitlines()[0], COMPLETE)
        except Exception as error:
            summary = f"the test itself failed: {type(error).__name__}: {error}"
            finding = Finding(name, summary, "please report this, with what course doctor prints")
        print(text_of(finding), flush=True)
        problems += [finding.name] if finding.needed and finding.advice else []
    return problems


def text_of(finding: Finding) -> str:
    """Return a finding as lines for a terminal."""
    mark = "✓" if not finding.advice else "✗" if finding.needed else "!"
    line = f"{mark} {finding.name:15} {finding.summary}"
    return line if not finding.advice else f"{line}\n{'→':>19} {finding.advice}"


# Python and its packages ----------------------------------------------------------------------


def packages() -> Finding:
    """Test whether the packages in pyproject.toml are installed and new enough."""
    from packaging.requirements import Requirement

    python = f"Python {platform.python_version()} in {sys.prefix}"
    try:
        requirements = [Requirement(line) for line in metadata.requires(NAME) or []]
    except metadata.PackageNotFoundError:
        return Finding("packages", f"the course is not installed in {python}", COMPLETE)
    # Those with a marker are of an extra, or only for grading.
    needed = {r.name: r.specifier for r in requirements if r.marker is None}
    problems = []
    for name, specifier in needed.items():
        try:
            version = metadata.version(name)
            if not specifier.contains(version, prereleases=True):
                problems.append(f"{name} is {version}, but the course needs {specifier}")
        except metadata.PackageNotFoundError:
            problems.append(f"{name} is missing")
    if problems:
        return Finding("packages", "; ".join(problems), COMPLETE)
    installed = f"all {len(needed)} that the course needs are installed for {python}"
    return Finding("packages", installed)


def torch_and_gpus() -> Finding:
    """Test PyTorch: its version, whether it can run ranks, and which GPUs it sees."""
    import torch
    import torch.distributed as dist

    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU"
    summary = f"{torch.__version__}, built for {built}"
    if not (dist.is_available() and dist.is_gloo_available()):
        return Finding("PyTorch", f"{summary}, without gloo", f"install another build; {COMPLETE}")
    if count := torch.cuda.device_count():
        names = ", ".join(sorted({torch.cuda.get_device_name(gpu) for gpu in range(count)}))
        return Finding("PyTorch", f"{summary}; GPUs: {count} ({names})")
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return Finding("PyTorch", f"{summary}; no GPU, and none is needed: ranks run on the CPU")
    advice = (
        "update NVIDIA's driver, or correct CUDA_VISIBLE_DEVICES"
        if torch.version.cuda
        else "to use the GPUs, install PyPI's torch, which has CUDA: see pip in the README"
    )
    return Finding("PyTorch", f"{summary}; it sees no GPU of this machine", advice, needed=False)


# The machine --------------------------------------------------------------------------------


def memory() -> Finding:
    """Test how much memory processes can still get, and how many cores they may use."""
    cores = usable_cores()
    free = _available()
    summary = f"{free / GIB:.1f} GiB available, {cores} cores"
    advice = "close other programs: four ranks need one or two gibibytes"
    return Finding("memory", summary, advice if free < ENOUGH_MEMORY else "")


def _available() -> int:
    """Return the bytes that processes can get from the machine and from this control group."""
    import psutil

    free = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
    except (OSError, ValueError):  # there is no such group, or it has no limit
        return free
    return min(free, limit - used)


def simulated() -> Finding:
    """Start four simulated ranks."""
    return _try("simulated", 4)


def real() -> Finding:
    """Start two processes that communicate over gloo."""
    return _try("cpu", 2)


def _try(on: Literal["simulated", "cpu"], size: int) -> Finding:
    from course_lib.ranks import Ranks
    from course_lib.ranks.explain.errors import RanksError

    name, start = f"{on} ranks", time.monotonic()
    try:
        with Ranks(size, on=on, timeout=SECONDS) as ranks:
            ranks.run(_work)
    except (RanksError, OSError, RuntimeError) as error:
        summary = str(error).strip().splitlines()[0]
        advice = (
            "see memory above. CPU ranks also need the loopback interface (ip link set lo "
            "up), or the one that GLOO_SOCKET_IFNAME names"
        )
        return Finding(name, summary, advice)
    return Finding(name, f"{size} started and worked for {time.monotonic() - start:.1f} s")


def _work() -> None:
    """Do what lectures do on every rank: draw numbers, multiply matrices, and make a group."""
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    matrix = torch.randn(64, 64)
    dist.all_reduce(matrix @ matrix.T, group=dist.new_group())


LOOKS: tuple[Look, ...] = (packages, torch_and_gpus, memory, simulated, real)
