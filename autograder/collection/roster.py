"""The class list: each student's id in a learning system, and their id in the course.

This module reads the lists that the systems export, and plain ones:

- Canvas, *Grades → Export*: ``Student, ID, SIS User ID, SIS Login ID, Section, …``
- Moodle, *Download grading worksheet*: ``Identifier, Full name, ID number, Email address, …``
- plain: ``student_id``, and any of ``system_id, name, first_name, last_name, email, group,
  submitted_at``.
"""

from __future__ import annotations

import csv
import io
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from autograder.collection.listing import SourceError
from autograder.files import write_whole

_COLUMNS = {
    "student_id": ("student_id", "student id", "username", "sis login id", "id number"),
    "system_id": ("system_id", "identifier", "id"),
    "name": ("name", "full name", "student"),
    "first_name": ("first_name", "first name", "firstname"),
    "last_name": ("last_name", "last name", "surname", "lastname"),
    "email": ("email", "email address"),
    "group": ("group",),
    "submitted_at": ("submitted_at", "last modified (submission)"),
    "status": ("status",),
}
_OF_ONE_ASSIGNMENT = ("submitted_at", "status")


@dataclass(frozen=True)
class Student:
    """One line of the list; a missing value is empty."""

    student_id: str
    system_id: str = ""
    name: str = ""
    first_name: str = ""
    last_name: str = ""
    email: str = ""
    group: str = ""
    """Students of the same group share every submission of one of them."""
    submitted_at: str = ""
    """The time of their submission as the list writes it; empty or ``-`` if there is none."""
    status: str = ""
    """The state of their submission as Moodle writes it."""


def is_student_id(text: str) -> bool:
    """Tell whether a text may be a student id: safe as a folder's name and on nbgrader's pages."""
    return (
        0 < len(text) <= 100
        and all(_is_of_a_word(letter) or letter in "_.@+-" for letter in text)
        and text[0] not in ".+-"
    )


def usable_id(text: str) -> str:
    """Return a text without what a student id must not have; empty if nothing is left."""
    return "".join(c for c in text if _is_of_a_word(c) or c in "_@-")[:100].lstrip("-")


def _is_of_a_word(letter: str) -> bool:
    """Tell whether a character is a letter, a mark that belongs to a letter, or a digit."""
    return unicodedata.category(letter)[0] in "LMN"


class Roster:
    """The students by their id, in the order of the list."""

    def __init__(self, students: Iterable[Student] = ()) -> None:
        self.students = {student.student_id: student for student in students}
        self._alike: dict[str, list[Student]] = {}
        for student in self.students.values():
            self._alike.setdefault(usable_id(student.student_id).casefold(), []).append(student)
        self._systems = {s.system_id: s for s in self.students.values() if s.system_id}
        self._names: dict[str, set[Student]] = {}
        for student in self.students.values():
            for name in (student.name, f"{student.first_name} {student.last_name}"):
                for written in _ways_to_write(words_of(name)):
                    self._names.setdefault(written, set()).add(student)

    def __bool__(self) -> bool:
        return bool(self.students)

    def has(self, student_id: str) -> bool:
        """Tell whether somebody is in the class; everybody is, if there is no list."""
        return not self or student_id in self.students

    def group_of(self, student_id: str) -> list[str]:
        """Return a student and the other members of their group, if they are in one."""
        group = self.students[student_id].group if student_id in self.students else ""
        if not group:
            return [student_id]
        return [name for name, student in self.students.items() if student.group == group]

    def find(self, system_id: str, name: str, is_number: bool = False) -> Student | None:
        """Return the student with this id of the course, number of the system, or unique name.

        Ids may differ in case, and by what an id must not have, if only one student's then fits.
        The given name may come first or last. If the id is certainly a system's number
        (`is_number`), it fits no student of whom the list has another number.
        """
        numbered, by_id = self._systems.get(system_id), self.students.get(system_id)
        if is_number:
            by_id = numbered or (None if by_id is None or by_id.system_id else by_id)
        if match := by_id or numbered:
            return match
        alike = self._alike.get(usable_id(system_id).casefold(), [])
        if len(alike) == 1 and not is_number:
            return alike[0]
        namesakes = self._names.get(" ".join(words_of(name)), set())
        return next(iter(namesakes)) if len(namesakes) == 1 else None

    def write(self, path: Path) -> None:
        """Keep the list for later commands, without what belongs to one assignment."""
        columns = [f.name for f in fields(Student) if f.name not in _OF_ONE_ASSIGNMENT]
        text = io.StringIO()
        rows = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
        rows.writeheader()
        rows.writerows(asdict(student) for student in self.students.values())
        if not path.is_file() or path.read_text(encoding="utf-8") != text.getvalue():
            write_whole(path, text.getvalue())


def words_of(name: str) -> tuple[str, ...]:
    """Return the words of a name, to compare them, without case and punctuation."""
    text = unicodedata.normalize("NFC", name.casefold())
    parts = ("".join(filter(_is_of_a_word, word)) for word in re.split(r"[\s,_/\-‐-―]+", text))
    return tuple(filter(None, parts))


def _ways_to_write(parts: Sequence[str]) -> set[str]:
    """Return a name from each of its words on: ``ada lovelace``, ``lovelace ada``.

    Canvas writes the same without blanks in the names of files.
    """
    turned = [[*parts[i:], *parts[:i]] for i in range(len(parts))]
    return {blank.join(rotation) for rotation in turned for blank in (" ", "")}


def read_roster(path: Path) -> Roster:
    """Read a class list.

    Raises:
        SourceError: the list cannot be read, has no column of student ids, or has an id twice.

    """
    header, rows = read_table(path)
    # Moodle gives each member of a group a file. It also has words for those who are in no group.
    columns = {**_COLUMNS, "group": ()} if "identifier" in header else _COLUMNS
    for name in {name for names in _COLUMNS.values() for name in names}:
        if header.count(name) > 1:
            raise SourceError(f"{path} has two columns {name!r}: rename or delete one of them")
    if not any(name in header for key in ("student_id", "email") for name in _COLUMNS[key]):
        raise SourceError(
            f"{path} has no column of student ids: give one column the name student_id. The "
            f"file's first line is: {', '.join(header)}"
        )
    students: dict[str, Student] = {}
    numbers: dict[str, str] = {}
    for number, row in rows:
        values = {
            key: next((row[name] for name in names if name in row), "")
            for key, names in columns.items()
        }
        if "points possible" in values["name"].lower() or not any(values.values()):
            continue  # Canvas's second line
        student = _student(values)
        if not is_student_id(student.student_id):
            instead = usable_id(student.student_id)
            raise SourceError(
                f"{path}, line {number}: {student.student_id!r} cannot be a student id: use only "
                "letters, digits and . _ - @ +" + (f", for example {instead}" if instead else "")
            )
        if students.setdefault(student.student_id, student) != student:
            raise SourceError(
                f"{path}, line {number}: {student.student_id} is in the list twice, and the two "
                "lines differ: correct one of them"
            )
        other = numbers.setdefault(student.system_id, student.student_id)
        if student.system_id and other != student.student_id:
            raise SourceError(
                f"{path}, line {number}: {student.student_id} has the number {student.system_id}, "
                f"as {other} has: correct one of them"
            )
    if not students:
        raise SourceError(
            f"{path} has a header but no students: add one line per student, with a student_id"
        )
    return Roster(students.values())


def kept_roster(data: Path) -> Roster:
    """Return the class list that was kept for later commands; empty if there is none."""
    path = data / "roster.csv"
    return read_roster(path) if path.is_file() else Roster()


def _student(values: Mapping[str, str]) -> Student:
    student_id = values["student_id"] or values["email"].partition("@")[0]
    # Canvas's test student has an id but no login.
    student_id = student_id or values["system_id"]
    system_id = number_of(values["system_id"])
    name = values["name"] or f"{values['first_name']} {values['last_name']}".strip()
    return Student(**{**values, "student_id": student_id, "system_id": system_id, "name": name})


def number_of(text: str) -> str:
    """Return the number of a student in a system; Moodle writes it as ``Participant 123``."""
    return re.sub(r"^\D+(?=\d+$)", "", text)


def read_table(path: Path) -> tuple[list[str], list[tuple[int, dict[str, str]]]]:
    """Return a CSV's header in lower case, and its other lines' cells with the lines' numbers.

    Raises:
        SourceError: it cannot be read.

    """
    try:
        header, *lines = read_csv(path)[0]
    except csv.Error as error:
        raise SourceError(f"{path} cannot be read as a CSV: {error}") from error
    header = [name.strip().lower() for name in header]
    rows = [dict(zip(header, (cell.strip() for cell in line), strict=False)) for line in lines]
    return header, [(number, row) for number, row in enumerate(rows, 2) if any(row.values())]


def read_csv(path: Path) -> tuple[list[list[str]], str]:
    """Return a CSV's lines, at least one, and what separates its cells: ``,``, ``;`` or a tab.

    Raises:
        SourceError: it cannot be read, or it is empty.
        csv.Error: it is no CSV.

    """
    try:
        text = decode(path.read_bytes()).replace("\r\n", "\n").replace("\r", "\n")
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror}") from error
    first = text.partition("\n")[0]
    mark = max(",;\t", key=lambda mark: len(next(csv.reader([first], delimiter=mark), ())))
    lines = list(csv.reader(io.StringIO(text), delimiter=mark, strict=True))
    if not lines:
        raise SourceError(f"{path} is empty")
    return lines, mark


def decode(data: bytes) -> str:
    """Decode a text: UTF-8, UTF-16 with its mark, else GB 18030 or cp1252.

    A letter with an accent is one character in the result, however it was written (NFC).
    """
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        encoding = "utf-16"
    else:
        try:
            return unicodedata.normalize("NFC", data.decode("utf-8-sig"))
        except UnicodeDecodeError:
            encoding = "gb18030" if _is_chinese(data) else "cp1252"
    return unicodedata.normalize("NFC", data.decode(encoding, "replace"))


def _is_chinese(data: bytes) -> bool:
    """Tell GB 18030 from a Western encoding.

    In Western text a byte of 128 or more is a letter with an accent: most stand alone between
    plain letters. A Chinese character is two such bytes, and no plain letter is beside it.
    """
    runs = re.findall(rb"([A-Za-z]?)([\x80-\xff]+)(?![A-Za-z\x80-\xff])", data)
    chinese = sum(not letter and len(run) % 2 == 0 for letter, run in runs)
    return 4 * chinese > len(re.findall(rb"[\x80-\xff]+", data))


def student_id_of(system_id: str, name: str) -> str:
    """Return an id for a student who is in no class list; empty if none can be made.

    In a plain folder, the id is the name of the student's folder, without what an id must not have.
    In a system's export, it is name and number, because two students may have the same name.
    """
    if name == system_id:
        return name if is_student_id(name) else usable_id(name)
    plain = "".join(filter(_is_of_a_word, name))
    student_id = f"{plain}-{system_id}".removeprefix("-")
    return student_id if is_student_id(student_id) else ""
