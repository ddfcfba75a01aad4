"""The page that a student reads: nbgrader's feedback, without scripts and without downloads.

The page says what was examined. It shows formulas as pictures, because MathJax is a script that a
browser downloads.
"""

from __future__ import annotations

import base64
import io
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from nbconvert.exporters import HTMLExporter
from nbconvert.exporters.exporter import ResourcesDict
from nbconvert.preprocessors import Preprocessor
from nbformat import NotebookNode, from_dict

from autograder.course import Folders
from autograder.passes.tell import tell
from autograder.tables import plain_text
from course_lib.learner.notebooks import MARK_SCHEME
from course_lib.learner.what_counts import role

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; font-src data:; "
    "form-action 'none'; base-uri 'none'"
)
_STYLE = Path(__file__).with_name("feedback.css")


class PlainText(Preprocessor):
    """Replaces all characters of a notebook that control a terminal or turn other text."""

    def preprocess(
        self, nb: NotebookNode, resources: ResourcesDict
    ) -> tuple[NotebookNode, ResourcesDict]:
        """Return the notebook with plain text, and with its pictures as they were."""
        return from_dict(_plain(nb)), resources


def _plain(value: Any, kind: str = "") -> Any:
    if isinstance(value, str) and not kind.startswith("image/"):
        return plain_text(value)
    if isinstance(value, list):
        return [_plain(part, kind) for part in value]
    return {k: _plain(v, k) for k, v in value.items()} if isinstance(value, dict) else value


class FeedbackPage(HTMLExporter):
    """nbconvert's exporter, for ``GenerateFeedback.exporter_class``."""

    def _preprocess(
        self, nb: NotebookNode, resources: ResourcesDict
    ) -> tuple[NotebookNode, ResourcesDict]:
        nb, resources = super()._preprocess(nb, resources)  # type: ignore[no-untyped-call]
        data = Folders.of(self.parent.coursedir).data  # type: ignore[union-attr]
        names = resources["nbgrader"]
        tell(nb, data, names["assignment"], names["student"], names["notebook"])
        for cell in nb.cells:
            if cell.cell_type == "markdown" and not _is_theirs(cell):
                cell.source = with_formulas(MARK_SCHEME.sub("", cell.source))
        return nb, resources

    def from_notebook_node(  # type: ignore[override]
        self, nb: NotebookNode, resources: Any = None, **options: Any
    ) -> tuple[str, ResourcesDict]:
        """Return the page."""
        html, resources = super().from_notebook_node(nb, resources, **options)
        return locked(_with_names(html)), resources


def _with_names(html: str) -> str:
    """Return the page with each task's name in the list above; nbgrader writes "Test cell"."""
    contents, end, rest = html.partition("</ol>")
    link = r'(<li><a href="#(?!comment-)([^"]+)">)[^<]*'
    return re.sub(link, r"\1<code>\2</code>", contents) + end + rest


def _is_theirs(cell: NotebookNode) -> bool:
    """Tell whether a student may have written a text cell; only our own cells get pictures."""
    return not role(cell).get("locked")


def locked(html: str) -> str:
    """Return a page without scripts, and with a rule that forbids scripts and downloads."""
    html = re.sub(r"<script\b.*?</script\s*>", "", html, flags=re.DOTALL | re.IGNORECASE)
    meta = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"/>'
    meta += '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
    html = re.sub(r"<head[^>]*>", lambda match: match[0] + meta, html, count=1)
    style = _STYLE.read_text(encoding="utf-8")
    return html.replace("</head>", f"<style>\n{style}</style></head>", 1)


_FORMULA = re.compile(r"\$\$(?P<display>[^$]+)\$\$|(?<![\\$\w])\$(?P<inline>[^$\s`][^$`]*)\$(?!\w)")


def with_formulas(source: str) -> str:
    """Return Markdown with a picture for each formula. If it cannot be drawn, it stays text."""
    parts = re.split(r"(```.*?```|`[^`\n]*`)", source, flags=re.DOTALL)
    parts[::2] = [_FORMULA.sub(_picture, part) for part in parts[::2]]
    return "".join(parts)


def _picture(match: re.Match[str]) -> str:
    formula = " ".join((match["display"] or match["inline"]).split())
    data = _drawn(formula)
    if not data:
        return match[0]
    alt = re.sub(r"([\\\[\]*_])", r"\\\1", formula)
    image = f"![{alt}](data:image/png;base64,{data})"
    return f"\n\n{image}\n\n" if match["display"] else image


@lru_cache(maxsize=1000)
def _drawn(formula: str) -> str:
    """Return the formula as a PNG in base64; empty if matplotlib cannot draw it."""
    from matplotlib.mathtext import math_to_image

    plain = re.sub(r"\\(Bigl|Bigr|bigl|bigr|Big|big)(?![a-z])", "", formula)
    image = io.BytesIO()
    try:
        math_to_image(f"${plain}$", image, dpi=110, format="png")
    except Exception:  # mathtext knows only part of TeX, and pyparsing raises many kinds of errors
        return ""
    return base64.b64encode(image.getvalue()).decode("ascii")
