"""The pass of ``nbgrader autograde`` that decides the points, in place of nbgrader's Execute.

It examines one notebook, and writes the test cells' outputs and a verdict. nbgrader's own
`SaveAutoGrades` then reads the points from these outputs, as always.

The assignment's self-test (`self_test`) is run before the first submission of a process, and in
each new sandbox.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from nbconvert.exporters.exporter import ResourcesDict
from nbformat import NotebookNode
from nbgrader.preprocessors import NbGraderPreprocessor
from traitlets import Enum, Float

from autograder.course import Settings
from autograder.examination.verdict import verdict_path
from autograder.passes.examine import blank_verdict
from autograder.passes.rebuild import submission_in
from autograder.passes.self_test import SelfTest


class Examine(NbGraderPreprocessor):
    """Grades one notebook; each process of its student runs in a cell of the sandbox."""

    cell_seconds = Float(
        Settings.cell_seconds, help="Time limit of one code cell, in seconds."
    ).tag(config=True)
    case_seconds = Float(
        Settings.case_seconds,
        help="Time limit of one case, in seconds, if its check sets no limit. Default: the limit "
        "of a check in a notebook.",
    ).tag(config=True)
    submission_seconds = Float(
        Settings.submission_seconds,
        help="Time limit for the solutions and checks of one submission, in seconds, and again "
        "for its other cells. Time spent waiting for a core counts for no limit, but at least a "
        "tenth of the wall-clock time always counts.",
    ).tag(config=True)
    memory_gib = Float(
        Settings.memory_gib,
        help="Memory that a submission's processes may hold together, in GiB.",
    ).tag(config=True)
    on = Enum(
        ("", "cpu", "gpu"),
        Settings.on,
        help="If a solution passes on the simulated network, run it again on real ranks: 'cpu' "
        "(gloo) or 'gpu'. A solution that fails there fails. Default: no second run.",
    ).tag(config=True)

    def preprocess(
        self, nb: NotebookNode, resources: ResourcesDict
    ) -> tuple[NotebookNode, ResourcesDict]:
        """Run the notebook's cells and checks; write its outputs, and a verdict in a separate file.

        Raises:
            MachineFailure: this machine failed, or does not grade correctly. nbgrader continues,
                but the submission gets no mark.

        """
        folders, path = submission_in(self, resources)
        assignment, student = path.parent.name, path.parents[1].name
        settings = Settings(**{name: getattr(self, name) for name in asdict(Settings())})
        key = folders.source / assignment, folders.release / assignment, settings
        if key not in _tests:
            _tests[key] = SelfTest(*key)
        verdict = blank_verdict(nb, folders, path, settings)
        _tests[key].examine(nb, verdict, self.log)
        target = verdict_path(folders.data, assignment, student, path.stem)
        verdict.write(target)
        self.log.info("%g of %g points; verdict: %s", verdict.score, verdict.max_score, target)
        return nb, resources


_tests: dict[tuple[Path, Path, Settings], SelfTest] = {}
