"""The processes of a running sandbox, by their part in it, for tests that end or stop them."""

import contextlib
import itertools

import psutil


def processes(bubblewrap: int) -> dict[str, list[int]]:
    """Return the pids of one sandbox, as they are numbered here.

    Args:
        bubblewrap: the pid of bubblewrap.

    Returns:
        ``bubblewrap``; ``init``, process 1 inside; ``server``, which forks; ``cells``: process 1 of
        each cell, in the order of their start.

    """
    parts = {"bubblewrap": [bubblewrap]}
    for above, part in itertools.pairwise(("bubblewrap", "init", "server", "cells")):
        parts[part] = []
        for pid in parts[above]:
            with contextlib.suppress(psutil.NoSuchProcess):
                parts[part] += sorted(child.pid for child in psutil.Process(pid).children())
    return parts
