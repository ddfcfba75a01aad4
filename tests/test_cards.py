"""docs/site/cards.py: the lectures' cards on pages to print."""

import base64
import importlib.util
import io
import re
from pathlib import Path
from types import ModuleType

import pytest
from matplotlib.image import imsave
from nbformat import v4

from tests.helpers import ROOT

CARD = r"""### Card
- **Question** How many bytes does a rank send with $K = 4$?
- **Formula** $\frac{2(K-1)}{K}\,n$
- **Figure** [The ring, drawn](#The-ring,-drawn)
- **Bug** Whole tensors instead of chunks."""


@pytest.fixture(scope="module")
def cards() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cards", ROOT / "docs" / "site" / "cards.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def png(grey: float) -> bytes:
    file = io.BytesIO()
    imsave(file, [[grey, 0.0], [1.0, grey]], format="png")
    return file.getvalue()


def lecture(path: Path, card: str) -> None:
    """Write a lecture with a figure before, and two after, the section of its card."""
    cells = [v4.new_markdown_cell(f"# What about {path.stem}?\n\nA lecture.")]
    for number, text in enumerate(("## First", "## The ring, drawn", "## Last")):
        picture = {"image/png": base64.b64encode(png(number / 4)).decode()}
        shown = v4.new_output("display_data", data=picture)
        cells += [v4.new_markdown_cell(text), v4.new_code_cell("show(fig)", outputs=[shown])]
    cells.append(v4.new_markdown_cell(card))
    path.write_text(v4.writes(v4.new_notebook(cells=cells)), encoding="utf-8")


def pages(pdf: Path) -> int:
    return len(re.findall(rb"/Type /Page\b", pdf.read_bytes()))


@pytest.mark.large
@pytest.mark.parametrize(("lectures", "expected"), [(8, 1), (9, 2)])
def test_cards_are_printed_eight_on_a_page(
    cards: ModuleType, tmp_path: Path, lectures: int, expected: int
) -> None:
    for number in range(lectures):
        lecture(tmp_path / f"{number:02}_topic.ipynb", CARD)
    pdf = tmp_path / "site" / "cards.pdf"
    assert cards.main(["--lectures", str(tmp_path), "--to", str(pdf)]) == 0
    assert pages(pdf) == expected


@pytest.mark.parametrize(
    ("card", "complaint"),
    [
        ("A cell that is no card.", "exactly one card"),
        (CARD.replace("- **Bug**", "**Bug**"), "in this form"),
        (CARD.replace("Formula", "Equation"), "in this form"),
        (CARD + " more" * 60, "words; at most 60"),
        (CARD.replace("#The-ring,", "#The-tree,"), "but no figure follows"),
    ],
)
def test_what_is_wrong_with_a_card_is_said(
    cards: ModuleType, tmp_path: Path, card: str, complaint: str
) -> None:
    lecture(tmp_path / "03_topic.ipynb", card)
    with pytest.raises(ValueError, match=f"03_topic.ipynb.*{complaint}"):
        cards.card_of(tmp_path / "03_topic.ipynb")


@pytest.mark.large
def test_the_cards_of_all_lectures_can_be_printed(cards: ModuleType, tmp_path: Path) -> None:
    """Their form is right, their figures are there, and mathtext knows what the formulas use."""
    assert cards.main(["--to", str(tmp_path / "cards.pdf")]) == 0
    assert 1 <= pages(tmp_path / "cards.pdf") <= 2
