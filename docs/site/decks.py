"""Makes slides of the lectures, from what is committed: ``python docs/site/decks.py``.

A heading begins a slide, and so do a figure and what follows a question, *Predict: …*. A slide has
the first sentence of each paragraph; the key n adds the others. Code that only draws is left out,
answers to exercises stay folded. The browser cuts what is too long into several slides. Nothing of
a notebook is run, nothing is fetched, and a deck is one file.
"""

from __future__ import annotations

import argparse
import html
import re
import sys
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote, urlsplit

from blocks import HERE, ROOT, Block, blocks_of, parse_lectures, style_of

LINES = 24
"""Lines of a listing that fit a slide."""
PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title>
<style>{style}</style></head><body><main>
{sections}
</main><nav class="where"><a href="index.html">all lectures</a><button class="back"
aria-label="previous slide">‹</button><output></output><button class="on"
aria-label="next slide">›</button></nav><script type="module">{script}</script></body></html>
"""
INDEX = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>Slides</title><style>
body {{ color: #1f2328; font: 18px/1.6 system-ui, sans-serif; margin: 3em auto; max-width: 42em;
  padding: 0 1em; }}
a {{ color: #0072b2; }} li {{ list-style: none; }} ul {{ padding: 0; }}
kbd {{ border: 1px solid #d1d9e0; border-radius: 4px; padding: 0 .3em; }}
</style></head><body><h1>From mini-batch SGD to DDP</h1><ul>
{lectures}
</ul><p><kbd>←</kbd> <kbd>→</kbd> turn the slides, <kbd>Home</kbd> and <kbd>End</kbd> lead to the
first and the last one. <kbd>n</kbd> shows the full text, and hides it again. A browser prints a
deck with one slide a page. The lectures themselves are notebooks: they can be run.</p></body>
</html>
"""


class Deck(NamedTuple):
    """A lecture's name, its title, and its slides as a page."""

    name: str
    title: str
    page: str


def deck_of(path: Path) -> Deck:
    """Return the slides of a lecture.

    Raises ValueError if it does not begin with a title.
    """
    names = {each.stem for each in path.parent.glob("*.ipynb")}

    def link(href: str) -> str | None:
        parts = urlsplit(href)
        file = Path(unquote(parts.path))
        lecture = file.stem in names and str(file.parent) == "."
        place = f"#{quote(unquote(parts.fragment))}" if parts.fragment else ""
        if not parts.path:
            return place
        return f"{file.stem}.html{place}" if lecture and file.suffix == ".ipynb" else None

    blocks = list(blocks_of(path, link))
    if not blocks or (blocks[0].kind, blocks[0].level) != ("heading", 1):
        raise ValueError(
            f"{path.name} has no title for its first slide: begin the notebook with # and a title"
        )
    title = f"{path.stem[:2]} · {blocks[0].words}"
    page = PAGE.format(
        title=html.escape(title),
        style=style_of("deck.css"),
        sections="\n".join(_sections(blocks, path.stem[:2])),
        script=(HERE / "deck" / "deck.js").read_text(encoding="utf-8"),
    )
    return Deck(path.stem, title, page)


def _sections(blocks: list[Block], number: str) -> list[str]:
    """Return an element for each heading, with what belongs to it; the title has its number."""
    sections: list[str] = []
    for block in blocks:
        if block.kind == "heading":
            place = html.escape(block.place, quote=True)
            first = block.level == 1
            name = f"{number} · {block.html}" if first else block.html
            look = "slide title" if first else "slide"
            sections.append(f'<section class="{look}" id="{place}"><h2>{name}</h2>')
        else:
            for part in _parts(block.html):
                sections[-1] += f'\n<div class="block {block.kind}">{part}</div>'
    return [f"{section}</section>" for section in sections]


def _parts(block: str) -> list[str]:
    """Cut a listing that is longer than a slide; one in colours stays whole."""
    found = re.fullmatch("(<pre[^>]*>)(.*)</pre>", block.strip(), re.DOTALL)
    if found is None or ("code" not in found[1] and "<span" in found[2]):
        return [block]
    lines = found[2].rstrip("\n").split("\n")
    return [
        f"{found[1]}{chr(10).join(lines[at : at + LINES])}</pre>"
        for at in range(0, len(lines), LINES)
    ]


def make(lectures: list[Path], to: Path) -> int:
    """Write a deck for each lecture, and a page that lists them; return the exit status."""
    to.mkdir(parents=True, exist_ok=True)
    listed = []
    for number, path in enumerate(lectures, 1):
        print(f"{number}/{len(lectures)} {path.stem} ...", flush=True)
        try:
            deck = deck_of(path)
        except ValueError as error:
            print(f"decks.py: {error}", file=sys.stderr)
            return 1
        (to / f"{deck.name}.html").write_text(deck.page, encoding="utf-8")
        listed.append(f'<li><a href="{deck.name}.html">{html.escape(deck.title)}</a></li>')
    (to / "index.html").write_text(INDEX.format(lectures="\n".join(listed)), encoding="utf-8")
    print(f"{len(listed)} decks; open {to / 'index.html'}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, and make the decks of all lectures or of those that are named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--to",
        type=Path,
        default=ROOT / "_site" / "slides",
        help="folder of the slides (default: _site/slides)",
    )
    given = parse_lectures(parser, arguments)
    return make(given.lectures, given.to.resolve())


if __name__ == "__main__":
    sys.exit(main())
