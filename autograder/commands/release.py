"""Make the notebook in assignments/NN_name from the one in instructor/NN_name.

It has no solutions and no mark schemes. A notebook that shows a line of a solution is not written.
The same source gives the same bytes. checks.py is in assignments/ only, and this command does not
change it.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from nbgrader.apps.api import NbGraderAPI

from autograder.commands import must
from autograder.course import find_sources, load_config
from autograder.errors import CommandFailed

MARKS = ("BEGIN SOLUTION", "BEGIN MARK SCHEME", "BEGIN HIDDEN TESTS")
LONG_ENOUGH = 12  # characters; shorter lines such as `x = 1` are not searched in other lines
LEFTOVERS = {"__pycache__", ".ipynb_checkpoints"}


def release(root: Path, names: Sequence[str] = ()) -> None:
    """Generate the notebooks in ``assignments/`` again; say which files have changed.

    They are nbgrader's releases, byte for byte, and so are the other files beside them, such as
    figures. They are committed, so that a student needs only a clone, and nobody edits them.

    Args:
        root: the course folder.
        names: the assignments; by default all.

    Raises:
        CommandFailed: there are no sources, or not of this assignment, nbgrader refused it, or a
            solution would leak.

    """
    sources = find_sources(root)
    assignments = sorted({path.parent.name for path in sources.glob("*/*.ipynb")})
    if unknown := sorted(set(names) - set(assignments)):
        raise CommandFailed(
            f"{sources} has no {unknown[0]}/{unknown[0]}.ipynb. The assignments there are: "
            f"{', '.join(assignments) or 'none'}"
        )
    with tempfile.TemporaryDirectory() as scratch:
        for name in names or assignments:
            folder, outputs = root / "assignments" / name, generate(root, name, Path(scratch))
            old = {p: data for p, data in files(folder).items() if not p.endswith(".py")}
            changed = sorted(p for p in {*outputs, *old} if outputs.get(p) != old.get(p))
            for path in changed:
                if path in outputs:
                    (folder / path).parent.mkdir(parents=True, exist_ok=True)
                    (folder / path).write_bytes(outputs[path])
                else:
                    (folder / path).unlink()
            print(f"{name}: changed: {', '.join(changed)}" if changed else f"{name}: unchanged")


def generate(root: Path, name: str, scratch: Path) -> dict[str, bytes]:
    """Return one assignment's generated files for students, by their relative paths.

    Args:
        root: the course folder.
        name: the assignment.
        scratch: a folder to make them in.

    Raises:
        CommandFailed: nbgrader refused it, a solution would leak, or the files include Python.

    """
    config = load_config(root, data=scratch)
    config.GenerateAssignment.no_database = True  # a release is not yet a class
    config.SaveCells.enabled = False
    must(NbGraderAPI(config=config).generate_assignment(name), f"releasing {name}")
    outputs, folder = files(scratch / "release" / name), find_sources(root) / name
    if python := [path for path in outputs if path.endswith(".py")]:
        raise CommandFailed(
            f"{folder / python[0]} would be handed out, but students get no Python file from "
            f"instructor/. Move files for students to assignments/{name}/."
        )
    for path in (path for path in outputs if path.endswith(".ipynb")):
        source = nbformat.read(folder / path, as_version=4)
        if leaked_lines := leaks(source, nbformat.reads(outputs[path].decode(), as_version=4)):
            listed = "\n  ".join(leaked_lines)
            raise CommandFailed(
                f"{name}/{path} would show these lines of the solution:\n  {listed}"
            )
    return outputs


def leaks(source: NotebookNode, released: NotebookNode) -> list[str]:
    """Return the lines that only `source` has, and that `released` shows anywhere.

    A line counts if the released cell does not contain it. A short line leaks only if
    it appears as a whole line. A longer line also leaks if it appears inside another line.
    """
    stubs = {cell.id: _lines(cell) for cell in released.cells}
    secret = {line for cell in source.cells for line in _lines(cell) - stubs.get(cell.id, set())}
    shown = set().union(*stubs.values())
    text = "\n".join(shown)
    long = {line for line in secret if len(line) >= LONG_ENOUGH}
    leaked = secret & shown | {line for line in long if line in text}
    return sorted(leaked | {mark for mark in MARKS if mark in text})


def files(folder: Path) -> dict[str, bytes]:
    """Return the files below a folder by their relative paths, in order, without leftovers."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    relative = {path.relative_to(folder): path for path in paths}
    return {str(r): p.read_bytes() for r, p in relative.items() if not LEFTOVERS & {*r.parts}}


def _lines(cell: NotebookNode) -> set[str]:
    return {line.strip() for line in cell.source.splitlines()} - {""}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "assignment", nargs="*", help="assignment, such as 02_data_parallel_sgd (default: all)"
    )


def run(root: Path, arguments: argparse.Namespace) -> int:
    """Release for the command line; return the exit status."""
    release(root, arguments.assignment)
    return 0
