"""Collect an assignment from a source into ``submitted/``, with a table row per submission."""

from __future__ import annotations

import os
import pwd
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path

import nbformat
from traitlets.config import Config

from autograder.collection._placing import Places, digest_of
from autograder.collection.extensions import read_extensions
from autograder.collection.formats import (
    EXCHANGE_FOLDER,
    SECRET,
    Gathered,
    HandIn,
    Refused,
    gather,
)
from autograder.collection.listing import Entry, SourceError, list_source
from autograder.collection.roster import (
    Roster,
    Student,
    kept_roster,
    read_roster,
    student_id_of,
    words_of,
)
from autograder.collection.times import NoTimeZone, course_zone, days_late, gradebook_due, read_time
from autograder.collection.vetting import Vetted, vet_hand_in
from autograder.course import Folders, load_config

_DRAFT = "Draft (not submitted)"
"""The beginning of a status in Moodle's worksheet, in English."""


@dataclass(frozen=True)
class Row:
    """One line of the table of collected submissions."""

    student: str
    name: str
    action: str
    time: datetime | None
    late: int
    notes: str


@dataclass
class Collected:
    """The result of `collect`.

    Attributes:
        rows: one row for each submission that was collected.
        refused: files that were not collected, with the course's student id if it is known.
        absent: students of the class who have submitted nothing, now or before.
        format: the source's format.
        zone: the course's time zone, if it is known.

    """

    rows: list[Row]
    refused: list[Refused]
    absent: list[str]
    format: str
    zone: tzinfo | None = None


def collect(
    root: Path,
    assignment: str,
    source: str,
    *,
    format: str = "",
    roster: Path | None = None,
    due: datetime | None = None,
    retime: bool = False,
) -> Collected:
    """Collect an assignment's submissions.

    Args:
        root: the course folder.
        assignment: its name.
        source: ``exchange``, a folder, or a zip.
        format: one of `FORMATS`; by default it is recognised.
        roster: a class list, which is kept for later commands; by default the list kept before.
        due: the deadline; by default the gradebook's.
        retime: correct the times of what was collected before, because its time zone was wrong.

    Raises:
        SourceError: nothing can be collected from this source.
        NoTimeZone: the class list has times without a zone, and the course has none yet.

    """
    config = load_config(root)
    notebooks = notebooks_of(root, config, assignment)
    data = Folders.at(root).data
    students = read_roster(roster) if roster else kept_roster(data)
    gathered = _gather(config, source, assignment, format)
    due = due or gradebook_due(config, assignment)
    zone = course_zone(data)
    own_due = read_extensions(data, assignment, zone)
    if roster:
        students.write(data / "roster.csv")
    places = Places(data, assignment)
    refused = [_by_our_id(entry, students) for entry in gathered.refused]
    collected = Collected([], refused, [], gathered.format, zone=zone)
    ours = gathered.format in ("exchange", "folder")
    by_student = _by_student(gathered, students, collected.refused)
    for student, hand_ins in by_student.items():
        listed = students.students.get(student, Student(student))
        for hand_in in hand_ins:
            hand_in.notes += _time(hand_in, listed.submitted_at, zone, due)
            if listed.status.startswith(_DRAFT):
                hand_in.notes.append("Moodle has it as a draft, which was not submitted")
    for student, hand_ins in sorted(_shared(by_student, students).items()):
        vetted = []
        for hand_in in hand_ins:
            content = vet_hand_in(hand_in.files, notebooks, own_stamp=ours)
            if hand_in.shared_by:  # with its secret, nbgrader's exchange gives both the same page
                content.files.pop(SECRET, None)
            content.notes[:0] = hand_in.notes
            vetted.append((hand_in, content))
        until = own_due.get(student, due)
        collected.rows += _take(places, student, vetted, until, collected, retime)
    present = {row.student for row in collected.rows} | {e.student for e in collected.refused}
    collected.absent += [
        student
        for student in students.students
        if student not in present and not places.submitted(student).is_dir()
    ]
    return collected


def hand_ins_by_student(
    root: Path, assignment: str, source: str
) -> tuple[dict[str, list[HandIn]], str]:
    """Return a source's unread files by the course's student ids, and the source's format."""
    gathered = _gather(load_config(root), source, assignment, "")
    students = kept_roster(Folders.at(root).data)
    return _by_student(gathered, students, []), gathered.format


def _gather(config: Config, source: str, assignment: str, format: str) -> Gathered:
    path = Path(source).expanduser()
    if source == "exchange" or format == "exchange":
        top = Path(config.Exchange.root) if source == "exchange" else path
        course = str(config.CourseDirectory.course_id)
        places = (top / course / "inbound", top / "inbound", top)
        inbounds = [f for f in places if f.name == "inbound" and f.is_dir()]
        if not inbounds:
            raise SourceError(
                f"there is no exchange in {top}: no student has used nbgrader submit yet, or "
                "the exchange is in another folder. If so, give that folder and --from exchange"
            )
        path, format = inbounds[0], "exchange"
    entries: Sequence[Entry] = list_source(path)
    foreign = {}
    if path.name == "inbound":
        if config.ExchangeCollect.get("check_owner", True):
            foreign = _owned_by_others(path)
        entries = [e for e in entries if e.path.partition("/")[0] not in foreign]
        entries = [replace(entry, path=f"inbound/{entry.path}") for entry in entries]
    if not entries and not foreign:
        raise SourceError(f"{path} is empty: there is nothing to collect")
    gathered = gather(entries, assignment, format) if entries else Gathered(format, [], [])
    for folder, owner in foreign.items():
        name = EXCHANGE_FOLDER.fullmatch(folder)
        if name is not None and name["assignment"] == assignment:
            reason = f"belongs to {owner}, not to this student"
            gathered.refused.append(Refused(name["id"], folder, reason))
    return gathered


def _owned_by_others(inbound: Path) -> dict[str, str]:
    """Return the submissions in the exchange that neither the named student nor we wrote.

    Anybody may write into the exchange, and choose a folder's name.
    """
    ours, foreign = (_account(0), _account(os.geteuid())), {}
    for path in inbound.iterdir():
        if match := EXCHANGE_FOLDER.fullmatch(unicodedata.normalize("NFC", path.name)):
            owner = owner_of(path)
            if owner not in ours and owner.casefold() != match["id"].casefold():
                foreign[match[0]] = owner
    return foreign


def owner_of(path: Path) -> str:
    """Return the account to which a file or folder belongs."""
    return _account(path.lstat().st_uid)


def _account(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"account {uid}"  # no student's id: a number alone may be one


def _by_student(
    gathered: Gathered, students: Roster, refused: list[Refused]
) -> dict[str, list[HandIn]]:
    """Return the submissions by the course's student ids; add others to `refused`."""
    hand_ins_by_student: dict[str, list[HandIn]] = {}
    identities: dict[str, str] = {}
    is_number = gathered.format in ("moodle", "canvas")
    matches = [(h, students.find(h.system_id, h.name, is_number)) for h in gathered.hand_ins]
    # First those who fit the class list best: a second one is somebody else.
    for hand_in, listed in sorted(matches, key=lambda match: _misfit(*match)):
        name = hand_in.name or hand_in.system_id
        if listed is None and students:
            refused.append(Refused(name, "", "is not in the class list (see --roster)"))
            continue
        student = listed.student_id if listed else student_id_of(hand_in.system_id, hand_in.name)
        if not student:
            refused.append(Refused(name, "", "has a name that cannot be a student id"))
            continue
        identity = (listed and hand_in.system_id) or hand_in.name
        if (other := identities.setdefault(student, identity)) != identity:
            reason = f"would have the student id {student}, as {other!r} has: rename one"
            refused.append(Refused(name, "", f"{reason}, or correct the class list"))
            continue
        if listed and _misfit(hand_in, listed) > 1:
            hand_in.notes.append(f"{name!r} counts as {listed.name or student} of the class list")
        hand_ins_by_student.setdefault(student, []).append(hand_in)
    return hand_ins_by_student


def _shared(by_student: dict[str, list[HandIn]], students: Roster) -> dict[str, list[HandIn]]:
    """Return the submissions of all members of a student's group, their own last."""
    shared: dict[str, list[HandIn]] = {}
    for student, hand_ins in by_student.items():
        for member in students.group_of(student):
            of_member = shared.setdefault(member, [])
            if member == student:
                of_member += hand_ins
                continue
            of_member[:0] = [
                replace(
                    hand_in,
                    shared_by=student,
                    notes=[*hand_in.notes, f"handed in by {student}, of the same group"],
                )
                for hand_in in hand_ins
            ]
    return shared


def _misfit(hand_in: HandIn, student: Student | None) -> int:
    """Return 0 if the class list has the id or number, 1 if it has the name or other letters' case.

    A name in another order, and one that the list has with another number, return 2.
    """
    if student is None:
        return 0
    if hand_in.system_id and hand_in.system_id in (student.student_id, student.system_id):
        return 0
    same_id = hand_in.system_id.casefold() == student.student_id.casefold()
    same_name = words_of(hand_in.name) == words_of(student.name)
    return 1 if same_id or (same_name and not student.system_id) else 2


def _by_our_id(refused: Refused, students: Roster) -> Refused:
    """Return the refused file with the course's student id, if the class list has this name."""
    student = students.find("", refused.student) if refused.student else None
    return replace(refused, student=student.student_id) if student else refused


def _time(hand_in: HandIn, listed: str, zone: tzinfo | None, due: datetime | None) -> list[str]:
    """Set the time of submission from any source that gives it; return notes for the table."""
    if hand_in.time is None and listed.strip(" -"):
        try:
            hand_in.time = read_time(listed, zone)
        except NoTimeZone:
            raise
        except SourceError as error:
            return [f"time unknown: {error}"]
    if hand_in.time is None and hand_in.late:
        if due is None:
            return ["LATE, but no deadline is known: give --due"]
        hand_in.time = due + timedelta(seconds=1)
        return ["LATE; Canvas does not say how late, so the submission counts as one second late"]
    return []


def _take(
    places: Places,
    student: str,
    vetted: list[tuple[HandIn, Vetted]],
    due: datetime | None,
    collected: Collected,
    retime: bool,
) -> list[Row]:
    """Place the last submission that has a notebook, keep the others aside; return their rows."""
    never = datetime.min.replace(tzinfo=UTC)
    vetted.sort(key=lambda pair: (pair[0].time or never, pair[0].order))
    for hand_in, content in vetted:
        files = () if hand_in.shared_by else content.refused  # told once, of who submitted it
        collected.refused += [Refused(student, path, reason) for path, reason in files]
    good = [pair for pair in vetted if any(n.endswith(".ipynb") for n in pair[1].files)]
    if not good:
        collected.refused.append(Refused(student, "", "contains no notebook that can be graded"))
        return []
    rows = []
    firsts: dict[str, datetime] = {}
    last, last_content = good[-1]
    last_place = last.time, last.order
    digests = [digest_of(content.files) for _, content in good]
    for (hand_in, content), sha256 in zip(good, digests, strict=True):
        at = hand_in.time
        if sha256 != digests[-1] and (at, hand_in.order) == last_place:
            author = hand_in.shared_by or student
            last_content.notes.append(
                f"{author} handed in other files, and no time says which are later"
            )
        if hand_in.time is not None:
            time_before = None if retime else places.first_time(student, sha256)
            first = min(filter(None, (hand_in.time, firsts.get(sha256), time_before)))
            if first < hand_in.time:
                content.notes.append("the same was handed in before, so the earlier time counts")
            hand_in.time = firsts[sha256] = first
        elif places.digest(student) == sha256:
            hand_in.time = places.time(student)  # the time from an earlier source
        is_last = content is last_content
        if sha256 == digests[-1] and not is_last:
            continue
        late = days_late(hand_in.time, due, collected.zone)
        if is_last:
            action = places.place(student, content.files, hand_in.time, at)
        else:
            action = places.keep_aside(student, content.files, hand_in.time)
        rows.append(
            Row(student, hand_in.name, action, hand_in.time, late, "; ".join(content.notes))
        )
    return rows


def notebooks_of(root: Path, config: Config, assignment: str) -> dict[str, nbformat.NotebookNode]:
    """Return an assignment's notebooks as they were handed out, by their names.

    Raises:
        SourceError: there is no such assignment.

    """
    folders = Folders.of(config.CourseDirectory)
    places = (folders.release, root / "assignments", folders.source)
    for place in places:
        if paths := sorted((place / assignment).glob("*.ipynb")):
            return {path.stem: nbformat.read(path, as_version=4) for path in paths}
    assignments = sorted({path.parent.name for place in places for path in place.glob("*/*.ipynb")})
    names = ", ".join(assignments) or "none"
    raise SourceError(f"there is no assignment {assignment!r}. The assignments are: {names}")
