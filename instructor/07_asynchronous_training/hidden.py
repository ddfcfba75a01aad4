"""Cases that are never handed out and never enter a sandbox."""

from functools import partial

from course_lib.checking import in_many_forms

from .checks import of_events, rounds, serving, working

in_both_forms = partial(in_many_forms, dtypes=("float64", "float32"))

HIDDEN = {
    "staleness": in_both_forms(
        of_events("four workers", "2 4 6 8 +8 8 +6 +8 8 +4 4 6 +2 +4 +6 +8"),
        of_events("one pulls three times", "3 1 +1 3 1 +1 1 3 +1 +3"),
        of_events("no event", ""),
    ),
    "async_server": in_both_forms(
        serving("four workers", "2 4 6 8 +8 8 +6 +8 8 +4 4 6 +2 +4 2 8", [(2,), (0, 2)], 0.2),
        serving("very stale", "1 2 +2 2 +2 2 +2 2 +2 2 +2 +1 1 +1 1 2", [(3, 3)], 0.6),
    ),
    "work": in_both_forms(
        working(
            "4 workers, server 2",
            *(2, {0: 1e-4, 1: 2.3e-4, 3: 3.1e-4, 4: 1.7e-4}, 11),
            *([(2, 2), (3,)], 0.15, True),
        ),
        working(
            "3 workers, one has a single gradient",
            *(0, {1: 1e-4, 2: 1.1e-4, 3: 4.3e-4}, 8),
            *([()], 0.4, True),
        ),
        groups=False,
    ),
    "backup_server": in_both_forms(
        serving(
            "2 of 4",
            "1 2 3 4 +3 +4 3 4 +1 +3 1 3 +2 +4 +1 2 4 +3 1 +2 2",
            [(2, 2)],
            0.2,
            wait_for=2,
        ),
        serving(
            "4 of 4, two steps",
            "1 2 3 4 +4 +2 +1 +3 1 2 3 4 +1 +2 +3 +4 1",
            [(3,), (1,)],
            0.5,
            wait_for=4,
        ),
    ),
    "diloco": in_both_forms(
        rounds("4 ranks, 4 rounds", 4, 3, 12, 0.8, 0.6, [(2,), (2, 2)], "along"),
        rounds("7 ranks, two groups", 7, 4, 13, 0.5, 0.9, [(5,)], "to"),
    ),
}

# Modules with the answers to this assignment: they cannot be imported while it is graded.
MASKED = ("course_lib.asynchronous", "course_lib.local_sgd")
