"""The capstone: train to a target loss as fast as possible, on a clock that nobody can cheat.

A student's function runs on every rank of a simulated network. It has no data: it asks for the
gradient of its rows at its weights, by `Job.backward`. Whoever holds the data computes it, and
counts its time: the notebook in a rehearsal, and the examiner in the grader. So no gradient can be
skipped, and no label enters the sandbox. Messages cost what they cost on the network. Everything
else is free: it is on the student's own processor.

- `problem`: the race's numbers, and how its data are drawn
- `race`: what a rank can ask, and what a run has cost
- `light`: a time that no run can beat
"""

from course_lib.capstone.problem import DEVICE, OVERHEAD, Draw, Race, draw
from course_lib.capstone.race import (
    Job,
    Score,
    answer,
    inputs,
    loss_of,
    rehearse,
    run_rank,
    score_of,
)
