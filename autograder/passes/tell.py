"""Write the results of an examination into the notebook that becomes a student's feedback.

The top of the notebook shows each task's points and its number of passed cases, "visible n of m;
k hidden". Below a task, it shows a timeline of the ranks, if the verdict has one.
"""

from __future__ import annotations

import base64
import re
from pathlib import Path

from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell, new_output

from autograder.collection.repair import damage
from autograder.examination.verdict import KEPT, MAX_EVENTS, CheckVerdict, Verdict, verdict_path
from autograder.tables import plain_text
from course_lib.learner.what_counts import grade_id


def tell(nb: NotebookNode, data: Path, assignment: str, student: str, notebook: str) -> None:
    """Write a verdict's results into a graded notebook.

    Args:
        nb: the notebook, changed in place.
        data: the folder of verdicts.
        assignment: its name.
        student: the student's id.
        notebook: the notebook's name.

    """
    try:
        verdict = Verdict.read(verdict_path(data, assignment, student, notebook))
    except (OSError, ValueError):
        text = "There is no verdict on this notebook: ask your instructor."
        nb.cells.insert(0, _cell(text))
        return
    checks = {check.task: check for check in verdict.checks}
    cells = [_cell(_overview(verdict))]
    for cell in nb.cells:
        cells.append(cell)
        check = checks.get(grade_id(cell))
        if check is None:
            continue
        if cell.cell_type == "code":
            passed = f"cases passed on the grader's network: {_counted(check)}\n"
            cell.outputs = [new_output("stream", name="stdout", text=passed), *cell.outputs]
        cells += _timeline(check)
    nb.cells = cells


def _cell(text: str) -> NotebookNode:
    cell: NotebookNode = new_markdown_cell(text, metadata={"nbgrader": {"locked": True}})
    return cell


def _overview(verdict: Verdict) -> str:
    rows = [
        f"| `{check.task}` | {check.score:g} of {check.max_score:g} "
        f"| {_counted(check)} | {_why(check)} |"
        for check in verdict.checks
    ]
    # Notes that begin with the assignment's name are for the author of a check.
    notes = [note for note in verdict.notes if not note.startswith(f"{verdict.assignment}/")]
    damaged = damage(notes)
    notes = [note for note in notes if note not in damaged]
    also = "".join(f"\n- {_plain(note)}" for note in dict.fromkeys(notes))
    first = "".join(f"**Read this first:** {_plain(note)}\n\n" for note in damaged)
    return (
        f"{first}**What was examined?** Your functions ran in a sandbox, on several ranks. You "
        "have the visible cases, but not the hidden cases. Questions that a person grades are "
        "not in this table.\n\n"
        "| task | points | cases passed | first failure |\n|---|---|---|---|\n"
        + "\n".join(rows)
        + (f"\n\n**Also:**\n{also}" if also else "")
    )


def _counted(check: CheckVerdict) -> str:
    visible = [case["passed"] for case in check.cases if not case["hidden"]]
    hidden = [case["passed"] for case in check.cases if case["hidden"]]
    passed = f"{sum(visible)} of {len(visible)} visible"
    return f"{passed}; {sum(hidden)} of {len(hidden)} hidden" if hidden else passed


def _why(check: CheckVerdict) -> str:
    """Return the simplest visible failure; about hidden failures, say only that there are some."""
    failed = [case for case in check.cases if not case["passed"]]
    visible = [case for case in failed if not case["hidden"]]
    if not visible:
        return "only hidden cases fail" if failed else ""
    first = min(visible, key=lambda case: (not case["ran"], case["difficulty"]))
    return f"{_plain(first['name'])}: {_plain(first['reason'])}"


def _plain(text: object) -> str:
    """Return text on one line without Markdown, because it may contain the student's values."""
    line = plain_text(" ".join(str(text)[:400].split()))
    return re.sub(r"[^\w ]", lambda match: f"&#{ord(match[0])};", line)


def _alt(text: str) -> str:
    """Return a picture's description without characters that Markdown would interpret."""
    return re.sub(r"[^\w ,.;:%]", " ", text)


def _timeline(check: CheckVerdict) -> list[NotebookNode]:
    """Return the cell below a task with its timeline, if it has one."""
    png, alt = timeline_of(check)
    if not png:
        return []
    data = base64.b64encode(png).decode("ascii")
    picture = f"![{_alt(alt)}](data:image/png;base64,{data})"
    return [_cell(f"{_plain(caption_of(check))}\n\n{picture}")]


def caption_of(check: CheckVerdict) -> str:
    """Return the caption of the picture that `timeline_of` draws."""
    part = f" Only the first {MAX_EVENTS} events are drawn." if check.trace["cut"] else ""
    return (
        f"The timeline of each rank in the case “{check.trace['case']}”: the simplest visible case "
        "that failed after a message was sent. Times are on the clock of the grader's "
        f"network.{part}"
    )


def timeline_of(check: CheckVerdict) -> tuple[bytes, str]:
    """Return a PNG with the timeline of each rank in the case that failed, and the same in words.

    Both are empty if no case failed, or none of the failed cases sent anything.
    """
    from course_lib.ranks.trace.event import Event
    from course_lib.ranks.trace.figure import png_of
    from course_lib.ranks.trace.timeline import draw_timeline

    events = []
    for values in check.trace.get("events", ()):
        fields = dict(zip(KEPT, values, strict=True))
        # Names that a student may have chosen are not drawn: matplotlib would parse $…$ in them.
        events.append(Event(**{**fields, "group": tuple(fields["group"]), "where": ""}))
    if not events:
        return b"", ""
    figure = draw_timeline(events, int(check.trace["world_size"]))
    return png_of(figure), figure.alt
