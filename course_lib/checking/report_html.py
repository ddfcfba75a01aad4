"""Show a report as HTML in a notebook: the simplest failing case open, the others folded.

Names of cases, reasons and values may repeat what a student's code returned, so all text is
escaped, and none of it can add a tag. The colours come from JupyterLab, which has a light and a
dark theme. Outside JupyterLab, the colours are shades that fit both.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from html import escape
from typing import Any

from course_lib.ranks.explain.words import counted

# The selectors begin with an element. Otherwise JupyterLab's own rules for output would win.
_STYLE = """<style>
div.course-report { --line: var(--jp-border-color2, #8886); --box: #8882;
  line-height: 1.45; overflow-wrap: break-word; }
div.course-report p { margin: .3em 0; max-width: 70em; }
div.course-report .good { color: var(--jp-success-color1, #388e3c); font-weight: bold; }
div.course-report .bad { color: var(--jp-error-color1, #e04848); font-weight: bold; }
div.course-report summary { cursor: pointer; margin: .3em 0; }
div.course-report details.case { border-left: 3px solid var(--line); margin: .5em 0;
  padding: .1em 0 .1em .8em; }
div.course-report details.first { border-left-color: var(--jp-error-color1, #e04848); }
div.course-report table { border: 0; border-collapse: collapse; margin: .4em 0; }
div.course-report td, div.course-report th { background: none; border: 1px solid var(--line);
  padding: .25em .8em; text-align: left; white-space: normal; }
div.course-report td { font-family: var(--jp-code-font-family, monospace); }
div.course-report pre { background: var(--box); margin: .4em 0; max-width: 100%; overflow-x: auto;
  padding: .5em .8em; white-space: pre; }
div.course-report code { background: var(--box); overflow-wrap: anywhere; padding: .1em .4em;
  user-select: all; white-space: normal; }
div.course-report img { background: white; display: block; height: auto; max-width: 100%; }
div.course-report ul { margin: .2em 0; padding-left: 1.6em; }
</style>"""


def html_of(report: Any, picture: tuple[bytes, str] | None = None) -> str:
    """Return the report as HTML that runs nothing and fetches nothing.

    Args:
        report: a `CheckReport`, which calls this function to show itself.
        picture: a PNG of what the ranks did in the case `report.traced`, and its description.

    """
    good = [result for result in report.results if result.passed]
    parts = [f"<p>{_mark(report.passed)} <strong>{_text(report.heading)}</strong></p>"]
    if good:
        count = f"{counted(len(good), 'case')} passed"
        names = _list(_text(report.title_of(result)) for result in good)
        parts.append(f"<details><summary>{_mark(True)} {count}</summary>{names}</details>")
    for number, results in enumerate(report.causes):
        drawn = picture if any(each.name == report.traced for each in results) else None
        parts.append(_cause(report, results, drawn, first=number == 0))
    parts += [f"<p>{_text(each)}</p>" for each in (report.only, report.points) if each]
    # Both classes prevent a dollar sign from being read as the start of a formula.
    kept = "course-report tex2jax_ignore mathjax_ignore"
    return f'{_STYLE}<div class="{kept}">{"".join(parts)}</div>'


def _cause(report: Any, results: list[Any], picture: tuple[bytes, str] | None, first: bool) -> str:
    """Return the cases that failed for one reason: the simplest in full, the others below it."""
    shown, *others = results
    full = bool(shown.detail) and not shown.hidden
    body = [_reason(shown, shown.summary if full and shown.summary else shown.reason)]
    body += [_paragraphs(shown.detail)] if full else []
    if picture is not None:
        body.append(_picture(report.traced, *picture))
    if report.function and not shown.hidden:
        name, case = (json.dumps(text, ensure_ascii=False) for text in (report.name, shown.name))
        line = f"check({name}, {report.function}, case={case})"
        body.append(f"<p>To run only this case: <code>{_text(line)}</code></p>")
    if others:
        names = _list(f"{_text(report.title_of(each))}<br>{_text(each.reason)}" for each in others)
        summary = f"<summary>{_text(report.the_same(len(others)))}</summary>"
        body.append(f"<details>{summary}{names}</details>")
    return (
        f'<details class="case{" first" if first else ""}"{" open" if first else ""}>'
        f"<summary>{_mark(False)} <strong>{_text(report.title_of(shown))}</strong></summary>"
        f"{''.join(body)}</details>"
    )


def _reason(result: Any, reason: str) -> str:
    """Return the reason; if it is about a value, with a table of the expected and the got value."""
    pair = f"expected {result.expected}, got {result.got}"
    before, found, after = reason.partition(pair)
    if not (result.expected and found):
        return f"<p>{_text(reason)}</p>"
    head = "<tr><th>expected</th><th>got</th></tr>"
    row = f"<tr><td>{_text(result.expected)}</td><td>{_text(result.got)}</td></tr>"
    return f"<p>{_text(before.strip())}</p><table>{head}{row}</table><p>{_text(after.strip())}</p>"


def _paragraphs(text: str) -> str:
    """Return sentences as paragraphs, which can wrap; tables and tracebacks keep their lines."""
    parts = [part for part in text.split("\n\n") if part.strip()]
    return "".join(
        f"<pre>{_text(part)}</pre>" if "\n" in part.strip() else f"<p>{_text(part)}</p>"
        for part in parts
    )


def _picture(case: str, png: bytes, words: str) -> str:
    data = base64.b64encode(png).decode("ascii")
    return (
        f"<p>The ranks over time in the case ‘{_text(case)}’:</p>"
        f'<img alt="{_text(words)}" src="data:image/png;base64,{data}">'
    )


def _list(items: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>"


def _mark(good: bool) -> str:
    return f'<span class="{"good" if good else "bad"}">{"✓" if good else "✗"}</span>'


def _text(text: str) -> str:
    return escape(text, quote=True)
