"""Prints the lectures' cards, eight on a page of A4: ``python docs/site/cards.py --to cards.pdf``.

A card is the lecture's cell with the heading ``### Card``: its question, formula, figure and bug.
The figure is the first image after the section to which the card links.
"""

from __future__ import annotations

import argparse
import base64
import io
import re
import sys
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

import nbformat
from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.image import imread
from matplotlib.patches import Rectangle
from matplotlib.textpath import TextPath

ROOT = Path(__file__).resolve().parents[2]
FORM = """### Card
- **Question** …
- **Formula** $…$
- **Figure** [name of the section](#section-anchor)
- **Bug** …"""
CARD = re.compile(
    r"### Card\n- \*\*Question\*\* (.+)\n- \*\*Formula\*\* (\$.+\$)\n"
    r"- \*\*Figure\*\* \[.+\]\(#(.+)\)\n- \*\*Bug\*\* (.+)"
)
WORDS = 60
PAGE = 8.27, 11.69  # inches of A4
COLUMNS, ROWS = 2, 4
MARGIN, GAP, PAD = 0.3, 0.15, 0.12  # inches: of the page, between cards, inside a card
LINE = 0.15  # inches from one line of text to the next
TITLE = FontProperties(size=9, weight="bold")
TEXT = FontProperties(size=8)


class Card(NamedTuple):
    """A lecture's number, title, question, formula (mathtext), bug, and its figure as a PNG."""

    number: str
    title: str
    question: str
    formula: str
    bug: str
    figure: bytes


def card_of(path: Path) -> Card:
    """Return the card of a lecture.

    Raises ValueError if there is not exactly one card, if it has another form or too many words, or
    if no figure follows.
    """
    cells = nbformat.read(path, as_version=4).cells
    texts = [cell.source for cell in cells if cell.source.startswith("### Card")]
    found = CARD.fullmatch(texts[0].strip()) if len(texts) == 1 else None
    if found is None:
        raise ValueError(f"{path.name}: write exactly one card, in this form:\n{FORM}")
    question, formula, section, bug = found.groups()
    if (words := len(texts[0].replace(formula, "").split())) > WORDS:
        raise ValueError(f"{path.name}: the card has {words} words; at most {WORDS} are allowed")
    title = cells[0].source.partition("\n")[0].removeprefix("# ")
    figure = figure_after(cells, section)
    if figure is None:
        raise ValueError(f"{path.name}: the card names #{section}, but no figure follows there")
    return Card(path.name[:2], title, question, formula, bug, figure)


def figure_after(cells: list[nbformat.NotebookNode], section: str) -> bytes | None:
    """Return the first PNG after the heading that ``#section`` names, or None."""
    reached = False
    for cell in cells:
        headings = re.findall(r"^#+ +(.+)$", cell.source, re.MULTILINE)
        if cell.cell_type == "markdown" and plain(unquote(section)) in map(plain, headings):
            reached = True
        outputs = cell.metadata.get("answer", cell.get("outputs", []))  # see answers.py
        for output in outputs if reached else []:
            if "image/png" in output.get("data", {}):
                return base64.b64decode(output.data["image/png"])
    return None


def plain(heading: str) -> str:
    """Return a heading, or a link to it, in the same letters: no signs, dashes for spaces."""
    return re.sub(r"[^\w-]", "", heading.strip().replace(" ", "-")).lower()


def wrapped(text: str, font: FontProperties, width: float) -> list[str]:
    """Return lines no wider than ``width`` inches; a formula stays on one line."""
    text = text.replace("`", "").replace("*", "")
    text = re.sub(r"\$[^$]+\$", lambda found: found[0].replace(" ", "\xa0"), text)
    lines = [""]
    for word in text.split(" "):
        word = word.replace("\xa0", " ")
        longer = f"{lines[-1]} {word}".strip()
        if TextPath((0, 0), longer, prop=font).get_extents().width <= 72 * width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def draw(page: Figure, card: Card, left: float, top: float, width: float, height: float) -> None:
    """Draw a card into a rectangle; all in inches, from the page's lower left corner."""

    def at(x: float, y: float) -> tuple[float, float]:
        return x / PAGE[0], y / PAGE[1]

    frame = Rectangle(
        at(left, top - height), width / PAGE[0], height / PAGE[1], fill=False, linewidth=0.8
    )
    page.add_artist(frame)
    left, width, bottom = left + PAD, width - 2 * PAD, top - height + PAD
    y = top - PAD
    for line in wrapped(f"{card.number}  {card.title}", TITLE, width):
        page.text(*at(left, y), line, font=TITLE, va="top")
        y -= LINE
    y -= 0.04
    again = card.question == card.title
    for line in [] if again else wrapped(card.question, TEXT, width):
        page.text(*at(left, y), line, font=TEXT, va="top")
        y -= LINE
    for line in reversed(wrapped(f"Bug: {card.bug}", TEXT, width)):
        page.text(*at(left, bottom), line, font=TEXT, va="bottom")
        bottom += LINE
    natural = TextPath((0, 0), card.formula, size=11).get_extents()  # in points, 72 an inch
    smaller = min(1.0, 72 * width / natural.width)
    y -= 0.08
    middle = left + width / 2
    page.text(*at(middle, y), card.formula, fontsize=11 * smaller, ha="center", va="top")
    y -= smaller * natural.height / 72 + 0.12
    bottom += 0.08
    axes = page.add_axes((*at(left, bottom), *at(width, y - bottom)))
    axes.imshow(imread(io.BytesIO(card.figure)), interpolation="none")
    axes.set_axis_off()


def print_cards(cards: list[Card], to: Path) -> None:
    """Write the cards into a PDF."""
    width = (PAGE[0] - 2 * MARGIN - (COLUMNS - 1) * GAP) / COLUMNS
    height = (PAGE[1] - 2 * MARGIN - (ROWS - 1) * GAP) / ROWS
    with PdfPages(to) as pdf:
        for first in range(0, len(cards), COLUMNS * ROWS):
            page = Figure(figsize=PAGE)
            for place, card in enumerate(cards[first : first + COLUMNS * ROWS]):
                row, column = divmod(place, COLUMNS)
                left = MARGIN + column * (width + GAP)
                draw(page, card, left, PAGE[1] - MARGIN - row * (height + GAP), width, height)
            pdf.savefig(page)


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, and print the cards of a folder of lectures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lectures", type=Path, default=ROOT / "lectures")
    parser.add_argument("--to", type=Path, default=ROOT / "_site" / "html" / "cards.pdf")
    given = parser.parse_args(arguments)
    cards = [card_of(path) for path in sorted(given.lectures.glob("*.ipynb"))]
    given.to.parent.mkdir(parents=True, exist_ok=True)
    print_cards(cards, given.to)
    return 0


if __name__ == "__main__":
    sys.exit(main())
