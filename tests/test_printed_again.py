"""What a lecture prints is compared with the page, but for rounding and for what was measured."""

import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from tests.helpers.printed_again import differences, same


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("loss 0.4321 after 96 steps", "loss 0.4322 after 96 steps"),
        ("takes 12.0 ms", "takes  12.1 ms"),
        ("off by 3e-16", "off by 0.0"),
        ("off by 1.2e-07", "off by -2.4e-08"),
        ("K = 4", "K = 4"),
    ],
)
def test_rounding_is_no_difference(before, after):
    assert same(before, after) and same(after, before)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("loss 0.4321", "loss 0.4421"),
        ("takes 12 ms", "takes 13 ms"),
        ("K = 4", "K = 5"),
        ("ring wins", "tree wins"),
        ("1 2 3", "1 2"),
        ("off by 3e-16", "off by 3e-3"),
        ("rank 0", "rank 1"),
    ],
)
def test_another_number_or_word_is_one(before, after):
    assert not same(before, after) and not same(after, before)


def page(*cells):
    """Return a notebook of cells, each given as its id, output and tags."""
    made = []
    for name, text, tags in cells:
        cell = new_code_cell("…", id=name, metadata={"tags": tags})
        cell.outputs = [new_output("stream", text=text)]
        made.append(cell)
    return new_notebook(cells=made)


def test_cells_that_measure_the_machine_are_left_out():
    before = page(("a", "3 ms", ["measured"]), ("b", "4 B", []), ("c", "5 B", []))
    after = page(("a", "9 ms", ["measured"]), ("b", "4 B", []), ("c", "6 B", []))
    (found,) = differences(before, after)
    assert found.startswith("c printed '5 B'")
