"""A drawn schedule has a numbered box for each step, in the lane of its rank."""

import matplotlib.pyplot as plt
import pytest
from matplotlib.patches import Rectangle

from course_lib.figures import draw_schedules
from course_lib.pipeline_parallel import (
    gpipe,
    interleaved,
    one_forward_one_backward,
    simulate,
    zero_bubble,
)

SCHEDULES = {
    "GPipe": gpipe(3, 4),
    "1F1B": one_forward_one_backward(4, 8),
    "interleaved": interleaved(4, 8, 2),
    "H2": zero_bubble(4, 8, ahead=2),
}


def test_every_step_is_a_box_with_its_micro_batch():
    panels = {name: simulate(plan).spans for name, plan in SCHEDULES.items()}
    figure = draw_schedules(panels, unit="s")
    for axes, (name, spans) in zip(figure.axes, panels.items(), strict=True):
        assert axes.get_title(loc="left") == name
        boxes = [part for part in axes.patches if isinstance(part, Rectangle)]
        drawn = {
            (round(box.get_y() + 0.4), round(box.get_x(), 6), round(box.get_width(), 6))
            for box in boxes
        }
        expected = {
            (rank, round(start, 6), round(stop - start, 6)) for rank, _, start, stop, _ in spans
        }
        assert drawn == expected and len(boxes) == len(spans)
        (outlines,) = axes.collections
        assert len(outlines.get_paths()) == len(spans)
        written = sorted((text.get_position(), text.get_text()) for text in axes.texts)
        numbers = [(((a + b) / 2, rank), label.rstrip("b")) for rank, _, a, b, label in spans]
        assert written == sorted(numbers)
        assert min(text.get_size() for text in axes.texts) >= 6
    plt.close(figure)


def test_a_box_says_its_stage_and_a_later_stage_of_the_rank_is_paler():
    plan = interleaved(2, 4, 3)
    spans = simulate(plan).spans
    figure = draw_schedules({"three each": spans}, unit="s")
    works = {
        (rank, span[2]): plan.work(rank, step)
        for rank, steps in enumerate(plan.steps)
        for span, step in zip((s for s in spans if s[0] == rank), steps, strict=True)
    }
    colors = {}
    for box in (part for part in figure.axes[0].patches if isinstance(part, Rectangle)):
        work = works[round(box.get_y() + 0.4), box.get_x()]
        lane = "forward" if work.action == "F" else "backward"
        said = box.get_gid()
        assert f"stage {work.stage}, micro-batch {work.micro_batch}: {lane}" in said
        time = f"time {box.get_x():.4g} to {box.get_x() + box.get_width():.4g}"
        assert said.endswith(f"{time} (s)")
        colors.setdefault((lane, work.stage // 2), set()).add(sum(box.get_facecolor()))
    assert all(len(each) == 1 for each in colors.values())
    for lane in ("forward", "backward"):
        first, second, third = (colors[lane, chunk].pop() for chunk in range(3))
        assert first < second < third
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["forward", "backward", "paler: a rank's later stage"]
    plt.close(figure)


def test_a_box_too_narrow_for_its_number_has_none():
    figure = draw_schedules({"": simulate(interleaved(4, 12, 3)).spans}, unit="s")
    texts = figure.axes[0].texts
    assert len(texts) < len(figure.axes[0].patches)
    assert all(text.get_size() >= 6 for text in texts)
    plt.close(figure)


def test_figures_of_fewer_ranks_can_have_the_size_and_the_axis_of_more():
    two, four = simulate(gpipe(2, 2)), simulate(gpipe(4, 2))
    panels = ({"": two.spans}, {"": four.spans})
    figures = [draw_schedules(each, unit="s", end=20, lanes=4) for each in panels]
    small, large = (figure.axes[0] for figure in figures)
    assert small.get_xlim() == large.get_xlim() == (0, 20)
    assert small.get_ylim() == large.get_ylim()
    assert [each.get_text() for each in small.get_yticklabels()] == ["rank 0", "rank 1"]
    assert tuple(figures[0].get_size_inches()) == tuple(figures[1].get_size_inches())
    plt.close("all")


def test_the_figure_is_no_higher_than_it_is_wide():
    figure = draw_schedules({n: simulate(p).spans for n, p in SCHEDULES.items()}, unit="s")
    width, height = figure.get_size_inches()
    assert height < width
    plt.close(figure)


def test_kinds_differ_in_hatch_as_in_colour():
    figure = draw_schedules({"H1": simulate(zero_bubble(2, 4)).spans}, unit="s")
    patches = figure.legends[0].get_patches()
    assert len({patch.get_hatch() for patch in patches}) == len(patches) == 3
    assert len({patch.get_facecolor() for patch in patches}) == 3
    plt.close(figure)


@pytest.mark.parametrize(
    ("panels", "said"),
    [({}, "no spans"), ({"a": []}, "no spans"), ({"a": [(0, "F", 0.0, 1.0, "0")]}, "lanes must")],
)
def test_what_cannot_be_drawn_is_refused(panels, said):
    with pytest.raises(ValueError, match=said):
        draw_schedules(panels, unit="s")
