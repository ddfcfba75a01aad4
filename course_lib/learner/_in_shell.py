"""The process of ``course check`` that runs a student's cells, in IPython's shell, as the grader's.

What the cells print goes to the terminal. Cells come, and their outcomes go, through a pipe.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from course_lib.learner.no_display import plain_shell, run_cell


def main() -> None:
    """Run the cells that come through the pipe whose descriptor the command line names."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_parent, args=[os.getppid()], daemon=True).start()
    pipe = Connection(int(sys.argv[1]))
    os.set_inheritable(pipe.fileno(), False)
    shell = plain_shell(InteractiveShell={"colors": "nocolor"})
    shell.displayhook.write_output_prompt = lambda: None  # type: ignore[method-assign]
    importlib.import_module("course_lib.checking")  # as in the grader, it takes no cell's time
    pipe.send({})
    while True:
        try:
            number, source = pipe.recv()
        except EOFError:
            return
        pipe.send(_run(shell, number, source))


def _end_with_the_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


def _run(shell: InteractiveShell, number: int, source: str) -> dict[str, Any]:
    """Run a cell; return the report of its check, if it has one, and its error in words."""
    result, error = run_cell(shell, source, number)
    report: Any = getattr(error, "report", result.result)
    outcome: dict[str, Any] = {}
    if hasattr(report, "fraction"):
        undecided = getattr(report, "undecided", "")
        outcome |= {"fraction": report.fraction, "reason": report.reason, "undecided": undecided}
    if isinstance(error, NameError):
        outcome["missing"] = error.name
    if isinstance(error, SyntaxError):  # its text names a file, which nobody has written
        outcome["error"] = f"{type(error).__name__} in line {error.lineno}: {error.msg}"
    elif error is not None:
        outcome["error"] = f"{type(error).__name__}: {error}".removesuffix(": ")
    return outcome


if __name__ == "__main__":
    main()
