r"""Write each student's own code as files for programs that find copies.

grading/sources/ASSIGNMENT/STUDENT.py has the code that a student wrote or changed, and
grading/sources/ASSIGNMENT.py the code that all were given. Dolos, JPlag and MOSS read these files
and find solutions that look alike. Likeness is no proof: ask both students.

For example::

  autograder sources 02_data_parallel_sgd
  dolos run -l python -i grading/sources/02_data_parallel_sgd.py \
      grading/sources/02_data_parallel_sgd/*.py
  java -jar jplag.jar -l python3 grading/sources/02_data_parallel_sgd
  moss -l python -b grading/sources/02_data_parallel_sgd.py \
      grading/sources/02_data_parallel_sgd/*.py
"""

from __future__ import annotations

import argparse
import re
import shutil
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from autograder.collection.collecting import notebooks_of
from autograder.collection.listing import SourceError
from autograder.collection.repair import MAX_NOTEBOOK, text_of
from autograder.commands import add_assignment
from autograder.course import Folders, load_config
from autograder.files import write_whole
from course_lib.learner.what_counts import rebuild
from course_lib.ranks.explain.words import counted

add_options = add_assignment


def _own(released: NotebookNode, path: Path) -> list[str]:
    """Return the sources of the code cells that a student changed or added."""
    if path.is_symlink() or path.stat().st_size > MAX_NOTEBOOK:
        raise ValueError(f"the file is a link, or larger than {MAX_NOTEBOOK // 2**20} MiB")
    submitted = nbformat.reads(text_of(path.read_bytes()), as_version=4)
    given_code = set(_code(released))
    return [source for source in _code(rebuild(released, submitted)) if source not in given_code]


def _code(notebook: NotebookNode) -> list[str]:
    """Return the sources of the code cells, with what only IPython understands as comments."""
    return [
        re.sub(r"^(\s*)(?=[%!?])", r"\1# ", cell.source.strip(), flags=re.MULTILINE)
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def run(root: Path, arguments: argparse.Namespace) -> int:
    """Write the files; return the exit status.

    Raises:
        SourceError: there is no such assignment, or it has no submission.

    """
    assignment = arguments.assignment
    data, released = Folders.at(root).data, notebooks_of(root, load_config(root), assignment)
    submitted = sorted((data / "submitted").glob(f"*/{assignment}"))
    if not submitted:
        raise SourceError(
            f"nobody has submitted {assignment}: run autograder collect {assignment} SOURCE"
        )
    folder, unread = data / "sources" / assignment, {}
    shutil.rmtree(folder, ignore_errors=True)  # files of students who are no longer there
    given_to_all = [cell for notebook in released.values() for cell in _code(notebook)]
    write_whole(folder.with_suffix(".py"), "\n\n".join(given_to_all) + "\n")
    for path in submitted:
        student = path.parent.name
        try:
            code = [c for n, nb in released.items() for c in _own(nb, path / f"{n}.ipynb")]
        except Exception as error:  # reading a file that is no notebook may raise anything
            unread[student] = f"{type(error).__name__}: {error}"[:200]
            continue
        write_whole(folder / f"{student}.py", "\n\n".join(code) + "\n")
    print(f"{counted(len(submitted) - len(unread), 'file')} in {folder}")
    for student, reason in unread.items():
        print(f"  {student} has no file, because the notebook cannot be read: {reason}")
    return 0
