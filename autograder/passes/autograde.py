"""The hook and the two passes that ``nbgrader autograde`` calls; see ``nbgrader_config.py``.

`Rebuild` is the first pass. `Examine` takes the place of nbgrader's Execute: it examines one
notebook, and writes the test cells' outputs and a verdict. nbgrader's own `SaveAutoGrades` then
reads the points from these outputs, as always.

The assignment's self-test (`self_test`) is run before the first submission of a process, and in
each new sandbox.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from nbconvert.exporters.exporter import ResourcesDict
from nbformat import NotebookNode
from nbgrader.preprocessors import NbGraderPreprocessor
from traitlets import Bool, Enum

from autograder.collection import repair
from autograder.course import Folders, Settings
from autograder.errors import SandboxUnavailable
from autograder.examination.verdict import verdict_path
from autograder.passes.examine import blank_verdict, keep, rebuilt
from autograder.passes.self_test import SelfTest
from autograder.sandbox.sandbox import Sandbox
from autograder.tables import printable


def before_any(assignment: str, student: str, notebooks: Sequence[str]) -> None:
    """Vet a submission, or stop if grading cannot work here: nbgrader's hook, see `repair.vet`.

    Raises:
        SystemExit: nothing can be graded here. After any other error, nbgrader would continue, and
            repeat a hundred lines for each student.

    """
    repair.vet(assignment, student, notebooks)
    try:
        _make_sure_of_a_sandbox()
    except SandboxUnavailable as error:
        raise SystemExit(f"nbgrader autograde: {error}") from None


@functools.cache
def _make_sure_of_a_sandbox() -> None:
    with Sandbox() as sandbox:
        sandbox.make_ready()


class Rebuild(NbGraderPreprocessor):
    """Puts the student's sources into the released notebook, see `rebuilt`."""

    def preprocess(
        self, nb: NotebookNode, resources: ResourcesDict
    ) -> tuple[NotebookNode, ResourcesDict]:
        """Rebuild one submission; `Examine` logs what was left out or put back.

        Raises:
            FileNotFoundError: the assignment was not released here. nbgrader then reports that it
                could not process the submission. The submission gets no mark, and nbgrader
                continues with the others.
        """
        folders, path = _submission(self, resources)
        return rebuilt(folders, path), resources


class Examine(NbGraderPreprocessor):
    """Grades one notebook; each process of its student runs in a cell of the sandbox."""

    on = Enum(
        ("", "cpu", "gpu"),
        Settings.on,
        help="If a solution passes on the simulated network, run it again on real ranks: 'cpu' "
        "(gloo) or 'gpu'. A solution that fails there fails. Default: no second run.",
    ).tag(config=True)
    hidden = Bool(
        Settings.hidden,
        help="Examine hidden cases, too. Without them, a check's visible cases give its points.",
    ).tag(config=True)

    def preprocess(
        self, nb: NotebookNode, resources: ResourcesDict
    ) -> tuple[NotebookNode, ResourcesDict]:
        """Run the notebook's cells and checks; write its outputs, and a verdict in a separate file.

        Raises:
            MachineFailure: this machine failed, or does not grade correctly. nbgrader continues,
                but the submission gets no mark.

        """
        folders, path = _submission(self, resources)
        assignment, student = path.parent.name, path.parents[1].name
        settings = Settings(on=self.on, hidden=self.hidden)
        verdict = blank_verdict(nb, folders, path, settings)
        test = self_test_of(folders.source / assignment, folders.release / assignment, settings)
        test.examine(nb, verdict)
        for note in verdict.notes:
            self.log.warning("%s of %s: %s", path.stem, student, printable(note))
        target = verdict_path(folders.data, assignment, student, path.stem)
        verdict.write(target)
        keep(nb, verdict, folders)
        self.log.info("%g of %g points; verdict: %s", verdict.score, verdict.max_score, target)
        return nb, resources


self_test_of = functools.cache(SelfTest)
"""Return the self-test with these arguments, and so the sandbox that has passed it."""


def _submission(step: NbGraderPreprocessor, resources: ResourcesDict) -> tuple[Folders, Path]:
    """Return the course's folders and the submitted notebook that nbgrader gives to a pass."""
    names = resources["nbgrader"]
    folders = Folders.of(step.parent.parent.coursedir)  # of the exporter's converter
    file = f"{names['notebook']}.ipynb"
    return folders, folders.submitted / names["student"] / names["assignment"] / file
