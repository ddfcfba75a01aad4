"""Compare codecs with a copy of memory, and training on a slow link with PyTorch's hooks.

    python benchmarks/compression.py [--rounds 7] [--write]

Each rank has one thread. The codecs are compared with a copy of a bucket of 25 MiB, DDP's default.
Like the copy, they decode to memory that exists already. They are timed in the thread's own CPU
seconds, which do not include the time of other programs. But the effect of other programs on cache
and memory is included. The training runs on 4 CPU ranks on an emulated link of 100 MB/s, until the
loss on held-out data is below a bound. So the time includes the additional steps that worse
gradients cost.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from machine import arguments, publish, sentence
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from course_lib.compression import (
    QSGD,
    CompressionState,
    Compressor,
    ErrorFeedback,
    OneBit,
    PowerSGD,
    RandomK,
    TopK,
    Uniform8Bit,
    compression_hook,
)
from course_lib.data import digits
from course_lib.ddp import DistributedDataParallel
from course_lib.ranks import Network, Ranks, Trace
from course_lib.sharding import shard

ELEMENTS = 25 * (1 << 20) // 4
LOSS = 0.3
MOST_STEPS = 400
LINK = Network(latency=1e-4, bandwidth=100e6)

CODECS: dict[str, Compressor] = {
    "8 bit": Uniform8Bit(),
    "8 bit, error feedback": ErrorFeedback(Uniform8Bit()),
    "8 bit, stochastic": Uniform8Bit(stochastic=True),
    "1 bit": OneBit(),
    "1 bit, error feedback": ErrorFeedback(OneBit()),
    "QSGD, 7 levels": QSGD(7),
    "random-k 1 %": RandomK(0.01),
    "top-k 1 %": TopK(0.01),
    "top-k 1 %, error feedback": ErrorFeedback(TopK(0.01)),
    "PowerSGD, rank 1": PowerSGD(1),
}


def seconds(call: Callable[[], Any]) -> float:
    """Return the CPU seconds of one call."""
    start = time.thread_time()
    call()
    return time.thread_time() - start


def codecs(rounds: int) -> tuple[list[str], dict[str, list[float]]]:
    """Return a table row per codec, with ratios to a copy of the same round, and all seconds."""
    torch.set_num_threads(1)
    x = torch.randn(ELEMENTS)
    copy = torch.empty_like(x)
    payloads = {name: codec.encode(x) for name, codec in CODECS.items()}
    series: dict[str, list[float]] = {}
    for _ in range(rounds):
        measured = {"copy": seconds(lambda: copy.copy_(x))}
        measured["torch.topk 1 %"] = seconds(lambda: x.abs().topk(ELEMENTS // 100))
        for name, codec in CODECS.items():
            # Take the best of two: before the first, the cache is full of the last codec's data.
            measured["copy"] = min(measured["copy"], seconds(lambda: copy.copy_(x)))
            measured[f"{name}: encode"] = min(
                seconds(lambda codec=codec: codec.encode(x)) for _ in range(2)
            )
            measured[f"{name}: decode"] = min(
                seconds(lambda codec=codec, name=name: codec.decode_into(payloads[name], copy))
                for _ in range(2)
            )
        for name, value in measured.items():
            series.setdefault(f"{name} (s)", []).append(value)
    rows = []
    for name in CODECS:
        encode, decode = (
            statistics.median(
                a / b
                for a, b in zip(series[f"{name}: {what} (s)"], series["copy (s)"], strict=True)
            )
            for what in ("encode", "decode")
        )
        part = payloads[name].nbytes / x.nbytes
        rows.append(f"| {name} | {part:.2%} | {encode:.2f} | {decode:.2f} |")
    return rows, series


def train(ddp: Callable[..., Any], register: Callable[[Any], None]) -> tuple[int, float, float]:
    """Train until the loss is low; return steps, seconds, and the loss that was reached."""
    torch.manual_seed(0)
    (images, labels), (test_images, test_labels) = (part.tensors for part in digits())
    net = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU())
    net.append(nn.Linear(1024, 10))
    model = ddp(net, bucket_cap_mb=100)
    register(model)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    order = torch.Generator().manual_seed(0)
    rank, k = dist.get_rank(), dist.get_world_size()
    test_loss = float("inf")
    dist.barrier()
    start, waited = time.perf_counter(), 0.0
    for step in range(1, MOST_STEPS + 1):
        rows = shard(torch.randint(len(images), (128,), generator=order), k, rank)
        optimizer.zero_grad()
        F.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimizer.step()
        if step % 10 == 0:  # replicas are equal, so all ranks stop together without a message
            pause = time.perf_counter()
            with torch.no_grad():
                test_loss = float(F.cross_entropy(net(test_images), test_labels))
            waited += time.perf_counter() - pause
            if test_loss < LOSS:
                break
    return step, time.perf_counter() - start - waited, test_loss


def ours(make: Callable[[], Compressor]) -> Callable[[Any], None]:
    """Return the function that registers our hook."""
    return lambda model: model.register_comm_hook(CompressionState(make()), compression_hook)


def torch_power_sgd(model: Any) -> None:
    """Register PyTorch's PowerSGD from the third step on, which is the earliest that it allows."""
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


# One bucket, like PyTorch's DDP with such a cap, because its PowerSGD hook hangs on gloo with two.
OURS = functools.partial(DistributedDataParallel, first_bucket_mb=100)

HOOKS: dict[str, tuple[Callable[..., Any], Callable[[Any], None]]] = {
    "PyTorch, no hook": (TorchDDP, lambda model: None),
    "PyTorch, fp16": (
        TorchDDP,
        lambda model: model.register_comm_hook(None, default_hooks.fp16_compress_hook),
    ),
    "PyTorch, PowerSGD rank 2": (TorchDDP, torch_power_sgd),
    "ours, no hook": (OURS, lambda model: None),
    "ours, 8 bit": (OURS, ours(lambda: ErrorFeedback(Uniform8Bit()))),
    "ours, 1 bit": (OURS, ours(lambda: ErrorFeedback(OneBit()))),
    "ours, top-k 1 %": (OURS, ours(lambda: ErrorFeedback(TopK(0.01)))),
    "ours, PowerSGD rank 2": (OURS, ours(lambda: ErrorFeedback(PowerSGD(2)))),
}


def exchanged(trace: Trace) -> int:
    """Return the bytes that rank 0 sent for gradients: all except the weights at the start."""
    events = [event for event in trace.events if event.kind != "broadcast"]
    return Trace(events, trace.world_size).bytes_sent(0)


def training(rounds: int) -> tuple[list[str], dict[str, list[float]]]:
    """Return a table row per hook, and all seconds."""
    series: dict[str, list[float]] = {}
    steps: dict[str, tuple[int, float]] = {}
    sent: dict[str, int] = {}
    for number in range(rounds):
        for name, (ddp, register) in HOOKS.items():
            with Ranks(4, on="cpu", network=LINK, timeout=120) as ranks:
                results = ranks.run(train, ddp, register)
                sent[name] = exchanged(ranks.trace)
            steps[name] = (results[0][0], results[0][2])
            series.setdefault(f"{name}: training (s)", []).append(max(r[1] for r in results))
            print(f"  round {number + 1}: {name}: {series[f'{name}: training (s)'][-1]:.1f} s")
    base = series["PyTorch, fp16: training (s)"]
    rows = []
    for name in HOOKS:
        times = series[f"{name}: training (s)"]
        ratio = statistics.median(a / b for a, b in zip(times, base, strict=True))
        count, loss = steps[name]
        reached = f"{count}" if loss < LOSS else f"not in {count}"
        taken = statistics.median(times)
        step, link = 1e3 * taken / count, 1e3 * sent[name] / count / LINK.bandwidth
        row = (name, reached, f"{taken:.1f}", f"{ratio:.2f}", f"{step:.0f}", f"{link:.1f}")
        rows.append(f"| {' | '.join(row)} |")
    return rows, series


def main() -> None:
    """Print both tables; with ``--write``, also to ``benchmarks/results/compression.*``."""
    options = arguments(__doc__, rounds=7).parse_args()
    coded, series = codecs(options.rounds)
    by_sorting = statistics.median(
        a / b
        for a, b in zip(series["torch.topk 1 % (s)"], series["top-k 1 %: encode (s)"], strict=True)
    )
    coded = [
        "| codec | sent | encode ÷ copy | decode ÷ copy |",
        "|---|---|---|---|",
        *coded,
        "",
        f"`torch.topk`, which sorts, takes {by_sorting:.1f} times as long as our top-k.",
    ]
    trained, more = training(max(options.rounds // 3, 1))
    text = "\n".join(
        [
            "# The cost of compression, and its gain",
            "",
            f"A bucket of 25 MiB, float32, one thread, CPU seconds; medians of {options.rounds} "
            "rounds.",
            sentence("python benchmarks/compression.py"),
            "",
            *coded,
            "",
            "1.1 million parameters, 4 CPU ranks, an emulated link of 100 MB/s; SGD until the loss "
            f"on held-back digits is below {LOSS}.",
            "",
            "| hook | steps | seconds | ÷ PyTorch's fp16 | ms per step | of these, link |",
            "|---|---|---|---|---|---|",
            *trained,
            "",
            "The time on the link is derived: a rank's bytes divided by the bandwidth. The rest of "
            "a step is forward and backward, the hook's own work, for which 4 ranks share the "
            "cores above, and the wait for the slowest rank. fp16 needs hardly any work and sends "
            "half of the bytes. Another hook is faster only if it saves more time on the link than "
            "its encoding and decoding take.",
        ]
    )
    publish("compression", text, series | more, options.write)


if __name__ == "__main__":
    main()
