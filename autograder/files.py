"""Files that are there whole or not at all, whatever happens while they are written."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str, encoding: str = "utf-8", errors: str = "strict") -> None:
    """Write a file, and its folder if there is none; readers find the old one or the new one.

    Args:
        path: the file.
        text: its content, line ends as they are.
        encoding: of the file.
        errors: what becomes of a character that cannot be encoded, as for `str.encode`.

    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.part")  # others may write it, too
    draft.write_text(text, encoding=encoding, errors=errors, newline="")
    draft.replace(path)
