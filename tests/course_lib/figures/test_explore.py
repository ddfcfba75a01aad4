"""A figure under sliders: a drawing for each combination; the browser shows the one asked for."""

import base64
import itertools
import json
import re
import zlib
from xml.etree import ElementTree

import matplotlib.pyplot as plt
import pytest

from course_lib.figures import explore, tip

SIZES, STEPS = [2, 3, 5], range(4)


def bars(K: int, step: int):
    figure, axes = plt.subplots()
    for rank in range(K):
        (bar,) = axes.bar(rank, rank + step)
        tip(bar, f"rank {rank} <& step {step}>")
    axes.set_title(f"{K} ranks, step {step}")
    return figure


def in_words(K: int, step: int) -> str:
    return f"After {step} steps the last of {K} ranks has {K - 1 + step}."


def page_of(explored) -> str:
    return explored._repr_mimebundle_()["text/html"]


@pytest.fixture(scope="module")
def explored():
    return explore(bars, in_words, K=SIZES, step=STEPS, first={"step": 2}, alt="So & <so>.")


def test_every_combination_has_its_drawing_and_its_words(explored) -> None:
    (text,) = re.findall(r"^const data = (\{.*\});$", page_of(explored), re.MULTILINE)
    data = json.loads(text)
    # The hatches that all drawings share, then the drawings.
    hatches, *drawings = json.loads(zlib.decompress(base64.b64decode(data["drawings"])))
    assert not hatches
    for place, (size, step) in enumerate(itertools.product(SIZES, STEPS)):
        svg = ElementTree.fromstring(drawings[place])
        texts = [element.text for element in svg.iter("{http://www.w3.org/2000/svg}text")]
        assert f"{size} ranks, step {step}" in texts
        tips = [element.text for element in svg.iter("{http://www.w3.org/2000/svg}title")]
        assert tips == [f"rank {rank} <& step {step}>" for rank in range(size)]
        assert data["words"][place] == in_words(size, step)
    assert data["at"] == [0, 2] and len(drawings) == len(data["words"]) == 12
    boxes = {re.search(r'viewBox="[^"]+"', drawing)[0] for drawing in drawings}
    assert len(boxes) == 1, "the drawings would jump"
    assert not plt.get_fignums()


def test_the_element_fetches_nothing_and_says_what_it_shows(explored) -> None:
    page = page_of(explored)
    assert repr(explored) == explored._repr_mimebundle_()["text/plain"] == "So & <so>."
    assert 'alt="So &amp; &lt;so&gt;."' in page and f"<td>{in_words(5, 3)}</td>" in page
    assert not re.findall(r"(?:src|href)=[\"'](?!data:)|https?://\w", page)
    assert explored._repr_mimebundle_()["image/png"] in page
