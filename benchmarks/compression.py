"""Compare codecs with a copy of memory.

    python benchmarks/compression.py [--rounds 7] [--write]

Each rank has one thread. The codecs are compared with a copy of a bucket of 25 MiB, DDP's default.
Like the copy, they decode to memory that exists already. They are timed in the thread's own CPU
seconds, which do not include the time of other programs. But the effect of other programs on cache
and memory is included.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from machine import arguments, publish, ratios, sentence

from course_lib.compression import (
    QSGD,
    Compressor,
    ErrorFeedback,
    OneBit,
    PowerSGD,
    RandomK,
    TopK,
    Uniform8Bit,
)

ELEMENTS = 25 * (1 << 20) // 4

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


def codecs(rounds: int) -> tuple[str, dict[str, list[float]]]:
    """Return a table's rows, with ratios to a copy of the same round, and all seconds."""
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
            statistics.median(ratios(series, f"{name}: {direction} (s)", "copy (s)"))
            for direction in ("encode", "decode")
        )
        part = payloads[name].nbytes / x.nbytes
        rows.append(f"| {name} | {part:.2%} | {encode:.2f} | {decode:.2f} |")
    return "\n".join(rows), series


def main() -> None:
    """Print the table; with ``--write``, also to ``benchmarks/results/compression.md``."""
    options = arguments(__doc__, rounds=7).parse_args()
    table, series = codecs(options.rounds)
    by_sorting = ratios(series, "torch.topk 1 % (s)", "top-k 1 %: encode (s)")
    text = f"""# The cost of compression

A bucket of 25 MiB, float32, one thread, CPU seconds; medians of {options.rounds} rounds.
{sentence("python benchmarks/compression.py")}

| codec | sent | encode ÷ copy | decode ÷ copy |
|---|---|---|---|
{table}

`torch.topk`, which sorts, takes {statistics.median(by_sorting):.1f} times as long as our top-k.
"""
    publish("compression", text, options.write)


if __name__ == "__main__":
    main()
