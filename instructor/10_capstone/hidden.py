"""What the grader hides. The other task draws its hidden cases from the class's secret seed."""

from .checks import race

FINAL = tuple(
    race(
        *(f"3 ranks, far apart, draw {number}", {"fewer rounds": 0.5}),
        **{"world_size": 3, "hidden": 64, "latency": 3e-3, "bandwidth": 125e6},
        **{"clusters": 2, "target": 0.5},
    )
    for number in (1, 2, 3)
)
"""The network and model of `autograder leaderboard --final`, on three secret draws of the data."""

HIDDEN = {"train": FINAL}

# Any module of the course may be used but this one: it is the answer to the first task.
MASKED = ("course_lib.capstone.light",)
