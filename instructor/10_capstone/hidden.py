"""What the grader hides. The other task draws its hidden cases from the class's secret seed."""

from .checks import race

FINAL = race(
    *("3 ranks, far apart", {"fewer rounds": 0.5}),
    **{"world_size": 3, "hidden": 64, "latency": 3e-3, "bandwidth": 125e6},
    **{"clusters": 2, "target": 0.5},
)
"""The network and model of `autograder leaderboard --final`."""

HIDDEN = {"train": (FINAL,)}

# Any module of the course may be used but this one: it is the answer to the first task.
MASKED = ("course_lib.capstone.light",)
