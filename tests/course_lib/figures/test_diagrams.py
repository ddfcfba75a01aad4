"""Every diagram draws, and no text leaves it."""

import inspect

import pytest

from course_lib.figures import diagrams

DRAWN = [name for name, each in inspect.getmembers(diagrams, inspect.isfunction) if name[0] != "_"]


@pytest.mark.parametrize("name", DRAWN)
def test_all_texts_are_inside_the_drawing(name: str) -> None:
    figure = getattr(diagrams, name)()
    figure.canvas.draw()
    frame = figure.bbox
    texts = [text for axes in figure.axes for text in axes.texts if text.get_text()]
    assert texts
    for text in texts:
        box = text.get_window_extent()
        assert frame.x0 <= box.x0 and box.x1 <= frame.x1, text.get_text()
        assert frame.y0 <= box.y0 and box.y1 <= frame.y1, text.get_text()
