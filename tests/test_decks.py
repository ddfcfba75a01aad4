"""The lectures as slides and as one PDF: `make slides` and `make pdf`."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat import v4

from course_lib.figures import explore
from tests.helpers import ROOT
from tests.helpers.browser import Browser, needs_browser

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


def decks(*arguments: object) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("myst_nb", reason="pip install -e '.[site]' brings it")
    words = [sys.executable, SITE / "decks.py", *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the deck of a small lecture."""
    folder = tmp_path_factory.mktemp("slides")
    done = decks(LECTURE, "--to", folder)
    assert done.returncode == 0, done.stderr
    assert "1/1 00_start_here" in done.stdout and str(folder / "index.html") in done.stdout
    return folder


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


def test_a_deck_has_every_heading_and_fetches_nothing(small: Path, load) -> None:
    page = (small / "00_start_here.html").read_text(encoding="utf-8")
    for cell in nbformat.read(LECTURE, as_version=4).cells:
        for heading in re.findall(r"^## (.+)$", cell.source, re.MULTILINE):
            assert f"<h2>{heading}</h2>" in page
    assert re.search(r"<h2>00 · .+</h2>", page)
    assert not load("build").remote_resources(small)
    assert 'href="00_start_here.html"' in (small / "index.html").read_text(encoding="utf-8")


def test_all_figures_of_a_deck_have_alternative_texts(small: Path) -> None:
    page = (small / "00_start_here.html").read_text(encoding="utf-8")
    images = re.findall(r"<img [^>]*>", page)
    assert images and all(re.search(r'alt="[^"]{20,}"', image) for image in images)


def test_a_lecture_that_is_not_there_or_has_no_title_is_named(tmp_path: Path) -> None:
    done = decks(tmp_path / "none.ipynb", "--to", tmp_path)
    assert done.returncode == 2 and "there is no notebook" in done.stderr
    path = tmp_path / "02_blank.ipynb"
    path.write_text(v4.writes(v4.new_notebook()), encoding="utf-8")
    done = decks(path, "--to", tmp_path)
    assert done.returncode == 1
    assert "02_blank.ipynb has no title for its first slide" in done.stderr


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


def test_the_first_results_after_a_question_answer_it(load) -> None:
    cells = [
        code("print(0)", printed("0")),
        v4.new_markdown_cell(f"## A\n\n{QUESTION}"),
        code("x = 1"),
        code("print(x)", printed("1")),
        code("print(x)", printed("1")),
        v4.new_markdown_cell("It does."),
        code("print(2)", printed("2")),
        v4.new_markdown_cell(QUESTION),
        v4.new_markdown_cell("A remark."),
        code("print(3)", printed("3")),
        v4.new_markdown_cell(QUESTION),
        v4.new_markdown_cell("## B"),
        code("print(4)", printed("4")),
    ]
    assert load("folding").answers(cells) == {3, 4, 9}


FALLS = "The loss falls from 2.3 to 0.2 in time."
TEXTS = [
    ("It falls. It rises.", "It falls. It rises."),  # too short to stand alone
    (f"{FALLS} It rises.", FALLS),
    (f"**The loss.** {FALLS} It rises.", f"The loss. {FALLS}"),
    ("As S. Li et al. say, it falls. So. Or.", "As S. Li et al. say, it falls."),
    ("It is long, and `a. B` stays whole in it. So.", "It is long, and a. B stays whole in it."),
    (f"{FALLS} The second is", None),  # it goes on below
]


@pytest.mark.parametrize(("source", "expected"), TEXTS)
def test_a_slide_has_the_first_sentence(
    load, tmp_path: Path, source: str, expected: str | None
) -> None:
    path = notebook(tmp_path, v4.new_markdown_cell(source))
    block = list(load("blocks").blocks_of(path, lambda _: None))[1]
    seen = re.sub(r'<span class="more">.*</span>', "", block.html, flags=re.DOTALL)
    assert re.sub("<.*?>", "", seen).strip() == (expected or source)
    assert not block.html.endswith("</span></span></p>")


def test_a_long_listing_is_cut_at_its_lines(load, tmp_path: Path) -> None:
    lines = [f"line {number}" for number in range(60)]
    path = notebook(tmp_path, code("print(listing)", printed("\n".join(lines))))
    parts = re.findall(
        r'<pre class="said">(.*?)</pre>', load("decks").deck_of(path).page, re.DOTALL
    )
    assert len(parts) > 1 and "\n".join(parts).splitlines() == lines


def test_links_between_lectures_lead_to_decks_and_others_are_text(load, tmp_path: Path) -> None:
    (tmp_path / "02_next.ipynb").touch()
    text = "[a](02_next.ipynb#Its-goal) [b](#Topic) [c](../docs/symbols.md) [d](https://x.org)"
    page = load("decks").deck_of(notebook(tmp_path, v4.new_markdown_cell(text))).page
    assert '<a href="02_next.html#Its-goal">a</a> <a href="#Topic">b</a>' in page
    assert '<span>c</span> <a href="https://x.org">d</a>' in page


@pytest.fixture(scope="module")
def moving(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a lecture with a figure under a slider, a question and a long text."""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    def drawn(k: int) -> Figure:
        figure = Figure(figsize=(6, 3))
        figure.subplots().plot([0, k])
        return figure

    words = "A line, the steeper the larger k."
    slider = explore(drawn, lambda k: f"k is {k}", k=[1, 2, 3], alt=words)
    text = "A sentence that needs its place on a slide.\n\n" * 30
    cells = [
        v4.new_markdown_cell(f"## Goal\n\n{text}"),
        v4.new_markdown_cell(QUESTION),
        code("print(1)", printed("x" * 300)),
        code("explore(drawn)", displayed(slider._repr_mimebundle_())),
        v4.new_markdown_cell(f"## End\n\n{ANSWER}"),
    ]
    return notebook(tmp_path_factory.mktemp("moving"), *cells)


# The slides that hold more than they show.
TOO_LONG = """[...document.querySelectorAll('.slide')].filter((slide) =>
  slide.querySelector('.body').getBoundingClientRect().bottom
  > slide.getBoundingClientRect().bottom).map((slide) => slide.textContent.slice(0, 300))"""


def pressed(key: str, where: str = "document.body") -> str:
    return f"{where}.dispatchEvent(new KeyboardEvent('keydown', {{key: '{key}', bubbles: true}}))"


@needs_browser
def test_slides_fit_the_screen_and_figures_move(load, moving: Path, tmp_path: Path) -> None:
    page = tmp_path / "deck.html"
    page.write_text(load("decks").deck_of(moving).page, encoding="utf-8")
    with Browser() as browser:
        browser.open(page.as_uri())
        count = int(browser.wait_for("document.documentElement.dataset.ready"))
        assert count >= 6
        for _ in range(count - 1):
            assert browser.run(TOO_LONG) == []
            browser.run(pressed("ArrowRight"))
        assert browser.run("location.hash") == f"#/{count}"
        # What follows a question is on a later slide.
        slides = browser.run("[...document.querySelectorAll('.slide')].map((s) => s.textContent)")
        asked = next(n for n, text in enumerate(slides) if "Predict" in text)
        assert "x" * 300 not in slides[asked] and "x" * 300 in slides[asked + 1]
        assert not browser.run("document.querySelector('details').open")
        # The slider moves its figure, and not the slides.
        slider = "document.querySelector('.course-explore input')"
        browser.wait_for(f"{slider} !== null")
        slide = f"{slider}.closest('.slide')"
        at = browser.run(f"[...document.querySelectorAll('.slide')].indexOf({slide})")
        browser.run(f"location.hash = '#/{at + 1}'")
        browser.wait_for("document.querySelector('.shown .course-explore') !== null")
        browser.run(f"{slider}.value = 2, {slider}.dispatchEvent(new Event('input'))")
        browser.wait_for("document.querySelector('.course-explore').innerText.includes('k is 3')")
        browser.run(pressed("ArrowLeft", slider))
        assert browser.run("location.hash") == f"#/{at + 1}"
        # The full text is longer, and goes back to what it was.
        browser.run(pressed("n"))
        assert browser.run("document.body.classList.contains('full')")
        browser.run(pressed("n"))
        assert browser.run("document.querySelectorAll('.slide').length") == count


def pdf(*arguments: object) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("myst_nb", reason="pip install -e '.[site]' brings it")
    words = [sys.executable, SITE / "pdf.py", *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=900)


def test_the_printed_page_has_still_figures_and_unfolded_answers(load, moving: Path) -> None:
    page = load("pdf").page_of([moving])
    assert "<script" not in page and "<details>" not in page
    assert page.count("<img ") == 1 and "<details open>" in page
    assert not load("build").remote_resources(moving.parent)


def test_without_a_browser_nothing_is_printed_and_it_is_said(tmp_path: Path) -> None:
    done = pdf(LECTURE, "--to", tmp_path / "course.pdf", "--browser", "no-such-browser")
    assert done.returncode == 1 and not (tmp_path / "course.pdf").exists()
    assert "there is no no-such-browser here to print the PDF. Install Chromium" in done.stderr


@needs_browser
def test_a_lecture_is_printed(tmp_path: Path) -> None:
    done = pdf(LECTURE, "--to", tmp_path / "course.pdf")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "course.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.large
@pytest.mark.timeout(900)
@needs_browser
def test_all_decks_fit_the_screen(load, tmp_path: Path) -> None:
    done = decks("--to", tmp_path)
    assert done.returncode == 0, done.stderr
    assert not load("build").broken_links(tmp_path)
    assert not load("build").remote_resources(tmp_path)
    for page in sorted(tmp_path.glob("[0-9]*.html")):
        with Browser() as browser:
            browser.open(page.as_uri())
            browser.wait_for("document.documentElement.dataset.ready")
            assert browser.run(TOO_LONG) == [], page.name


@pytest.mark.large
@pytest.mark.timeout(1800)
@needs_browser
def test_the_course_is_printed(tmp_path: Path) -> None:
    done = pdf("--to", tmp_path / "course.pdf")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "course.pdf").stat().st_size > 1e6
