"""Figures that everybody can read: with a description, and with no information in colour alone.

    >>> from course_lib.figures import show
    >>> show(figure, alt="The loss falls from 2.3 to 0.2 within 30 steps.")
    The loss falls from 2.3 to 0.2 within 30 steps.

People who cannot see a figure get its message only through its *alternative text*, which a screen
reader speaks. Notebook front ends drop the description of a plain image, so `show` writes the
figure as HTML, `<img alt="…">`, which JupyterLab, GitHub-like viewers and exported pages keep.

A good alternative text states what the figure shows, not that it is a figure: "The variance falls
from 0.8 at B = 1 to 0.006 at B = 128, along the line 1/B", rather than "plot of the variance".

- `_shown`: shows a figure; sets the style of the course; draws timelines and curves
- `_explore`: shows a figure with sliders, drawn for each combination of their values
- `_chunks`: draws which rank holds which chunk before, during and after a collective
- `_winners`: draws a map of the fastest algorithm for each size and number of ranks
- `_steps`: turns the marks and the trace of a training step into bars
- `_memory`: follows a rank's memory through a training step, and draws it
- `_feedback`: draws a step of error feedback
- `_graphs`: draws which ranks get messages from which
- `diagrams`: draws who holds what and what goes where, in boxes and arrows
"""

from course_lib.figures import diagrams
from course_lib.figures._chunks import (
    chunk_moments,
    collective_outcomes,
    draw_cables,
    draw_outcomes,
    explore_chunks,
    explore_circle,
    marked_chunks,
)
from course_lib.figures._explore import explore, tip
from course_lib.figures._feedback import feedback_step
from course_lib.figures._graphs import communication_graph
from course_lib.figures._memory import MemoryOverTime, Moment, memory_over_time
from course_lib.figures._shown import (
    Span,
    bytes_and_quality,
    error_curves,
    label_ends,
    order_of_rows,
    plain_ticks,
    show,
    timelines,
    use_course_style,
)
from course_lib.figures._steps import step_spans
from course_lib.figures._winners import winner_map
