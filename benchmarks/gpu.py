"""All that needs an NVIDIA GPU, in one command of at most nine minutes: tests, failures, speed.

    python benchmarks/gpu.py [--write]      (make gpu)

One GPU is enough: several ranks share it, through NCCL where it allows that and else through gloo.
Without a GPU it says so and exits with 0. Results go to benchmarks/results/gpu/.

- the tests marked ``gpu``: collectives, gradient synchronisation, DDP, failures, each on 1, 2 and 4
  ranks
- all-reduces beside the backend's own, in algorithm and bus bandwidth and as a part of what one
  copy on the same GPU reaches
- a training step of our DDP beside PyTorch's, in turns
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from machine import RESULTS, sentence
from models import MODELS
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from course_lib.collectives import central_all_reduce, ring_all_reduce
from course_lib.cost_model import algorithm_bandwidth, bus_bandwidth
from course_lib.ddp import DistributedDataParallel
from course_lib.ranks import Ranks, RanksError

ROOT = Path(__file__).parent.parent
TEST_SECONDS = 240
SIZES = [1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 28]
WORLD_SIZES = (1, 2, 4)
REPEATS = 10


def timed(call: Callable[[], object], repeats: int = REPEATS) -> float:
    """Return the seconds of one call, the mean of `repeats`, on the slowest rank."""
    call()
    torch.cuda.synchronize()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    torch.cuda.synchronize()
    seconds = torch.tensor([(time.perf_counter() - start) / repeats], device="cuda")
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def all_reduces() -> dict[int, dict[str, float]]:
    """Return, on a rank: bytes → algorithm → seconds."""
    results = {}
    for size in SIZES:
        x, other = (torch.zeros(size // 4, device="cuda") for _ in range(2))
        results[size] = {
            "one copy": timed(lambda x=x, other=other: other.copy_(x)),  # type: ignore[misc]
            "backend": timed(lambda x=x: dist.all_reduce(x)),  # type: ignore[misc]
            "ring": timed(lambda x=x: ring_all_reduce(x)),  # type: ignore[misc]
            "central": timed(lambda x=x: central_all_reduce(x)),  # type: ignore[misc]
        }
    return results


def training_steps(name: str, rounds: int = 7) -> dict[str, list[float]]:
    """Return, on a rank: whose DDP → seconds of a step, per round; the order turns every round."""
    case = MODELS[name]
    variants: dict[str, Callable[[], None]] = {}
    for who, ddp in {"torch": TorchDDP, "ours": DistributedDataParallel}.items():
        torch.manual_seed(0)
        model = ddp(case.make().cuda())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        x, y = (each.cuda() for each in case.batch(torch.Generator().manual_seed(dist.get_rank())))

        def step(model=model, optimizer=optimizer, x=x, y=y) -> None:  # type: ignore[no-untyped-def]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

        variants[who] = step
    times: dict[str, list[float]] = {who: [] for who in variants}
    for number in range(rounds):
        for who in list(variants) if number % 2 else reversed(list(variants)):
            times[who].append(timed(variants[who]))
    return times


def bandwidths(k: int, results: dict[int, dict[str, float]]) -> str:
    """Return a table: GB/s of algorithm and bus, and the part of a copy's."""
    rows = [
        f"| K = {k} | algorithm | ms | algbw (GB/s) | busbw (GB/s) | of one copy |",
        "|---|---|---|---|---|---|",
    ]
    for size, times in results.items():
        for name, seconds in times.items():
            if name == "one copy":
                continue
            rates = algorithm_bandwidth(size, seconds), bus_bandwidth(size, seconds, k)
            rows.append(
                f"| {size >> 10} KiB | {name} | {1e3 * seconds:.3g} | {rates[0] / 1e9:.3g} "
                f"| {rates[1] / 1e9:.3g} | {times['one copy'] / seconds:.2g} |"
            )
    return "\n".join(rows)


def steps(k: int) -> str:
    """Return a table of training steps on `k` ranks."""
    rows = [f"| K = {k} | torch (ms) | ours (ms) | ours / torch |", "|---|---|---|---|"]
    for name in MODELS:
        with Ranks(k, on="gpu", metered=False, timeout=120) as ranks:
            times = ranks.run(training_steps, name)[0]
        ratios = sorted(a / b for a, b in zip(times["ours"], times["torch"], strict=True))
        least, middle, most = ratios[0], ratios[len(ratios) // 2], ratios[-1]
        torch_ms, ours_ms = (1e3 * sorted(times[w])[len(ratios) // 2] for w in ("torch", "ours"))
        rows.append(
            f"| {name} | {torch_ms:.3g} | {ours_ms:.3g} | {middle:.2f} ({least:.2f}–{most:.2f}) |"
        )
    return "\n".join(rows)


def tests() -> tuple[int, str]:
    """Run the tests marked gpu; return pytest's exit status and its last lines."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=TEST_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b""
        return 1, f"took longer than {TEST_SECONDS} s\n" + bytes(said).decode(errors="replace")[
            -3000:
        ]
    print(done.stdout)
    return done.returncode, "\n".join(done.stdout.splitlines()[-40:])


def main() -> int:
    """Run everything; return an exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="also to benchmarks/results/gpu/")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("make gpu: PyTorch sees no NVIDIA GPU here, so there is nothing to run.")
        return 0
    parts = ["# On a GPU", sentence("make gpu")]
    with Ranks(2, on="gpu") as ranks:
        parts.append(f"`Ranks(2, on='gpu')`: {ranks!r}")
    status, said = tests()
    parts.append(f"## Tests marked gpu\n\n```text\n{said}\n```")
    for k in WORLD_SIZES:
        try:
            with Ranks(k, on="gpu", metered=False, timeout=90) as ranks:
                parts.append(bandwidths(k, ranks.run(all_reduces)[0]))
            parts.append(steps(k))
        except RanksError as error:  # the rest is still worth having
            status = 1
            parts.append(f"K = {k} failed:\n\n```text\n{error}\n```")
        print(parts[-1], flush=True)
    text = "\n\n".join(parts)
    print(text)
    if options.write:
        folder = RESULTS / "gpu"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.md").write_text(text + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
