"""Sphinx's settings for ``make site``: the source is the repository itself, and nothing is run."""

from __future__ import annotations

import ast
import base64
import html
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from docutils import nodes
from docutils.utils.math import MathError
from myst_nb.sphinx_ import HideCodeCellNode
from sphinx.util import logging

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE)]

from mathml import mathml  # noqa: E402

from course_lib.checking.asking import HOW_TO_CHOOSE  # noqa: E402

project = "From mini-batch SGD to DDP"
project_copyright = "2026, the authors of From mini-batch SGD to DDP. Notebooks: CC BY 4.0"
root_doc = "docs/site/index"
include_patterns = [
    *("docs/site/**.md", "docs/site/api/*.rst", "docs/*.md", "README.md", "CONTRIBUTING.md"),
    *("CHANGELOG.md", "AGENTS.md", "lectures/**.ipynb", "assignments/*/*.ipynb"),
    *("assignments/README.md", "instructor/*.md", "benchmarks/README.md"),
    *("benchmarks/results/*.md", "autograder/README.md"),
    *("course_lib/ranks/README.md", "course_lib/ranks/*/README.md"),
]
exclude_patterns = ["**/.ipynb_checkpoints", ".venv", "_site", "work", "grading"]
extensions = [
    *("myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"),
    "sphinx.ext.viewcode",
]

nb_execution_mode = "off"  # what is committed is what was run
nb_mime_priority_overrides = [("html", "text/html", 5)]
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 4
myst_dmath_double_inline = True
# A link to a folder is for readers of the repository; build.py checks every link of the pages.
suppress_warnings = ["myst.xref_missing", "myst.header", "mystnb.unknown_mime_type"]
suppress_warnings += ["misc.highlighting_failure"]  # an error in words, taken for Python

autosummary_generate = True
autodoc_typehints = "none"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "sphinx_book_theme"
html_title = project
html_static_path = ["static"]
html_extra_path = ["../calculator.html"]
html_theme_options = {
    "use_download_button": True,
    "show_toc_level": 2,
    "home_page_in_toc": True,
    "footer_content_items": ["copyright.html"],
    "navigation_with_keys": False,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_css_files = ["course.css"]
html_math_renderer = "mathml"  # which browsers draw themselves: nothing to fetch
nb_ipywidgets_js: dict[str, dict[str, str]] = {}

_log = logging.getLogger(__name__)
# In JupyterLab the place of a heading is its text, with dashes for spaces.
_HEADING = re.compile(r"\]\(([^()\s#]*\.ipynb|)#([^()\s]+)\)")
_WIDE = 640
"""Pixels. The words in a wider figure could not be read in the width of a phone."""
_PICTURE = re.compile(r"<img (?=[^>]*;base64,([\w+/]{32}))")  # also those in a check's report
_NUMBER = re.compile(r"lectures/(\d\d)_")
_TITLE = re.compile(r'"# ')  # the first one in a notebook's file
_FOLDER = re.compile(r"\[([^\[\]]*)\]\(((?:\.\./)*(?:[\w.-]+/)*[\w.-]+)/?\)")


def _to_pages(app: Any, docname: str, source: list[str]) -> None:
    """Let links lead to pages: of a folder to its notebook or README, of headings to theirs.

    And number the lectures' titles: people and other pages call a lecture by its number.
    """
    here = (ROOT / docname).parent

    def page(found: re.Match[str]) -> str:
        folder = here / found[2]
        if folder.is_dir():
            for name in (f"{folder.name}.ipynb", "README.md"):
                if (folder / name).is_file():
                    return f"[{found[1]}]({found[2]}/{name})"
            return found[1]  # a folder of code has no page: its name stays
        return found[0]

    def slug(found: re.Match[str]) -> str:
        if not (found[1] or (ROOT / f"{docname}.ipynb").is_file()):
            return found[0]
        words = re.sub(r"[^\w\- ]", "", unquote(found[2]).lower())
        return f"]({found[1]}#{words})"

    source[0] = _HEADING.sub(slug, _FOLDER.sub(page, source[0]))
    if number := _NUMBER.match(docname):
        source[0] = _TITLE.sub(f'"# {number[1]} · ', source[0], count=1)


def _fold(app: Any, docname: str, source: list[str]) -> None:
    """Fold code that only draws, which has the tag ``drawing``, and mark wide figures.

    On paper (`pdf.py`) nothing is folded, and code that only draws or imports is not there.
    """
    if not (ROOT / f"{docname}.ipynb").is_file():
        return
    notebook = json.loads(source[0])
    on_paper = app.builder.name == "singlehtml"
    for cell in notebook["cells"]:
        cell["source"] = "".join(cell["source"])
        if "answer" in cell["metadata"]:
            cell["outputs"] = cell["metadata"].pop("answer")
        for data in (output.get("data", {}) for output in cell.get("outputs", [])):
            if "text/html" in data:  # on a page, nothing can be typed
                shown = "".join(data["text/html"]).replace(HOW_TO_CHOOSE, "Choose, then read on.")
                data["text/html"] = shown
        tags = cell["metadata"].setdefault("tags", [])
        code = cell["cell_type"] == "code"
        if on_paper:
            drop = code and ({"hide-input", "drawing"} & set(tags) or _only_prepares(cell))
            tags[:] = ["remove-input"] if drop else []
            continue
        if "drawing" in tags:
            tags.append("hide-input")
        for data in (output.get("data", {}) for output in cell.get("outputs", [])):
            shown = _PICTURE.sub(_marked, "".join(data.get("text/html", "")))
            if _is_wide(data.get("image/png", "")):
                shown = shown.replace('"course-explore', '"wide course-explore')
            if "text/html" in data:
                data["text/html"] = shown
    source[0] = json.dumps(notebook, ensure_ascii=False)


def _only_prepares(cell: dict[str, Any]) -> bool:
    """Return whether a code cell imports, or sets a style, and has no result."""
    if cell["outputs"] or not cell["source"].startswith(("import ", "from ")):
        return False
    for each in ast.parse(cell["source"]).body:
        is_call = isinstance(each, ast.Expr) and isinstance(each.value, ast.Call)
        if not (is_call or isinstance(each, ast.Import | ast.ImportFrom)):
            return False
    return True


def _is_wide(png: str | list[str]) -> bool:
    """Return whether a PNG in base64 is wide; its first 24 bytes, if there are any, say so."""
    return int.from_bytes(base64.b64decode("".join(png)[:32])[16:20]) > _WIDE


def _marked(picture: re.Match[str]) -> str:
    return '<img class="wide" ' if _is_wide(picture[1]) else picture[0]


def _name_folds(app: Any, doctree: nodes.document, docname: str) -> None:
    """Say on what is folded what it is: the code, or an answer."""
    for fold in doctree.findall(HideCodeCellNode):
        thing = "code" if "above-input" in fold["classes"] else "answer"
        fold["prompt_show"], fold["prompt_hide"] = f"Show the {thing}", f"Hide the {thing}"


def _plain(
    app: Any, what: str, name: str, thing: object, options: object, lines: list[str]
) -> None:
    """Let docstrings, which are plain text, be what reStructuredText would misread.

    A bar is a bar; what a module's docstring sets in, a table or an example, stays as it is set.
    """
    shown: list[str] = []
    inside = False
    for number, line in enumerate(lines):
        starts = line.startswith("    ") and (number == 0 or not lines[number - 1].strip())
        if what == "module" and starts and not inside and not line.lstrip().startswith(">>>"):
            shown += ["::", ""]
            inside = True
        inside = inside and (not line.strip() or line.startswith("    "))
        # Odd parts stand between double backquotes, where a bar is one already.
        parts = re.split(r"(``.+?``)", line)
        bars = [part if n % 2 else part.replace("|", r"\|") for n, part in enumerate(parts)]
        shown.append(line if inside else "".join(bars))
    lines[:] = shown


def _math(block: bool) -> Callable[[Any, nodes.Element], None]:
    """Return what writes an equation as MathML, and lets its node's children alone."""

    def visit(writer: Any, node: nodes.Element) -> None:
        text = node.astext()
        try:
            drawn = mathml(text, block)
        except MathError as error:
            _log.warning("equation %r: %s", text, error, location=node)
            drawn = f"<code>{html.escape(text)}</code>"
        writer.body.append(f'<div class="math">{drawn}</div>' if block else drawn)
        raise nodes.SkipNode

    return visit


def setup(app: Any) -> None:
    """Connect the hooks and the equations."""
    app.connect("source-read", _to_pages)
    app.connect("source-read", _fold)
    app.connect("doctree-resolved", _name_folds)
    app.connect("autodoc-process-docstring", _plain, priority=400)  # before napoleon
    app.add_html_math_renderer("mathml", (_math(False), None), (_math(True), None))
