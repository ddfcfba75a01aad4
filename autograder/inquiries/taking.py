"""Accept questions from files ``TASK.md`` of submissions, between two dates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, tzinfo
from pathlib import Path, PurePosixPath

import nbformat

from autograder.collection.collecting import hand_ins_by_student
from autograder.collection.formats import Refused
from autograder.collection.times import shown
from autograder.files import write_whole
from autograder.inquiries.thread import MAX_TEXT, STUDENT, Thread, read_thread, write_thread


def tasks_of(root: Path, assignment: str, sources: str) -> list[str]:
    """Return the names of an assignment's tasks, which are the cells that give points."""
    for folder in (root / "assignments" / assignment, root / sources / assignment):
        found = [
            str(cell.metadata.nbgrader.grade_id)
            for path in sorted(folder.glob("*.ipynb"))
            for cell in nbformat.read(path, as_version=4).cells
            if cell.metadata.get("nbgrader", {}).get("grade")
        ]
        if found:
            return found
    return []


def take(
    root: Path, data: Path, assignment: str, source: str, tasks: list[str], roster: Path | None
) -> tuple[list[Thread], list[Refused]]:
    """Accept questions from a source that `collect` can read; return new and refused questions."""
    by_student, refused, _ = hand_ins_by_student(root, assignment, source, roster=roster)
    new: list[Thread] = []
    for student, hand_ins in by_student.items():
        for hand_in in hand_ins:
            for task, text, why in _questions(hand_in.files, tasks):
                thread = read_thread(data, student, assignment, task)
                try:
                    if why:
                        raise ValueError(why)
                    if thread.add(STUDENT, text):
                        write_thread(data, thread)
                        new.append(thread)
                except ValueError as error:
                    refused.append(Refused(student, f"{task}.md", str(error)))
    return new, refused


def _questions(files: object, tasks: list[str]) -> Iterator[tuple[str, str, str]]:
    """Yield task, text, and the reason if the question is refused."""
    assert isinstance(files, dict)
    for path, entry in files.items():
        name = PurePosixPath(path)
        if name.suffix.lower() not in (".md", ".txt"):
            continue
        if name.stem not in tasks:
            if name.stem != "timestamp":
                yield name.stem, "", f"matches no task; the tasks are: {', '.join(tasks)}"
            continue
        if entry.refusal:
            yield name.stem, "", entry.refusal
            continue
        yield name.stem, entry.read(4 * MAX_TEXT).decode("utf-8", "replace"), ""


Dates = tuple[datetime | None, datetime | None]


def read_dates(data: Path, assignment: str) -> Dates:
    """Return the first and the last date; None means no limit."""
    path = data / "inquiries" / "dates.json"
    if not path.is_file():
        return None, None
    found = json.loads(path.read_text(encoding="utf-8")).get(assignment, {})
    times = [found.get(key) for key in ("from", "until")]
    first, last = (datetime.fromisoformat(time) if time else None for time in times)
    return first, last


def write_dates(data: Path, assignment: str, dates: Dates) -> None:
    """Set the first and the last date."""
    path = data / "inquiries" / "dates.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    first, last = dates
    known[assignment] = {
        key: time.isoformat() for key, time in (("from", first), ("until", last)) if time
    }
    write_whole(path, json.dumps(known, indent=1, sort_keys=True) + "\n")


def why_not(dates: Dates, zone: tzinfo | None, now: datetime | None = None) -> str:
    """Return why no question is accepted now, or an empty string."""
    now = now or datetime.now(UTC)
    first, last = dates
    if first and now < first:
        return f"questions are taken from {shown(first, zone)} on"
    if last and now > last:
        return f"questions were taken until {shown(last, zone)}"
    return ""


def in_words(dates: Dates, zone: tzinfo | None) -> str:
    """Return the dates as words."""
    first, last = dates
    told = [f"from {shown(first, zone)}"] if first else []
    told += [f"until {shown(last, zone)}"] if last else []
    return " ".join(told) or "at any time"
