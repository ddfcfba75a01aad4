"""Equations as MathML, which browsers draw themselves: there is nothing to fetch."""

from __future__ import annotations

import re

from docutils.utils.math.latex2mathml import tex2mathml

_SIZE = re.compile(r"\\[bB]igg?[lrm]?(?![a-zA-Z])")  # of brackets: MathML finds its own
_ACCENTED = re.compile(r"(\\(?:bar|hat|tilde)\s*\w)(?=_)")  # docutils would set the index below it


def mathml(text: str, block: bool) -> str:
    """Return an equation in LaTeX as MathML.

    Raises docutils' MathError where it cannot be read.
    """
    if block and "\\\\" in text and "\\begin" not in text:
        text = f"\\begin{{split}}{text}\\end{{split}}"
    return tex2mathml(_ACCENTED.sub(r"\1{}", _SIZE.sub("", text)), as_block=block)
