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
from traitlets import Enum, Float, Unicode

from autograder.examination.verdict import verdict_path
from autograder.passes.examine import Exam, blank_verdict, examine_notebook
from autograder.passes.self_test import SelfTest
from autograder.sandbox.place import MachineFailure
from autograder.settings import ATTEMPTS, Settings
from course_lib.checking.limits import CASE_SECONDS


class Examine(NbGraderPreprocessor):
    """Grades one notebook; each process of its student runs in a cell of the sandbox."""

    cell_seconds = Float(
        Settings.cell_seconds, help="Time limit of one code cell, in seconds."
    ).tag(config=True)
    case_seconds = Float(
        Settings.case_seconds,
        help="Time limit of one case, in seconds, if its check sets no limit. Default: the limit "
        f"of a check in a notebook, {CASE_SECONDS:g}.",
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
    seed = Unicode(
        "",
        help="Draw the cases' inputs from this seed. Default: a secret seed, which the verdict "
        "records.",
    ).tag(config=True)

    def preprocess(
        self, nb: NotebookNode, resources: ResourcesDict
    ) -> tuple[NotebookNode, ResourcesDict]:
        """Run the notebook's cells and checks; write its outputs, and a verdict in a separate file.

        Raises:
            MachineFailure: this machine failed, or does not grade correctly. nbgrader continues,
                but the submission gets no mark.

        """
        coursedir = self.parent.parent.coursedir
        names = resources["nbgrader"]
        assignment, student, notebook = (
            names[key] for key in ("assignment", "student", "notebook")
        )
        # Follow no link: instructor/ may be a link, and assignments/ is in the link's folder.
        source = Path(coursedir.format_path(coursedir.source_directory, ".", assignment)).absolute()
        released = Path(coursedir.format_path(coursedir.release_directory, ".", assignment))
        data = Path(coursedir.root) / Path(coursedir.autograded_directory).parent
        settings = Settings(**{name: getattr(self, name) for name in asdict(Settings())})
        key = source, released.resolve(), settings
        if key not in _tests:
            _tests[key] = SelfTest(*key)
        test = _tests[key]
        for attempt in range(1, ATTEMPTS + 1):
            verdict = blank_verdict(
                *(nb, source, released / f"{notebook}.ipynb", data),
                *(assignment, student, notebook),
                settings,
                self.seed,
            )
            try:
                if not test.trusted():
                    test.run()
                examine_notebook(nb, Exam.of(source), verdict, self.log)
                break
            except MachineFailure as error:
                self.log.error("No verdict on %s in attempt %d: %s", student, attempt, error)
                if attempt == ATTEMPTS:
                    raise
        path = verdict_path(data, assignment, student, notebook)
        verdict.write(path)
        self.log.info("%g of %g points; verdict: %s", verdict.score, verdict.max_score, path)
        return nb, resources


_tests: dict[tuple[Path, Path, Settings], SelfTest] = {}
