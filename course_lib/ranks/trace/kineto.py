"""Traces of PyTorch's own profiler, read as the course's traces.

    >>> trace = read_profiles(["rank0.json", "rank1.json"])  # export_chrome_trace of each rank
    >>> trace.plot()

`torch.profiler` (Kineto) writes a file of JSON for each rank. On a GPU it names kernels and their
streams; NCCL's kernels are the collectives. On a CPU it names operators and gloo's collectives.
Ranks of one machine share a clock. The collectives of a kind are matched over the ranks from the
end, because a profiler may begin in the middle of a step.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from course_lib.ranks.trace.event import Event, computation
from course_lib.ranks.trace.meetings import waits
from course_lib.ranks.trace.trace import Trace

_COLLECTIVE = re.compile(r"gloo:(\w+)|ncclDevKernel_([A-Za-z]+)|ncclKernel_([A-Za-z]+)")
_BITS = {"bool": 8, "char": 8, "byte": 8, "half": 16, "bfloat16": 16, "int": 32, "float": 32}


def read_profiles(paths: Iterable[str | Path]) -> Trace:
    """Return the trace of all ranks, from one file of `torch.profiler` for each.

    A computation's `Event.where` is its stream or thread. Bytes are 0 if the profiler has not
    noted them. Raises ValueError if a file is not of a rank, or two files are of the same rank.
    """
    profiles: dict[int, dict[str, Any]] = {}
    for path in paths:
        profile = json.loads(Path(path).read_text(encoding="utf-8"))
        if "distributedInfo" not in profile:
            raise ValueError(
                f"{path} names no rank: profile after init_process_group, and write it with "
                "export_chrome_trace"
            )
        rank = profile["distributedInfo"]["rank"]
        if rank in profiles:
            raise ValueError(f"{path} is a second file of rank {rank}: give one file for each rank")
        profiles[rank] = profile
    if not profiles:
        raise ValueError("no files: give one for each rank")
    zero = min(profile.get("baseTimeNanoseconds", 0) for profile in profiles.values())
    events = [e for rank, profile in profiles.items() for e in _events(rank, profile, zero)]
    return Trace(events, next(iter(profiles.values()))["distributedInfo"]["world_size"])


def _events(rank: int, profile: dict[str, Any], zero: int) -> list[Event]:
    base = (profile.get("baseTimeNanoseconds", 0) - zero) / 1e9
    spans = [e for e in profile["traceEvents"] if e.get("ph") == "X" and "dur" in e]
    on_gpu = any(span.get("cat") == "kernel" for span in spans)
    members = tuple(range(profile["distributedInfo"]["world_size"]))
    operations, busy = [], []
    for span in spans:
        start = base + span["ts"] / 1e6
        end, notes = start + span["dur"] / 1e6, span.get("args", {})
        if (match := _COLLECTIVE.match(span["name"])) is not None:
            kind = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", next(filter(None, match.groups()))).lower()
            dtype = str(notes.get("dtype", "")).lower()
            nbytes = notes.get("In msg nelems", 0) * _BITS.get(dtype, 64) // 8
            event = computation(rank, start, end, f"stream {notes.get('stream', span['tid'])}")
            operations.append(event._replace(kind=kind, group=members, bytes=nbytes))
        elif span.get("cat") == ("kernel" if on_gpu else "cpu_op"):
            place = f"stream {notes['stream']}" if on_gpu else f"thread {span['tid']}"
            busy.append((place, start, end))
    left = Counter(event.kind for event in operations)
    numbered = []
    for event in sorted(operations, key=lambda event: event.start):
        numbered.append(event._replace(seq=-left[event.kind]))  # -1 is the last one
        left[event.kind] -= 1
    return numbered + [
        computation(rank, start, end, place)
        for place, spans in groupby(sorted(busy), key=lambda span: span[0])
        for start, end in _joined([span[1:] for span in spans])
    ]


def hidden_and_exposed(trace: Trace, rank: int) -> tuple[float, float]:
    """Return for how many seconds `rank` communicates while it computes, and while it does not."""
    own = [event for event in trace.events if event.rank == rank]
    sending = [(e.start, e.end) for e in own if e.kind != "compute"]
    computing = [(e.start, e.end) for e in own if e.kind == "compute"]
    either, total = _seconds(sending + computing), _seconds(sending)
    exposed = either - _seconds(computing)
    return total - exposed, exposed


def waiting(trace: Trace, rank: int) -> float:
    """Return for how many seconds `rank` is in a collective that another rank has not begun."""
    return sum(
        wait.until - trace.events[index].start
        for index, wait in waits(trace.events).items()
        if trace.events[index].rank == rank
    )


def _joined(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the times that the spans cover, without overlap."""
    joined: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def _seconds(spans: Sequence[tuple[float, float]]) -> float:
    return sum(end - start for start, end in _joined(spans))
