"""Start ranks that add up a tensor, as all lectures do."""

from __future__ import annotations

import time
from typing import Any, Literal

from course_lib.learner.doctor.finding import Finding

SECONDS = 60.0


def simulated() -> Finding:
    """Start four simulated ranks."""
    return _try("simulated", "simulated ranks")


def real() -> Finding:
    """Start two processes that communicate over gloo."""
    return _try("cpu", "CPU ranks")


def _try(on: Literal["simulated", "cpu"], name: str) -> Finding:
    try:
        import torch

        from course_lib.ranks import Ranks
        from course_lib.ranks.explain.errors import RanksError
    except ImportError as error:
        return Finding(name, f"{error.name} is missing: see packages", "see packages")
    size = 4 if on == "simulated" else 2
    start = time.monotonic()
    try:
        with Ranks(size, on=on, timeout=SECONDS) as ranks:
            sums = ranks.run(_sum)
    except (RanksError, OSError, RuntimeError) as error:
        told = str(error).strip().splitlines()[0]
        advice = "see memory, disk and network above; the notebooks need working ranks"
        return Finding(name, told, advice)
    if not all(torch.equal(each, torch.full((3,), float(size))) for each in sums):
        return Finding(name, f"the sum was {sums}", "install PyTorch again: its sums are wrong")
    return Finding(
        name, f"{size} added up a tensor in {time.monotonic() - start:.1f} s, start included"
    )


def _sum() -> Any:
    import torch
    import torch.distributed as dist

    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    return tensor
