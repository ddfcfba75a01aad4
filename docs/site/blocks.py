"""A lecture's notebook as blocks of HTML: what the printed course is made of.

A block is a paragraph, a list, an equation, a piece of code or a result.
"""

from __future__ import annotations

import argparse
import base64
import html
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from folding import QUESTION, only_draws, only_prepares
from markdown_it import MarkdownIt
from markdown_it.token import Token
from mathml import mathml
from mdit_py_plugins.amsmath import amsmath_plugin
from mdit_py_plugins.dollarmath import dollarmath_plugin
from nbconvert.filters import ansi2html
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
Linker = Callable[[str], str | None]
"""Returns where a link of the notebook leads on our page, or None: then its text stays alone."""

_STILL = re.compile(r'<img alt="[^"]*" src="data:image/png;base64,[^"]*">')
_LINKS_ALONE = re.compile(r"\[Symbols\].*\[Glossary\]\([^)]*\)\s*")


class Block(NamedTuple):
    """A block's kind, and its look.

    ``kind`` is "heading", "text", "question", "code", "output", "figure", "guess" or "folded". A
    heading has its level and its place.
    """

    kind: str
    html: str
    level: int = 0
    place: str = ""


def blocks_of(path: Path, link: Linker, place: str) -> Iterator[Block]:
    """Yield the blocks of a notebook, in its order.

    Code that only draws or imports is left out. The places of headings begin with `place`. Of a
    figure that can be moved, the picture of how it begins is taken.
    """
    parser = _parser(path.parent)
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        cell["source"] = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            yield from _of_text(_LINKS_ALONE.sub("", cell["source"]), parser, link, place)
        elif cell["cell_type"] == "code":
            yield from _of_code(cell)


def style_of(sheet: str) -> str:
    """Return the colours of code, and a sheet that stands beside this file."""
    colours: str = HtmlFormatter(style="a11y-high-contrast-light").get_style_defs(".code")
    return colours + (HERE / sheet).read_text(encoding="utf-8")


def parse_lectures(
    parser: argparse.ArgumentParser, arguments: list[str] | None
) -> argparse.Namespace:
    """Parse a command line that names notebooks; ``lectures`` are those, or all."""
    parser.add_argument("lectures", nargs="*", type=Path, help="notebooks (default: all lectures)")
    given = parser.parse_args(arguments)
    folder = ROOT / "lectures"
    given.lectures = given.lectures or sorted(folder.glob("*.ipynb"))
    if missing := [path for path in given.lectures if not path.is_file()]:
        parser.error(f"there is no notebook {missing[0]}; lectures are in {folder}")
    return given


def place_of(heading: str) -> str:
    """Return the place of a heading as JupyterLab names it: dashes for spaces."""
    return heading.strip().replace(" ", "-")


def _parser(folder: Path) -> MarkdownIt:
    def equation(text: str, options: dict[str, bool]) -> str:
        return mathml(text, options.get("display_mode", False))

    def coloured(code: str, language: str, _options: str) -> str:
        return _coloured(code, language or "text")

    def image(tokens: Any, number: int, _options: Any, _environment: Any) -> str:
        token = tokens[number]
        data = _embedded(folder / unquote(str(token.attrs["src"])))
        return f'<img alt="{html.escape(token.content, quote=True)}" src="{data}">'

    parser = MarkdownIt("commonmark", {"highlight": coloured}).enable("table")
    parser.use(dollarmath_plugin, renderer=equation, double_inline=True)
    parser.use(amsmath_plugin, renderer=lambda text: mathml(text, block=True))
    parser.renderer.rules["image"] = image
    return parser


def _of_text(source: str, parser: MarkdownIt, link: Linker, place: str) -> Iterator[Block]:
    tokens = parser.parse(source)
    for token in tokens:
        _lead(token.children or [], link)

    def drawn(some: list[Token]) -> str:
        return parser.renderer.render(some, parser.options, {})

    for group in _groups(tokens):
        first = group[0]
        text = group[1].content if len(group) > 1 else ""
        if first.type == "heading_open":
            yield Block("heading", drawn(group[1:-1]), int(first.tag[1]), place + place_of(text))
        elif first.type == "html_block" and first.content.startswith("<details"):
            yield Block("folded", drawn(group))
        elif first.type == "paragraph_open" and text.startswith(QUESTION):
            yield Block("question", drawn(group))
        elif first.type == "paragraph_open" and group[1].children[0].type == "image":
            yield Block("figure", drawn(group))
        else:
            yield Block("text", drawn(group))


def _groups(tokens: list[Token]) -> Iterator[list[Token]]:
    """Yield the tokens of each block; what is folded is one block, with all that is in it."""
    group: list[Token] = []
    depth = 0
    for token in tokens:
        group.append(token)
        depth += token.nesting
        if token.type == "html_block":
            depth += token.content.count("<details") - token.content.count("</details")
        if depth == 0:
            yield group
            group = []
    if group:
        yield group


def _lead(children: list[Token], link: Linker) -> None:
    """Let links lead to where their target is on our page, if it is there."""
    dead = False
    for token in children:
        if token.type == "link_open":
            href = str(token.attrs["href"])
            to = href if href.startswith("http") else link(href)
            dead = to is None
            token.attrs = {} if to is None else {"href": to}
        if dead and token.type in ("link_open", "link_close"):
            token.tag = "span"
            dead = token.type == "link_open"


def _of_code(cell: dict[str, Any]) -> Iterator[Block]:
    tags = cell["metadata"].get("tags", [])
    results = list(_results(cell["outputs"]))
    asks = any(block.kind == "guess" for block in results)
    if not (only_draws(cell) or only_prepares(cell) or asks or "hide-input" in tags):
        yield Block("code", _coloured(cell["source"], "python"))
    yield from results


def _results(outputs: list[dict[str, Any]]) -> Iterator[Block]:
    printed = ""
    for output in [*outputs, {"output_type": "end"}]:
        if output["output_type"] == "stream":
            printed += "".join(output["text"])
            continue
        if printed.strip():
            yield Block("output", _said(printed))
        printed = ""
        if output["output_type"] == "error":
            yield Block("output", _said(f"{output['ename']}: {output['evalue']}"))
        elif "data" in output:
            yield _shown({kind: "".join(text) for kind, text in output["data"].items()})


def _shown(data: dict[str, str]) -> Block:
    page = data.get("text/html", "")
    if picture := _STILL.search(page) if "<script" in page else None:
        return Block("figure", picture[0])
    if "image/png" in data and page:
        return Block("figure", page)
    if 'class="course-guess' in page:
        return Block("output" if "✗" in data.get("text/plain", "") else "guess", page)
    return Block("output", page or _said(data.get("text/plain", "")))


def _said(text: str) -> str:
    return f'<pre class="said">{ansi2html(text.rstrip())}</pre>'


def _coloured(code: str, language: str) -> str:
    try:
        lexer = get_lexer_by_name("python" if language.startswith("py") else language)
    except ClassNotFound:
        lexer = get_lexer_by_name("text")
    return f'<pre class="code">{highlight(code, lexer, HtmlFormatter(nowrap=True))}</pre>'


def _embedded(path: Path) -> str:
    kind = {"svg": "svg+xml", "jpg": "jpeg"}.get(path.suffix[1:], path.suffix[1:])
    return f"data:image/{kind};base64,{base64.b64encode(path.read_bytes()).decode('ascii')}"
