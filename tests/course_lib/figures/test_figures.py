"""Figures come with a description, stay small, and do not speak by colour alone."""

import base64
import re
import subprocess
import sys
from html.parser import HTMLParser

import matplotlib.pyplot as plt
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from course_lib.figures import (
    bytes_and_quality,
    feedback_step,
    show,
    step_spans,
    timeline,
)
from course_lib.ranks import Network, Ranks, clock, compute
from course_lib.ranks.trace.figure import described

SPANS = [
    (rank, lane, start + 0.1 * rank, start + 0.1 * rank + 0.8, label)
    for rank in range(4)
    for lane, start, label in [
        ("backward", 0, "B2"),
        ("backward", 1, "B1"),
        ("all-reduce", 1, "g2"),
        ("all-reduce", 2, "g1"),
        ("update", 3, "U"),
    ]
]


pytestmark = pytest.mark.usefixtures("fresh_matplotlib")


@pytest.fixture
def notebook():
    yield InteractiveShell.instance()
    InteractiveShell.clear_instance()


def shown(fig, alt: str) -> dict[str, str]:
    with capture_output() as captured:
        show(fig, alt=alt)
    (output,) = captured.outputs
    return output.data


def image_of(page: str) -> dict[str, str]:
    """Return the attributes of the one tag in `page`, which must be an image."""
    found = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: found.append((tag, dict(attributes)))
    parser.feed(page)
    ((tag, attributes),) = found
    assert tag == "img"
    return attributes


# --- show -----------------------------------------------------------------------------------------


def test_bundle_has_the_description_in_html_and_text(notebook):
    fig, ax = plt.subplots()
    ax.plot([1, 2])
    data = shown(fig, 'loss < 1 & "falling"')
    assert set(data) == {"text/html", "image/png", "text/plain"}
    assert data["text/plain"] == 'loss < 1 & "falling"'
    attributes = image_of(data["text/html"])
    assert attributes["alt"] == 'loss < 1 & "falling"'
    assert attributes["src"] == "data:image/png;base64," + data["image/png"]
    assert base64.b64decode(data["image/png"], validate=True).startswith(b"\x89PNG\r\n")


@given(alt=st.text(min_size=1))
def test_any_description_survives_html_and_adds_no_tag(alt):
    bundle = described(b"png", alt)
    body = re.fullmatch(r'<img alt="([^"<>]*)" src="[^"]*">', bundle["text/html"], re.DOTALL)
    assert body
    if not {"\r", "\0"} & set(alt):  # characters that HTML itself replaces
        assert image_of(bundle["text/html"])["alt"] == alt


def test_outside_of_a_notebook_the_description_is_printed(capsys):
    assert not InteractiveShell.initialized()
    show(plt.figure(), alt="nothing\n  drawn")
    assert capsys.readouterr().out == "nothing drawn\n"


@pytest.mark.parametrize("alt", ["", "  \n"])
def test_without_description_it_is_refused(alt):
    fig = plt.figure()
    with pytest.raises(ValueError, match="alt is empty"):
        show(fig, alt=alt)
    assert plt.fignum_exists(fig.number)


# --- use_course_style -----------------------------------------------------------------------------


def test_import_and_style_choose_no_backend():
    code = (
        "import sys, course_lib.figures as f; assert 'matplotlib' not in sys.modules\n"
        "f.use_course_style(); import matplotlib\n"
        "assert matplotlib.get_backend(auto_select=False) is None\n"
        "matplotlib.use('svg'); f.use_course_style(); assert matplotlib.get_backend() == 'svg'"
    )
    environment = {"PATH": "/usr/bin:/bin"}  # without MPLBACKEND
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, env=environment)


# --- timeline -------------------------------------------------------------------------------------


def test_lanes_have_names_colours_and_hatches():
    _, ax = plt.subplots()
    timeline(ax, [(r, f"lane {i}", i, i + 1, "") for r in range(2) for i in range(9)])
    assert [t.get_text() for t in ax.get_legend().get_texts()] == [f"lane {i}" for i in range(9)]
    looks = {(tuple(bars.get_facecolor()[0]), bars.get_hatch()) for bars in ax.collections}
    assert len(looks) == 9
    hatches = [bars.get_hatch() for bars in ax.collections]
    assert len(set(hatches[:6])) == 6  # as many lanes differ without their colours


def test_impossible_timelines_are_refused():
    _, ax = plt.subplots()
    with pytest.raises(ValueError, match="no spans"):
        timeline(ax, [])
    with pytest.raises(ValueError, match="rank 1 in 'a' stops"):
        timeline(ax, [(0, "a", 0, 1, ""), (1, "a", 2, 1, "")])


# --- order_of_rows --------------------------------------------------------------------------------


def test_a_step_of_feedback_shows_what_was_sent_what_is_left_and_the_errors_so_far() -> None:
    states = [
        (torch.tensor([5.0, 2.0]), torch.tensor([5.0, 0.0]), torch.tensor([0.4, 0.4])),
        (torch.tensor([5.0, 4.0]), torch.tensor([5.0, 0.0]), torch.tensor([0.3, 0.5])),
    ]
    figure = feedback_step(states, 2)
    bars, lines = figure.axes
    assert [[bar.get_height() for bar in group] for group in bars.containers] == [
        *([5.0, 4.0], [5.0, 0.0], [0.0, 4.0]),
    ]
    assert [group.get_label() for group in bars.containers][1:] == ["sent", "new residual"]
    drawn = {line.get_label(): line.get_ydata() for line in lines.lines}
    assert drawn["with residual"] == pytest.approx([0.4, 0.3])
    assert drawn["without"] == pytest.approx([0.4, 0.5])
    plt.close(figure)


def step_with_two_calls() -> list[tuple[str, float]]:
    dist.all_reduce(torch.ones(250))  # before the barrier: not a part of the step
    dist.barrier()
    marks = [("", clock())]
    for name in ("F1", "B1", "U"):
        compute(1.0)
        marks.append((name, clock()))
        if name == "B1":
            works = [dist.all_reduce(torch.ones(250), async_op=True) for _ in range(2)]
            for work in works:
                work.wait()
            marks.append(("", clock()))
    return marks


def test_a_step_has_its_lanes_and_an_all_reduce_begins_when_the_one_before_is_over() -> None:
    network = Network(latency=0, bandwidth=1e3)  # a call of 1000 bytes takes 1 s on two ranks
    with Ranks(2, on="simulated", network=network) as ranks:
        marks = ranks.run(step_with_two_calls)[0]
        spans = step_spans(marks, ranks.trace)
    assert [(span[1], span[4]) for span in spans] == [
        *(("forward", "F1"), ("backward", "B1")),
        *(("all-reduce", "g1"), ("all-reduce", "g2"), ("update", "U")),
    ]
    times = [edge for span in spans for edge in span[2:4]]
    assert times == pytest.approx([0, 1e3, 1e3, 2e3, 2e3, 3e3, 3e3, 4e3, 4e3, 5e3])


# --- error_curves, bytes_and_quality --------------------------------------------------------------


def test_every_run_has_a_marker_of_its_own() -> None:
    runs = {f"run {i}": (10.0**i, 0.9, 0.01) for i in range(8)}
    figure = bytes_and_quality(runs)
    (ax,) = figure.axes
    points = [container.lines[0] for container in ax.containers]
    assert len({line.get_marker() for line in points}) == 8
    assert [float(line.get_xdata()[0]) for line in points] == [10.0**i for i in range(8)]
    assert [text.get_text() for text in ax.texts] == list(runs)
    figure.canvas.draw()
