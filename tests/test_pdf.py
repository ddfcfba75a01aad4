"""The lectures as one PDF: `make pdf`."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat import v4

from tests.helpers import ROOT
from tests.helpers.browser import needs_browser

SITE = ROOT / "docs" / "site"
LECTURE = "lectures/00_start_here.ipynb"


@pytest.fixture(scope="module")
def load():
    """Return a function that imports a module of the site's, as its programs do."""
    pytest.importorskip("myst_nb", reason="pip install -e '.[site]' brings it")
    sys.path.insert(0, str(SITE))
    yield importlib.import_module
    sys.path.remove(str(SITE))


def code(source: str, *outputs: nbformat.NotebookNode) -> nbformat.NotebookNode:
    return v4.new_code_cell(source, outputs=list(outputs))


FIGURE = v4.new_output(
    "display_data", data={"text/html": '<img alt="It falls." src="data:,">', "image/png": "iVBO"}
)
PRINTED = v4.new_output("stream", text="3\n")
DRAWS = "fig, ax = plt.subplots()\nax.plot(losses)\nshow(fig, alt='It falls.')"


@pytest.mark.parametrize(
    ("source", "outputs", "expected"),
    [
        (DRAWS, [FIGURE], True),
        (DRAWS, [], False),
        ("losses = train()\nlowest = min(losses)\nprint(lowest)\n" + DRAWS, [FIGURE], False),
        ("def one(k):\n    f = draws(k)\n    return f\n\n\nexplore(one, k=[1])", [FIGURE], True),
        ("print(losses)", [PRINTED], False),
        ("%%ranks\nprint(losses)", [FIGURE], False),
    ],
)
def test_code_that_only_draws_is_recognised(load, source: str, outputs: list, expected: bool):
    assert load("folding").only_draws(code(source, *outputs)) is expected


@pytest.mark.large
def test_the_page_has_still_figures_and_unfolded_answers(load, tmp_path: Path) -> None:
    page = load("pdf").write_page(tmp_path, LECTURE).read_text(encoding="utf-8")
    assert "<script" not in page
    assert page.count("<details open") == page.count("<details") > 0
    assert "Show the answer" not in page and "Show the code" not in page
    assert 'href="#document-lectures/00_start_here"' in page  # the contents
    text = re.sub("<[^>]+>", "", page)
    assert "import torch" not in text and "ranks.run(add_up)" in text
    assert not load("build")._Page(tmp_path / "course.html").fetched


@needs_browser
def test_a_lecture_is_printed(tmp_path: Path) -> None:
    pytest.importorskip("myst_nb", reason="pip install -e '.[site]' brings it")
    command = [sys.executable, SITE / "pdf.py", LECTURE, "--to", tmp_path / "course.pdf"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "course.pdf").read_bytes().startswith(b"%PDF")
