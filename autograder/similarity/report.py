"""Write the report as one page without a script, and as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from autograder.collection.tables import format_rows
from autograder.similarity.compare import Comparison, Pair

WARNING = (
    "This list is no proof of copying. Solutions to the same short task are naturally alike, even "
    "more after a lecture that shows how. Read both, ask both students, and think of a third "
    "source that both may have used: lecture, book, library, forum. The report shows who shares "
    "text, never who wrote it."
)
MAX_LINES = 400
"""Largest number of lines of a cell that are shown."""

_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>Look-alike solutions: {name}</title>
<style>
body {{ font: 15px/1.4 system-ui, sans-serif; margin: 2em; max-width: 90em }}
.warning {{ border-left: 4px solid #b00; padding: .5em 1em; background: #f6f6f6 }}
table.pairs {{ border-collapse: collapse }}
table.pairs td, table.pairs th {{ padding: .2em 1em .2em 0; text-align: left }}
.two {{ display: grid; grid-template-columns: 1fr 1fr; gap: 1em }}
pre {{ background: #f6f6f6; padding: .5em; overflow-x: auto; font-size: 13px; margin: .3em 0 }}
mark {{ background: #ffe08a; border-left: 3px solid #a60; display: block }}
pre span {{ display: block; border-left: 3px solid transparent }}
</style></head><body>
<h1>Look-alike solutions: {name}</h1>
<p class="warning">{warning}</p>
<p>{summary}</p>
{damaged}
<table class="pairs"><tr><th></th><th>alike</th><th>first</th><th>second</th>
<th>passages shared</th><th>shared only by these two</th></tr>
{rows}</table>
{pairs}
</body></html>
"""


def summary_of(comparison: Comparison) -> str:
    """Return what was compared, and the median of the class, in a sentence or two."""
    n = comparison.compared
    told = (
        f"Compared: {n} solutions, {n * (n - 1) // 2} pairs. Released code does not count, and "
        "code that many students wrote counts little. The median pair is "
        f"{100 * comparison.median:.0f} % alike. Pairs in the list: {len(comparison.pairs)}."
    )
    if comparison.too_short:
        told += f" Too little code to compare: {', '.join(comparison.too_short)}."
    return told


def text_report(name: str, comparison: Comparison, damaged: Mapping[str, str]) -> str:
    """Return the report for a terminal or a mail."""
    rows = [
        (f"{100 * pair.alike:.0f} %", pair.first, pair.second, pair.shared, pair.rare)
        for pair in comparison.pairs
    ]
    parts = [f"Look-alike solutions: {name}", WARNING, summary_of(comparison)]
    if damaged:
        told = (f"  {student}: {why}" for student, why in damaged.items())
        parts.append("\n".join(("Not compared:", *told)))
    if rows:
        header = ("alike", "first", "second", "passages shared", "shared only by these two")
        parts.append(format_rows(header, rows))
    return "\n\n".join(parts) + "\n"


def html_report(
    name: str,
    comparison: Comparison,
    cells: Mapping[str, Mapping[str, str]],
    damaged: Mapping[str, str],
) -> str:
    """Return the page; `cells` is student → cell → source."""
    rows = "\n".join(
        f'<tr><td><a href="#pair-{i}">{i}</a></td><td>{100 * pair.alike:.0f}&nbsp;%</td>'
        f"<td>{escape(pair.first)}</td><td>{escape(pair.second)}</td>"
        f"<td>{pair.shared}</td><td>{pair.rare}</td></tr>"
        for i, pair in enumerate(comparison.pairs, 1)
    )
    pairs = "\n".join(_pair(i, pair, cells) for i, pair in enumerate(comparison.pairs, 1))
    told = "".join(f"<li>{escape(s)}: {escape(why)}</li>" for s, why in damaged.items())
    return _PAGE.format(
        name=escape(name),
        warning=escape(WARNING),
        summary=escape(summary_of(comparison)),
        damaged=f"<p>Not compared:</p><ul>{told}</ul>" if told else "",
        rows=rows,
        pairs=pairs,
    )


def _pair(number: int, pair: Pair, cells: Mapping[str, Mapping[str, str]]) -> str:
    names = list(dict.fromkeys((*pair.left, *pair.right)))
    sides = []
    for student, lines in ((pair.first, pair.left), (pair.second, pair.right)):
        shown = "".join(
            f"<p>{escape(name)}</p>{_code(cells[student][name], lines.get(name, ()))}"
            for name in names
            if name in cells[student]
        )
        sides.append(f"<div><h3>{escape(student)}</h3>{shown}</div>")
    return (
        f'<h2 id="pair-{number}">{number}. {escape(pair.first)} and {escape(pair.second)}: '
        f'{100 * pair.alike:.0f} % alike</h2><div class="two">{"".join(sides)}</div>'
    )


def _code(source: str, marked: Sequence[tuple[int, int]]) -> str:
    shown = []
    for number, line in enumerate(source.splitlines()[:MAX_LINES], 1):
        tag = "mark" if any(first <= number <= last for first, last in marked) else "span"
        shown.append(f"<{tag}>{escape(line[:300]) or ' '}</{tag}>")
    return f"<pre>{''.join(shown)}</pre>"
