"""Cases that are never handed out and never enter a sandbox."""

from course_lib.checking import in_many_forms

from .checks import bound, race

FINAL = race(
    *("3 ranks, far apart", {"fewer rounds": 0.5}),
    **{"world_size": 3, "hidden": 64, "latency": 3e-3, "target": 0.5},
)
"""The network and model of `autograder leaderboard --final`."""

HIDDEN = {
    "speed_of_light": in_many_forms(
        bound("8 ranks", 8, 1e12, 1e9, 1e9, 3e12, 1e9),
        bound("2 ranks, slow network", 2, 1e12, 1e9, 2e9, 1e13, 1e7),
    ),
    "train": (FINAL,),
}

# Any module of the course may be used.
MASKED = ()
