"""Records of what the desk has been given so far, kept on the desk."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

FOLDER = ".desk"
"""The folder on the desk for the records, and for a file while it is being written."""
_VERSION = 1


@dataclass
class Record:
    """The record of one path.

    Attributes:
        given: digest of the last version that was handed out, or put beside the student's file;
            empty during a refresh, and after a refresh that was interrupted.
        words: digests of the words of all versions so far: a file with such words is not edited.

    """

    given: str = ""
    words: list[str] = field(default_factory=list)


class Records:
    """The records of a desk, by path."""

    def __init__(self, desk: Path) -> None:
        self._desk = desk
        self._path = desk / FOLDER / "handed_out.json"
        self.damaged = False
        self.by_path: dict[str, Record] = {}
        if self._path.exists():
            try:
                told = json.loads(self._path.read_bytes())
                files = told["files"] if told["version"] == _VERSION else {}
                self.by_path = {
                    path: Record(str(entry["given"]), [str(word) for word in entry["words"]])
                    for path, entry in files.items()
                }
            except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
                self.damaged = True

    def of(self, path: str) -> Record:
        """Return the record of a path; create it if there is none yet."""
        return self.by_path.setdefault(path, Record())

    def save(self) -> None:
        """Write the records completely or not at all."""
        files = {path: asdict(record) for path, record in sorted(self.by_path.items())}
        told = {"version": _VERSION, "files": files}
        put(self._desk, self._path, f"{json.dumps(told, indent=1)}\n".encode())


def put(desk: Path, path: Path, content: bytes, read_only: bool = False) -> None:
    """Write a file of the desk, so that it holds either the old or the complete new content.

    Raises:
        OSError: the place cannot be written to.

    """
    part = desk / FOLDER / "part"  # one name: the next call reuses what an interruption left
    part.parent.mkdir(parents=True, exist_ok=True)
    part.unlink(missing_ok=True)
    part.write_bytes(content)
    if read_only:
        part.chmod(0o444)
    path.parent.mkdir(parents=True, exist_ok=True)
    os.replace(part, path)
