"""Several timelines under a slider: what moves when one number changes.

All of them were run before; the page holds them, and shows one. So every number in it is Python's,
and it needs neither a kernel nor the network.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from course_lib.figures._shown import Span, placed_spans, timelines
from course_lib.ranks.trace.bars import styles_of

_PROGRAM = Path(__file__).with_name("slider.js")
# The selectors begin with an element: JupyterLab's own rules for output would win otherwise.
_STYLE = """<style>
div.course-slider { color: var(--jp-content-font-color1, var(--pst-color-text-base, inherit));
  font: 13px/1.5 var(--jp-content-font-family, system-ui, sans-serif); }
div.course-slider svg { display: block; fill: currentColor; font-size: 11px; width: 100%; }
div.course-slider label { align-items: center; display: flex; gap: .7em; }
div.course-slider input { accent-color: #0072b2; flex: 1; margin: 0;
  max-width: 30em; min-width: 6em; }
div.course-slider output { display: block; font-weight: bold; }
div.course-slider img { background: white; height: auto; max-width: 100%; }
</style>"""


class TimelineSlider:
    """Timelines under a slider, as a notebook shows them; see `timeline_slider`."""

    def __init__(self, bundle: dict[str, str]) -> None:
        self._bundle = bundle

    def __repr__(self) -> str:
        return self._bundle["text/plain"]

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return self._bundle


def timeline_slider(
    frames: Mapping[str, Iterable[Span]],
    *,
    parameter: str,
    alt: str,
    unit: str = "s",
    first: str | None = None,
) -> TimelineSlider:
    """Return timelines of which a slider shows one, for a notebook to display.

    All have the lanes, the looks and the axis of time of `timelines`. Where no program may run, as
    on GitHub, the first is a picture. The titles of all stand below, folded.

    Args:
        frames: what the slider shows → its spans, with times in `unit`.
        parameter: the name of what changes, beside the slider.
        alt: what changes when it is moved, in a sentence, for those who cannot see it.
        unit: of the times.
        first: the title of the frame that is shown first; by default that of the first.

    Raises:
        ValueError: there are no frames, or one has no spans; `alt` is blank; or no frame has the
            title `first`.

    """
    import matplotlib.pyplot as plt

    from course_lib.ranks.trace.figure import png_of

    if not frames or not alt.strip():
        raise ValueError("a slider needs timelines, and alt, which says what it shows")
    spans = {title: list(each) for title, each in frames.items()}
    first = next(iter(spans)) if first is None else first
    if first not in spans:
        raise ValueError(f"no frame is called {first!r}: there are {', '.join(spans)}")
    figure = timelines({first: spans[first]}, unit=unit)
    still = base64.b64encode(png_of(figure)).decode("ascii")
    plt.close(figure)
    told = " ".join(alt.split())
    return TimelineSlider(
        {
            "text/html": _element(_data(spans, parameter, unit, first), still, told),
            "text/plain": told,
        }
    )


def _data(
    frames: Mapping[str, list[Span]], parameter: str, unit: str, first: str
) -> dict[str, Any]:
    """Return what the program shows. A bar is [row, kind, start, stop, label]."""
    placed, lanes = placed_spans(frames.values())
    ranks = sorted({span[0] for each in frames.values() for span in each})
    strips = {
        key: number
        for number, key in enumerate(
            (rank, lane, strip) for rank in ranks for lane in lanes for strip in range(lanes[lane])
        )
    }
    styles = styles_of(list(lanes))
    kinds = list(lanes)
    shown = []
    for title, each in zip(frames, placed, strict=True):
        bars = [
            [strips[rank, lane, strip], kinds.index(lane), _short(start), _short(stop), label]
            for (rank, lane, start, stop, label), strip in each
        ]
        counts = [f"{sum(span[1] == lane for span, _ in each)} {lane}" for lane in lanes]
        end = max(span[3] for span, _ in each)
        words = f"{', '.join(counts)}; the last ends at {end:.4g} {unit}"
        shown.append({"title": title, "words": words, "bars": bars})
    return {
        "parameter": parameter,
        "unit": unit,
        "first": list(frames).index(first),
        "from": min(0.0, *(span[2] for each in frames.values() for span in each)),
        "to": max(span[3] for each in frames.values() for span in each),
        "kinds": [{"color": styles[lane][0], "hatch": styles[lane][1]} for lane in lanes],
        "rows": [
            (f"rank {rank} " if len(ranks) > 1 else "") + (lane if strip == 0 else "")
            for rank, lane, strip in strips
        ],
        "frames": shown,
    }


def _short(time: float) -> float:
    return float(f"{time:.7g}")


def _element(data: dict[str, Any], still: str, alt: str) -> str:
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    name = f"course-slider-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    # A sign that would end the script, or begin a comment in it, is written by its number.
    given = json.dumps({"id": name}) + ", " + text.replace("<", "\\u003c")
    words = html.escape(alt, quote=True)
    rows = "".join(
        f"<li>{html.escape(each['title'])}: {html.escape(each['words'])}</li>"
        for each in data["frames"]
    )
    parameter = html.escape(data["parameter"])
    start = f'for (const root of document.querySelectorAll("div.{name}:not([data-runs])")) '
    start += '{ root.dataset.runs = "yes"; mount(root, data); }'
    summary = f"<summary>All of them in words: {parameter}</summary>"
    return (
        f'{_STYLE}<div class="course-slider {name} tex2jax_ignore mathjax_ignore" role="group" '
        f'aria-label="{words}" data-lm-suppress-shortcuts="true">'
        f'<img alt="{words}" src="data:image/png;base64,{still}">'
        f"<details>{summary}<ul>{rows}</ul></details></div>"
        f'<script type="module">{_PROGRAM.read_text(encoding="utf-8")}\n'
        f"const data = Object.assign({given});\n{start}</script>"
    )
