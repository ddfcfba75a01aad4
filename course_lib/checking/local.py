"""``check("02_data_parallel_sgd/shard_bounds", shard_bounds)``: the check under a task's cell."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import cloudpickle

from course_lib.checking.cases import Check
from course_lib.checking.report import CheckFailed, CheckReport
from course_lib.checking.run_check import run_check
from course_lib.checking.runners import LocalRunner
from course_lib.learner import diary
from course_lib.ranks import Trace

WORDS = {"simulated": "simulated ranks", "cpu": "CPU ranks", "gpu": "GPU ranks"}


def check(
    name: str, function: Callable[..., Any], *, on: Literal["simulated", "cpu", "gpu"] = "cpu"
) -> CheckReport:
    """Examine `function` on several ranks of this machine and print how it went.

    It runs on simulated ranks first, which are exact; if it is right there, on real ones. Below the
    report of a case that failed, a notebook shows what its ranks did over time.

    Args:
        name: ``assignment/check``, as it stands under the task.
        function: what you wrote.
        on: the real ranks; ``"simulated"``: none.

    Returns:
        The report.

    Raises:
        CheckFailed: a case failed; the printed report says which, and why.
        LookupError: there is no such check, or its file was not found.

    """
    assignment, _, short = name.partition("/")
    checks = load_checks(find_assignment(assignment) / "checks.py")
    if short not in checks:
        raise LookupError(f"{assignment} has no check '{short}'; it has {', '.join(checks)}")
    report = examine(name, checks[short], function, on=on)
    print(report, flush=True)
    diary.keep(diary.CHECKS, {"checked": name, "fraction": report.fraction, "all": report.passed})
    if not report.passed:
        if report.trace is not None:
            _show_timeline(report.trace, report.traced)
        raise CheckFailed(report)
    return report


def examine(
    name: str,
    check: Check,
    function: Callable[..., Any],
    *,
    on: Literal["simulated", "cpu", "gpu"] = "cpu",
) -> CheckReport:
    """Run a check on simulated ranks and, if it passes, on real ones; return the report."""
    with ExitStack() as stack:
        runners = {
            place: stack.enter_context(LocalRunner(function, place, quiet=place != "simulated"))
            for place in dict.fromkeys(("simulated", on))
        }
        for run in runners.values():
            run.start(check)  # a core that simulated ranks leave idle can do that for the real ones
        places: tuple[str, ...] = ()
        for place, run in runners.items():
            places = (*places, WORDS[place])
            report = replace(run_check(name, check, run, seed="public"), places=places)
            if not report.passed:
                # What passes on simulated ranks and fails on real ones failed there.
                return replace(report, places=places[-1:])
            run.end()
        return report


def _show_timeline(trace: Trace, case: str) -> None:
    """Show the student's own run in a notebook; a terminal shows no figures."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if trace.operations and getattr(shell, "kernel", None) is not None:
        from IPython.display import display

        display(trace.plot(title=f"What your ranks did in the case ‘{case}’"))


def find_assignment(name: str) -> Path:
    """Return the folder that holds the assignment's ``checks.py``.

    It is looked for beside the notebook, then in ``assignments/`` of the folders above it, then
    beside the installed course.
    """
    here = Path.cwd()
    candidates = [here, here / name]
    candidates += [parent / "assignments" / name for parent in (here, *here.parents)]
    candidates.append(Path(__file__).resolve().parents[2] / "assignments" / name)
    for folder in candidates:
        beside = folder != here or here.name == name or any(here.glob(f"{name}.ipynb"))
        if beside and (folder / "checks.py").is_file():
            return folder
    raise LookupError(
        f"checks.py of '{name}' was not found. Keep it beside the notebook, as it was handed out, "
        "and start Jupyter in that folder or above it."
    )


def load_checks(path: Path) -> dict[str, Check]:
    """Return the checks that a ``checks.py`` defines as ``CHECKS``, in their order."""
    checks: dict[str, Check] = load_module(path).CHECKS
    return checks


def load_module(path: Path, beside: Path | None = None) -> ModuleType:
    """Import a file by its path; it can import its neighbours: ``from .judges import …``.

    Args:
        path: the file.
        beside: the folder of its neighbours, if that is not its own. Hidden cases import the judges
            that students get.

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
    """Return the name of the package that the modules of a folder belong to, one for each folder.

    `anew`: forget what was imported of it, since its files may have been edited.
    """
    folder = folder.resolve()
    path = hashlib.sha256(str(folder).encode()).hexdigest()[:8]
    name = re.sub(r"\W", "_", f"_course_{folder.name}_{path}")
    if anew:
        for known in [known for known in sys.modules if known.startswith(f"{name}.")]:
            del sys.modules[known]
    if name not in sys.modules:
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
        # The ranks cannot import what only this process knows by name.
        cloudpickle.register_pickle_by_value(package)
    return name
