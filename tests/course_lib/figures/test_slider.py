"""Timelines under a slider: its data are the spans, and its bars lie where their times say."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from course_lib.figures import _slider, timeline_slider
from tests.helpers.browser import Browser, needs_browser

NODE = shutil.which("node")
FRAMES = {
    "1 layer": [(0, "backward", 0.0, 4.0, "B"), (0, "all-reduce", 1.0, 3.0, "g1"),
                (0, "all-reduce", 2.0, 6.0, "g2"), (1, "backward", 0.0, 5.0, "")],
    "2 layers": [(0, "backward", 0.0, 4.0, "B"), (1, "all-reduce", 4.0, 7.25, "g1")],
}  # fmt: skip
PROGRAM = Path(_slider.__file__).with_name("slider.js")


def shown(**options: Any) -> dict[str, str]:
    given: dict[str, Any] = {"parameter": "layers", "alt": "More layers, later."} | options
    return timeline_slider(FRAMES, **given)._repr_mimebundle_()


def data_in(page: str) -> dict[str, Any]:
    (found,) = re.findall(r"const data = Object.assign\((\{.*?\}), (\{.*\})\);", page)
    return json.loads(found[0]) | json.loads(found[1])


def test_every_span_is_a_bar() -> None:
    data = data_in(shown()["text/html"])
    assert [frame["title"] for frame in data["frames"]] == list(FRAMES)
    for frame, spans in zip(data["frames"], FRAMES.values(), strict=True):
        bars = sorted((start, stop, label) for _, _, start, stop, label in frame["bars"])
        assert bars == sorted((start, stop, label) for *_, start, stop, label in spans)
        # Bars of one row never lie on one another.
        for row in range(len(data["rows"])):
            own = sorted((bar[2], bar[3]) for bar in frame["bars"] if bar[0] == row)
            assert all(one[1] <= other[0] for one, other in pairwise(own))
    assert (data["from"], data["to"]) == (0, 7.25)
    assert data["rows"][0] == "rank 0 backward"
    assert "2 backward, 2 all-reduce; the last ends at 6 s" in data["frames"][0]["words"]


def test_the_element_fetches_nothing_and_says_what_it_shows() -> None:
    bundle = shown(alt="So & <so>.", first="2 layers", unit="ms")
    page = bundle["text/html"]
    assert bundle["text/plain"] == "So & <so>."
    assert 'alt="So &amp; &lt;so&gt;."' in page and data_in(page)["first"] == 1
    assert not re.findall(r"(?:src|href)=[\"'](?!data:)|https?://\w", page)


def test_odd_titles_cannot_end_the_script() -> None:
    odd = "</script><!-- "
    made = timeline_slider({odd: FRAMES["1 layer"]}, parameter=odd, alt="x")
    page = made._repr_mimebundle_()["text/html"]
    assert page.count("</script>") == 1 and "<!--" not in page


@pytest.mark.parametrize(
    ("frames", "options", "message"),
    [
        ({}, {}, "needs timelines"),
        (FRAMES, {"alt": " "}, "alt"),
        (FRAMES, {"first": "3 layers"}, "no frame is called '3 layers'"),
        ({"none": []}, {}, "no spans"),
    ],
)
def test_what_it_cannot_show(frames: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        timeline_slider(frames, **({"parameter": "layers", "alt": "x"} | options))


@pytest.mark.skipif(NODE is None, reason="node is not installed")
def test_a_bar_lies_where_its_times_say(tmp_path: Path) -> None:
    data = data_in(shown()["text/html"])
    shutil.copy(PROGRAM, tmp_path / "slider.mjs")
    (tmp_path / "run.mjs").write_text(
        f"import {{ boxes, ticks }} from './slider.mjs'; const d = {json.dumps(data)};\n"
        "console.log(JSON.stringify([[0, 1].map((frame) => boxes(d, frame, 1002)), ticks(d)]));\n"
    )
    assert NODE is not None
    ran = subprocess.run([NODE, tmp_path / "run.mjs"], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    frames, ticks = json.loads(ran.stdout)
    for frame, boxes in zip(data["frames"], frames, strict=True):
        for (row, _, start, stop, label), (x, y, wide, high, _, name) in zip(
            frame["bars"], boxes, strict=True
        ):
            assert (x, wide) == pytest.approx(
                (92 + 900 * start / 7.25, 900 * (stop - start) / 7.25)
            )
            assert y // 22 == (y + high) // 22 == row and name == label
    assert ticks == list(range(8))


@pytest.mark.large
@needs_browser
def test_the_slider_changes_the_picture(tmp_path: Path) -> None:
    page = f"<!doctype html><meta charset=utf-8>{shown()['text/html']}"
    (tmp_path / "slider.html").write_text(page, encoding="utf-8")
    with Browser() as browser:
        browser.open((tmp_path / "slider.html").as_uri())
        browser.wait_for("document.querySelector('svg rect') !== null")
        told = "document.querySelector('div.course-slider output').textContent"
        assert browser.run(told) == "1 layer"
        slider = "document.querySelector('div.course-slider input')"
        browser.run(f"{slider}.value = 1; {slider}.dispatchEvent(new Event('input'))")
        assert browser.run(told) == "2 layers"
        label = browser.run("document.querySelector('svg').getAttribute('aria-label')")
        assert "1 backward, 1 all-reduce; the last ends at 7.25 s" in label
        assert browser.run("document.querySelector('div.course-slider img') === null")
