"""The first pass of ``nbgrader autograde``: put the student's sources into the released notebook.

Any editor may have changed a submitted file: cells copied, deleted, renamed, tagged, or with a
different type. nbgrader trusts the file's structure. If the structure is wrong, nbgrader loses
marks, the submission or the whole batch. So this pass makes the notebook anew, by the rule that
``course check`` has too: `course_lib.learner.what_counts`.
"""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbconvert.exporters.exporter import ResourcesDict
from nbformat import NotebookNode
from nbgrader.preprocessors import NbGraderPreprocessor

from course_lib.learner.what_counts import pictures_in, rebuild


class Rebuild(NbGraderPreprocessor):
    """nbgrader's pass that calls ``rebuild``: the first of ``Autograde.sanitize_preprocessors``."""

    def preprocess(
        self, nb: NotebookNode, resources: ResourcesDict
    ) -> tuple[NotebookNode, ResourcesDict]:
        """Rebuild one submission, and log what was left out or put back.

        Raises:
            FileNotFoundError: the assignment was not released here. nbgrader then reports that it
                could not process the submission. The submission gets no mark, and nbgrader
                continues with the others.
        """
        coursedir = self.parent.parent.coursedir  # of the exporter's converter
        names = resources["nbgrader"]
        student, assignment = names["student"], names["assignment"]
        released = Path(coursedir.format_path(coursedir.release_directory, ".", assignment))
        submitted = Path(coursedir.format_path(coursedir.submitted_directory, student, assignment))
        rebuilt = rebuild(
            released_notebook(released, names["notebook"]), nb, pictures_in(submitted)
        )
        for note in rebuilt.metadata.get("rebuild", ()):
            self.log.warning("%s of %s: %s", names["notebook"], student, note)
        return rebuilt, resources


def released_notebook(folder: Path, notebook: str) -> NotebookNode:
    """Return an assignment's released notebook; `folder` has the assignment's name.

    Raises:
        FileNotFoundError: the assignment was not released.

    """
    path = folder / f"{notebook}.ipynb"
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no released version at {path}: "
            f"run nbgrader generate_assignment {folder.name}"
        )
    found: NotebookNode = nbformat.read(path, as_version=4)
    return found
