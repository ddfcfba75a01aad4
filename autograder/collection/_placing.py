"""Put submissions into ``submitted/``: the latest counts, and no earlier one is lost.

``collected/ASSIGNMENT.json`` keeps a digest of each collected submission. Grading may repair a
notebook in ``submitted/``, but the digest still shows whether the same submission comes again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

from autograder.collection.formats import SECRET
from autograder.collection.times import read_stamp, stamp
from autograder.files import write_whole

NEW, UNCHANGED, REPLACED, OLDER = "taken", "unchanged", "taken, newer", "kept aside, older"


class Places:
    """The submissions of one assignment that were collected: their folders, and a record of them.

    Each is recorded at once, so Ctrl-C loses none.

    Args:
        data: the class's folder.
        assignment: its name.

    """

    def __init__(self, data: Path, assignment: str) -> None:
        self._data, self._assignment = data, assignment
        self._record = data / "collected" / f"{assignment}.json"
        self._taken: dict[str, dict[str, Any]] = {}
        if self._record.is_file():
            self._taken = json.loads(self._record.read_text(encoding="utf-8"))

    def submitted(self, student: str) -> Path:
        """Return the folder where nbgrader looks for a submission."""
        return self._data / "submitted" / student / self._assignment

    def earlier(self, student: str) -> Path:
        """Return the folder of the student's submissions that no longer count."""
        return self._data / "earlier" / student / self._assignment

    def digest(self, student: str) -> str:
        """Return the digest of the student's submission that counts, or an empty string."""
        return str(self._taken.get(student, {}).get("sha256", ""))

    def time(self, student: str) -> datetime | None:
        """Return the time of the submission that counts, if its timestamp gives one."""
        return _time_of(self.submitted(student))

    def first_time(self, student: str, sha256: str) -> datetime | None:
        """Return when the student handed in exactly these files before, if they did."""
        folders = [self.earlier(student) / sha256[:12]]
        if self.digest(student) == sha256:
            folders.append(self.submitted(student))
        return min((time for folder in folders if (time := _time_of(folder))), default=None)

    def place(
        self, student: str, files: dict[str, bytes], time: datetime | None, at: datetime | None
    ) -> str:
        """Put a submission where nbgrader looks for it, or keep it aside; return what was done.

        Args:
            student: the student's id.
            files: name → content, without ``timestamp.txt``.
            time: None if it is unknown, and then the submission counts as the latest.
            at: the time that decides which is the latest; `time` is earlier if the same was handed
                in before.

        """
        target, sha256 = self.submitted(student), digest_of(files)
        old_sha256 = (self.digest(student) or digest_of(_read(target))) if target.is_dir() else ""
        if old_sha256 == sha256:
            before = _time_of(target)
            if time is not None and before != time:
                (target / "timestamp.txt").write_text(stamp(time), encoding="utf-8")
            self._keep(student, sha256, at)
            return UNCHANGED if time in (None, before) else f"{UNCHANGED}, but with a new time"
        outcome = NEW
        if old_sha256:
            recorded = str(self._taken.get(student, {}).get("handed_in", ""))
            before = read_stamp(recorded) or _time_of(target)
            if before is not None and at is not None:
                is_older = at < before
            else:  # without times: what was replaced once is older
                is_older = (self.earlier(student) / sha256[:12]).is_dir()
            if is_older:
                return self.keep_aside(student, files, time)
            earlier = self.earlier(student) / old_sha256[:12]
            earlier.parent.mkdir(parents=True, exist_ok=True)
            if earlier.is_dir():
                shutil.rmtree(target)
            else:
                target.rename(earlier)
            outcome = REPLACED
        _write(target, files, time)
        self._keep(student, sha256, at)
        return outcome

    def keep_aside(self, student: str, files: dict[str, bytes], time: datetime | None) -> str:
        """Keep a submission that does not count, unless it is kept already."""
        if not (folder := self.earlier(student) / digest_of(files)[:12]).is_dir():
            _write(folder, files, time)
        return OLDER

    def _keep(self, student: str, sha256: str, at: datetime | None) -> None:
        """Record the submission that counts now."""
        entry = {"sha256": sha256, "handed_in": stamp(at) if at else ""}
        if self._taken.get(student) == entry:
            return
        self._taken[student] = entry
        text = json.dumps(dict(sorted(self._taken.items())), indent=1, ensure_ascii=False)
        write_whole(self._record, f"{text}\n")


def digest_of(files: dict[str, bytes]) -> str:
    """Return the SHA-256 of files and their names, without what ``nbgrader submit`` adds."""
    parts = [
        f"{name}\0{hashlib.sha256(data).hexdigest()}\n"
        for name, data in sorted(files.items())
        if name != SECRET
    ]
    return hashlib.sha256("".join(parts).encode("utf-8", "surrogatepass")).hexdigest()


def _write(target: Path, files: dict[str, bytes], time: datetime | None) -> None:
    """Write a folder completely or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="collecting-", dir=target.parents[2]) as folder:
        draft = Path(folder, target.name)
        draft.mkdir()
        for name, data in files.items():
            (draft / name).parent.mkdir(parents=True, exist_ok=True)
            (draft / name).write_bytes(data)
        if time is not None:
            (draft / "timestamp.txt").write_text(stamp(time), encoding="utf-8")
        draft.rename(target)


def _time_of(folder: Path) -> datetime | None:
    try:
        return read_stamp((folder / "timestamp.txt").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None


def _read(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink() and path.name != "timestamp.txt"
    }
