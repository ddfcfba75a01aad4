"""The first operation of a process makes PyTorch import for seconds; nobody must wait for that."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import _thread, sys, threading, time
from course_lib.ranks import Ranks
import torch, torch.distributed as dist

sleep = time.sleep

class Slow:
    seen = 0

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "torch._dynamo":
            cls.seen += 1
            sleep(5)

assert "torch._dynamo" not in sys.modules
sys.meta_path.insert(0, Slow)

def exchange():
    other = 1 - dist.get_rank()
    work = dist.isend(torch.ones(1), other)
    dist.recv(torch.ones(1), other)
    work.wait()
    return dist.get_rank()

ranks = Ranks(2, on="simulated")
threading.Timer(0.5, _thread.interrupt_main).start()
start = time.monotonic()
try:
    ranks.run(exchange)
except KeyboardInterrupt:
    print("interrupted", time.monotonic() - start < 4)
print(ranks.run(exchange), Slow.seen, "torch._dynamo" in sys.modules)
"""


def test_an_interrupt_does_not_wait_for_pytorch_s_late_import() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.splitlines() == ["interrupted True", "[0, 1] 1 True"], done.stderr
