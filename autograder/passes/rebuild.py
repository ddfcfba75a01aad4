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

from autograder.course import Folders
from course_lib.learner.what_counts import pictures_in, rebuild


class Rebuild(NbGraderPreprocessor):
    """nbgrader's pass that calls `rebuilt`: the first of ``Autograde.sanitize_preprocessors``."""

    def preprocess(
        self, nb: NotebookNode, resources: ResourcesDict
    ) -> tuple[NotebookNode, ResourcesDict]:
        """Rebuild one submission, and log what was left out or put back.

        Raises:
            FileNotFoundError: the assignment was not released here. nbgrader then reports that it
                could not process the submission. The submission gets no mark, and nbgrader
                continues with the others.
        """
        folders, path = submission_in(self, resources)
        made = rebuilt(folders, path, nb)
        for note in made.metadata.get("rebuild", ()):
            self.log.warning("%s of %s: %s", path.stem, path.parents[1].name, note)
        return made, resources


def submission_in(step: NbGraderPreprocessor, resources: ResourcesDict) -> tuple[Folders, Path]:
    """Return the course's folders and the submitted notebook that nbgrader gives to a pass."""
    names = resources["nbgrader"]
    folders = Folders.of(step.parent.parent.coursedir)  # of the exporter's converter
    file = f"{names['notebook']}.ipynb"
    return folders, folders.submitted / names["student"] / names["assignment"] / file


def rebuilt(folders: Folders, path: Path, nb: NotebookNode | None = None) -> NotebookNode:
    """Return the released notebook with the sources of a submitted one.

    Args:
        folders: the course's folders.
        path: the submitted notebook: STUDENT/ASSIGNMENT/NOTEBOOK.ipynb.
        nb: its content; by default it is read.

    Raises:
        FileNotFoundError: the assignment was not released.

    """
    released = folders.release / path.parent.name / path.name
    if not released.is_file():
        raise FileNotFoundError(
            f"there is no released version at {released}: "
            f"run nbgrader generate_assignment {path.parent.name}"
        )
    submitted = nbformat.read(path, as_version=4) if nb is None else nb
    return rebuild(nbformat.read(released, as_version=4), submitted, pictures_in(path.parent))
