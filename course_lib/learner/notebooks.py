"""The student's part of a notebook, its *words*: the cells that students can write in.

Outputs, execution counts and metadata do not count: opening and running a notebook changes them.
Empty cells do not count either, because running the last cell adds one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re

import nbformat
from nbformat import NotebookNode

EXPLORE = "explore"
"""Tag of cells for free exploration: neither the grader nor ``course check`` runs them."""
MARK_SCHEME = re.compile(r"=== BEGIN MARK SCHEME ===\s*(.*?)\s*=== END MARK SCHEME ===", re.DOTALL)
"""What a written question says to graders alone, in the source of an assignment."""


def digest(content: bytes) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def words(path: str, content: bytes) -> str | None:
    """Return a digest of a file's words; None for a notebook that cannot be read.

    Args:
        path: its ending shows whether it is a notebook. In any other file, all bytes count.
        content: the file's content.

    """
    if not path.endswith(".ipynb"):
        return digest(content)
    try:
        cells = [
            [cell.cell_type, cell.source, cell.get("attachments") or {}]
            for cell in _cells(content)
            if cell.source.strip()
        ]
        return digest(json.dumps(cells, sort_keys=True).encode())
    except Exception:  # nbformat raises errors of any type on a damaged file
        return None


def cleared(content: bytes) -> bytes:
    """Return a notebook without outputs; the same notebook always gives the same bytes.

    Raises:
        ValueError: this is not a notebook; the message says why.

    """
    notebook = nbformat.reads(content.decode(), as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
            cell.metadata.pop("answer", None)
    text: str = nbformat.writes(notebook)
    return f"{text.rstrip()}\n".encode()


def has_outputs(path: str, content: bytes) -> bool:
    """Tell whether any cell of a notebook has an output."""
    with contextlib.suppress(Exception):
        return path.endswith(".ipynb") and any(cell.get("outputs") for cell in _cells(content))
    return False


def _cells(content: bytes) -> list[NotebookNode]:
    cells: list[NotebookNode] = nbformat.reader.reads(content.decode()).cells
    return cells
