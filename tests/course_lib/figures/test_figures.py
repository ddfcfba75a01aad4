"""Figures come with a description, stay small, and do not speak by colour alone."""

import base64
import html
import re

import matplotlib.pyplot as plt
import pytest
import torch
import torch.distributed as dist
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from course_lib.figures import show, step_spans
from course_lib.ranks import Network, Ranks, clock, compute

pytestmark = pytest.mark.usefixtures("fresh_matplotlib")


@pytest.fixture
def notebook():
    yield InteractiveShell.instance()
    InteractiveShell.clear_instance()


# --- show -----------------------------------------------------------------------------------------


def test_bundle_has_the_description_in_html_and_text(notebook):
    fig, ax = plt.subplots()
    ax.plot([1, 2])
    with capture_output() as captured:
        show(fig, alt='loss < 1 & "falling"')
    (output,) = captured.outputs
    data = output.data
    assert set(data) == {"text/html", "image/png", "text/plain"}
    assert data["text/plain"] == 'loss < 1 & "falling"'
    tag, attributes = re.findall(r"^<(\w+) ([^<>]*)>$", data["text/html"].strip())[0]
    attributes = dict(re.findall(r'(\w+)="([^"]*)"', attributes))
    assert tag == "img" and html.unescape(attributes["alt"]) == 'loss < 1 & "falling"'
    assert attributes["src"] == "data:image/png;base64," + data["image/png"]
    assert base64.b64decode(data["image/png"], validate=True).startswith(b"\x89PNG\r\n")


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


# --- step_spans -----------------------------------------------------------------------------------


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
