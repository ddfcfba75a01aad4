"""Describe a `Ranks` object: in one line, and as a table in a notebook."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

from course_lib.ranks.explain.words import format_bytes
from course_lib.ranks.placement import Placement


def one_line(placement: Placement, pids: Sequence[int], closed: bool) -> str:
    """Return, for example, ``<Ranks 4: CPU processes, gloo; pids 7, 8, 9, 10>``."""
    return f"<Ranks {len(placement.devices)}: {placement.why}; {_state(pids, closed)}>"


def _state(pids: Sequence[int], closed: bool) -> str:
    if closed:
        return "closed"
    return "pids " + ", ".join(map(str, pids)) if pids else "start with the first call"


def html_table(placement: Placement, pids: Sequence[int], closed: bool) -> str:
    """Return a table: rank, device, backend, process, memory."""
    head = "".join(f"<th>{name}</th>" for name in ("rank", "device", "backend", "pid", "memory"))
    rows = []
    for rank, device in enumerate(placement.devices):
        pid = pids[rank] if rank < len(pids) else None
        memory = memory_of(pid) if pid is not None else None
        cells = (
            str(rank),
            device,
            placement.backend,
            "" if pid is None else str(pid),
            "" if memory is None else format_bytes(memory),
        )
        rows.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    alive = pids and not closed
    title = html.escape(placement.why if alive else f"{placement.why}; {_state(pids, closed)}")
    return (
        f"<table><caption>{title}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def memory_of(pid: int) -> int | None:
    """Return a process's share of memory in bytes (PSS: shared memory counts in part)."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith("Pss:"):
            return 1024 * int(line.split()[1])
    return None
