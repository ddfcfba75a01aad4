"""Test Python and the packages that the course needs."""

from __future__ import annotations

import json
import platform
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from course_lib.installed import PACKAGE, find_course
from course_lib.learner.doctor._finding import Finding

NAME = "sgd-to-ddp"
COMPLETE = "complete the installation: `make .venv/ready`, or `pip install -e .` in the course"
_DEPENDENCY = re.compile(r"([A-Za-z0-9_.-]+)>=([0-9.]+)$")


def python() -> Finding:
    """Report Python's version and environment."""
    told = f"{platform.python_version()} in {sys.prefix}"
    return Finding("Python", told)


def packages() -> Finding:
    """Test whether the packages in pyproject.toml are installed and new enough."""
    try:
        asked = metadata.requires(NAME) or []
    except metadata.PackageNotFoundError:
        told = f"the course is not installed in {sys.prefix}"
        return Finding("packages", told, COMPLETE)
    wrong, count = [], 0
    for name, bound in (found.groups() for line in asked if (found := _DEPENDENCY.match(line))):
        count += 1
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{name} is missing")
            continue
        if _numbers(version) < _numbers(bound):
            wrong.append(f"{name} is {version}, but the course needs {bound}")
    if wrong:
        return Finding("packages", "; ".join(wrong), COMPLETE)
    return Finding("packages", f"all {count} packages that the course needs are installed")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def course() -> Finding:
    """Test whether the lectures, assignments and solutions are there."""
    folder = find_course()
    if not (folder / "lectures" / "00_start_here.ipynb").is_file():
        advice = "install from a clone with `pip install -e .`, or from a wheel of the course"
        return Finding("course", f"there are no lectures in {folder}", advice)
    where = "a checkout" if folder == PACKAGE.parent else "installed"
    kept = "with" if (folder / "instructor").is_dir() else "without"
    return Finding("course", f"{folder} ({where}, {kept} solutions)")


def torch_build() -> Finding:
    """Test PyTorch: its version, what it was built for, and whether it can run ranks."""
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        told = "is missing" if missing else f"does not load: {str(error).splitlines()[0]}"
        return Finding("PyTorch", told, COMPLETE)
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU"
    told = f"{torch.__version__}, built for {built}"
    if not (dist.is_available() and dist.is_gloo_available()):
        return Finding("PyTorch", f"{told}, without gloo", f"install another build; {COMPLETE}")
    has_driver = any(Path("/dev").glob("nvidia[0-9]*"))
    if has_driver and not torch.version.cuda:
        advice = "to use the GPUs, install PyPI's torch, which has CUDA: see pip in the README"
        return Finding("PyTorch", f"{told}, but this machine has GPUs", advice, "nothing")
    if torch.version.cuda and not has_driver:
        told += "; there is no NVIDIA GPU, so the CUDA part only uses disk space"
    return Finding("PyTorch", told)


def kernels() -> Iterator[Finding]:
    """Test whether JupyterLab has the kernel that notebooks name, and the multi-rank one."""
    try:
        from jupyter_client.kernelspec import KernelSpecManager
    except ImportError:
        yield Finding("kernels", "jupyter_client is missing", COMPLETE)
        return
    there = KernelSpecManager().find_kernel_specs()
    if "python3" not in there:
        yield Finding("kernels", "the kernel python3 is missing", COMPLETE)
    elif "data-parallel" not in there:
        advice = "use %load_ext course_lib in a notebook, or install the course again"
        yield Finding(
            "kernels", "python3 is there, but not the multi-rank kernel", advice, "nothing"
        )
    else:
        yield Finding("kernels", "python3, and Data Parallel (multi-rank)")


def extensions() -> Finding:
    """Test whether nbgrader's panels are there: formgrader needs them, students do not."""
    advice = f"formgrader needs nbgrader's panels: {COMPLETE}"
    try:
        version = metadata.version("nbgrader")
    except metadata.PackageNotFoundError:
        return Finding("nbgrader", "is missing", advice, "nothing")
    switched_on = Path(sys.prefix, "etc/jupyter/jupyter_server_config.d/nbgrader.json")
    panels = Path(sys.prefix, "share/jupyter/labextensions/@jupyter/nbgrader/package.json")
    missing = [path.name for path in (switched_on, panels) if not _readable(path)]
    if missing:
        return Finding("nbgrader", f"{version}, without its panels", advice, "nothing")
    return Finding("nbgrader", f"{version}, with its panels for instructors")


def _readable(path: Path) -> bool:
    try:
        return bool(json.loads(path.read_bytes()))
    except (OSError, ValueError):
        return False
