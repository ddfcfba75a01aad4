"""Let notebook cells run where nobody looks: in ``course check`` and in the grader, by one rule."""

from __future__ import annotations

import sys
from typing import Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell


def without_display(shell: InteractiveShell) -> None:
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
