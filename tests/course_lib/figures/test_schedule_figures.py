"""A drawn schedule has a numbered box for each step, in the lane of its rank."""

import matplotlib.pyplot as plt
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
        written = sorted((text.get_position(), text.get_text()) for text in axes.texts)
        numbers = [(((a + b) / 2, rank), label.rstrip("b")) for rank, _, a, b, label in spans]
        assert written == sorted(numbers)
    plt.close(figure)
