"""Text that somebody else wrote, shown: no terminal, page or spreadsheet obeys it."""

from __future__ import annotations

import unicodedata

_STARTS_A_FORMULA = ("=", "+", "-", "@")


def printable(text: str) -> str:
    """Return text on one line, in which no character moves the cursor or turns others around."""
    return "".join(c if _is_shown(c) else "\N{REPLACEMENT CHARACTER}" for c in text)


def _is_shown(character: str) -> bool:
    kind = unicodedata.category(character)
    return kind[0] != "C" and kind not in ("Zl", "Zp")


def no_formula(text: str) -> str:
    """Return text that a spreadsheet takes for text: spaces before a formula do not hide it."""
    return f"'{text}" if text.lstrip(" \u00a0\u3000").startswith(_STARTS_A_FORMULA) else text
