"""A fresh process that runs a notebook's cells and checks: started by ``course check``.

It reads one line of JSON and runs the cells in IPython, as a notebook would. To a separate file
descriptor it writes a line before each cell with a time limit, and a line after it. The cells
print to the terminal. The process ends when the one that started it ends, because its
standard input then closes.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import sys
import threading
from typing import IO, Any

from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from course_lib.learner.no_display import without_display
from course_lib.limits import clock_of, limit_of

INTERRUPTED = 130
Failed = tuple[str, str]
"""The source of a cell that failed, and why: ``cell 3 failed: …``."""


def main() -> int:
    """Run the steps that standard input names; return the exit status."""
    plan = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, args=[os.dup(0)], daemon=True).start()
    # As in the grader, input() and breakpoint() find nobody who types.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(plan["folder"])
    importlib.import_module("course_lib.checking")  # as in the grader, imports take no cell's time
    with os.fdopen(plan["results"], "w") as results:
        config = Config(HistoryManager={"enabled": False}, InteractiveShell={"colors": "nocolor"})
        shell = InteractiveShell.instance(config=config)
        without_display(shell)
        _be_quiet_about_failed_checks(shell)
        shell.displayhook.write_output_prompt = lambda: None  # type: ignore[method-assign]
        failed: list[Failed] = []
        for step in plan["steps"]:
            outcome = _run(shell, step, plan["left"], results, failed)
            if outcome is None:
                return INTERRUPTED
            _write(results, outcome)
    return 0


def _run(
    shell: Any,
    step: dict[str, Any],
    left: dict[str, float],
    results: IO[str],
    failed: list[Failed],
) -> dict[str, Any] | None:
    """Run one cell and return its time, and its outcome if it is a check; note it if it failed.

    Return None if a person interrupted it. If it lasts longer than its limit, the process that
    started this one interrupts it.
    """
    kind, number, pid = step.get("kind"), step["number"], os.getpid()
    limit = None if kind is None else limit_of(kind, left[kind])
    start, seconds, error = clock_of(pid), 0.0, None
    if limit:
        _write(results, {"cell": number, "kind": kind, "seconds": limit})
    if limit != 0:
        shell.execution_count = number  # tracebacks say: Cell In[…]
        signal.signal(signal.SIGINT, signal.default_int_handler)
        done = shell.run_cell(step["source"])
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt that comes late
        error = done.error_before_exec or done.error_in_exec
        seconds = clock_of(pid) - start
    is_late = limit is not None and seconds >= limit
    if isinstance(error, KeyboardInterrupt) and not is_late:
        return None
    if kind is None:
        print(flush=True)
        outcome = _outcome(getattr(error, "report", done.result), error, failed)
        return {**outcome, "check": step["check"], "seconds": round(seconds, 1)}
    left[kind] -= seconds
    outcome = {"cell": number, "kind": kind, "seconds": seconds, "is_late": is_late}
    if error is not None:
        outcome["failed"] = f"cell {number} failed: {_said(error, failed)}"
        failed.append((step["source"], outcome["failed"]))
    return outcome


def _write(results: IO[str], line: dict[str, Any]) -> None:
    results.write(json.dumps(line) + "\n")
    results.flush()


def _be_quiet_about_failed_checks(shell: Any) -> None:
    """Show no traceback of an error that has a report, as the report was already printed."""
    show = shell.showtraceback

    def showtraceback(*args: Any, **more: Any) -> None:
        if not hasattr(sys.exc_info()[1], "report"):
            show(*args, **more)

    shell.showtraceback = showtraceback


def _outcome(report: Any, error: BaseException | None, failed: list[Failed]) -> dict[str, Any]:
    if hasattr(report, "fraction"):
        undecided = getattr(report, "undecided", "")
        return {"fraction": report.fraction, "reason": report.reason, "undecided": undecided}
    if error is not None:
        return {"fraction": 0.0, "reason": _said(error, failed)}
    return {"fraction": 0.0, "reason": "the cell of this check does not call check any more"}


def _said(error: BaseException, failed: list[Failed]) -> str:
    """Return an error in words: of a missing name, why the first cell with that name failed."""
    if isinstance(error, NameError):
        name = re.compile(rf"\b{error.name}\b")
        for source, why in failed:
            if name.search(source):
                return f"there is no {error.name}, because {why}"
    if isinstance(error, SyntaxError):  # its text names a file, which nobody has written
        return f"{type(error).__name__} in line {error.lineno}: {error.msg}"
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def _end_with_parent(pipe: int) -> None:
    os.read(pipe, 1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
