"""nbgrader's configuration: where the course is, and which passes grade it.

Plain nbgrader commands use it when they run in this folder: ``nbgrader generate_assignment``,
``nbgrader autograde``, ``nbgrader generate_feedback``. So does the formgrader that
``make formgrader`` opens. ``assignments/`` is none of nbgrader's folders: ``autograder release``
makes its notebooks, the checks beside them are read from there, and students clone it.
"""

import contextlib
import os
import sys
from pathlib import Path

c = get_config()  # noqa: F821  (nbgrader provides it)

# nbgrader starts alembic by name when it makes a gradebook. It lies beside this Python, which is
# not on PATH if a command is given as .venv/bin/nbgrader, or if make started JupyterLab.
commands = str(Path(sys.executable).parent)
if os.environ.get("PATH", os.defpath).split(os.pathsep)[0] != commands:
    os.environ["PATH"] = os.pathsep.join([commands, os.environ.get("PATH", os.defpath)])

root = Path(__file__).resolve().parent
# To use another class in the same checkout, such as one that `make` has graded:
# make formgrader GRADING=grading/demo
grading = Path(os.environ.get("GRADING") or "grading")
# SQLite makes the gradebook, but no folder for it. If nothing may be written, nbgrader says so.
with contextlib.suppress(OSError):
    (root / grading / "exchange").mkdir(parents=True, exist_ok=True)
# Students submit through an exchange on a hub. Elsewhere nobody does, but formgrader wants one.
exchange = Path(os.environ.get("EXCHANGE") or "/usr/local/share/nbgrader/exchange")
c.Exchange.root = str(exchange if exchange.is_dir() else root / grading / "exchange")

c.CourseDirectory.course_id = "sgd-to-ddp"
c.CourseDirectory.root = str(root)
c.CourseDirectory.source_directory = "instructor"
for step in ("release", "submitted", "autograded", "feedback", "solution"):
    c.CourseDirectory[f"{step}_directory"] = str(grading / step)
c.CourseDirectory.db_url = f"sqlite:///{root / grading / 'gradebook.db'}"
# Other outputs of nbgrader: `nbgrader export`, and submissions unpacked by `nbgrader zip_collect`.
c.ExportPlugin.to = str(root / grading / "grades.csv")
c.ZipCollectApp.downloaded_directory = str(grading / "downloaded")
# These files must not reach a student: neither on release nor with the feedback.
c.CourseDirectory.ignore = [".ipynb_checkpoints", "__pycache__", "*.pyc"]
c.CourseDirectory.ignore += ["hidden.py", "mutants.py", "comments.md"]

# Before a submission is copied, files that no student needs to submit are set aside. Nothing is
# graded if there is no sandbox with all that it needs.
c.Autograde.pre_convert_hook = "autograder.passes.autograde.before_any"
# First, a submission becomes the released notebook with the student's code in it.
c.Autograde.sanitize_preprocessors = [
    "autograder.passes.autograde.Rebuild",
    "nbgrader.preprocessors.ClearOutput",
    "nbgrader.preprocessors.DeduplicateIds",
    "nbgrader.preprocessors.OverwriteKernelspec",
    "nbgrader.preprocessors.OverwriteCells",
    "nbgrader.preprocessors.CheckCellMetadata",
]
# Examine takes the place of nbgrader's Execute: the verdict is made outside the student's process.
# LatePenalties adds to nbgrader's pass the deadlines of single students, and the calendar's days.
c.Autograde.autograde_preprocessors = [
    "autograder.passes.autograde.Examine",
    "nbgrader.preprocessors.SaveAutoGrades",
    "autograder.passes.late.LatePenalties",
    "nbgrader.preprocessors.CheckCellMetadata",
]
# A mark scheme is part of the question, so formgrader shows it above the answer.
c.ClearMarkScheme.enforce_metadata = False
# Before a deadline, docs/hourly.sh may ask for points of visible cases only.
c.Examine.hidden = not os.environ.get("VISIBLE_ONLY")
c.ClearSolutions.code_stub = {"python": "# YOUR CODE HERE\nraise NotImplementedError"}
# Student text must not run in the browser of the instructor, nor in that of a student.
c.HTMLExporter.sanitize_html = True
c.HTMLExporter.filters = {"markdown2html": "autograder.passes.safe_markdown.markdown2html"}
c.HTMLExporter.preprocessors = ["autograder.passes.page.PlainText"]
c.GenerateFeedback.exporter_class = "autograder.passes.page.FeedbackPage"
