"""The checks of this assignment. They are handed out: read them if a message is not enough.

The speed of light has a reference in `course_lib`, a program that calls a function on a rank, and a
draw that makes a case from a seed. The race has no reference, because every way to train is right
that reaches the target: `judges.py` says what is expected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from course_lib.capstone import Race, answer, inputs, run_rank
from course_lib.checking import Case, Draw, Expectation, Given, Variety, by_judge, by_reference

from .judges import in_time, reaches_the_target, says_its_bytes

# Task 1: the speed of light; one rank runs this, because nothing is communicated ------------------

KEYS = ("flops", "sent", "received")
ALIKE = (1e12, 1e9, 1e9)
"""Scales of the ranks' operations, bytes sent and bytes received that take about as long."""
BOUNDS = {
    "bound by operations": (1e12, 1e8, 1e8),
    "bound by what is sent": (1e10, 1e9, 1e8),
    "bound by what is received": (1e10, 1e8, 1e9),
    "no messages": (1e12, 0, 0),
}


def run_light(speed_of_light: Callable[..., Any], inputs: Any, case: Given) -> Any:
    """Call ``speed_of_light(flops, sent, received, rate, bandwidth)``."""
    lists = [case.iterable(inputs[key]) for key in KEYS]
    return {"seconds": speed_of_light(*lists, inputs["rate"], inputs["bandwidth"])}


def draw_light(d: Draw) -> list[Any]:
    """Draw each rank's operations and bytes, as integers."""
    k = d.maybe("1 rank", 1, d.one_of(2, 3, 4, 5, 8), one_in=6)
    if k > 1:
        d.say(f"{k} ranks")
    bound = d.one_of(*BOUNDS)
    scales = d.maybe(bound, BOUNDS[bound], ALIKE, one_in=2)
    counts = [d.whole(1 + int(scale), k) for scale in scales]
    idle = d.one_of(*range(k))
    if k > 1 and d.maybe("a rank without work"):
        for numbers in counts:
            numbers[idle] = 0
    faster = d.maybe("a fast device and network", 1e4, 1.0)
    speeds = {
        "rate": faster * d.one_of(1e12, 3e12, 7e11),
        "bandwidth": faster * d.one_of(1e9, 3e8, 7e8),
    }
    lists = {key: numbers.tolist() for key, numbers in zip(KEYS, counts, strict=True)}
    return [{**lists, **speeds}]


def light(of_rank: Callable[..., float] = max, of_all: Callable[..., float] = max) -> Any:
    """Return the mistake of another time for a rank, or for all of them."""

    def mistake(inputs: Sequence[Any], me: int, expected: Sequence[Any]) -> Any:
        (rank_input,) = inputs
        rate, bandwidth = rank_input["rate"], rank_input["bandwidth"]
        work = zip(*(rank_input[key] for key in KEYS), strict=True)
        times = [of_rank(f / rate, s / bandwidth, r / bandwidth) for f, s, r in work]
        return {"seconds": of_all(times)}

    return mistake


def mean(times: Sequence[float]) -> float:
    return sum(times) / len(times)


LIGHT_MISTAKES = {
    "the sum of computation and messages: perfect overlap hides the shorter one": light(
        lambda f, s, r: f + max(s, r)
    ),
    "sending plus receiving: a rank does both at once": light(lambda f, s, r: max(f, s + r)),
    "the bound without the bytes that are received": light(lambda f, s, r: max(f, s)),
    "the bound without the bytes that are sent": light(lambda f, s, r: max(f, r)),
    "the mean over the ranks: the slowest rank sets the time": light(of_all=mean),
    "the sum over the ranks: they work at the same time": light(of_all=sum),
}

# Task 2: the race; the ranks ask for gradients, which the examiner computes -----------------------


def race_inputs(case: Case, generator: torch.Generator) -> list[Any]:
    seed = str(torch.randint(2**62, (), generator=generator).item())
    return inputs(Race.of(case.parameters), seed)


def run_race(train: Callable[..., Any], inputs: Any, case: Given) -> Any:
    """Call ``train(job)``; return the trained weights, and the bytes that the rank says it sent."""
    result = run_rank(train, inputs, case.ask)
    return {"weights": result["weights"], "bytes": result["bytes"]}


def race(name: str, limits: dict[str, float], **parameters: Any) -> Case:
    """Return the case of a race; `limits` are seconds: part of the points → at most so many."""
    setting = Race(**parameters)
    parameters["limits"] = limits
    return Case(name, setting.world_size, parameters, network=setting.network)


# One technique after another reaches a limit; the wrong solutions of the assignment show it.
LADDER = {
    "bucketing": "Send all gradients of a step in one message: join them with torch.cat.",
    "fewer bytes": "Send all gradients of a step in one message, and half its bytes.",
    "fewer rounds": (
        "Let the ranks communicate less often, or take an optimizer that needs fewer steps."
    ),
    "all together": (
        "In addition to fewer rounds, send far fewer bytes, and let no message wait for another "
        "one: a ring takes 2 (K - 1) latencies, and sends to all ranks at once take one."
    ),
}
LIMITS = dict(zip(LADDER, (4.0, 2.5, 0.2, 0.06), strict=True))
RACE = race("4 ranks, 25 Mb/s: the race", LIMITS)
SMALL_RACE = race(
    *("2 ranks, a small model", {"fewer rounds": 0.1}),
    **{"world_size": 2, "hidden": 32, "latency": 1e-3, "bandwidth": 125e6},
    **{"clusters": 2, "target": 0.4},
)


CHECKS = {
    "speed_of_light": by_reference(
        "speed_of_light",
        seeds=(2, 4, 6, 9, 16, 19, 20, 21, 30, 31, 40, 50, 56),
        reference="course_lib.capstone.light:speed_of_light",
        program=run_light,
        draw=draw_light,
        # The arguments are integers. Code that divides float32 tensors is right, too.
        variety=Variety(ranks=(1,), dtypes=("float32",), layouts=(), groups=False),
        mistakes=LIGHT_MISTAKES,
    ),
    "train": by_judge(
        "train",
        inputs=race_inputs,
        program=run_race,
        judge=reaches_the_target,
        answers=answer,
        withheld=("seed",),
        expects=[
            *(in_time(part, hint) for part, hint in LADDER.items()),
            Expectation(says_its_bytes, "bytes"),
        ],
        worth={
            "values": 4,
            "bucketing": 1,
            "fewer bytes": 1,
            "fewer rounds": 2,
            "all together": 1,
            "bytes": 2,
        },
        cases=(SMALL_RACE, RACE),
        seconds=60,
    ),
}
