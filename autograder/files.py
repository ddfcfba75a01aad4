"""Write a file completely or not at all, even if the program is interrupted."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str, encoding: str = "utf-8") -> None:
    """Write a file, and make its folder if needed. Readers see the old content or the new one.

    Args:
        path: the file.
        text: its content; line ends are kept.
        encoding: the file's encoding; a character that it lacks becomes a question mark.

    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.part")  # other processes may write it too
    with draft.open("w", encoding=encoding, errors="replace", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # without this, a power loss may leave an empty file
    draft.replace(path)
