"""The kernel of ``course check``: IPython's, but cells run as in the grader."""

from __future__ import annotations

import getpass
import importlib
import os
import sys
from typing import Any

from ipykernel.kernelapp import IPKernelApp
from IPython.display import publish_display_data

from course_lib.learner.no_display import without_display

OUTCOME = "application/x-course-check+json"
"""The type of the output that says what a cell has done."""
OPTIONS = (
    "--InteractiveShell.colors=nocolor",
    "--IPKernelApp.capture_fd_output=False",  # the terminal would show it twice
    "--log-level=CRITICAL",
)


def main() -> None:
    """Serve the client whose connection file the command line names."""
    # As in the grader, imports take no cell's time. Before there is a kernel, this import starts no
    # fork server, which a check on simulated ranks does not need.
    importlib.import_module("course_lib.checking")
    app: Any = IPKernelApp.instance()
    app.initialize([*sys.argv[1:], *OPTIONS])
    # As in the grader, input() and breakpoint() find nobody who types.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    app.kernel.raw_input, app.kernel.getpass = input, getpass.getpass
    without_display(app.shell)
    _be_quiet_about_failed_checks(app.shell)
    app.shell.events.register("post_run_cell", _publish_outcome)
    app.start()


def _be_quiet_about_failed_checks(shell: Any) -> None:
    """Show no traceback of an error that has a report, as the report was already printed."""
    show = shell.showtraceback

    def showtraceback(*args: Any, **options: Any) -> None:
        if not hasattr(sys.exc_info()[1], "report"):
            show(*args, **options)

    shell.showtraceback = showtraceback


def _publish_outcome(result: Any) -> None:
    """Publish the report of the check in a cell, if it has one, and its error in words."""
    error = result.error_before_exec or result.error_in_exec
    report = getattr(error, "report", result.result)
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
    publish_display_data({OUTCOME: outcome})


if __name__ == "__main__":
    main()
