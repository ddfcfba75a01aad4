"""A large argument: written once, for all ranks, and a rank's own only where it writes to it."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from course_lib.ranks import Ranks

WORLD_SIZE = 2
# Share of the argument's size that a process may take in addition.
SPARE = 0.2


def memory(name: str, pid: int | str = "self") -> int:
    """Return one of the sums that the system keeps of a process's memory, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def forget_peak() -> int:
    """Let the peak of this process's memory begin anew; return what it is now."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmHWM")


def read_then_write(x: torch.Tensor) -> tuple[float, int, int]:
    """Return the argument's sum, the private memory that reading it took, and the peak of all."""
    dist.barrier()
    before = memory("RssAnon")
    total = float(x.sum())
    read = memory("RssAnon") - before
    x += dist.get_rank()
    assert x[-1] == 1 + dist.get_rank()  # nobody else's
    return total, read, memory("VmHWM")


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
@pytest.mark.parametrize("size", [64 << 20, pytest.param(1 << 30, marks=pytest.mark.large)])
@pytest.mark.parametrize("on", ["cpu", "simulated"])
def test_a_large_argument_is_copied_at_most_once_per_rank(on: str, size: int) -> None:
    """By memory: ranks that write to all of it have one copy each, of one for all."""
    argument = torch.ones(size // 4)
    with Ranks(WORLD_SIZE, on=on) as ranks:
        ranks.run(read_then_write, torch.ones(1 << 20))  # what the first call loads
        before = ranks.run(forget_peak)
        own_peak = forget_peak()
        answers = ranks.run(read_then_write, argument)
        own_peak = memory("VmHWM") - own_peak
    totals, read, peaks = zip(*answers, strict=True)
    grown = [peak - was for peak, was in zip(peaks, before, strict=True)]
    assert totals == (argument.numel(),) * WORLD_SIZE
    assert argument[-1] == 1
    assert max(read) < SPARE * size  # as long as nobody writes, there is one for all
    if on == "simulated":  # all in this process: one copy for all, and one of each rank
        assert own_peak < (WORLD_SIZE + 1 + SPARE) * size
    else:
        assert own_peak < SPARE * size
        assert max(grown) < (1 + SPARE) * size
