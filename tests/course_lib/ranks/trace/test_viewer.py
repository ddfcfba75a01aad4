"""The timeline to move in: its data against the trace, its layout in node, itself in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from course_lib.collectives import ring_all_reduce
from course_lib.ranks import Event, Network, Ranks, Trace, compute
from course_lib.ranks.trace import viewer
from course_lib.ranks.trace.meetings import messages, waits
from tests.helpers.browser import Browser, needs_browser

PROGRAM = Path(viewer.__file__).with_name("viewer.js")
NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="node is not installed")


def late_ring() -> None:
    compute(seconds=1e-3 * (1 + dist.get_rank()))
    ring_all_reduce(torch.full((1000,), float(dist.get_rank())))
    dist.all_reduce(torch.ones(10))


@pytest.fixture(params=[1, 2, 3, 4])
def trace(request: pytest.FixtureRequest) -> Trace:
    ranks = Ranks(request.param, on="simulated", network=Network(latency=1e-3, bandwidth=1e8))
    ranks.run(late_ring)
    return ranks.trace


def large() -> Trace:
    """Return 64 ranks with 10,240 events: messages around a ring."""
    events = [
        Event(rank, kind, (), peer, 8, "float32", i + 1, i + late, i + 0.5 + late, "x.py, line 1")
        for rank in range(64)
        for i in range(80)
        for late, kind, peer in (
            (0.0, "send", (rank + 1) % 64),
            (0.1, "recv", (rank - 1) % 64),
        )
    ]
    return Trace(events, 64)


def test_the_data_is_the_trace(trace: Trace) -> None:
    data = json.loads(json.dumps(viewer.data_of(trace.timeline)))
    count = len(trace.events)
    columns = [value for value in data.values() if isinstance(value, list) and len(value) == count]
    assert len(columns) >= 12
    shown = sorted(
        (data["rank"][i], data["kinds"][data["kind"][i]]["name"], data["start"][i], data["end"][i])
        for i in range(count)
    )
    assert shown == sorted(
        (e.rank, e.kind, round(1e9 * e.start), round(1e9 * e.end)) for e in trace.events
    )
    assert sum(other >= 0 for other in data["other"]) == 2 * len(messages(trace.events))
    for i, other in enumerate(data["other"]):
        assert other < 0 or data["other"][other] == i
    assert sum(rank >= 0 for rank in data["waitsFor"]) == len(waits(trace.events))
    hatches = [kind["hatch"] for kind in data["kinds"]]
    assert len(set(hatches)) == len(hatches), "nothing is told by colour alone"


def test_what_a_text_holds_cannot_end_the_script(trace: Trace, tmp_path: Path) -> None:
    odd = "</script><!-- <b>\u2028"
    events = [event._replace(where=odd, group_name=odd) for event in trace.events]
    Trace(events, trace.world_size).to_html(tmp_path / "odd.html", title=odd)
    page = (tmp_path / "odd.html").read_text(encoding="utf-8")
    assert page.count("</script>") == 1 and "<!--" not in page
    assert "<title>&lt;/script&gt;" in page


def test_the_page_fetches_nothing_and_has_words_and_a_picture(trace: Trace, tmp_path: Path) -> None:
    trace.to_html(tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert not re.findall(r"(?:src|href)=[\"'](?!data:)|https?://|\bimport\b.*\bfrom\b", page)
    (alt,) = re.findall(r'<img alt="([^"]+)"', page)
    assert alt.startswith(f"Timeline of {trace.world_size} rank")


def test_an_empty_trace_says_so(tmp_path: Path) -> None:
    for show in (Trace([], 2).show, lambda: Trace([], 2).to_html(tmp_path / "none.html")):
        with pytest.raises(ValueError, match="the trace is empty"):
            show()


def test_away_from_a_notebook_it_says_what_there_is(trace: Trace, capsys: Any) -> None:
    trace.show()
    assert "to_html(" in capsys.readouterr().out


def in_node(script: str, data: dict[str, Any], folder: Path) -> Any:
    """Return what an expression of the program's functions (as `v`) and the data (`d`) gives."""
    shutil.copy(PROGRAM, folder / "viewer.mjs")
    (folder / "data.json").write_text(json.dumps(data))
    (folder / "run.mjs").write_text(
        "import * as v from './viewer.mjs'; import { readFileSync } from 'node:fs';\n"
        "const d = JSON.parse(readFileSync(new URL('./data.json', import.meta.url)));\n"
        f"console.log(JSON.stringify({script}));\n"
    )
    assert NODE is not None
    ran = subprocess.run(
        [NODE, str(folder / "run.mjs")], capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@needs_node
def test_an_event_lies_where_a_click_finds_it(trace: Trace, tmp_path: Path) -> None:
    """Each in its row, no two on one another, left to right as their times."""
    data = viewer.data_of(trace.timeline)
    script = """(() => {
      const view = { from: 0, to: d.finish }, ranks = v.ranksIn("", d.worldSize);
      const place = v.layout(d, ranks, 4000, view), seen = v.visible(d, place.rows, view);
      return seen.map((i) => {
        const x = (place.x(d.start[i]) + place.x(d.end[i])) / 2, y = place.y(i) + place.strip / 2;
        return [i, v.eventAt(d, place, seen, x, y), Math.floor(y / place.high), x];
      });
    })()"""
    found = in_node(script, data, tmp_path)
    assert len(found) == len(trace.events)
    finish = max(event.end for event in trace.events)
    for i, hit, row, x in found:
        assert hit == i and row == data["rank"][i]
        middle = (data["start"][i] + data["end"][i]) / 2e9
        assert (x - 62) / (4000 - 70) == pytest.approx(middle / finish, abs=1e-6)


@needs_node
@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("", [0, 1, 2, 3]), ("0-1", [0, 1]), ("3, 1", [1, 3]), (" 2 ", [2]), ("1–2 0", [0, 1, 2]),
        ("4", None), ("x", None), ("2-1", None),
    ],
)  # fmt: skip
def test_ranks_that_a_text_names(text: str, ranks: list[int] | None, tmp_path: Path) -> None:
    assert in_node(f"v.ranksIn({json.dumps(text)}, 4)", {}, tmp_path) == ranks


@needs_node
def test_zooming_keeps_the_moment_and_stays_within_the_run(tmp_path: Path) -> None:
    script = """[[2, 500], [2, 0], [0.01, 500], [1e9, 999]].map(([factor, at]) =>
      v.zoomed({ from: 0, to: 1000 }, factor, at, 1000))"""
    half, left, whole, deep = in_node(script, {}, tmp_path)
    assert half == {"from": 250, "to": 750} and left == {"from": 0, "to": 500}
    assert whole == {"from": 0, "to": 1000}
    assert deep["from"] <= 999 <= deep["to"] <= 1000 and deep["to"] - deep["from"] == 10
    ticks = in_node("v.ticks({ from: 0, to: 3e7 }, 1e6, 8)", {}, tmp_path)
    assert [tick["text"] for tick in ticks] == ["0", "5", "10", "15", "20", "25", "30"]


PAGE = "document.querySelector('div.course-timeline')"
KEY = f"(key) => {PAGE}.querySelector(':scope > canvas').dispatchEvent(" + (
    "new KeyboardEvent('keydown', { key, bubbles: true, cancelable: true }))"
)


def opened(browser: Browser, trace: Trace, folder: Path) -> None:
    trace.to_html(folder / "run.html", title="a run")
    browser.open((folder / "run.html").as_uri())
    browser.wait_for(f"{PAGE}?.course !== undefined")


@pytest.mark.large
@needs_browser
def test_by_keys_one_follows_a_message_and_reads_it(tmp_path: Path) -> None:
    ranks = Ranks(4, on="simulated", network=Network(latency=1e-3, bandwidth=1e8))
    ranks.run(late_ring)
    with Browser() as browser:
        opened(browser, ranks.trace, tmp_path)
        assert browser.run(f"{PAGE}.querySelector('img') === null"), "the still picture has gone"

        def press(*keys: str) -> str:
            for key in keys:
                browser.run(f"({KEY})({json.dumps(key)})")
            browser.run("new Promise((done) => setTimeout(done, 200))")
            return str(browser.run(f"{PAGE}.querySelector('.about').innerText"))

        assert press("ArrowRight").startswith("rank 0: compute")
        sent = press("ArrowRight")
        assert sent.startswith("rank 0: send to 1") and "for rank 1" in sent
        assert press("Enter").startswith("rank 1: recv from 0")
        assert press("ArrowDown").startswith("rank 2: ")
        before = browser.run(f"{PAGE}.course.state().seen")
        press("+", "+", "+")
        assert browser.run(f"{PAGE}.course.state().seen") < before
        press("0", " ")
        browser.wait_for(f"{PAGE}.course.state().now < Infinity")
        press(" ")
        browser.run(f"{PAGE}.querySelector('details').open = true")
        rows = f"{PAGE}.querySelectorAll('tr').length"
        browser.wait_for(f"{rows} === {len(ranks.trace.events) + 1}")
        choose = f"{PAGE}.querySelector('input.ranks')"
        browser.run(f"{choose}.value = '1'; {choose}.dispatchEvent(new Event('input'))")
        own = sum(event.rank == 1 for event in ranks.trace.events)
        browser.wait_for(f"{rows} === {own + 1}")


@pytest.mark.large
@needs_browser
def test_ten_thousand_events_move_with_the_hand(tmp_path: Path) -> None:
    with Browser() as browser:
        trace = large()
        assert len(trace.events) > 10_000
        opened(browser, trace, tmp_path)
        assert browser.run(f"{PAGE}.course.state().seen") == len(trace.events)
        median = browser.run(f"""new Promise((done) => {{
          const course = {PAGE}.course, end = course.state().view.to, times = [];
          let last = performance.now();
          function step(now) {{
            times.push(now - last);
            last = now;
            if (times.length > 40) return done(times.sort((a, b) => a - b)[20]);
            course.see({{ from: (end * times.length) / 200, to: end }});
            requestAnimationFrame(step);
          }}
          requestAnimationFrame(step);
        }})""")
        assert median < 300, "milliseconds; without a GPU, on a machine that others use"
