"""The program ``course``, and the student's desk: working through the course, alone or in a class.

`make lab` and ``course lab`` bring the desk, ``work/``, up to date and open JupyterLab on it. The
desk holds copies of lectures and assignments, apart from the files that git tracks. They never
overwrite a student's work.

The commands, one file each:

- `start`: puts a copy of an assignment on the desk
- `check`: runs all checks of the copy in a new process; `_run_cells` starts it, `_in_shell` is it
- `progress`: shows points and predictions so far
- `solution`: shows the solution, after asking whether the student is sure
- `lab`: opens JupyterLab on the desk
- `doctor`: says whether this machine has what the course needs, and if not, what to do

The commands share these modules:

- `program`: reads the command line
- `notebooks`: the student's parts of a notebook
- `diary`: records predictions and checks on the desk
- `installed`: finds the course, in a checkout or where a wheel has put it
- `_course`: lists the course's assignments and their tasks
- `_desk`: decides for each file what happens to it on the desk

Nothing here needs nbgrader.
"""

import difflib
from collections.abc import Collection


class CannotGoOn(Exception):
    """A command cannot go on; the message says why, and what to do."""


def did_you_mean(word: str, names: Collection[str]) -> str:
    """Return a sentence, after a space, with the name that is most like the word; or nothing."""
    similar = difflib.get_close_matches(word, list(names), 1, 0.5)
    return f" Did you mean {similar[0]}?" if similar else ""
