"""The timeline as a web page with a view that can be moved, drawn by the program ``viewer.js``.

One element holds everything: the events, the program, and a still picture. The picture is for
viewers that do not run the program, such as GitHub and a notebook that is not trusted. The element
fetches nothing and needs no kernel.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import sys
from pathlib import Path
from typing import Any

from course_lib.ranks.explain.words import format_bytes
from course_lib.ranks.trace.bars import styles_of
from course_lib.ranks.trace.event import Event, group_label
from course_lib.ranks.trace.lanes import with_lanes
from course_lib.ranks.trace.meetings import messages, waits
from course_lib.ranks.trace.timeline import MAX_LANES, Timeline, in_words, unit_of

_PROGRAM = Path(__file__).with_name("viewer.js")
# The selectors begin with an element name. Otherwise JupyterLab's own rules for output would win.
_STYLE = """<style>
div.course-timeline { color: var(--jp-content-font-color1, var(--pst-color-text-base, CanvasText));
  background: var(--jp-layout-color0, var(--pst-color-background, Canvas));
  font: 13px/1.45 var(--jp-content-font-family, system-ui, sans-serif); max-width: 100%; }
div.course-timeline .bar { display: flex; flex-wrap: wrap; align-items: center; gap: .4em;
  margin: .3em 0; }
div.course-timeline button, div.course-timeline input { font: inherit; color: inherit;
  background: none; border: 1px solid #8888; border-radius: 4px; padding: .15em .6em; }
div.course-timeline button { cursor: pointer; min-width: 2.2em; }
div.course-timeline input.clock { flex: 1 1 8em; min-width: 6em; accent-color: currentColor;
  padding: 0; }
div.course-timeline input[aria-invalid=true] { outline: 2px solid #d55e00; }
div.course-timeline .legend span { margin-right: 1.2em; white-space: nowrap; }
div.course-timeline .legend canvas { display: inline; vertical-align: -2px; }
div.course-timeline > canvas { display: block; touch-action: pan-y; width: 100%; }
div.course-timeline :focus-visible { outline: 2px solid #4a90d9; outline-offset: 1px; }
div.course-timeline .about { min-height: 5.8em; margin: .3em 0; }
div.course-timeline .about code { background: #8882; padding: .1em .4em; }
div.course-timeline .hint { font-size: .85em; margin: .3em 0; opacity: .85; }
div.course-timeline .rows { max-height: 20em; overflow: auto; }
div.course-timeline td, div.course-timeline th { text-align: left; padding: .1em .8em .1em 0; }
div.course-timeline img { max-width: 100%; height: auto; }
</style>"""
_PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>{title}</title></head>
<body style="margin: 1em auto; max-width: 75em; padding: 0 .7em">{element}</body></html>
"""


def data_of(timeline: Timeline, title: str = "") -> dict[str, Any]:
    """Return the data for the program, as values for JSON: a list for each property of the events.

    Times are whole nanoseconds. A missing number, such as the peer of a computation, is -1. A text
    that many events share is stored once, and each of these events has its index.
    """
    placed = with_lanes(timeline.events)
    events = [event for event, _ in placed]
    waiting, pairs = waits(events), messages(events)
    other = pairs | {receive: send for send, receive in pairs.items()}
    kinds, sizes, groups, wheres = _Texts(), _Texts(), _Texts(), _Texts()
    finish = max(event.end for event in events)
    unit, scale = unit_of(finish)
    columns = {
        "rank": [event.rank for event in events],
        "lane": [min(lane, MAX_LANES) for _, lane in placed],
        "kind": [kinds.place(event.kind) for event in events],
        "start": [_ns(event.start) for event in events],
        "end": [_ns(event.end) for event in events],
        "peer": [-1 if event.peer is None else event.peer for event in events],
        "size": [sizes.place(_size(event)) for event in events],
        "group": [groups.place(group_label(event, timeline.world_size)) for event in events],
        "where": [wheres.place(event.where) for event in events],
        "waitsFor": [waiting[i].rank if i in waiting else -1 for i in range(len(events))],
        "until": [_ns(waiting[i].until) if i in waiting else -1 for i in range(len(events))],
        "other": [other.get(i, -1) for i in range(len(events))],
    }
    styles = styles_of(list(kinds))
    looks = [{"name": kind, "color": styles[kind][0], "hatch": styles[kind][1]} for kind in kinds]
    lines = {place: line for place, where in enumerate(wheres) if (line := _line(where))}
    return columns | {
        "title": title,
        "words": in_words(timeline),
        "worldSize": timeline.world_size,
        "finish": max(1, _ns(finish)),
        "unit": unit,
        "per": round(1e9 / scale),
        "lanes": 1 + max(columns["lane"]),
        "kinds": looks,
        "sizes": list(sizes),
        "groups": list(groups),
        "wheres": list(wheres),
        "lines": lines,
    }


def element(timeline: Timeline, still: bytes, title: str = "") -> str:
    """Return the timeline as one element of a page.

    Args:
        timeline: the events.
        still: a PNG, which is shown until the program runs, or if it may not run.
        title: the title above the timeline.

    """
    # A "<" could end the script or begin a comment in it, so it is written as an escape.
    data = json.dumps(data_of(timeline, title), separators=(",", ":")).replace("<", "\\u003c")
    name = f"course-timeline-{hashlib.sha256(data.encode()).hexdigest()[:12]}"
    image = base64.b64encode(still).decode("ascii")
    words = html.escape(in_words(timeline), quote=True)
    program = _PROGRAM.read_text(encoding="utf-8")
    start = f'for (const root of document.querySelectorAll("div.{name}:not([data-runs])")) '
    start += '{ root.dataset.runs = "yes"; root.course = mount(root, data); }'
    return (
        f'{_STYLE}<div class="course-timeline {name} tex2jax_ignore mathjax_ignore" '
        f'data-lm-suppress-shortcuts="true"><img alt="{words}" '
        f'src="data:image/png;base64,{image}"></div>'
        f'<script type="module">{program}\nconst data = {data};\n{start}</script>'
    )


def page(timeline: Timeline, still: bytes, title: str = "") -> str:
    """Return a web page that holds only the timeline, for a file."""
    name = html.escape(title or "Timeline")
    return _PAGE.format(title=name, element=element(timeline, still, title))


class _Texts(dict[str, int]):
    """Texts with their indices, in the order of their first use."""

    def place(self, text: str) -> int:
        return self.setdefault(text, len(self))


def _ns(seconds: float) -> int:
    return round(1e9 * seconds)


def _size(event: Event) -> str:
    return f"{format_bytes(event.bytes)} {event.dtype}".rstrip() if event.kind != "compute" else ""


def _line(where: str) -> str:
    """Return the text of the line that ``Cell In[3], line 7`` names; ``""`` outside a notebook."""
    found = re.fullmatch(r"Cell In\[(\d+)\], line (\d+)", where)
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if found is None or shell is None:
        return ""
    cells = shell.user_ns.get("In", [])
    cell, line = (int(number) for number in found.groups())
    lines = cells[cell].splitlines() if cell < len(cells) else []
    return lines[line - 1].strip() if line <= len(lines) else ""
