"""``autograder inquiries``: students' questions about their grades, and your answers."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from autograder.collection.listing import SourceError
from autograder.collection.tables import format_rows
from autograder.collection.times import course_zone, read_time, shown
from autograder.course import data_folder, load_config
from autograder.examination.verdict import Verdict
from autograder.inquiries.taking import in_words, read_dates, take, tasks_of, why_not, write_dates
from autograder.inquiries.thread import (
    CLOSED,
    INSTRUCTOR,
    OPEN,
    STUDENT,
    Thread,
    all_threads,
    read_thread,
    thread_path,
    write_thread,
)
from course_lib.ranks.explain.words import counted

DESCRIPTION = """\
Keep students' questions about grades, in one file for each student and task:
grading/inquiries/STUDENT/ASSIGNMENT/TASK.md. To ask, a student submits a text file that has the
task's name, TASK.md. The next run of autograder feedback shows question and answer under
that task."""
EXAMPLES = """\
examples:
  autograder inquiries dates 02_data_parallel_sgd --from "2026-11-25 00:00" \\
      --until "2026-12-02 23:59"
  autograder inquiries take 02_data_parallel_sgd questions.zip
  autograder inquiries list
  autograder inquiries show ada 02_data_parallel_sgd average_gradients
  autograder inquiries answer ada 02_data_parallel_sgd average_gradients --file answer.md
  autograder inquiries close ada 02_data_parallel_sgd average_gradients"""


class InquiryError(ValueError):
    """The action cannot be done; the message says why."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options: one parser for each action."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listed = actions.add_parser("list", help="list the questions that wait for an answer")
    listed.add_argument(
        "assignment", nargs="?", default="", help="the assignment's name (default: all)"
    )
    listed.add_argument(
        "--all", action="store_true", help="also list answered and closed questions"
    )
    taken = actions.add_parser(
        "take", help="collect questions from a folder, a zip or nbgrader's exchange"
    )
    taken.add_argument("assignment")
    taken.add_argument("source", help="'exchange', or the path of a folder or a zip")
    taken.add_argument("--roster", type=Path, metavar="CSV", help="class list, as for collect")
    dates = actions.add_parser(
        "dates", help="set the first and the last date for students' questions"
    )
    dates.add_argument("assignment")
    dates.add_argument(
        "--from",
        dest="first",
        metavar="TIME",
        help="take questions from this time on (default: at once)",
    )
    dates.add_argument(
        "--until",
        dest="last",
        metavar="TIME",
        help="take questions until this time (default: without end)",
    )
    for name, told in (
        ("show", "print a question, its answers, and the task's verdict"),
        ("ask", "record a question on a student's behalf, for example one that came by mail"),
        ("answer", "answer a question"),
        ("close", "close a question; a new text from the student opens it again"),
    ):
        action = actions.add_parser(name, help=told)
        for argument in ("student", "assignment", "task"):
            action.add_argument(argument)
        if name in ("ask", "answer"):
            text = action.add_mutually_exclusive_group(required=True)
            text.add_argument("--text", help="the text")
            text.add_argument("--file", type=Path, help="a file with the text")
    for name in ("take", "ask"):
        told = "take questions even outside the dates, and from students who submitted nothing"
        actions.choices[name].add_argument("--anyway", action="store_true", help=told)


def run(root: Path, arguments: argparse.Namespace) -> int:
    """Do one action for the command line; return the exit status."""
    try:
        return _ACTIONS[arguments.action](root, data_folder(root), arguments)
    except (InquiryError, SourceError, ValueError) as error:
        print(f"autograder inquiries: {error}", file=sys.stderr)
        return 2


def _list(root: Path, data: Path, arguments: argparse.Namespace) -> int:
    threads = all_threads(data, arguments.assignment)
    listed = [thread for thread in threads if arguments.all or thread.status == OPEN]
    zone = course_zone(data)
    rows = [
        (t.status, shown(t.messages[-1].when, zone) if t.messages else "", t.student, t.assignment,
         t.task, t.messages[-1].text.splitlines()[0][:50] if t.messages else "")
        for t in listed
    ]  # fmt: skip
    if rows:
        print(format_rows(("status", "since", "student", "assignment", "task", "last"), rows))
    waiting = sum(thread.status == OPEN for thread in threads)
    print(f"questions that wait for an answer: {waiting} of {len(threads)}")
    return 0


def _take(root: Path, data: Path, arguments: argparse.Namespace) -> int:
    tasks = _tasks(root, arguments.assignment)
    _must_be_open(data, arguments)
    new, refused = take(root, data, arguments.assignment, arguments.source, tasks, arguments.roster)
    for thread in new:
        print(f"new: {thread.student}, {thread.task}: {thread.messages[-1].text.splitlines()[0]}")
    for each in refused:
        print(f"refused: {each.who} {each.path}: {each.why}")
    told = counted(len(new), "new question")
    print(f"{told}, {len(refused)} refused; next: autograder inquiries list")
    return int(bool(refused))


def _dates(root: Path, data: Path, arguments: argparse.Namespace) -> int:
    _tasks(root, arguments.assignment)
    times, zone = (arguments.first, arguments.last), course_zone(data)
    if any(times):
        first, last = (read_time(time, zone) if time else None for time in times)
        if first and last and last <= first:
            raise InquiryError("--until must be after --from")
        write_dates(data, arguments.assignment, (first, last))
    dates = read_dates(data, arguments.assignment)
    print(f"{arguments.assignment}: questions are taken {in_words(dates, zone)}")
    return 0


def _show(root: Path, data: Path, arguments: argparse.Namespace) -> int:
    thread = _known(root, data, arguments)
    print(thread)
    for path in sorted((data / "verdicts" / thread.assignment / thread.student).glob("*.json")):
        for check in Verdict.read(path).checks:
            if check.task == thread.task:
                print(f"{check.score:g} of {check.max_score:g} points. {check.reason}")
        print(f"to examine it again with explanations: autograder replay {path}")
    return 0


def _write(root: Path, data: Path, arguments: argparse.Namespace) -> int:
    if arguments.action == "ask":
        _must_be_open(data, arguments)
        _tasks(root, arguments.assignment, arguments.task)
        names = _names(arguments)
        if not (data / "submitted" / names[0] / names[1]).is_dir() and not arguments.anyway:
            raise InquiryError(
                f"{names[0]} has submitted nothing for {names[1]}. To take the question anyway, "
                "add --anyway"
            )
        thread = read_thread(data, *names)
    else:
        thread = _known(root, data, arguments)
    try:
        text = arguments.text or arguments.file.read_text(encoding="utf-8")
    except OSError as error:
        raise InquiryError(f"cannot read {arguments.file}: {error.strerror}") from error
    if not thread.add(STUDENT if arguments.action == "ask" else INSTRUCTOR, text):
        print("nothing was changed: this text is recorded already")
        return 0
    print(f"{thread.status}: {write_thread(data, thread)}")
    if arguments.action == "answer":
        print(f"To show the answer to the student, run: autograder feedback {thread.assignment}")
    return 0


def _close(root: Path, data: Path, arguments: argparse.Namespace) -> int:
    thread = _known(root, data, arguments)
    thread.status = CLOSED
    print(f"closed: {write_thread(data, thread)}")
    return 0


def _known(root: Path, data: Path, arguments: argparse.Namespace) -> Thread:
    names = _names(arguments)
    if not thread_path(data, *names).is_file():
        raise InquiryError(
            f"{names[0]} asked nothing about {names[2]} of {names[1]}. To see all questions, "
            "run: autograder inquiries list --all"
        )
    return read_thread(data, *names)


def _names(arguments: argparse.Namespace) -> tuple[str, str, str]:
    names = (arguments.student, arguments.assignment, arguments.task)
    for name in names:
        if "/" in name or name.startswith("."):
            raise InquiryError(
                f"{name!r} cannot be a student, assignment or task: it contains / or starts with "
                "a dot"
            )
    return names


def _tasks(root: Path, assignment: str, task: str = "") -> list[str]:
    tasks = tasks_of(root, assignment, str(load_config(root).CourseDirectory.source_directory))
    if not tasks:
        raise InquiryError(
            f"there is no assignment {assignment!r} with tasks in assignments/ or instructor/: "
            "check its name"
        )
    if task and task not in tasks:
        raise InquiryError(f"{assignment} has no task {task!r}. Its tasks are: {', '.join(tasks)}")
    return tasks


def _must_be_open(data: Path, arguments: argparse.Namespace) -> None:
    if (
        why := why_not(read_dates(data, arguments.assignment), course_zone(data))
    ) and not arguments.anyway:
        raise InquiryError(f"{why}. To take questions anyway, add --anyway")


_ACTIONS = {
    "list": _list,
    "take": _take,
    "dates": _dates,
    "show": _show,
    "ask": _write,
    "answer": _write,
    "close": _close,
}
