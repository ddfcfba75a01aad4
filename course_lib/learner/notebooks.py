"""The student's part of a notebook, its *words*: the cells that students can write in.

Outputs, execution counts and metadata do not count: opening and running a notebook changes them.
Empty cells do not count either, because running the last cell adds one.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

import nbformat

Cell = dict[str, Any]
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
    notebook = _parse(content)
    if notebook is None:
        return None
    content_of_cells = [
        [cell.get("cell_type"), _source(cell), cell.get("attachments") or {}]
        for cell in _written(notebook)
    ]
    return digest(json.dumps(content_of_cells, sort_keys=True).encode())


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
    notebook = _parse(content) if path.endswith(".ipynb") else None
    return any(cell.get("outputs") for cell in notebook["cells"]) if notebook else False


def _parse(content: bytes) -> Cell | None:
    """Return a notebook as JSON, or None if it is not a notebook."""
    try:
        notebook = json.loads(content)
    except (ValueError, RecursionError):
        return None
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
        return None
    return notebook if all(isinstance(_source(cell), str) for cell in cells) else None


def _source(cell: Cell) -> Any:
    """Return a cell's source as one text; a file may hold it as a list of lines."""
    source = cell.get("source", "")
    if isinstance(source, list) and all(isinstance(line, str) for line in source):
        return "".join(source)
    return source


def _written(notebook: Cell) -> list[Cell]:
    return [cell for cell in notebook["cells"] if _source(cell).strip()]
