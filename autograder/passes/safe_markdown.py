"""Turn a student's Markdown into HTML that runs nothing and fetches nothing.

nbconvert can clean HTML, but nbgrader's pages do not use this. So the script of an
``<img onerror=…>`` in a text cell ran in the instructor's browser, with the instructor's rights
over every grade. If only the Markdown source were cleaned, as by ``sanitize_html``, HTML that
Markdown itself makes would be missed, such as links to ``javascript:``. So this module cleans the
resulting HTML, and keeps only what a list allows.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from html import escape
from typing import Any

from bleach.sanitizer import Cleaner
from jinja2 import pass_context
from jinja2.runtime import Context
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

from autograder.tables import plain_text

MAX_SOURCE = 20_000
"""Largest number of characters to convert; a longer text is shown as it was typed."""
MAX_TAGS = 1000
"""Largest number of tags to convert, because nested tags take quadratic time."""
MAX_SECONDS = 5.0
"""Processor time to convert all cells of a page; later texts are shown as they were typed."""
_USED = "seconds of safe_markdown"
_TAGS = {
    *("p", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "blockquote", "ul", "ol", "li"),
    *("em", "strong", "b", "i", "del", "code", "pre", "kbd", "sub", "sup", "a", "img"),
    *("table", "thead", "tbody", "tr", "th", "td", "details", "summary", "div", "span"),
}
_DATA = re.compile(r"data:image/(png|jpeg|gif);base64,[A-Za-z0-9+/=\s]*")
_LINK = re.compile(r"https?://|mailto:|#", re.IGNORECASE)
_CLASS = re.compile(r"highlight( hl-\w+)?|[a-z]{1,2}\d?")  # pygments'; none changes the layout


def _allowed(tag: str, name: str, value: str) -> bool:
    if tag == "a" and name == "href":
        return _LINK.match(value.strip()) is not None
    if tag == "img" and name == "src":
        return _DATA.fullmatch(value) is not None
    if tag in ("div", "span") and name == "class":
        return _CLASS.fullmatch(value) is not None
    return (tag, name) in (("img", "alt"), ("a", "title"), ("ol", "start"))


_cleaner = Cleaner(tags=_TAGS, attributes=_allowed, protocols={"http", "https", "mailto", "data"})


class _Renderer(IPythonRenderer):
    """nbconvert's renderer, except that a picture without an attachment raises no error."""

    def image(self, text: str, url: str, title: str | None = None) -> str:
        """Return a picture, or only its description if its attachment was left out."""
        name = url.removeprefix("attachment:")
        if name != url and name not in self.attachments:
            return escape(text)
        return str(super().image(text, url, title))


def safe_html(source: str, attachments: Mapping[str, Any] | None = None) -> str:
    """Return Markdown as HTML without scripts, styles, forms or addresses to load.

    Args:
        source: the Markdown.
        attachments: name → type → base64 of the pictures that it shows.

    """
    if len(source) > MAX_SOURCE or source.count("<") > MAX_TAGS:
        return _as_typed(source)
    try:
        renderer = _Renderer(
            escape=False, exclude_anchor_links=True, attachments=dict(attachments or {})
        )
        html = MarkdownWithMath(renderer=renderer).render(source)
        return plain_text(str(_cleaner.clean(html)))
    except Exception:  # the parser may raise anything, but the text must always be shown
        return _as_typed(source)


@pass_context
def markdown2html(context: Context, source: str) -> str:
    """Return safe HTML: the Jinja filter that replaces nbconvert's filter of the same name."""
    page: dict[str, Any] = context.get("resources") or {}
    start = time.process_time()
    attachments = (context.get("cell") or {}).get("attachments")
    has_time = page.get(_USED, 0.0) < MAX_SECONDS
    html = safe_html(source, attachments) if has_time else _as_typed(source)
    page[_USED] = page.get(_USED, 0.0) + time.process_time() - start
    return html


def _as_typed(source: str) -> str:
    return f"<pre>{escape(plain_text(source))}</pre>"
