"""A fresh process that runs a notebook's cells and checks: started by ``course check``.

It reads one line of JSON and runs the cells in IPython, as a notebook would. It writes one line per
check to a separate file descriptor, and the cells print to the terminal. It ends when the process
that started it ends, because its standard input then closes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from typing import IO, Any

from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from course_lib.learner.no_display import without_display

INTERRUPTED = 130


def main() -> int:
    """Run the steps that standard input names; return the exit status."""
    plan = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, args=[os.dup(0)], daemon=True).start()
    # As in the grader, input() and breakpoint() find nobody who types.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(plan["folder"])
    with (
        tempfile.TemporaryDirectory(prefix="course-check-") as home,  # without the user's settings
        os.fdopen(plan["results"], "w") as results,
    ):
        os.environ["IPYTHONDIR"] = home
        config = Config(HistoryManager={"enabled": False}, InteractiveShell={"colors": "nocolor"})
        shell = InteractiveShell.instance(config=config)
        without_display(shell)
        _be_quiet_about_failed_checks(shell)
        shell.displayhook.write_output_prompt = lambda: None  # type: ignore[method-assign]
        for step in plan["steps"]:
            if _run(shell, step, results) == INTERRUPTED:
                return INTERRUPTED
    return 0


def _run(shell: Any, step: dict[str, Any], results: IO[str]) -> int:
    """Run one cell; if it is a check, write its outcome to `results`."""
    start = time.monotonic()
    shell.execution_count = step["number"]  # tracebacks say: Cell In[…]
    done = shell.run_cell(step["source"])
    error = done.error_before_exec or done.error_in_exec
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if "check" not in step:
        results.write(json.dumps({"cell": step["number"], "seconds": _since(start)}) + "\n")
        results.flush()
    else:
        told = _told(getattr(error, "report", done.result), error)
        results.write(json.dumps({**told, "check": step["check"], "seconds": _since(start)}) + "\n")
        results.flush()
        print(flush=True)
    return 0


def _be_quiet_about_failed_checks(shell: Any) -> None:
    """Show no traceback of an error that has a report, as the report was already printed."""
    show = shell.showtraceback

    def showtraceback(*args: Any, **more: Any) -> None:
        if not hasattr(sys.exc_info()[1], "report"):
            show(*args, **more)

    shell.showtraceback = showtraceback


def _told(report: Any, error: BaseException | None) -> dict[str, Any]:
    if hasattr(report, "fraction"):
        return {"fraction": report.fraction, "reason": report.reason}
    if error is not None:
        return {"fraction": 0.0, "reason": f"{type(error).__name__}: {error}"}
    return {"fraction": 0.0, "reason": "the cell of this check does not call check any more"}


def _since(start: float) -> float:
    return round(time.monotonic() - start, 1)


def _end_with_parent(pipe: int) -> None:
    os.read(pipe, 1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
