"""Run the check of a task: ``check("02_data_parallel_sgd/shard_bounds", shard_bounds)``."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import cloudpickle

from course_lib import diary
from course_lib.checking.cases import Case, Check
from course_lib.checking.compare import describe
from course_lib.checking.report import CheckFailed, CheckReport
from course_lib.checking.report_html import html_of
from course_lib.checking.run_check import Runner, run_on_each
from course_lib.checking.runners import LocalRunner
from course_lib.installed import find_course
from course_lib.ranks.explain.words import counted
from course_lib.ranks.wire import Plain

WORDS = {"simulated": "simulated ranks", "cpu": "CPU ranks", "gpu": "GPU ranks"}


def check(
    name: str,
    function: Callable[..., Any],
    *,
    on: Literal["simulated", "cpu", "gpu"] = "cpu",
    case: str | None = None,
) -> CheckReport:
    """Check `function` on several ranks of this machine and show the result.

    The check first runs on simulated ranks, which are exact. If the function is right there, the
    check then runs on real ranks. A notebook also shows what the ranks did over time in a case that
    failed.

    Args:
        name: ``assignment/check``, as written under the task; the assignment's number is enough.
        function: what you wrote.
        on: the kind of real ranks; ``"simulated"``: no real ranks.
        case: the name of one case, as in a report. Only this case is run, and the result is not
            recorded in your progress.

    Returns:
        The report.

    Raises:
        CheckFailed: a case failed; the report above the error explains which, and why.
        LookupError: there is no such check or case, or the check's file was not found.
        TypeError: `function` is not a function.

    """
    if not callable(function):
        raise TypeError(
            f"check(name, function) needs the function itself: check({name!r}, f), not "
            f"check({name!r}, f()). Instead of a function it got {describe(function)}"
        )
    with _Shown() as shown:
        shown.say(f"reading {name} …")
        name, found = find_check(name)
        if case is not None:
            found = _only(found, case)
        report = examine(name, found, function, on=on, say=shown.say, echo=shown.echo)
        report = replace(report, alone=case is not None)
        shown.report(report)
    if case is None:
        entry = {"checked": name, "fraction": report.fraction, "all": report.passed}
        diary.keep(diary.CHECKS, entry)
    if not report.passed:
        raise CheckFailed(report)
    return report


def find_check(name: str) -> tuple[str, Check]:
    """Return a check and its full name; ``3/broadcast`` is ``03_collectives/broadcast``.

    Raises:
        LookupError: there is no such check; the message lists the existing names.

    """
    given, slash, short = name.partition("/")
    assignment = _full_name(given)
    if not slash and assignment not in _assignments():
        raise LookupError(
            f"there is no check '{name}': write assignment/check, as in 03_collectives/broadcast. "
            f"Assignments that were found: {', '.join(_assignments()) or 'none'}"
        )
    checks = load_checks(find_assignment(assignment) / "checks.py")
    if short not in checks:
        raise LookupError(
            f"{assignment} has no check '{short}'. Its checks: {', '.join(checks)}. Write for "
            f"example check('{assignment}/{next(iter(checks))}', …)"
        )
    return f"{assignment}/{short}", checks[short]


def _only(check: Check, case: str) -> Check:
    """Return the check with only this case."""
    found = tuple(each for each in check.cases if each.name == case)
    if not found:
        there = "; ".join(each.name for each in check.cases)
        raise LookupError(f"there is no case '{case}'. The cases: {there}")
    return replace(check, cases=found)


def examine(
    name: str,
    check: Check,
    function: Callable[..., Any],
    *,
    on: Literal["simulated", "cpu", "gpu"] = "cpu",
    say: Callable[[str], None] = lambda _: None,
    echo: Callable[[str], None] = lambda text: print(text, end=""),
) -> CheckReport:
    """Run a check on simulated ranks and, if it passes, on real ones; return the report.

    Args:
        name: the name of the check, with its assignment.
        check: the check.
        function: the student's function.
        on: the kind of real ranks.
        say: called with a description of each step before the step begins.
        echo: called with the text that simulated ranks print.

    """
    most = max(case.world_size for case in check.cases)
    say(f"starting {counted(most, 'rank')} …")
    with ExitStack() as stack:
        runners = {
            # What simulated ranks have printed, real ranks need not print again.
            kind: stack.enter_context(
                LocalRunner(function, kind, echo=echo if kind == "simulated" else None)
            )
            for kind in dict.fromkeys(("simulated", on))
        }
        for run in runners.values():
            run.start(check)  # real ranks start on a core that simulated ranks leave idle
        announced = {
            WORDS[kind]: _announcing(run, say, WORDS[kind]) for kind, run in runners.items()
        }
        return run_on_each(name, check, announced, seed="public")


def _announcing(run: Runner, say: Callable[[str], None], where: str) -> Runner:
    """Return a runner that announces each case before it runs the case."""

    def announced(check: Check, case: Case, inputs: Sequence[Plain]) -> Any:
        number = next(i for i, each in enumerate(check.cases, 1) if each is case)
        say(f"{where}, case {number} of {len(check.cases)}: {case.name}")
        return run(check, case, inputs)

    return announced


class _Shown:
    """The display of a check's progress and report; a context that leaves no unfinished line.

    In a notebook, the display is one output that changes: it shows the progress, then the report,
    then the report with its picture. In a terminal, it is a progress line that overwrites itself,
    followed by the report. If there is neither a notebook nor a terminal, it is only the report.
    """

    def __init__(self) -> None:
        shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        self._notebook = getattr(shell, "kernel", None) is not None
        self._handle: Any = None
        self._line = False

    def say(self, text: str) -> None:
        """Show a message about the progress."""
        if self._notebook:
            self._show({"text/plain": text})
        elif sys.stderr.isatty():
            room = shutil.get_terminal_size().columns - 1
            print(f"\r\033[K{text[:room]}", end="", file=sys.stderr, flush=True)
            self._line = True

    def echo(self, text: str) -> None:
        """Print the text that the ranks printed."""
        self._end_line()
        print(text, end="", flush=True)

    def report(self, report: CheckReport) -> None:
        """Show the report, and add its picture after it is drawn."""
        if not self._notebook:
            self._end_line()
            print(report, flush=True)
            return
        self._show({"text/html": html_of(report), "text/plain": str(report)})
        if not report.passed and report.picture is not None:
            self._show({"text/html": report._repr_html_(), "text/plain": str(report)})

    def _show(self, bundle: dict[str, str]) -> None:
        from IPython.display import display

        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)

    def _end_line(self) -> None:
        if self._line:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
            self._line = False

    def __enter__(self) -> _Shown:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end_line()
        # If a person interrupts the check, the line stays: it says what took so long.
        if self._handle is not None and kind is not None and issubclass(kind, Exception):
            self._handle.update({}, raw=True)


def find_assignment(name: str) -> Path:
    """Return the folder that holds the assignment's ``checks.py``.

    The search begins in the notebook's folder. It goes on in ``assignments/`` of this folder and of
    each folder above it, and ends in the installed course.
    """
    here = Path.cwd()
    candidates = [here, here / name]
    candidates += [parent / "assignments" / name for parent in (here, *here.parents)]
    candidates.append(find_course() / "assignments" / name)
    for folder in candidates:
        beside = folder != here or here.name == name or any(here.glob(f"{name}.ipynb"))
        if beside and (folder / "checks.py").is_file():
            return folder
    there = ", ".join(_assignments()) or "none"
    raise LookupError(
        f"checks.py of '{name}' was not found. Keep it beside the notebook, as it was handed out, "
        f"and start Jupyter in that folder or above it. Assignments that were found: {there}"
    )


def _full_name(given: str) -> str:
    """Return an assignment's full name, from the name or the number, as in ``3`` or ``03``."""
    if not given.isdecimal():
        return given
    known = [folder for folder in _assignments() if folder.partition("_")[0].isdecimal()]
    same = [folder for folder in known if int(folder.partition("_")[0]) == int(given)]
    return same[0] if same else given


def _assignments() -> list[str]:
    """Return the names of the assignments that can be found from here, in order."""
    here = Path.cwd()
    folders = [parent / "assignments" for parent in (here, *here.parents)]
    folders.append(find_course() / "assignments")
    found = {path.parent.name for folder in folders for path in folder.glob("*/checks.py")}
    if (here / "checks.py").is_file():
        found |= {here.name, *(path.stem for path in here.glob("*.ipynb"))}
    return sorted(found)


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
        for known in [known for known in sys.modules if known.startswith(f"{name}.")]:
            del sys.modules[known]
    if name not in sys.modules:
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
        # The ranks cannot import this package by name, because only this process knows the name.
        cloudpickle.register_pickle_by_value(package)
    return name
