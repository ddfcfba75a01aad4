"""The meaning of ``!`` and ``%`` in a ``%%ranks`` cell.

IPython rewrites ``!ls`` into ``get_ipython().system('ls')``, and ``%`` in the same way. A
rank has no IPython of its own, because IPython would take over the whole process. Instead it has a
`RankShell`, which does the same with the rank's variables and prints under the rank's name.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Coroutine
from typing import Any

from course_lib.ranks.variables import Namespace


class RankShell:
    """The part of IPython that ``%%ranks`` cells need; `variables` are the rank's."""

    def __init__(self, variables: Namespace) -> None:
        self._variables = variables
        self._runner: asyncio.Runner | None = None

    def wait_for(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine to its end. All cells of the rank share one event loop."""
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(coroutine)

    # Called by code that IPython has rewritten --------------------------------------------------

    def system(self, command: str) -> None:
        """Run a shell command; the rank prints the command's output."""
        with self._started(command) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    print(line, end="")
            except BaseException:
                process.kill()
                raise
        self._variables["_exit_code"] = process.returncode

    def getoutput(self, command: str) -> list[str]:
        """Return the lines that a shell command prints."""
        with self._started(command) as process:
            return process.communicate()[0].splitlines()

    def run_line_magic(self, name: str, line: str, _stack_depth: int = 1) -> None:
        """Do nothing for ``%matplotlib``: figures of ranks appear in the notebook anyway."""
        if name != "matplotlib":
            raise NameError(
                f"%{name} does not work on ranks: put %{name} into a cell without %%ranks"
            )

    def run_cell_magic(self, name: str, line: str, cell: str) -> None:
        """Refuse a cell magic below ``%%ranks``."""
        raise NameError(f"%%{name} does not work below %%ranks")

    def _started(self, command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self._filled_in(command),
            shell=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )

    def _filled_in(self, command: str) -> str:
        """Return a command in which ``{x}`` and ``$x`` are replaced by the rank's variables."""
        from IPython.utils.text import DollarFormatter

        try:
            return str(DollarFormatter().vformat(command, args=[], kwargs=self._variables))
        except Exception:  # the braces are not for our variables: ${HOME}, awk '{print $1}'
            return command
