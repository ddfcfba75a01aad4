"""The lectures as one PDF: `make pdf`."""

import importlib
import re
import subprocess
import sys

import pytest

from tests.helpers import ROOT
from tests.helpers.browser import needs_browser

pytestmark = pytest.mark.large
SITE = ROOT / "docs" / "site"
LECTURE = "lectures/00_start_here.ipynb"


def test_the_page_has_still_figures_and_unfolded_answers(monkeypatch, tmp_path) -> None:
    pytest.importorskip("myst_nb", reason="pip install -e '.[site]' brings it")
    monkeypatch.syspath_prepend(SITE)
    page = importlib.import_module("pdf").write_page(tmp_path, LECTURE).read_text(encoding="utf-8")
    assert "<script" not in page
    assert page.count("<details open") == page.count("<details") > 0
    assert "Show the answer" not in page and "Show the code" not in page
    assert 'href="#document-lectures/00_start_here"' in page  # the contents
    text = re.sub("<[^>]+>", "", page)
    assert "import torch" not in text and "ranks.run(add_up)" in text
    assert not importlib.import_module("build")._Page(tmp_path / "course.html").fetched


@needs_browser
def test_a_lecture_is_printed(tmp_path) -> None:
    pytest.importorskip("myst_nb", reason="pip install -e '.[site]' brings it")
    command = [sys.executable, SITE / "pdf.py", LECTURE, "--to", tmp_path / "course.pdf"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "course.pdf").read_bytes().startswith(b"%PDF")
