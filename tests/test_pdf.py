"""The lectures as one PDF: `make pdf`."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from matplotlib.figure import Figure
from nbformat import v4

from course_lib.figures import explore
from tests.helpers import ROOT
from tests.helpers.browser import needs_browser

SITE = ROOT / "docs" / "site"
LECTURE = ROOT / "lectures" / "00_start_here.ipynb"
QUESTION = "*Predict: does it fall?*"
ANSWER = "<details>\n<summary>Answer</summary>\n\nYes.\n\n</details>"


@pytest.fixture(scope="module")
def load():
    """Return a function that imports a module of the site's, as its programs do."""
    pytest.importorskip("myst_nb", reason="pip install -e '.[site]' brings it")
    sys.path.insert(0, str(SITE))
    yield importlib.import_module
    sys.path.remove(str(SITE))


def code(source: str, *outputs: nbformat.NotebookNode) -> nbformat.NotebookNode:
    return v4.new_code_cell(source, outputs=list(outputs))


def printed(text: str) -> nbformat.NotebookNode:
    return v4.new_output("stream", text=text)


def displayed(bundle: dict[str, str]) -> nbformat.NotebookNode:
    return v4.new_output("display_data", data=bundle)


def notebook(folder: Path, *cells: nbformat.NotebookNode) -> Path:
    path = folder / "01_topic.ipynb"
    book = v4.new_notebook(cells=[v4.new_markdown_cell("# Topic"), *cells])
    path.write_text(v4.writes(book), encoding="utf-8")
    return path


FIGURE = displayed({"text/html": '<img alt="It falls." src="data:,">', "image/png": "iVBO"})


DRAWS = "fig, ax = plt.subplots()\nax.plot(losses)\nshow(fig, alt='It falls.')"


@pytest.mark.parametrize(
    ("source", "outputs", "expected"),
    [
        (DRAWS, [FIGURE], True),
        (DRAWS, [], False),
        ("losses = train()\nlowest = min(losses)\nprint(lowest)\n" + DRAWS, [FIGURE], False),
        ("def one(k):\n    f = draws(k)\n    return f\n\n\nexplore(one, k=[1])", [FIGURE], True),
        ("print(losses)", [printed("3\n")], False),
        ("%%ranks\nprint(losses)", [FIGURE], False),
    ],
)
def test_code_that_only_draws_is_recognised(load, source: str, outputs: list, expected: bool):
    assert load("folding").only_draws(code(source, *outputs)) is expected


@pytest.fixture(scope="module")
def moving(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a lecture with a figure under a slider, a question and a folded answer."""

    def drawn(k: int) -> Figure:
        figure = Figure(figsize=(6, 3))
        figure.subplots().plot([0, k])
        return figure

    words = "A line, the steeper the larger k."
    slider = explore(drawn, lambda k: f"k is {k}", k=[1, 2, 3], alt=words)
    cells = [
        v4.new_markdown_cell("## Goal\n\n[there](#Goal) and [elsewhere](../docs/symbols.md)"),
        v4.new_markdown_cell(QUESTION),
        code("print(1)", printed("x" * 300)),
        code("explore(drawn)", displayed(slider._repr_mimebundle_())),
        v4.new_markdown_cell(f"## End\n\n{ANSWER}"),
    ]
    return notebook(tmp_path_factory.mktemp("moving"), *cells)


def pdf(*arguments: object) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("myst_nb", reason="pip install -e '.[site]' brings it")
    words = [sys.executable, SITE / "pdf.py", *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=900)


def test_the_printed_page_has_still_figures_and_unfolded_answers(load, moving: Path) -> None:
    page = load("pdf").page_of([moving])
    assert "<script" not in page and "<details>" not in page
    assert page.count("<img ") == 1 and "<details open>" in page
    assert '<a href="#01_topic/Goal">there</a> and <span>elsewhere</span>' in page
    assert f'<pre class="said">{"x" * 300}</pre>' in page
    assert not load("build").remote_resources(moving.parent)


@needs_browser
def test_a_lecture_is_printed(tmp_path: Path) -> None:
    done = pdf(LECTURE, "--to", tmp_path / "course.pdf")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "course.pdf").read_bytes().startswith(b"%PDF")
