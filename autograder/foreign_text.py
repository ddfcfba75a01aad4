"""Make text that somebody else wrote safe to show in a terminal, page or spreadsheet."""

from __future__ import annotations

import unicodedata

_STARTS_A_FORMULA = ("=", "+", "-", "@")


def printable(text: str) -> str:
    """Return text on one line, without characters that move the cursor or reverse other text."""
    return "".join(c if _is_shown(c) else "\N{REPLACEMENT CHARACTER}" for c in text)


def _is_shown(character: str) -> bool:
    kind = unicodedata.category(character)
    return kind[0] != "C" and kind not in ("Zl", "Zp")


def no_formula(text: str) -> str:
    """Return text that a spreadsheet never reads as a formula, even if it begins with spaces."""
    return f"'{text}" if text.lstrip(" \u00a0\u3000").startswith(_STARTS_A_FORMULA) else text
