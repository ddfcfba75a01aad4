"""One question about one task, its answer, and further messages, as a Markdown file.

``grading/inquiries/STUDENT/ASSIGNMENT/TASK.md`` can be read in any editor. Each message has a line
with its writer and time. The text below that line is quoted, so a student's text can never look
like such a line from the instructor. A file that somebody put there by hand counts as the student's
first message.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from autograder.files import write_whole

OPEN, ANSWERED, CLOSED = "open", "answered", "closed"
STUDENT, INSTRUCTOR = "student", "instructor"
MAX_TEXT = 10_000
"""Largest number of characters in one message."""

_HEAD = re.compile(r"\*\*(student|instructor)\*\*, (\d{4}-\d\d-\d\d \d\d:\d\d) UTC:")
_STATUS = re.compile(r"Status: (open|answered|closed)")


@dataclass(frozen=True)
class Message:
    """One side's message, and its time."""

    who: str
    when: datetime
    text: str


@dataclass
class Thread:
    """The messages about one task of one student, oldest first."""

    student: str
    assignment: str
    task: str
    status: str = OPEN
    messages: list[Message] = field(default_factory=list)

    def add(self, who: str, text: str, when: datetime | None = None) -> bool:
        """Add a message; return False if it only repeats its writer's last one.

        A student's message opens the thread again; an instructor's message answers it.

        Raises:
            ValueError: the text is empty or too long.

        """
        text = text.replace("\r\n", "\n").replace("\0", "").strip()
        if not text:
            raise ValueError("the text is empty")
        if len(text) > MAX_TEXT:
            raise ValueError(f"the text is longer than {MAX_TEXT} characters")
        theirs = [message.text for message in self.messages if message.who == who]
        if text in theirs:
            return False
        self.messages.append(Message(who, when or datetime.now(UTC), text))
        self.status = OPEN if who == STUDENT else ANSWERED
        return True

    def __str__(self) -> str:
        parts = [f"# {self.task} of {self.assignment}: {self.student}", f"Status: {self.status}"]
        for message in self.messages:
            parts.append(f"**{message.who}**, {message.when.astimezone(UTC):%Y-%m-%d %H:%M} UTC:")
            parts.append("\n".join(f"> {line}".rstrip() for line in message.text.splitlines()))
        return "\n\n".join(parts) + "\n"


def thread_path(data: Path, student: str, assignment: str, task: str) -> Path:
    """Return where a thread is kept."""
    return data / "inquiries" / student / assignment / f"{task}.md"


def read_thread(data: Path, student: str, assignment: str, task: str) -> Thread:
    """Return a thread; an empty one if there is none."""
    thread, path = Thread(student, assignment, task), thread_path(data, student, assignment, task)
    if not path.is_file():
        return thread
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = text.splitlines()
    if not any(_HEAD.fullmatch(line) for line in lines):  # somebody put the file there by hand
        if text.strip():
            written = datetime.fromtimestamp(path.stat().st_mtime, UTC)
            thread.add(STUDENT, text[:MAX_TEXT], written)
        return thread
    quoted: list[str] = []
    head: re.Match[str] | None = None
    for line in [*lines, "**student**, 0001-01-01 00:00 UTC:"]:
        if found := _HEAD.fullmatch(line):
            if head is not None:
                when = datetime.strptime(head[2], "%Y-%m-%d %H:%M").replace(tzinfo=UTC)
                thread.messages.append(Message(head[1], when, "\n".join(quoted).strip()))
            head, quoted = found, []
        elif line.startswith(">"):
            quoted.append(line[1:].removeprefix(" "))
        elif (status := _STATUS.fullmatch(line)) and head is None:
            thread.status = status[1]
    return thread


def write_thread(data: Path, thread: Thread) -> Path:
    """Write a thread; return its path."""
    path = thread_path(data, thread.student, thread.assignment, thread.task)
    write_whole(path, str(thread))
    return path


def all_threads(data: Path, assignment: str = "") -> list[Thread]:
    """Return the threads of one or all assignments; the thread that waits longest comes first."""
    found = [
        read_thread(data, path.parts[-3], path.parts[-2], path.stem)
        for path in (data / "inquiries").glob(f"*/{assignment or '*'}/*.md")
    ]
    return sorted(found, key=lambda t: (str(t.messages[-1].when) if t.messages else "", t.student))
