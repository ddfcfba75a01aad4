"""Pipeline parallelism: each rank holds some layers, and micro-batches pass through all of them.

    >>> from course_lib.pipeline_parallel import Pipeline, one_forward_one_backward, split_layers
    >>> stages = split_layers(model, 2)  # two ranks: the first layers, and the last ones
    >>> pipeline = Pipeline(stages, loss_fn, one_forward_one_backward(2, micro_batches=4))
    >>> loss = pipeline.step(x, y)  # gradients as on one machine; the loss on the last rank

Read in this order:

- `schedule`: the steps of each rank, in order, as data
- `schedules`: GPipe, one forward one backward, interleaved, zero bubble
- `simulation`: how long a schedule takes, how long ranks are idle, how many activations they hold
- `validity`: checks for schedules that deadlock or lack a step
- `weight_gradients`: backward in two halves
- `stage`: forward and backward of one part of the model
- `messages`: activations and their gradients between neighbours
- `pipeline`: all of these together, an engine that executes any schedule
"""

from typing import TYPE_CHECKING

from course_lib._later import later
from course_lib.pipeline_parallel.schedule import Schedule, Step
from course_lib.pipeline_parallel.schedules import (
    gpipe,
    interleaved,
    one_forward_one_backward,
    pipeline_schedule,
    zero_bubble,
)
from course_lib.pipeline_parallel.simulation import (
    Simulation,
    bubble_fraction,
    peak_activations,
    simulate,
    zero_bubble_fraction,
)
from course_lib.pipeline_parallel.validity import ScheduleError, check_schedule

if TYPE_CHECKING:
    from course_lib.pipeline_parallel.pipeline import Pipeline
    from course_lib.pipeline_parallel.stage import split_layers

# Schedules are data, so simulating them does not need PyTorch.
__getattr__, __dir__ = later(__name__, {"Pipeline": "pipeline", "split_layers": "stage"})
