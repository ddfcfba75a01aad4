"""What a student did on the desk, a line each: predictions, their scores, and checks.

The files lie beside the desk's own records. Away from a desk nothing is kept, and a disk that is
full or read-only is no reason to stop a lecture.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

DESK = ".desk"
PREDICTIONS = "predictions.jsonl"
CHECKS = "checks.jsonl"


def keep(file: str, entry: dict[str, Any]) -> None:
    """Append `entry` to a file of the desk that the working directory lies on, if it lies on one.

    The line begins with the time, and with the notebook's name where JupyterLab tells it.
    """
    desk = find_desk(Path.cwd())
    if desk is None:
        return
    line: dict[str, Any] = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    if notebook := Path(os.environ.get("JPY_SESSION_NAME", "")).stem:
        line["notebook"] = notebook
    try:
        with (desk / DESK / file).open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({**line, **entry}, ensure_ascii=False) + "\n")
    except OSError:
        return


def kept(file: str, desk: Path) -> list[dict[str, Any]]:
    """Return what a file of `desk` holds; lines that cannot be read are left out."""
    found = []
    try:
        text = (desk / DESK / file).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):  # cut by a full disk, or edited
            continue
        if isinstance(entry, dict):
            found.append(entry)
    return found


def find_desk(start: Path) -> Path | None:
    """Return the nearest folder, from `start` upwards, that is a desk; ``None``: none is."""
    return next((folder for folder in (start, *start.parents) if (folder / DESK).is_dir()), None)
