"""Formulas of released text as pictures, each with the formula as its description."""

from __future__ import annotations

import base64
import io
import re
from functools import lru_cache

_FORMULA = re.compile(r"\$\$(?P<display>[^$]+)\$\$|(?<![\\$\w])\$(?P<inline>[^$\s`][^$`]*)\$(?!\w)")


def with_formulas(source: str) -> str:
    """Return Markdown with a picture for each formula; one that cannot be drawn stays text."""
    parts = re.split(r"(```.*?```|`[^`\n]*`)", source, flags=re.DOTALL)
    parts[::2] = [_FORMULA.sub(_picture, part) for part in parts[::2]]
    return "".join(parts)


def _picture(found: re.Match[str]) -> str:
    formula = " ".join((found["display"] or found["inline"]).split())
    data = _drawn(formula)
    if not data:
        return found[0]
    alt = re.sub(r"([\\\[\]*_])", r"\\\1", formula)
    image = f"![{alt}](data:image/png;base64,{data})"
    return f"\n\n{image}\n\n" if found["display"] else image


@lru_cache(maxsize=1000)
def _drawn(formula: str) -> str:
    """Return the formula as a PNG in base64; empty if matplotlib cannot draw it."""
    from matplotlib.mathtext import math_to_image

    plain = re.sub(r"\\(Bigl|Bigr|bigl|bigr|Big|big)(?![a-z])", "", formula)
    image = io.BytesIO()
    try:
        math_to_image(f"${plain}$", image, dpi=110, format="png")
    except Exception:  # mathtext knows a part of TeX, and pyparsing raises many kinds
        return ""
    return base64.b64encode(image.getvalue()).decode("ascii")
