r"""Find each exported file's student by the way in which the systems name their files.

===========  =========================================================================
Moodle       ``Ada Lovelace_12345_assignsubmission_file/hw.ipynb``, in older versions
             ``…_file_/hw.ipynb``, without folders ``…_file_hw.ipynb``. The number is the
             *Identifier* of the grading worksheet (``mod/assign/classes/downloader.php``).
Canvas       ``lovelaceada_LATE_340934_208490284_hw-1.ipynb``: the sortable name without
             punctuation, a mark if late, the user's number, the file's number, and its name,
             numbered if it was handed in again (``lib/content_zipper.rb``).
             Anonymous: ``anon_x1y2z``.
Gradescope   ``assignment_9_export/submission_71/hw.ipynb``. The submitters and the time are in
             ``assignment_9_export/submission_metadata.yml``.
exchange     nbgrader's ``inbound/ada+02_data_parallel_sgd+2026-11-20 10:00:00 UTC+random/``
folder       ``ada/hw.ipynb``, ``ada/02_data_parallel_sgd/hw.ipynb`` or ``ada.ipynb``
===========  =========================================================================
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from autograder.collection.listing import Entry, SourceError, without_top
from autograder.collection.times import read_stamp, read_time

_MOODLE = re.compile(
    r"(?P<name>[^/]*)_(?P<id>\d+)_assignsubmission_(?P<kind>[a-z]+)(?:_?/|_)(?P<file>.+)"
)
_CANVAS = re.compile(
    r"(?:(?P<name>[^/]*?)_)??(?P<late>LATE_)?(?P<id>\d+|anon_[^_/]+)_"
    r"(?:(?P<number>\d+)_(?P<file>[^/]+)|(?P<typed>text|link)\.html)"
)
_GRADESCOPE = re.compile(r"(?P<id>submission_\d+)/(?P<file>.+)|submission_metadata\.yml")
# Gradescope's YAML has Ruby's tags and students' texts. We match only lines that are indented less.
_MADE = re.compile(
    r"^(?P<id>submission_\d+):\s+:submitters:\n(?P<whose>(?:  - .+\n|    .+\n)+)"
    r"(?:  :created_at: (?P<when>.+))?",
    re.MULTILINE,
)
EXCHANGE_FOLDER = re.compile(
    r"(?P<id>[^/]+)\+(?P<assignment>[^/+]+)\+(?P<time>[^/+]+ UTC)(?:\+[^/]*)?"
)
"""The name that ``nbgrader submit`` gives to a submission's folder."""
SECRET = "submission_secret.txt"
"""The file by which ``nbgrader fetch_feedback`` finds a page; each submission has another one."""
_EXCHANGE = re.compile(rf"(?:.*/)?inbound/{EXCHANGE_FOLDER.pattern}/(?P<file>.+)")
_EXPORTS = {"moodle": _MOODLE, "canvas": _CANVAS, "gradescope": _GRADESCOPE}
FORMATS = (*_EXPORTS, "exchange", "folder")

MAX_METADATA = 50 * 2**20
"""Bytes to read of Gradescope's submission list, which repeats the results of all submissions."""


@dataclass
class HandIn:
    """One submission of one student at one time.

    Attributes:
        system_id: the system's id of the student.
        name: their name, as the system writes it.
        files: path → file.
        time: the time, if the source gives it.
        late: whether the system marks it as late, perhaps without saying by how much.
        order: if two submissions have no time, the one with the greater order is later.
        returned_as: the start of the name that a file must have so that the system accepts it as
            feedback for this student; empty if the system accepts none. Moodle wants a folder with
            the student's number (``mod/assign/feedback/file/importziplib.php``). Canvas wants the
            numbers of the student and of one of their files (``generate_comments_from_files`` in
            ``app/models/assignment.rb``).
        shared_by: the id of the member of a group who submitted this, if it was another one.

    """

    system_id: str
    name: str = ""
    files: dict[str, Entry] = field(default_factory=dict)
    time: datetime | None = None
    late: bool = False
    order: int = 0
    notes: list[str] = field(default_factory=list)
    returned_as: str = ""
    shared_by: str = ""


@dataclass(frozen=True)
class Refused:
    """A file that was not collected: whose it is, its path, and the reason."""

    student: str
    path: str
    reason: str


@dataclass
class Gathered:
    """The content of a source: submissions, and files that were refused."""

    format: str
    hand_ins: list[HandIn]
    refused: list[Refused]


def gather(entries: Sequence[Entry], assignment: str, format: str = "") -> Gathered:
    """Sort a source's files by student.

    Args:
        entries: the files.
        assignment: its name; other assignments' files are left out.
        format: one of `FORMATS`; by default the format of most names.

    Raises:
        SourceError: the source has no name of that format.

    """
    entries = _without_common_folder(entries)
    format = format or recognise(entries)
    gathered = Gathered(format, [], [])
    gathered.hand_ins += _READERS[format](entries, assignment, gathered.refused)
    if not gathered.hand_ins and not gathered.refused:
        raise SourceError(
            f"the source has no submission of {assignment} in the format {format}. If this format "
            "is wrong, give the right one with --from"
        )
    return gathered


def recognise(entries: Sequence[Entry]) -> str:
    """Return the format of more than half of the names, or ``folder`` if there is none."""
    for name, pattern in {**_EXPORTS, "exchange": _EXCHANGE}.items():
        if 2 * sum(pattern.fullmatch(entry.path) is not None for entry in entries) > len(entries):
            return name
    return "folder"


def _without_common_folder(entries: Sequence[Entry]) -> list[Entry]:
    """Leave out a single folder around all files, as a system or an unpacked zip may have it.

    A single folder ``ada/`` may be a student's. So the folder is left out only if it contains a
    name that Moodle, Canvas or Gradescope gives.
    """
    inside = without_top(entries)
    is_export = any(p.fullmatch(entry.path) for p in _EXPORTS.values() for entry in inside)
    is_inbound = all(entry.path.startswith("inbound/") for entry in entries)
    return inside if is_export and not is_inbound else list(entries)


def _named(
    entries: Sequence[Entry], pattern: re.Pattern[str], system: str, refused: list[Refused]
) -> Iterator[tuple[Entry, re.Match[str]]]:
    """Yield the files whose names the system has given; refuse the others."""
    for entry in entries:
        if match := pattern.fullmatch(entry.path):
            yield entry, match
        else:
            refused.append(Refused("", entry.path, f"has a name that is not from {system}"))


_TYPED = "is text typed into {}, not a file"


def _moodle(entries: Sequence[Entry], assignment: str, refused: list[Refused]) -> Iterable[HandIn]:
    hand_ins: dict[str, HandIn] = {}
    for entry, match in _named(entries, _MOODLE, "Moodle", refused):
        hand_in = hand_ins.setdefault(match["id"], HandIn(match["id"], match["name"]))
        # Moodle before 4.1 wants the underscore at the end; later versions allow it.
        hand_in.returned_as = f"{match['name']}_{match['id']}_assignfeedback_file_/"
        if match["kind"] == "file":
            hand_in.files[match["file"]] = replace(entry, path=match["file"])
        else:
            refused.append(Refused(hand_in.name, entry.path, _TYPED.format("Moodle")))
    return hand_ins.values()


def _canvas(entries: Sequence[Entry], assignment: str, refused: list[Refused]) -> Iterable[HandIn]:
    hand_ins: dict[str, HandIn] = {}
    matches = _named(entries, _CANVAS, "Canvas", refused)
    # A file's number grows with time, so the latest file of a name is the last one.
    for entry, match in sorted(matches, key=lambda pair: int(pair[1]["number"] or 0)):
        hand_in = hand_ins.setdefault(match["id"], HandIn(match["id"], match["name"] or ""))
        hand_in.late = hand_in.late or match["late"] is not None
        if match["typed"]:
            refused.append(Refused(hand_in.name, entry.path, _TYPED.format("Canvas")))
            continue
        file = match["file"]
        hand_in.files[file] = replace(entry, path=file, modified=0.0)
        hand_in.order = int(match["number"])
        hand_in.returned_as = entry.path.removesuffix(file)
    return hand_ins.values()


def _gradescope(
    entries: Sequence[Entry], assignment: str, refused: list[Refused]
) -> Iterable[HandIn]:
    """Add each submission to each of its submitters, because a group submits together."""
    groups: dict[str, list[HandIn]] = {}
    for entry in entries:
        if entry.path == "submission_metadata.yml":
            text = entry.read(MAX_METADATA).decode("utf-8", "replace")
            for listed in _MADE.finditer(text):
                groups[listed["id"]] = list(_submitters(listed["whose"], listed["when"]))
    for entry, match in _named(entries, _GRADESCOPE, "Gradescope", refused):
        if match["id"] and not groups.get(match["id"]):
            reason = "belongs to a submission without a submitter in submission_metadata.yml"
            refused.append(Refused("", entry.path, reason))
        for hand_in in groups.get(match["id"], ())[:1]:  # all of them have the same files
            hand_in.files[match["file"]] = replace(entry, path=match["file"])
    return [hand_in for group in groups.values() for hand_in in group if hand_in.files]


def _submitters(submitters: str, created_at: str | None) -> Iterator[HandIn]:
    files: dict[str, Entry] = {}  # of all of them
    for person in re.split(r"^  - ", submitters, flags=re.MULTILINE)[1:]:
        fields = {k: v.strip("'\" ") for k, v in re.findall(r":(name|sid|email): *(.*)", person)}
        number = fields.get("sid") or fields.get("email", "").partition("@")[0]
        if number or fields.get("name"):
            time = read_time(created_at) if created_at else None
            yield HandIn(number, fields.get("name", ""), files, time)


def _exchange(
    entries: Sequence[Entry], assignment: str, refused: list[Refused]
) -> Iterable[HandIn]:
    hand_ins: dict[str, HandIn] = {}
    for entry in entries:
        match = _EXCHANGE.fullmatch(entry.path)
        if match is None or match["assignment"] != assignment:
            continue
        key = entry.path[: match.start("file")]
        hand_in = hand_ins.setdefault(
            key, HandIn(match["id"], match["id"], time=read_stamp(match["time"]))
        )
        hand_in.files[match["file"]] = replace(entry, path=match["file"])
    return hand_ins.values()


def _folder(entries: Sequence[Entry], assignment: str, refused: list[Refused]) -> Iterable[HandIn]:
    hand_ins: dict[str, HandIn] = {}
    for entry in entries:
        student, _, file = entry.path.partition("/")
        if not file:
            if not student.endswith((".ipynb", ".zip")):
                reason = "lies beside the students' folders: move it into one of them"
                refused.append(Refused("", student, reason))
                continue
            file, student = student, re.sub(r"\.(ipynb|zip)$", "", student)
            student = student.removesuffix(f"_{assignment}").removeprefix(f"{assignment}_")
        key = f"{student}/" if "/" in entry.path else student
        hand_in = hand_ins.setdefault(key, HandIn(student, student))
        hand_in.files[file] = replace(entry, path=file)
    for hand_in in hand_ins.values():
        # In nbgrader's own layout, a student's folder also contains their other assignments.
        if nested := {p: e for p, e in hand_in.files.items() if p.startswith(f"{assignment}/")}:
            inner = {path.partition("/")[2]: entry for path, entry in nested.items()}
            hand_in.files = {path: replace(entry, path=path) for path, entry in inner.items()}
        hand_in.order = int(max(entry.modified for entry in hand_in.files.values()))
        stamp = hand_in.files.get("timestamp.txt")
        if stamp is not None and not stamp.refusal:
            hand_in.time = read_stamp(stamp.read(1000).decode("utf-8", "replace"))
            if hand_in.time is None:
                hand_in.notes.append("timestamp.txt contains no time, so the file is ignored")
    return hand_ins.values()


_READERS: dict[str, Callable[[Sequence[Entry], str, list[Refused]], Iterable[HandIn]]] = {
    "moodle": _moodle,
    "canvas": _canvas,
    "gradescope": _gradescope,
    "exchange": _exchange,
    "folder": _folder,
}
