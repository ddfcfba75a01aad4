"""Let notebook cells run where nobody looks: in ``course check`` and in the grader, by one rule."""

from __future__ import annotations

import signal
import sys
from typing import Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell
from traitlets.config import Config


def plain_shell(**config: dict[str, Any]) -> InteractiveShell:
    """Return IPython's shell without displays and history; `config` is more of its settings."""
    # The history would write into the user's folder, and start a thread, but a cell may have
    # reached the limit of threads.
    settings = Config({"HistoryManager": {"enabled": False}, **config})
    shell = InteractiveShell.instance(config=settings)
    _without_display(shell)
    return shell


def run_cell(
    shell: InteractiveShell, source: str, number: int
) -> tuple[ExecutionResult, BaseException | None]:
    """Run a cell, which SIGINT interrupts; return what it gave, and its error."""
    shell.execution_count = number  # a traceback says: Cell In[number]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    result = shell.run_cell(source, store_history=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return result, result.error_before_exec or result.error_in_exec


def _without_display(shell: InteractiveShell) -> None:
    """Make magics for displays do nothing, and ``exit()`` as well.

    There is no window, so ``%matplotlib`` changes nothing, with any argument. A notebook's kernel
    knows more line magics than a plain shell, and they too are for displays only.
    """
    run = shell.run_line_magic

    def forgiving(name: str, line: str, _stack_depth: int = 1) -> Any:
        try:
            return run(name, line, _stack_depth + 1)
        except UsageError as error:
            print(f"%{name} has no effect here: {error}", file=sys.stderr)
            return None

    shell.run_line_magic = forgiving  # type: ignore[method-assign, assignment]
    shell.enable_gui = lambda *_, **__: None  # type: ignore[method-assign]
    shell.enable_matplotlib = lambda gui=None: (gui, "agg")  # type: ignore[method-assign]
    shell.ask_exit = lambda: None  # type: ignore[attr-defined]
