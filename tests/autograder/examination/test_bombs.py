"""Student code may not use up the examiner, which is outside the sandbox without a memory limit.

Each bomb is examined in a process of its own, whose memory and processor time are measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
MEMORY = 700 * 2**20
"""Bytes that the examiner may take for a case, beyond what it has."""
PROCESSOR = 25.0
"""Seconds that it may compute for one: less than the case may last."""

CLIENT = """
import gc, os, socket, sys, time, torch, torch.distributed as dist
def found(name):
    return next(o for o in gc.get_objects() if type(o).__name__ == name)
def lines(n, text="x" * 4000):
    context = found("SimulatedRank")
    context.locate = lambda: text
    context.handles._watched = False
def raw(*data):
    try:
        for each in data: found("FabricClient")._channel.sendall(each)
    except OSError:
        time.sleep(99)
def encode(kind, value):
    from course_lib.ranks import wire
    wire.MAX_KEY = 10**9
    return wire.encode((kind, value))
def says(kind, value):
    for fd in range(3, 64):
        try: socket.socket(fileno=os.dup(fd)).sendall(encode(kind, value))
        except OSError: pass
---
"""


@dataclass(frozen=True)
class Bomb:
    """A function, and the words of its report."""

    source: str
    words: str
    ranks: int = 4


BOMBS = {
    "messages that are under way": Bomb(
        "def f(x):\n    big = torch.zeros(60_000_000)\n"
        "    works = [dist.isend(big, 1 - dist.get_rank() % 2) for _ in range(4)]\n"
        "    [work.wait() for work in works]",
        "bytes is too large; the limit is 33,554,432",
    ),
    "many smaller ones": Bomb(
        "def f(x):\n    big = torch.zeros(1_000_000)\n    lines(0)\n"
        "    works = [dist.isend(big, (dist.get_rank() + 1) % 4) for _ in range(400)]\n"
        "    dist.recv(x, (dist.get_rank() + 1) % 4, tag=9)",
        "under way at once; the limit for a rank is 67,108,864",
    ),
    "half a frame": Bomb(
        "def f(x):\n    raw(encode('post', torch.zeros(8_000_000))[:-1])\n    time.sleep(99)",
        "longer than",
    ),
    "what it does not read": Bomb(
        "def f(x):\n    lines(0)\n    big = torch.zeros(8_000_000)\n"
        "    for i in range(5):\n"
        "        work = dist.isend(big, 1) if dist.get_rank() == 0 else dist.irecv(big, 0)\n"
        "        raw(encode('wait', i + 1)), time.sleep(2.5)\n"
        "        dist.get_rank() == 0 and found('FabricClient')._receive('done')\n"
        "    time.sleep(99)",
        "under way at once; the limit for a rank is 134,217,728",
        2,
    ),
    "handles": Bomb(
        "def f(x):\n    lines(9990)\n    none = torch.zeros(0)\n    r = dist.get_rank()\n"
        "    for i in range(9990): dist.isend(none, (r + 1) % 4, tag=i)\n"
        "    dist.recv(none, (r + 1) % 4, tag=-5)",
        "that it has not waited for; the limit for a rank is 1,024",
    ),
    "empty collectives": Bomb(
        "def f(x):\n    lines(0)\n    none = torch.zeros(0)\n"
        "    for _ in range(20_000): dist.all_reduce(none)\n    return x",
        "it would have started 5,001 operations; the limit for a rank is 5,000",
    ),
    "questions": Bomb(
        "def f(x):\n    lines(0)\n    work = dist.irecv(x, (dist.get_rank() + 1) % 4)\n"
        "    while True: work.is_completed()",
        "sent 25,001 requests to the network",
    ),
    "groups": Bomb(
        "def f(x):\n    lines(0)\n    for i in range(60_000): dist.new_group([0, 1, 2, 3])",
        "it would have started 5,001 operations; the limit for a rank is 5,000",
    ),
    "tensors without numbers": Bomb(
        "def f(x):\n    big = torch.empty(1 << 47, device='meta')\n"
        "    for _ in range(50): dist.all_reduce(big)\n    return x",
        "on the device meta has no values",
    ),
    "large answers": Bomb(
        "def f(x):\n    return torch.zeros(12_000_000)", "an answer that cannot be read", 8
    ),
    "a long exception": Bomb(
        "def f(x):\n    says('failure', {'kind': 'E', 'message': 'm' * 900_000, 'where': 'w', "
        "'trace': 't'})\n    time.sleep(99)",
        "raised E",
    ),
    "a key that is long, with many items": Bomb(
        "def f(x):\n    says('touched', {'k' * 10_000: [0] * 200_000})\n    time.sleep(99)",
        "a dict with a bad, long or repeated key",
    ),
    "buffers that were touched": Bomb(
        "def f(x):\n    misuses = found('SimulatedRank').handles.misuses\n"
        "    Misuse = sys.modules['course_lib.ranks.simulated.handles'].Misuse\n"
        "    for i in range(1500):\n"
        "        misuses.append(Misuse(0, f'{i} ' + 'w' * 500, 'read', 'l' * 50, 'h' * 50))\n"
        "    return x",
        "before its wait()",
    ),
    "a cell that says too much": Bomb(
        "says('ran', {'stdout': 'o' * 900_000, 'stderr': '', 'error': None})",
        "f could not be read from the notebook",
    ),
    "functions that carry much": Bomb(
        "load = torch.zeros(15_000_000)\ndef f(x): return load.sum()", "it came back"
    ),
}


def examined(bomb: Bomb) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.examined_alone", str(bomb.ranks)],
        input=f"{CLIENT.strip()}\n{bomb.source}",
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    cost: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(cost)
    return cost


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_the_examiner_stays_small_and_says_why(bomb: Bomb) -> None:
    cost = examined(bomb)
    assert bomb.words in cost["reason"]
    assert cost["memory"] < MEMORY
    assert cost["processor"] < PROCESSOR
    assert cost["written"] < 300_000
