"""The pass that replaces Examine if a submission is graded already. It runs no code.

``autograder grade`` examines a class in many processes, and writes a graded notebook and a verdict
for each submission. One process then books them, through nbgrader's own passes and this one.
"""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbconvert.exporters.exporter import ResourcesDict
from nbformat import NotebookNode
from nbgrader.preprocessors import NbGraderPreprocessor
from traitlets import Dict, Unicode

EXAMINE = "autograder.passes.autograde.Examine"
BOOK = "autograder.passes.book.Book"
VET = "autograder.collection.repair.vet"


class NotAsGraded(ValueError):
    """The notebook to book is not the one that was graded."""


class Book(NbGraderPreprocessor):
    """Puts the outputs of the graded notebook into the one that nbgrader is about to save."""

    graded = Dict(
        value_trait=Unicode(), key_trait=Unicode(), help="Notebook → its graded version's path."
    ).tag(config=True)

    def preprocess(
        self, nb: NotebookNode, resources: ResourcesDict
    ) -> tuple[NotebookNode, ResourcesDict]:
        """Copy outputs cell by cell.

        Raises:
            NotAsGraded: the notebook's code is not the code that was graded.

        """
        name = resources["nbgrader"]["notebook"]
        if name not in self.graded:
            raise NotAsGraded(f"{name} was not graded")
        copy_outputs(nbformat.read(Path(self.graded[name]), as_version=4), nb)
        return nb, resources


def copy_outputs(graded: NotebookNode, nb: NotebookNode) -> None:
    """Copy the outputs of `graded` to `nb`, which must have the same code.

    Raises:
        NotAsGraded: `nb` has different code.

    """
    ours, theirs = ([c for c in n.cells if c.cell_type == "code"] for n in (nb, graded))
    if [cell.source for cell in ours] != [cell.source for cell in theirs]:
        raise NotAsGraded(
            "the code differs from the code that was graded. If the assignment was released again "
            "since, run nbgrader generate_assignment to update the gradebook; then grade again"
        )
    for to, cell in zip(ours, theirs, strict=True):
        to.outputs, to.execution_count = cell.outputs, cell.execution_count
