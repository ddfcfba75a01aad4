"""A table is text for print and search, and markup of ours alone in a notebook."""

import re
from html import unescape

from hypothesis import given
from hypothesis import strategies as st

from course_lib.ranks.trace.table import Table

CELLS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=8)
ROWS = st.integers(1, 4).flatmap(
    lambda width: st.lists(st.lists(CELLS, min_size=width, max_size=width), min_size=1, max_size=4)
)


@given(ROWS)
def test_html_has_the_cells_and_no_markup_of_theirs(rows: list[list[str]]) -> None:
    html = Table(rows)._repr_html_()
    cells = re.findall(r"<t[hd] style[^>]*>(.*?)</t[hd]>", html)
    assert [unescape(cell) for cell in cells] == [cell for row in rows for cell in row]
    assert not any("<" in cell for cell in cells)
    assert html.count("<tr>") == len(rows)
