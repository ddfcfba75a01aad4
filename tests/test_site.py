"""The course as web pages: `make site`."""

import importlib
import subprocess
import sys

import pytest

from course_lib.checking.asking import HOW_TO_CHOOSE
from tests.helpers import ROOT
from tests.helpers.browser import Browser, needs_browser

SITE = ROOT / "docs" / "site"


def test_links_to_nowhere_and_files_from_elsewhere_are_found(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(SITE)
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.html").write_text(
        '<a href="sub/b.html#there"></a><a href="sub/b.html#lost"></a><a href="gone.html"></a>'
        '<a href="https://example.org"></a><a href="#"></a><a href="#here" id="here"></a>'
    )
    (tmp_path / "sub/b.html").write_text('<p id="there"><a href="../a.html"></a><img src="no.png">')
    (tmp_path / "c.html").write_text(
        '<script src="https://cdn.example/x.js"></script><script src="x.js"></script>'
        '<link rel="stylesheet" href="https://cdn.example/x.css"><a href="https://example.org">'
    )
    (tmp_path / "x.js").touch()
    assert sorted(importlib.import_module("build").what_is_wrong(tmp_path)) == [
        "a page needs a file from the network: https://cdn.example/x.css",
        "a page needs a file from the network: https://cdn.example/x.js",
        "broken link: a.html: gone.html",
        "broken link: a.html: sub/b.html#lost",
        "broken link: sub/b.html: no.png",
    ]


def test_an_index_stands_beside_an_accented_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("docutils", reason="pip install -e '.[site]' brings it")
    monkeypatch.syspath_prepend(SITE)
    mathml = importlib.import_module("mathml").mathml(r"\bar w_{t+1} = \sum_i w_i", block=False)
    assert mathml.count("<msub>") == 2 and mathml.count("<munder>") == 1  # below the sum only
    assert "munderover" not in mathml


def test_all_lectures_and_tables_have_a_place_in_the_contents() -> None:
    contents = (SITE / "index.md").read_text(encoding="utf-8")
    names = ("/lectures/*", "/assignments/*/*", "/instructor/README", "/benchmarks/results/*")
    for entry in names:
        assert f"\n{entry}\n" in contents
    for page in (ROOT / "docs").glob("*.md"):
        assert f"\n/docs/{page.stem}\n" in contents, f"{page.name} has no place on the site"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory):
    pytest.importorskip("myst_nb", reason="pip install -e '.[site]' brings it")
    pytest.importorskip("sphinx_book_theme")
    folder = tmp_path_factory.mktemp("site") / "html"
    done = subprocess.run(
        [sys.executable, SITE / "build.py", "--to", folder], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.mark.large
@pytest.mark.timeout(900)
def test_the_site_is_built_without_a_warning_and_shows_what_was_run(site) -> None:
    """Sphinx's warnings are errors, and all links between pages lead somewhere."""
    for lecture in (ROOT / "lectures").glob("*.ipynb"):
        page = (site / "lectures" / f"{lecture.stem}.html").read_text(encoding="utf-8")
        assert 'class="output' in page or "cell_output" in page
        assert "<math" in page or lecture.stem.startswith("00")
        assert "Answered by the run" in page and HOW_TO_CHOOSE not in page
    assert 'data-theme="dark"' in (site / "_static/pygments.css").read_text()
    assert (site / "calculator.html").is_file() and (site / "searchindex.js").is_file()


@pytest.mark.large
@pytest.mark.timeout(900)
@needs_browser
def test_no_page_runs_over_the_edge_of_a_phone(site) -> None:
    """Nor the lines to the pages before and after, of which the theme shows only a part."""
    links = "[...document.querySelectorAll('.prev-next-area a')]"
    images = "[...document.querySelectorAll('div.cell_output img')]"
    small = f"{images}.some(i => i.naturalWidth > 640 && i.width < 600)"
    with Browser() as browser:
        browser.narrow(390)
        for page in sorted(set(site.rglob("*.html")) - set(site.glob("_static/**/*"))):
            browser.open(page.as_uri())
            browser.wait_for("document.readyState == 'complete'")
            assert browser.run("document.scrollingElement.scrollWidth") == 390, page.stem
            assert not browser.run(f"{links}.some(a => a.scrollWidth > a.clientWidth)"), page.stem
            assert not browser.run(small), f"{page.stem}: letters that cannot be read"
            assert not browser.run("!!document.querySelector('details.hide .course-explore')")
