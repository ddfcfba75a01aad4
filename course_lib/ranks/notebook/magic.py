"""``%%ranks``: a notebook cell that runs on every rank.

    %ranks 4            make four ranks, as the notebook's variable `ranks`
    %ranks 64 --on simulated        the kind of ranks
    %ranks              show the ranks
    %ranks off          end the ranks

    %%ranks             run the cell below on every rank
    %%ranks 0,2-3       run it on some ranks

Ranks with other options are made in a plain cell: the magics use the variable `ranks`.

The variables of cells last until the ranks end. Every cell starts with `rank`, `world_size`,
`device`, `dist` and `torch`, also after a cell that has bound them. It sees a variable of the
notebook only if it was sent: ``ranks.push(x=x)``. ``ranks.pull("loss")`` gets the ranks' values of
a variable into the notebook.
"""

from __future__ import annotations

import ast
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from course_lib.ranks.calls import cell_labels
from course_lib.ranks.explain.errors import RanksError
from course_lib.ranks.explain.lines import frames_from
from course_lib.ranks.notebook.cells import Cell, compile_cell, run_cell
from course_lib.ranks.notebook.hints import add_hint, hint_after
from course_lib.ranks.notebook.options import choose, make_ranks
from course_lib.ranks.output.printer import equal_items, label, show_bundle
from course_lib.ranks.ranks import Ranks

DEFAULT_WORLD_SIZE = 4


def load_ipython_extension(ipython: Any) -> None:
    """Add the magics to a notebook; ``%load_ext`` calls this."""
    magics = _Magics(ipython)
    ipython.register_magic_function(magics.line, "line", "ranks")
    ipython.register_magic_function(magics.cell, "cell", "ranks")
    ipython.events.register("post_run_cell", hint_after)


class _Magics:
    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def line(self, line: str) -> Ranks | None:
        """Make, show or end the notebook's ranks."""
        current = self._current()
        arguments = shlex.split(line)
        if not arguments:
            if current is None:
                print("There are no ranks yet. %ranks 4 starts four ranks.")
            return current
        # An invalid line must not end the current ranks, which may hold an hour's work.
        new_ranks = None if arguments == ["off"] else make_ranks(arguments)
        if current is not None:
            current.close()
        if new_ranks is not None:
            self._shell.user_ns["ranks"] = new_ranks
        return new_ranks

    def cell(self, line: str, cell: str) -> None:
        """Run the cell on the ranks."""
        ranks = self._current()
        if ranks is None:
            ranks = self._shell.user_ns["ranks"] = Ranks(DEFAULT_WORLD_SIZE)
        chosen = choose(line, ranks.world_size)
        name = self._file_name(line, cell)
        source = self._plain_python(cell)
        # Raise a SyntaxError here, once, and not on each rank.
        compile_cell(ast.parse(source, name), name)
        before = ranks.processes()
        try:
            shown = ranks.run(run_cell, Cell(source, name, chosen, ranks.owner))
        except (RanksError, KeyboardInterrupt) as error:
            if before != ranks.processes() and before:
                print(
                    "New ranks start, without the variables of earlier %%ranks cells. If you need "
                    "these variables, run those cells again.",
                    file=sys.stderr,
                )
            if isinstance(error, RanksError):
                add_hint(error, self._shell.user_ns)
            raise
        _show(shown)

    def _current(self) -> Ranks | None:
        ranks = self._shell.user_ns.get("ranks")
        return ranks if isinstance(ranks, Ranks) and not ranks.closed else None

    def _plain_python(self, cell: str) -> str:
        """Return the cell without ``!``, ``?`` and ``%``; every line keeps its line number."""
        lines = cell.splitlines(keepends=True)
        blank = next((i for i, line in enumerate(lines) if line.strip()), 0)
        # The first line is the line of the magic. IPython removes the blank lines after it.
        rewritten: str = self._shell.input_transformer_manager.transform_cell(cell)
        return "\n" * (1 + blank) + rewritten

    def _file_name(self, line: str, cell: str) -> str:
        """Store the cell's lines under a file name, as IPython does for cells; return the name."""
        text = f"%%ranks {line}".rstrip() + "\n" + cell
        name: str = self._shell.compile.cache(text, self._number())
        return name

    def _number(self) -> int:
        """Return the number of the cell that is running.

        Depending on its release, IPython's counter may already be one higher. The calling cell's
        own code has a file name, and this file name gives the right number.
        """
        labels = cell_labels()
        for frame in frames_from(sys._getframe()):
            if (name := frame.f_code.co_filename) in labels:
                return int(self._shell.compile._filename_map[name])
        return int(self._shell.execution_count)


def _show(shown: Sequence[Any]) -> None:
    """Show what the ranks return. Equal values are shown only once."""
    bundles = ((rank, bundle) for rank, bundle in enumerate(shown) if bundle is not None)
    for bundle, ranks in equal_items(bundles):
        show_bundle(label(ranks), bundle)
