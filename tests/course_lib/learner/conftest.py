"""A course with one small assignment, its solution, and a desk."""

import pytest
from nbformat import v4

from tests.helpers.desk_files import notebook, write

NAME = "02_topic"
STUB = "def rank():\n    raise NotImplementedError"
RIGHT = "import torch.distributed as dist\n\n\ndef rank():\n    return dist.get_rank()"
CHECKS = """
from course_lib.checking import Case, by_judge, expect_equal


def judge(case, inputs, outputs):
    for rank, output in enumerate(outputs):
        expect_equal(output, rank, f"number of rank {rank}")


CHECKS = {
    "rank": by_judge(
        "rank",
        inputs=lambda case, generator: [{} for _ in range(case.world_size)],
        program=lambda function, mine, given: function(),
        judge=judge,
        cases=[Case("2 ranks", 2), Case("3 ranks", 3)],
    )
}
"""


def cell(kind: str, source: str, **nbgrader: object):
    made = v4.new_code_cell(source) if kind == "code" else v4.new_markdown_cell(source)
    if nbgrader:
        made.metadata["nbgrader"] = {"grade": False, "solution": False, **nbgrader}
    return made


def assignment(*written: str):
    """Return a notebook with a task, a cell to play with, its check, and a question."""
    played = v4.new_code_cell("raise SystemExit('played with')")
    played.metadata["tags"] = ["explore"]
    asked = f'check("{NAME}/rank", rank, on="simulated")'
    return v4.new_notebook(
        cells=[
            cell("markdown", "# Topic"),
            cell("code", "from course_lib.checking import check", grade_id="setup"),
            cell("code", written[0], grade_id="write_rank", solution=True),
            *(cell("code", more) for more in written[1:]),
            played,
            cell("code", asked, grade_id="rank", grade=True, points=3),
            cell(
                "markdown", "YOUR ANSWER HERE", grade_id="why", grade=True, solution=True, points=2
            ),
        ]
    )


@pytest.fixture
def course(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """Return a course whose one check asks for a rank's own number; we stand beside it."""
    folder = tmp_path / "the course, 课程"
    write(folder / f"lectures/{NAME}.ipynb", notebook("a = 1", link="#"))
    write(folder / f"assignments/{NAME}/{NAME}.ipynb", assignment(STUB))
    solved = f"### BEGIN SOLUTION\n{RIGHT}\n### END SOLUTION"
    source = assignment(solved)
    scheme = "=== BEGIN MARK SCHEME ===\nBecause.\n=== END MARK SCHEME ==="
    source.cells.insert(-1, cell("markdown", f"Why?\n{scheme}", grade_id="asked", locked=True))
    write(folder / f"instructor/{NAME}/{NAME}.ipynb", source)
    write(folder / f"assignments/{NAME}/checks.py", CHECKS)
    for module in ("start", "check", "progress", "solution"):
        monkeypatch.setattr(f"course_lib.learner.{module}.find_course", lambda: folder)
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture
def mine(course):
    """Return where the student's copy will lie."""
    return course / "work" / "assignments" / NAME / f"{NAME}.ipynb"
