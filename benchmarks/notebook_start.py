"""Time how long a notebook waits for its first ranks after importing the module that makes them.

A real kernel runs two cells. The first cell imports `course_lib.ranks` (for the peer: only torch),
which starts the work that a notebook does in the background. The second cell is timed: it makes the
ranks and adds up their numbers. It runs at once, as in "Run All", or after a pause as long as a
person's.
"""

from __future__ import annotations

import time
from pathlib import Path

AT_ONCE, LATER = 0.0, 4.0
"""Seconds between the cells."""

_IMPORTS = {
    "ours": "import torch, torch.distributed as dist\nfrom course_lib.ranks import Ranks",
    "spawn": "import torch, torch.distributed as dist",
}
_FIRST = """
import sys, time
sys.path.insert(0, {folder!r})
from ranks_vs_peers import Ours, Spawned, sum_of_ranks
{imports}
"""
_SECOND = """
start = time.monotonic()
pool = {pool}({world_size})
assert pool.run(sum_of_ranks) == [sum(range({world_size}))] * {world_size}
print("seconds", time.monotonic() - start)
pool.close()
"""


def first_ranks(kind: str, world_size: int, pause: float) -> float:
    """Return the seconds of the second cell; `kind` is ``ours`` or ``spawn``."""
    from jupyter_client.manager import start_new_kernel

    pool = {"ours": "Ours", "spawn": "Spawned"}[kind]
    folder = str(Path(__file__).parent)
    outputs: list[str] = []

    def listen(message: dict[str, dict[str, str]]) -> None:
        content = message["content"]
        outputs.append(content.get("text", "") + "\n".join(content.get("traceback", "")))

    manager, client = start_new_kernel(kernel_name="python3")
    try:
        first = _FIRST.format(folder=folder, imports=_IMPORTS[kind])
        client.execute_interactive(first, timeout=120, output_hook=listen)
        time.sleep(pause)
        second = _SECOND.format(pool=pool, world_size=world_size)
        client.execute_interactive(second, timeout=120, output_hook=listen)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    for text in outputs:
        if text.startswith("seconds"):
            return float(text.split()[1])
    raise RuntimeError("the notebook outputs: " + "".join(outputs))


def compare_starts(world_size: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return kind → measurement → seconds of each round; the kinds are measured in turn."""
    found: dict[str, dict[str, list[float]]] = {"ours": {}, "spawn": {}}
    for _ in range(rounds):
        for pause, when in ((AT_ONCE, "at once"), (LATER, f"{LATER:.0f} s later")):
            for kind, measured in found.items():
                name = f"first ranks of a notebook, {when} (s)"
                measured.setdefault(name, []).append(first_ranks(kind, world_size, pause))
    return found
