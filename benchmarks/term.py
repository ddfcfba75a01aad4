"""Play through a term with the public commands, and compare submissions with booked points.

    python benchmarks/term.py [--students 12] [--assignments NN_NAME …] [--said FILE] [--write]

Students hand in solutions, mutants, stubs, crashes, hangs, damage, wrong files and nothing. Some
are late, in pairs, or submit again. One check is wrong until mid-term. A person grades written
answers. The way in which a notebook is made determines its points. A mutant gets the points that
its check alone gives, and so does a task whose solution calls the mutant. At the end, each
student's line in the exports is compared with the line that it must be.
`--students 300 --assignments all` is a whole term.
"""

from __future__ import annotations

import collections
import contextlib
import csv
import itertools
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from shutil import copytree, ignore_patterns, rmtree
from typing import Any

import nbformat
from machine import BusyElsewhere, arguments, descendants, publish, sentence
from nbgrader.api import Gradebook
from nbgrader.utils import is_grade, is_solution

from autograder.course import load_config
from autograder.examination.check import examine
from autograder.examination.submission import Submission
from autograder.passes.canary import Canary, solved
from autograder.passes.examine import Exam, masked_from
from autograder.pool.slurm import Cluster
from autograder.sandbox.place import SandboxedPlace
from course_lib.checking.local import load_module
from course_lib.checking.mutants import Mutant, mutants_of

ROOT = Path(__file__).parents[1]
ALL = sorted(path.parent.name for path in (ROOT / "instructor").glob("*/hidden.py"))
ZONE, FROM_UTC = "Asia/Hong_Kong", 8
FREE, SHARE = 1, 0.1
POLICY = f"""
c.AssignLatePenalties.plugin_class = "autograder.late_policy.PerDay"
c.PerDay.share = {SHARE}
c.PerDay.free_days = {FREE}
"""
BROKEN = """
import dataclasses
from course_lib.checking import Wrong

def refuse(case, inputs, outputs):
    raise Wrong("the check is wrong, and not the student")

CHECKS[{task!r}] = dataclasses.replace(CHECKS[{task!r}], judge=refuse)
"""
SYSTEMS = ("moodle", "canvas", "folder")
"""Systems that take turns, assignment by assignment."""
EXTENSION = 2
"""Days."""
LOOK_EVERY = 0.1
"""Seconds."""
CLOSE = 0.006
"""Allowed difference of points, because exports have two decimals."""
KINDS = (
    *("right",) * 7,
    *("differently",) * 3,
    *("mutant",) * 5,
    *("unwritten", "untouched", "crash", "hang", "syntax"),
    *("cut off", "long number", "utf-16", "empty", "wrong name"),
    *("another's", "no notebook", "nothing"),
)
"""Kinds of submissions; a class gets as many of each as its size allows."""
REFUSED = ("another's", "no notebook", "nothing")
LATE = (0.5, 1.2, 2.7, 30.0)
"""Days."""
FULL = 300, 10
"""The numbers of students and assignments of the term for which the hours are computed."""


@dataclass
class Piece:
    """One student's submission, and the points that it must get; None if nothing is booked."""

    kind: str
    name: str
    data: bytes
    points: dict[str, float] | None
    late: float = 0.0


@dataclass
class Task:
    """One assignment of the term, and the solutions that its students hand in."""

    name: str
    due: datetime
    released: Any = None
    solution: Any = None
    worth: dict[str, float] = field(default_factory=dict)
    written: dict[str, float] = field(default_factory=dict)
    mutants: list[Mutant] = field(default_factory=list)
    alone: dict[str, float] = field(default_factory=dict)

    def read(self, root: Path) -> None:
        """Read the released notebook, its solution and its mutants."""
        source, file = root / "instructor" / self.name, f"{self.name}.ipynb"
        self.released = nbformat.read(root / "grading/release" / self.name / file, as_version=4)
        self.solution = nbformat.read(source / file, as_version=4)
        self.exam = Exam.of(source)
        for cell in filter(is_grade, self.released.cells):
            into = self.written if is_solution(cell) else self.worth
            into[cell.metadata.nbgrader.grade_id] = float(cell.metadata.nbgrader.points)
        found = mutants_of(load_module(source / "mutants.py"))
        self.mutants = [m for m in found if m.reason is None or "grader" in m.where]
        canary = Canary.of(self.exam, source, root / "grading/release" / self.name)
        self.mended = [task for task in self.worth if canary is None or task != canary.task][-1]

    def cell(self, task: str) -> str:
        """Return the solution's cell of a task."""
        found = (
            str(cell.source)
            for cell in filter(is_solution, self.solution.cells)
            if cell.metadata.nbgrader.grade_id == f"write_{task}"
        )
        return next(found, "")

    def uses(self, task: str) -> list[str]:
        """Return a task and those whose functions its solution calls, in the notebook's order."""
        text = self.cell(task)
        calls = [n for n in self.worth if re.search(rf"\b{self.exam.checks[n].function}\(", text)]
        earlier = [u for n in calls if n != task for u in self.uses(n)]
        return [*dict.fromkeys(earlier), task]

    def points(self, place: SandboxedPlace, task: str, instead: dict[str, str]) -> float:
        """Return the points of a task's check if only its cell and the cells that it uses exist."""
        names = self.uses(task)
        if not any(f"write_{name}" in instead for name in names):
            return self.worth[task]
        cells = [instead.get(f"write_{name}", self.cell(name)) for name in names]
        key = "\n".join([task, *cells])
        if key not in self.alone:
            setup = next(c.source for c in self.solution.cells if c.cell_type == "code")
            check, hidden = self.exam.checks[task], self.exam.hidden.get(task, ())
            with Submission(place) as submission:
                for source in (setup, *cells):
                    submission.run_cell(source)
                name = f"{self.name}/{task}"
                found = examine(name, check, submission, seed="alone", hidden=hidden).report
            self.alone[key] = self.worth[task] * found.fraction
        return self.alone[key]


def make(task: Task, kind: str, draw: random.Random, place: SandboxedPlace) -> Piece:
    """Return one student's submission of this kind."""
    file, points = f"{task.name}.ipynb", {**task.worth, **dict.fromkeys(task.written, 0.0)}
    stubs = {
        c.metadata.nbgrader.grade_id: c.source for c in filter(is_solution, task.released.cells)
    }
    plain = [n for n in task.worth if f"def {task.exam.checks[n].function}(" in task.cell(n)]
    instead: dict[str, str] = {}
    one = draw.choice(plain)
    function = task.exam.checks[one].function
    if kind in ("mutant", "differently"):
        mutant = draw.choice([m for m in task.mutants if (m.reason is None) == (kind != "mutant")])
        instead[f"write_{mutant.task}"] = mutant.source
        kind += f" {mutant.task}__{mutant.mistake}"
    elif kind in ("unwritten", "untouched"):
        for name in task.worth if kind == "untouched" else [one]:
            instead[f"write_{name}"] = stubs[f"write_{name}"]
    elif kind in ("crash", "hang", "syntax"):
        body = {"crash": "import os; os._exit(3)", "hang": "while True: pass", "syntax": "return ("}
        instead[f"write_{one}"] = f"def {function}(*args, **kwargs):\n    {body[kind]}"
    tried = kind.startswith(("mutant", "differently"))
    for name in task.worth:
        nothing = f"write_{name}" in instead and not tried
        points[name] = 0.0 if nothing else task.points(place, name, instead)
    notebook = solved(task.released, task.solution, instead)
    answers = kind != "untouched" and draw.random() < 0.8
    for cell in notebook.cells:
        if answers and cell.metadata.get("nbgrader", {}).get("grade_id") in task.written:
            cell.source = f"An answer, number {draw.randrange(10**6)}."
            points[cell.metadata.nbgrader.grade_id] = math.nan  # a person decides
    data = nbformat.writes(notebook).encode()
    if kind == "cut off":
        last = list(task.worth)[-1]
        data = data[: data.index(f'"grade_id": "write_{last}"'.encode())]
        points |= {last: 0.0, **dict.fromkeys(task.written, 0.0)}
    elif kind == "long number":
        data = data.replace(b'"nbformat": 4', b'"n": ' + b"9" * 9000 + b', "nbformat": 4')
    elif kind == "utf-16":
        data = data.decode().encode("utf-16")
    elif kind == "empty":
        data, points = b"", dict.fromkeys(points, 0.0)
    elif kind == "wrong name":
        file = "Untitled7.ipynb"
    elif kind == "another's":
        other = next(name for name in ALL if name != task.name)
        data = (ROOT / "assignments" / other / f"{other}.ipynb").read_bytes()
    elif kind == "no notebook":
        file, data = "notes.txt", b"I could not export it."
    return Piece(kind, file, data, None if kind in REFUSED else points)


class Office:
    """Runs commands like an instructor; keeps their output, seconds and counts."""

    def __init__(self, root: Path, said: Path | None) -> None:
        self._root, self._file = root, said
        self.seconds: dict[str, float] = collections.defaultdict(float)
        self.examined = self.gave_up = self.retries = 0

    def __call__(self, *words: str, program: str = "autograder") -> str:
        """Run a command; return its output.

        Raises:
            RuntimeError: the command failed.

        """
        command = [sys.executable, "-m", program, *words]
        command += ["--course", str(self._root)] if program == "autograder" else []
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        with tempfile.TemporaryFile("w+") as answer:
            process = subprocess.Popen(
                command,
                cwd=self._root,
                env={**os.environ, "PYTHONPATH": paths},
                stdin=subprocess.DEVNULL,
                stdout=answer,
                stderr=subprocess.STDOUT,
            )
            took = processor(process)
            answer.seek(0)
            told = answer.read()
        self.seconds[words[0]] += took
        status = process.returncode
        said = f"$ {program} {' '.join(words)}\n{told}[{status}, {took:.0f} s]\n\n"
        if self._file:
            with self._file.open("a") as file:
                file.write(said)
        if status not in (0, 1) or "Traceback (most" in told:
            raise RuntimeError(said)
        for found in re.finditer(r"graded: (\d+) \((\d+) of them unchanged", told):
            self.examined += int(found[1]) - int(found[2])
        self.gave_up += sum(map(int, re.findall(r"could not be graded: (\d+)", told)))
        self.retries += sum(
            map(int, re.findall(r"tried again, because the machine had failed: (\d+)", told))
        )
        return told


def processor(process: subprocess.Popen[Any]) -> float:
    """Wait for a process; return at least the processor seconds of it and its descendants.

    No process waits for the processes of a sandbox, so their time must be read while they run.
    """
    ticks: dict[tuple[int, str], int] = {}
    while process.poll() is None:
        for pid in (process.pid, *descendants(process.pid)):
            with contextlib.suppress(OSError, IndexError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks[pid, fields[19]] = int(fields[11]) + int(fields[12])
        time.sleep(LOOK_EVERY)
    return sum(ticks.values()) / os.sysconf("SC_CLK_TCK")


class Term:
    """The class, each student's submissions, and the points that each must have at the end."""

    def __init__(self, root: Path, office: Office, students: int, jobs: str, seed: int) -> None:
        self.root, self.office, self.jobs = root, office, jobs
        self.students = [f"s{number:03}" for number in range(1, students + 1)]
        self.ids = {student: 1000 + number for number, student in enumerate(self.students)}
        self.draw = random.Random(seed)
        self.pieces: dict[tuple[str, str], Piece] = {}
        self.extended: dict[tuple[str, str], int] = {}
        self.late: dict[tuple[str, str], float] = {}
        self.lost: dict[str, None] = {}
        self.wrong: list[str] = []
        self.again = 0

    def week(self, number: int, task: Task, mended: bool) -> None:
        """Play through one assignment, from its release to the students' pages."""
        office, draw, name = self.office, self.draw, task.name
        office("generate_assignment", name, program="nbgrader")
        task.read(self.root)
        checks = self.root / "assignments" / name / "checks.py"
        as_it_must_be = checks.read_text()
        kinds = itertools.cycle(draw.sample(KINDS, len(KINDS)))
        chosen = dict(zip(self.students, kinds, strict=False))
        with SandboxedPlace(masked_from(task.exam.masked)) as place:
            pieces = {s: make(task, kind, draw, place) for s, kind in chosen.items()}
        taken = [student for student in self.students if pieces[student].points]
        for student in draw.sample(taken, len(taken) // 4):
            pieces[student].late = draw.choice(LATE)
        early = {
            s: make(task, "untouched", draw, place) for s in draw.sample(taken, len(taken) // 6)
        }
        rest = [student for student in taken if student not in early]
        pairs = dict(zip(*[iter(draw.sample(rest, len(rest) // 6 * 2))] * 2, strict=True))
        for one, other in pairs.items():
            pieces[other] = replace(pieces[one], points=dict(pieces[one].points or {}))
        for student in draw.sample(self.students, len(self.students) // 6):
            self._extend(task, student)
        if mended:
            checks.write_text(as_it_must_be + BROKEN.format(task=task.mended))
        by_zip = {s: piece for s, piece in pieces.items() if s not in pairs.values()}
        for handed_in in ({**by_zip, **early}, by_zip):
            source = self._source(number, task, handed_in)
            due = f"{task.due:%Y-%m-%d %H:%M}"
            office("collect", name, *source, "--due", due, "--timezone", ZONE)
            for one, other in pairs.items():
                folder = self.root / "grading/submitted"
                copytree(folder / one / name, folder / other / name, dirs_exist_ok=True)
                self.late[other, name] = self.late[one, name]
            office("grade", name, "--jobs", self.jobs)
        self.pieces |= {(student, name): piece for student, piece in pieces.items()}
        self._read(task)
        office("grade", name, "--jobs", self.jobs)
        if mended:
            self._mend(task, checks, as_it_must_be)
        office("status", name)
        office("report", name)
        system = SYSTEMS[number % len(SYSTEMS)]
        office("feedback", name, *(() if system == "folder" else ("--zip", source[0])))
        self.compare_pages(task)

    def _extend(self, task: Task, student: str) -> None:
        path = self.root / "grading/extensions.csv"
        if not path.is_file():
            path.write_text("assignment,student_id,until\n")
        with path.open("a") as file:
            file.write(f"{task.name},{student},{task.due + timedelta(EXTENSION):%Y-%m-%d %H:%M}\n")
        self.extended[student, task.name] = EXTENSION

    def _source(self, number: int, task: Task, pieces: dict[str, Piece]) -> list[str]:
        """Write a system's export of these submissions; return the arguments to collect it."""
        folder = self.root / "systems" / task.name
        folder.mkdir(parents=True, exist_ok=True)
        system = SYSTEMS[number % len(SYSTEMS)]
        there = {s: piece for s, piece in pieces.items() if piece.kind != "nothing"}
        times = {s: task.due + timedelta(days=p.late or -0.2) for s, p in there.items()}
        second = timedelta(seconds=1) / timedelta(days=1)  # Canvas only marks a file as late
        for student, piece in there.items():
            late = min(piece.late, second) if system == "canvas" else piece.late
            self.late[student, task.name] = late
        if system == "folder":
            for student, piece in there.items():
                own = folder / "handed_in" / student
                rmtree(own, ignore_errors=True)
                own.mkdir(parents=True)
                (own / piece.name).write_bytes(piece.data)
                at = times[student] - timedelta(hours=FROM_UTC)
                (own / "timestamp.txt").write_text(f"{at:%Y-%m-%d %H:%M:%S} UTC")
            return [str(folder / "handed_in")]
        with zipfile.ZipFile(folder / "submissions.zip", "w") as archive:
            for student, piece in there.items():
                who, mark = self.ids[student], "LATE_" * (piece.late > 0)
                start = f"Student {student}_{who}_assignsubmission_file/"
                if system == "canvas":
                    start = f"student{student}_{mark}{who}_{50000 + who}_"
                archive.writestr(start + piece.name, piece.data)
        self._list(folder / "list.csv", system, task, times)
        return [str(folder / "submissions.zip"), "--roster", str(folder / "list.csv")]

    def _list(self, path: Path, system: str, task: Task, times: dict[str, datetime]) -> None:
        """Write the class list as a system exports it."""
        most = sum((task.worth | task.written).values())
        if system == "canvas":
            head = ["Student", "ID", "SIS User ID", "SIS Login ID", "Section", f"{task.name} (7)"]
            rows = [["    Points Possible", "", "", "", "", f"{most:g}"]]
            rows += [[f"Student {s}", str(self.ids[s]), "", s, "1", ""] for s in self.students]
        else:
            head = ["Identifier", "Full name", "ID number", "Email address", "Status", "Grade"]
            head += ["Maximum Grade", "Last modified (submission)", "Last modified (grade)"]
            rows = [
                [
                    f"Participant {self.ids[s]}",
                    f"Student {s}",
                    s,
                    "",
                    "",
                    "",
                    f"{most:g}",
                    f"{times[s]:%A, %d %B %Y, %I:%M %p}" if s in times else "-",
                    "-",
                ]
                for s in self.students
            ]
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([head, *rows])

    def _book(self) -> Any:
        config = load_config(self.root)
        return Gradebook(config.CourseDirectory.db_url, config.CourseDirectory.course_id)

    def _read(self, task: Task) -> None:
        """Give points for the waiting answers, as formgrader does; change one check's points."""
        with self._book() as book:
            grades = [
                (submission.student.id, grade)
                for submission in book.assignment_submissions(task.name)
                for notebook in submission.notebooks
                for grade in notebook.grades
            ]
            for student, grade in grades:
                if grade.needs_manual_grade:
                    points = self.draw.randrange(int(2 * grade.cell.max_score) + 1) / 2
                    self._by_hand(grade, student, task, points)
            others = task.worth.keys() - {task.mended}
            zeros = [g for g in grades if g[1].cell.name in others and not g[1].auto_score]
            if zeros:
                self._by_hand(zeros[0][1], zeros[0][0], task, 0.5)
            book.db.commit()

    def _by_hand(self, grade: Any, student: str, task: Task, points: float) -> None:
        grade.manual_score, grade.needs_manual_grade = points, False
        expected = self.pieces[student, task.name].points
        assert expected is not None
        expected[grade.cell.name] = points

    def _mend(self, task: Task, checks: Path, text: str) -> None:
        """Compare the points of the wrong check; then fix the check, and grade again."""
        lost = {
            key: replace(piece, points={**piece.points, task.mended: 0.0})
            for key, piece in self.pieces.items()
            if piece.points and key[1] == task.name
        }
        self.compare(task.name, {**self.pieces, **lost})
        checks.write_text(text)
        outdated = int(self.office("status", task.name).splitlines()[1].split()[3])
        booked = sum(bool(p.points) for (_, name), p in self.pieces.items() if name == task.name)
        if outdated != booked:
            self.wrong.append(f"{task.name}: status finds {outdated} of {booked} outdated")
        said = self.office("regrade", task.name, "--changed", "--jobs", self.jobs)
        for line in said.splitlines():
            if (words := line.split()) and words[0] in self.students and words[4:] != [task.mended]:
                self.wrong.append(f"{task.name}: the mended check changed other points: {line}")
        if ", 0 lose," not in said:
            self.wrong.append(f"{task.name}: the mended check took points from a student")
        self.compare(task.name, {**self.pieces, **lost})
        self.office("grade", task.name, "--jobs", self.jobs)
        with self._book() as book:
            for submission in book.assignment_submissions(task.name):
                self.again += submission.needs_manual_grade

    def compare(self, assignment: str, pieces: dict[tuple[str, str], Piece]) -> None:
        """Compare the exported grades of an assignment with the right grades."""
        self.office("export", assignment, "--tasks")
        with (self.root / "grading/grades_plain.csv").open(encoding="utf-8-sig") as file:
            rows = {row["student_id"]: row for row in csv.DictReader(file)}
        for (student, name), piece in pieces.items():
            if name == assignment:
                told = self._difference(rows.get(student), student, name, piece)
                line = f"{name}: {student} ({piece.kind}): {told}"
                self.wrong += [line] if told and line not in self.wrong else []

    def _difference(self, row: dict[str, str] | None, student: str, name: str, piece: Piece) -> str:
        """Return how a line of the plain export differs from the right one, or an empty string."""
        if row is None:
            return "is not in the export"
        if piece.points is None:
            return "" if row["status"] == "missing" else f"is {row['status']}, but must be missing"
        if row["status"] != "graded":
            self.lost[f"{name}: {student} ({piece.kind}): {row['status']}"] = None
            return ""
        if any(map(math.isnan, piece.points.values())):
            return "has an answer that nobody was asked to read"
        days = math.ceil(self.late[student, name] - self.extended.get((student, name), 0))
        raw = sum(piece.points.values())
        penalty = min(raw, max(0, days - FREE) * SHARE * raw)
        must = {
            **piece.points,
            "days_late": max(0, days),
            "raw_score": raw,
            "late_penalty": penalty,
            "score": raw - penalty,
        }
        found = {key: float(row[key] or 0) for key in must}
        return "; ".join(
            f"{key} is {found[key]:g}, but must be {value:g}"
            for key, value in must.items()
            if abs(found[key] - value) > CLOSE
        )

    def compare_systems(self, number: int, task: Task) -> None:
        """Compare the points that Canvas or Moodle would import with the plain export."""
        system = SYSTEMS[number % len(SYSTEMS)]
        if system == "folder":
            return
        fill, to = self.root / "systems" / task.name / "list.csv", self.root / "filled.csv"
        self.office("export", task.name, "--for", system, "--fill", str(fill), "--to", str(to))
        with (self.root / "grading/grades_plain.csv").open(encoding="utf-8-sig") as file:
            plain = {r["student_id"]: r["score"] for r in csv.DictReader(file)}
        who, points = {
            "canvas": ("SIS Login ID", f"{task.name} (7)"),
            "moodle": ("ID number", "Grade"),
        }[system]
        with to.open() as file:
            for row in csv.DictReader(file):
                if row[who] and abs(float(row[points] or 0) - float(plain[row[who]] or 0)) > CLOSE:
                    self.wrong.append(
                        f"{task.name}: {row[who]} has {row[points]} points for {system}, but "
                        f"{plain[row[who]]} in the plain export"
                    )

    def compare_pages(self, task: Task) -> None:
        """Check that each student has a page with all of their points."""
        for (student, name), piece in self.pieces.items():
            page = self.root / "grading/feedback" / student / name / f"{name}.html"
            if name == task.name and page.is_file() != bool(piece.points):
                self.wrong.append(
                    f"{name}: {student} must have {'no' if page.is_file() else 'a'} feedback page"
                )


def report(term: Term, tasks: list[Task], fixed: float, told: str, *, write: bool) -> None:
    """Print the table; also write it if `write`."""
    office, cluster = term.office, Cluster(jobs=2, chunk=10, minutes=60)
    handed_in = sum(piece.kind != "nothing" for piece in term.pieces.values())
    grading = office.seconds["grade"] + office.seconds["regrade"]
    each = grading / max(1, office.examined)
    rest = (sum(office.seconds.values()) - grading) / max(1, handed_in)
    again = office.examined / max(1, handed_in)
    students, assignments = FULL
    full = students * assignments
    hours = full * (again * each + rest) / 3600
    elements = math.ceil(students / cluster.chunk)
    minutes = (fixed + cluster.chunk * each) / cluster.jobs / 60
    slurm = f"{elements} jobs, each {cluster.chunk} submissions, 2 cores, {minutes:.1f} minutes"
    command = " ".join(["python benchmarks/term.py", *sys.argv[1:]])
    kinds = collections.Counter(p.kind.partition(" ")[0] for p in term.pieces.values())
    markdown = f"""# A term played through

{sentence(command)} {told}

{len(term.students)} students; {", ".join(task.name for task in tasks)}.

| | |
|---|---|
| pieces of work, student × assignment | {len(term.pieces)} |
| … of them handed in | {handed_in} |
| examined, resubmissions and the mended check included | {office.examined} |
| lost | **{len(term.lost)}** |
| with wrong points, pages or penalties | **{len(term.wrong)}** |
| points by hand that somebody had to give again | {term.again} |
| not graded because the machine failed | {office.gave_up} |
| tried again because the machine failed | {office.retries} |
| processor time of one examination, booking included, at least | {each:.1f} s |
| all other commands, for each piece, at least | {rest:.1f} s |

*Derived* for {students} students, {assignments} assignments, each piece examined as often as here:

| | |
|---|---|
| 2 cores, all commands | {hours / 2:.1f} hours in the whole term |
| one assignment, 2 cores | {students * each / 2 / 3600:.1f} hours |
| one assignment, `--slurm` | {slurm} |

Kinds: {", ".join(f"{n} {kind}" for kind, n in kinds.most_common())}.
"""
    series = {
        "processor time of an examination, booking included (s)": [each],
        "processor time of all other commands, each piece (s)": [rest],
        "lost, of all handed in (ratio)": [len(term.lost) / max(1, handed_in)],
        "wrong, of all handed in (ratio)": [len(term.wrong) / max(1, handed_in)],
    }
    publish("term", markdown, series, write)


def main() -> int:
    """Play the term; return 1 if anything was lost or wrong."""
    parser = arguments(__doc__, rounds=1)
    parser.add_argument("--students", type=int, default=12, help="number of students")
    parser.add_argument("--assignments", nargs="+", default=ALL[1:3], choices=[*ALL, "all"])
    parser.add_argument("--jobs", default="2", help="submissions graded at the same time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--said", type=Path, help="write commands and their output to this file")
    options = parser.parse_args()
    names = ALL if "all" in options.assignments else options.assignments
    busy = BusyElsewhere()
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "course"
        for name in names:
            for folder in ("assignments", "instructor"):
                to = root / folder / name
                copytree(ROOT / folder / name, to, ignore=ignore_patterns("__pycache__"))
        config = (ROOT / "nbgrader_config.py").read_text()
        (root / "nbgrader_config.py").write_text(config + POLICY)
        for path in (root, root.parent):
            path.chmod(0o755)
        office = Office(root, options.said)
        term = Term(root, office, options.students, options.jobs, options.seed)
        due = datetime(2026, 9, 7, 23, 59)
        tasks = [Task(name, due + timedelta(weeks=week)) for week, name in enumerate(names)]
        for number, task in enumerate(tasks):
            term.week(number, task, mended=number == len(tasks) // 2)
        for number, task in enumerate(tasks):  # a later week must not change an earlier one
            term.compare(task.name, term.pieces)
            term.compare_systems(number, task)
        office("status")
        office("export")
        office("export", "--for", "moodle", "--to", str(root / "term.csv"), "--zero")
        canary = [sys.executable, "-m", "autograder.passes.canary", "--course", str(root)]
        fixed = processor(subprocess.Popen(canary, stdout=subprocess.DEVNULL, cwd=ROOT))
        told = f"Others used {100 * busy.share():.0f} % of the machine meanwhile."
        report(term, tasks, fixed, told, write=options.write)
    for line in [*term.lost, *term.wrong]:
        print(line)
    return int(bool(term.lost or term.wrong))


if __name__ == "__main__":
    sys.exit(main())
