"""What is handed over arrives, whatever its size: cloudpickle is the oracle."""

from collections.abc import Iterator

import pytest

from course_lib.ranks import Ranks

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def cpu() -> Iterator[Ranks]:
    with Ranks(2, on="cpu", timeout=60) as ranks:
        yield ranks


def in_a_cell(source: str) -> object:
    """Return a function as a cell of a notebook defines it."""
    return eval(compile(source, "<a cell>", "eval"), {"__name__": "__main__"})


@pytest.mark.parametrize("size", [5_000, 8_000, 8_192, 100_000])
def test_long_text_for_a_function_of_a_cell_arrives(cpu: Ranks, size: int) -> None:
    function = in_a_cell("lambda text: len(text)")
    assert callable(function)
    assert cpu.run(function, "x" * size) == [size] * 2
