"""Find an assignment's checks by the name that a student gives, load them, pack them for ranks."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from course_lib.checking.cases import Check
from course_lib.installed import find_course
from course_lib.ranks.explain.pickling import dumps


def find_check(name: str) -> tuple[str, Check]:
    """Return a check and its full name; ``3/broadcast`` is ``03_collectives/broadcast``.

    Raises:
        LookupError: there is no such check; the message lists the existing names.

    """
    assignment_name, slash, short = name.partition("/")
    try:
        assignment, folder = find_assignment(assignment_name)
    except LookupError:
        if slash:
            raise
        raise LookupError(
            f"there is no check '{name}': write assignment/check, as in 03_collectives/broadcast. "
            f"Assignments that were found: {', '.join(_folders()) or 'none'}"
        ) from None
    checks = load_checks(folder / "checks.py")
    if short not in checks:
        raise LookupError(
            f"{assignment} has no check '{short}'. Its checks: {', '.join(checks)}. Write for "
            f"example check('{assignment}/{next(iter(checks))}', …)"
        )
    return f"{assignment}/{short}", checks[short]


def find_assignment(name: str) -> tuple[str, Path]:
    """Return an assignment's full name, and the folder that holds its ``checks.py``.

    Args:
        name: its name or its number, as in ``3`` or ``03``.

    """
    folders = _folders()
    for full_name, folder in folders.items():
        number = full_name.partition("_")[0]
        numbered = name.isdecimal() and number.isdecimal() and int(number) == int(name)
        if name == full_name or numbered:
            return full_name, folder
    raise LookupError(
        f"checks.py of '{name}' was not found. Keep it beside the notebook, as it was handed out, "
        "and start Jupyter in that folder or above it. Assignments that were found: "
        f"{', '.join(folders) or 'none'}"
    )


def _folders() -> dict[str, Path]:
    """Return the assignments that can be found from here, in order: name → folder.

    The nearest folder of a name is taken: the notebook's own, one below it, one in ``assignments/``
    here or above, and at last that of the installed course.
    """
    here = Path.cwd()
    roots = [find_course(), *reversed(here.parents), here]
    paths = [path for root in roots for path in (root / "assignments").glob("*/checks.py")]
    folders = {path.parent.name: path.parent for path in (*paths, *here.glob("*/checks.py"))}
    if (here / "checks.py").is_file():
        names = (here.name, *(path.stem for path in here.glob("*.ipynb")))
        folders |= dict.fromkeys(names, here)
    return dict(sorted(folders.items()))


def load_checks(path: Path) -> dict[str, Check]:
    """Return the checks that a ``checks.py`` defines as ``CHECKS``, in their order."""
    checks: dict[str, Check] = load_module(path).CHECKS
    return checks


def load_module(path: Path, beside: Path | None = None) -> ModuleType:
    """Import a file by its path; it can import files of its folder: ``from .judges import …``.

    Args:
        path: the file.
        beside: the folder of its neighbours, if it is not the file's own folder. Files with hidden
            cases need it, to import the judges that students get.

    """
    package = _package_of(beside or path.parent, anew=beside is None)
    spec = importlib.util.spec_from_file_location(f"{package}.{path.stem}", path)
    if spec is None or spec.loader is None:
        raise LookupError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _package_of(folder: Path, anew: bool) -> str:
    """Return the name of the package for the modules of a folder; each folder has its own.

    `anew`: forget the modules already imported from it, because its files may have been edited.
    """
    folder = folder.resolve()
    path = hashlib.sha256(str(folder).encode()).hexdigest()[:8]
    name = re.sub(r"\W", "_", f"_course_{folder.name}_{path}")
    if anew:
        for module_name in list(sys.modules):
            if module_name.startswith(f"{name}."):
                del sys.modules[module_name]
    if name not in sys.modules:
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
        # The ranks cannot import this package by name, because only this process knows the name.
        cloudpickle.register_pickle_by_value(package)
    return name


_OURS = "course_lib.checking."
_THERE = f"{_OURS}on_ranks"
"""The part of `checking` that is on the ranks: all of it is there, and no other part is."""


def pack_program(program: Callable[..., Any]) -> bytes:
    """Return a check's program as bytes, with all that it uses of its assignment and `checking`.

    It is sent without its file and without the other parts of the check. So a student's code finds
    no judge and no oracle where it runs. Reading these bytes runs code. They are read on ranks,
    never where a grade is decided.
    """
    author = getattr(program, "program", program).__module__  # in a task, the author's program
    ours = {name for name in sys.modules if name.startswith(_OURS)}
    by_value = {name for name in (*ours, author) if not name.startswith(_THERE)}
    by_value -= cloudpickle.list_registry_pickle_by_value()
    modules = [sys.modules[name] for name in by_value if name in sys.modules]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        return dumps(program)
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)
