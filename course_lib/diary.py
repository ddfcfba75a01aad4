"""A record of the student's work on the desk: predictions, their scores, and checks.

The files have one line per entry, and are in the same folder as the desk's own records. Outside a
desk, nothing is recorded. A disk that is full or read-only does not stop a lecture.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

FOLDER = ".desk"
"""The folder on a desk that holds its records."""
PREDICTIONS = "predictions.jsonl"
CHECKS = "checks.jsonl"


def keep(file: str, entry: dict[str, Any]) -> None:
    """Append `entry` to a file of the desk; do nothing if the working directory is not on a desk.

    The line begins with the time, the working directory (the notebook's folder) relative to the
    desk, and the notebook's name if JupyterLab gives it.
    """
    desk = find_desk(Path.cwd())
    if desk is None:
        return
    line: dict[str, Any] = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    line["folder"] = Path.cwd().relative_to(desk).as_posix()
    if notebook := Path(os.environ.get("JPY_SESSION_NAME", "")).stem:
        line["notebook"] = notebook
    try:
        with (desk / FOLDER / file).open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({**line, **entry}, ensure_ascii=False) + "\n")
    except OSError:
        return


def kept(file: str, desk: Path) -> list[dict[str, Any]]:
    """Return the entries in a file of `desk`; skip lines that cannot be read."""
    entries = []
    try:
        text = (desk / FOLDER / file).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):  # cut by a full disk, or edited
            continue
        if isinstance(entry, dict):
            entries.append(entry)
    return entries


def in_lecture(entry: dict[str, Any]) -> bool:
    """Tell whether an entry was made in a lecture; a check there is part of the lecture."""
    return Path(str(entry.get("folder"))).parts[:1] == ("lectures",)


def find_desk(start: Path) -> Path | None:
    """Return the nearest desk from `start` upwards; ``None`` if there is none."""
    return next((folder for folder in (start, *start.parents) if (folder / FOLDER).is_dir()), None)
