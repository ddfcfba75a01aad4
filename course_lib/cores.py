"""How many cores this process may use."""

import os


def usable_cores() -> int:
    """Return how many cores this process may use; macOS tells only how many there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
