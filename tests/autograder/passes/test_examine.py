"""What a notebook may print, and what its pages may cost."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from nbformat.v4 import new_code_cell, new_notebook

from autograder.examination.submission import CellOutcome
from autograder.examination.verdict import Verdict
from autograder.passes import safe_markdown
from autograder.passes.examine import MAX_OUTPUT, Exam, examine_cells


def test_the_outputs_of_a_notebook_have_a_limit_together() -> None:
    """All cells print as much as one cell may."""
    printed = CellOutcome(stdout="o" * 64_000, stderr="e" * 64_000)
    notebook = new_notebook(cells=[new_code_cell("print()") for _ in range(900)])
    verdict = Verdict("02", "somebody", "02", "seed", "")
    submission: Any = SimpleNamespace(run_cell=lambda *_, **__: printed)
    examine_cells(notebook, Exam({}, ()), submission, verdict)
    sizes = [len(str(cell.outputs)) for cell in notebook.cells]
    assert sizes[0] > 128_000 and max(sizes[-800:]) < 400
    assert sum(sizes) < 1.2 * MAX_OUTPUT
    assert "were left out" in str(notebook.cells[-1].outputs)


@pytest.mark.parametrize("tag", ["<div>", "<ul><li>", "<b><i>\n"])
def test_nested_tags_are_shown_as_they_were_typed(tag: str) -> None:
    start = time.process_time()
    assert safe_markdown.safe_html(9800 * tag).startswith("<pre>&lt;")
    assert time.process_time() - start < 1
    assert safe_markdown.safe_html("<b>bold</b>").strip() == "<p><b>bold</b></p>"


def test_all_texts_of_a_page_share_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    page: Any = {"resources": {}}
    assert safe_markdown.markdown2html(page, "*a*").strip() == "<p><em>a</em></p>"
    monkeypatch.setattr(safe_markdown, "MAX_SECONDS", 0.0)
    assert safe_markdown.markdown2html(page, "*a*") == "<pre>*a*</pre>"
