"""Format numbers, ranks and tables for people."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

_LISTED = 8
"""Up to this number of ranks, or of runs of ranks, all are listed."""


def names(ranks: Sequence[int]) -> str:
    """Return ``Rank 2`` or ``Ranks 0, 1``."""
    listed = ", ".join(map(str, ranks)) if len(ranks) <= _LISTED else in_short(ranks)
    return ("Rank " if len(ranks) == 1 else "Ranks ") + listed


def names_inside(ranks: Sequence[int]) -> str:
    """Return ``rank 2`` or ``ranks 0, 1``, for use inside a sentence."""
    return names(ranks).lower()


def spans(ranks: Sequence[int]) -> str:
    """Return ranks, in order, with runs shortened: ``0-3, 5``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(f"{a}" if a == b else f"{a}{'-' if b > a + 1 else ', '}{b}" for a, b in runs)


def in_short(ranks: Sequence[int]) -> str:
    """Return ranks, in order, in about 40 characters at most: ``0-3, 5``, ``0, 4, 8, … (64)``."""
    text = spans(ranks)
    if text.count(",") < _LISTED:
        return text
    first = ", ".join(text.split(", ")[:_LISTED])
    return f"{first}, … ({len(ranks)} ranks)"


def one_or_many(ranks: Sequence[int], singular: str, plural: str) -> str:
    """Return the form of a verb that agrees with `ranks`: `singular` for one, else `plural`."""
    return singular if len(ranks) == 1 else plural


def counted(count: int, noun: str) -> str:
    """Return ``1 message`` or ``3 messages``."""
    return f"{count} {noun}{'s' * (count != 1)}"


def format_bytes(count: int) -> str:
    """Return a byte count for people, in binary units: ``4.0 KiB``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as columns of text, two spaces apart, without spaces at the ends of lines.

    A 中 is two columns wide.
    """
    widths = [max(map(_width, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(c + " " * (w - _width(c)) for c, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _width(text: str) -> int:
    return sum(1 + (unicodedata.east_asian_width(c) in "WF") for c in text)
