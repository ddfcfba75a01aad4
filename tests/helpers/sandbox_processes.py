"""The processes of a running sandbox, by their part in it, for tests that end or stop them."""

import contextlib

import psutil

from autograder.sandbox.memory import descendants


def processes(bubblewrap: int) -> dict[str, list[int]]:
    """Return the pids of one sandbox, as they are numbered here.

    Args:
        bubblewrap: the pid of bubblewrap.

    Returns:
        ``bubblewrap``; ``init``, process 1 inside; ``server``, which forks; ``cells``: process 1 of
        each cell, in the order of their start.

    """
    parents = {}
    for pid in descendants(bubblewrap):
        with contextlib.suppress(psutil.NoSuchProcess):
            parents[pid] = psutil.Process(pid).ppid()
    parts = {"bubblewrap": [bubblewrap]}
    above = [bubblewrap]
    for part in ("init", "server", "cells"):
        above = sorted(pid for pid, parent in parents.items() if parent in above)
        parts[part] = above
    return parts
