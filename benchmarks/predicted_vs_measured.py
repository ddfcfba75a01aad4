"""Compare training times that simulated ranks predict with those of real ranks on a slow network.

    python benchmarks/predicted_vs_measured.py [--rounds 5] [--write]

Real CPU ranks on an emulated slow network train a small model, with three ways to synchronise
gradients and without synchronisation. There are runs with four ranks, which share this machine's
cores, and with two ranks. Simulated ranks run the same functions. Their communication takes the
time of the network's formula. Their computation takes the CPU time of the rank, and only one rank
runs at a time. How much sharing slows computation is measured once, by a step without
communication. The simulation gets this number as the device's slowdown. Nothing else is fitted.

The table also has the cost model's times. C is the time of the same step, and backward takes 2/3
of it. t(n) is the time of an all-reduce of n bytes. The three ways take C + sum of t for each
parameter; C + t(all); and C/3 plus `bucketing.overlapped_time`.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from machine import RESULTS, arguments, publish, sentence
from torch import nn

from course_lib.bucketing import assign_buckets, overlapped_time
from course_lib.cost_model import ring_all_reduce_time
from course_lib.ddp import DistributedDataParallel
from course_lib.gradient_sync import sync_flat, sync_per_parameter
from course_lib.ranks import Ranks, clock
from course_lib.ranks.costs.network import Device, Network
from course_lib.ranks.trace.timeline import draw_timelines
from course_lib.ranks.trace.trace import Trace

WIDTH, LAYERS, BATCH = 320, 20, 768
BUCKET_MB = 2.0
STRATEGIES = ("no communication", "per parameter", "flat", "bucketed, overlapped")
Times = dict[str, tuple[float, float]]
"""Strategy → (measured, predicted) seconds."""


class Case(NamedTuple):
    """A number of ranks on a network."""

    world_size: int
    network: Network


CASES = (Case(4, Network(1e-3, 100e6)), Case(2, Network(2.5e-3, 94e6)))


def model() -> nn.Sequential:
    """Return an MLP of 42 tensors and 2.1 million parameters, the same on every rank."""
    torch.manual_seed(0)
    hidden: list[nn.Module] = []
    for _ in range(LAYERS):
        hidden += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, 10))


def train(strategy: str, steps: int) -> list[float]:
    """Return the seconds of each of `steps` training steps of this rank, by its own clock."""
    net = model()
    wrapped: nn.Module = net
    synchronise: Callable[[Iterable[torch.Tensor]], None] | None = None
    if strategy == "per parameter":
        synchronise = sync_per_parameter
    elif strategy == "flat":
        synchronise = sync_flat
    elif strategy == "bucketed, overlapped":
        wrapped = DistributedDataParallel(net, bucket_cap_mb=BUCKET_MB)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    seconds = []
    for step in range(steps + 2):
        x = torch.randn(BATCH, WIDTH, generator=generator)
        y = torch.randint(10, (BATCH,), generator=generator)
        dist.barrier()
        start = clock()
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapped(x), y).backward()
        if synchronise is not None:
            synchronise(net.parameters())
        optimizer.step()
        if step >= 2:  # the first steps build buckets and warm caches
            seconds.append(clock() - start)
    return seconds


def formula(case: Case, strategy: str, alone: float) -> float:
    """Return the cost model's seconds, computed from those of a step without communication."""
    params = list(model().parameters())
    if strategy == "no communication":
        return alone
    cap, first = {"per parameter": (0, 0), "flat": (math.inf, math.inf)}.get(
        strategy, (BUCKET_MB, 1)
    )
    buckets = assign_buckets(params, cap, first)
    sizes = [sum(params[i].nbytes for i in bucket) for bucket in buckets]
    if strategy == "bucketed, overlapped":
        return alone / 3 + overlapped_time(sizes, 2 / 3 * alone, *case)
    return alone + sum(ring_all_reduce_time(size, *case) for size in sizes)


def slowest(results: list[list[float]]) -> float:
    """Return the median over the steps of the slowest rank's seconds."""
    return statistics.median(max(each) for each in zip(*results, strict=True))


def last_step(trace: Trace) -> Trace:
    """Return the part of the trace after the last barrier."""
    barriers = [event for event in trace.events if event.kind == "barrier"]
    begin = max(event.end for event in barriers)
    after = [e._replace(start=max(e.start, begin)) for e in trace.events if e.end > begin]
    return Trace(after, trace.world_size)


def on_real(case: Case, strategy: str, steps: int) -> tuple[float, Trace]:
    """Return the seconds of a step on real ranks, and the trace of one of them."""
    with Ranks(case.world_size, on="cpu", network=case.network) as ranks:
        seconds = slowest(ranks.run(train, strategy, steps))
        return seconds, last_step(ranks.trace)


def on_simulated(
    case: Case, strategy: str, steps: int, slowdown: float = 1.0
) -> tuple[float, Trace]:
    """Return the seconds of a step on simulated ranks whose computation is measured."""
    ranks = Ranks(
        case.world_size,
        on="simulated",
        network=case.network,
        device=Device(slowdown=dict.fromkeys(range(case.world_size), slowdown)),
        computation="measured",
    )
    seconds = slowest(ranks.run(train, strategy, steps))
    return seconds, last_step(ranks.trace)


def one_round(case: Case, steps: int) -> tuple[Times, float, dict[str, Trace]]:
    """Measure and predict every strategy once; return also the slowdown and the last traces."""
    times: Times = {}
    slowdown = 1.0
    for strategy in STRATEGIES:
        real, real_trace = on_real(case, strategy, steps)
        if strategy == STRATEGIES[0]:
            slowdown = real / on_simulated(case, strategy, steps)[0]
        simulated, simulated_trace = on_simulated(case, strategy, steps, slowdown)
        times[strategy] = real, simulated
    titled = {"measured on real ranks": real_trace, "predicted by simulated ranks": simulated_trace}
    return times, slowdown, titled


def measure(
    case: Case, rounds: int, steps: int
) -> tuple[list[Times], list[float], dict[str, Trace]]:
    """Return the times of all rounds, their slowdowns, and the last round's traces."""
    every, slowdowns = [], []
    for _ in range(rounds):
        times, slowdown, traces = one_round(case, steps)
        pairs = ", ".join(f"{1e3 * r:.0f} / {1e3 * s:.0f} ms" for r, s in times.values())
        print(f"measured / predicted: {pairs}", file=sys.stderr)
        every.append(times)
        slowdowns.append(slowdown)
    return every, slowdowns, traces


def table(case: Case, rounds: list[Times], slowdown: float) -> str:
    """Return the medians over the rounds as Markdown."""
    rows = []
    for strategy in STRATEGIES:
        real, simulated = zip(*(times[strategy] for times in rounds), strict=True)
        model_says = [formula(case, strategy, times[STRATEGIES[0]][0]) for times in rounds]
        off = statistics.median(m / r - 1 for m, r in zip(model_says, real, strict=True))
        errors = sorted(s / r - 1 for r, s in zip(real, simulated, strict=True))
        rows.append(
            f"| {strategy} | {1e3 * statistics.median(real):.0f} "
            f"| {1e3 * statistics.median(simulated):.0f} "
            f"| {100 * statistics.median(errors):+.1f} % "
            f"| {100 * errors[0]:+.1f} … {100 * errors[-1]:+.1f} % "
            f"| {1e3 * statistics.median(model_says):.0f} | {100 * off:+.1f} % |"
        )
    orders = {
        tuple(sorted(STRATEGIES, key=lambda strategy: times[strategy][which]))
        for times in rounds
        for which in (0, 1)
    }
    ranking = "the same in every round" if len(orders) == 1 else "NOT the same in every round"
    network = f"{1e3 * case.network.latency:g} ms and {case.network.bandwidth / 1e6:g} MB/s"
    return "\n".join(
        [
            f"## {case.world_size} ranks, {network}",
            "",
            f"The ranks share the cores, which makes computation {slowdown:.2f} times slower. This "
            "factor was fitted to the first row, without communication; the other rows are "
            f"predicted. The ranking, measured and predicted, is {ranking}.",
            "",
            "| gradients | measured (ms) | simulated (ms) | error | range over the rounds "
            "| formula (ms) | error |",
            "|---|---|---|---|---|---|---|",
            *rows,
        ]
    )


def main() -> None:
    """Print the tables; with ``--write``, also to ``benchmarks/results/``, with a figure."""
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--steps", type=int, default=9, help="steps per round and strategy")
    parser.add_argument("--cases", type=int, default=len(CASES), help="number of cases")
    options = parser.parse_args()
    parameters = sum(p.numel() for p in model().parameters())
    parts = [
        "# Predicted and measured",
        f"A training step of an MLP ({parameters / 1e6:.1f} million parameters, "
        f"{sum(1 for _ in model().parameters())} tensors, batch {BATCH} per rank), buckets of "
        f"{BUCKET_MB:g} MiB. Medians of {options.rounds} rounds, of the slowest rank's median of "
        f"{options.steps} steps. " + sentence("python benchmarks/predicted_vs_measured.py"),
    ]
    series: dict[str, list[float]] = {}
    for case in CASES[: options.cases]:
        rounds, slowdowns, traces = measure(case, options.rounds, options.steps)
        parts.append(table(case, rounds, statistics.median(slowdowns)))
        for strategy in STRATEGIES:
            what = f"K = {case.world_size}, {strategy}"
            series[f"{what}, measured (s)"] = [times[strategy][0] for times in rounds]
            series[f"{what}, simulated (s)"] = [times[strategy][1] for times in rounds]
        series[f"K = {case.world_size}, slowdown by sharing the cores (ratio)"] = slowdowns
        if case is CASES[0]:
            titled = {
                f"{title}: {1e3 * t.makespan:.0f} ms": t.timeline for title, t in traces.items()
            }
            timelines = draw_timelines(titled)
            parts.append(
                "![Two timelines of one step with overlapped buckets: the real ranks above, the "
                "simulated ranks below](predicted_vs_measured.png)"
            )
    text = "\n\n".join(parts)
    publish("predicted_vs_measured", text, series, options.write)
    if options.write:
        timelines.savefig(RESULTS / "predicted_vs_measured.png")


if __name__ == "__main__":
    main()
