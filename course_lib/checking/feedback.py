"""Error feedback: two senders with a memory for each key, and what people get instead."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from course_lib.checking.cases import Case
from course_lib.checking.judges import Oracle, equals
from course_lib.checking.on_ranks.given import Given
from course_lib.checking.shared.chain import called
from course_lib.checking.shared.sums import EXACT


def only_largest(p: Tensor) -> Tensor:
    """Return p with zeros for all but one of its largest numbers."""
    place = p.abs().argmax()
    return torch.zeros_like(p).flatten().index_fill(0, place, 1).view(p.shape) * p


def signs(p: Tensor) -> Tensor:
    """Return one power of two with the signs of p."""
    return torch.copysign(torch.exp2(torch.frexp(p.abs().max()).exponent - 1.0), p)


SHAPES = (4, 3), (4, 3), (2, 4, 2), (11,)
"""Of the keys: two are alike. With fewer numbers a tensor might come again by chance."""


def rounded(p: Tensor) -> Tensor:
    """Return multiples of 1/256, with more bits than bfloat16 has; like PowerSGD, spare vectors.

    They are one multiple too large: else all but the small would be x, which bfloat16 has.
    """
    return (torch.round(p * 256) + 1) / 256 if p.dim() > 1 else p.clone()


COMPRESS = {"only_largest": only_largest, "signs": signs, "rounded": rounded}


def _once(compress: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return `compress`, which refuses a tensor that comes again."""
    seen: set[bytes] = set()

    def compress_once(p: Tensor) -> Tensor:
        if p.dtype != torch.float32:
            raise TypeError(f"compress takes a float32 tensor, not {p.dtype}")
        numbers = p.detach().double().cpu().contiguous().numpy().tobytes()
        if numbers in seen:
            raise RuntimeError(
                "compress is called twice for one tensor: if it rounds at random, what is kept "
                "does not belong to what is returned"
            )
        seen.add(numbers)
        return compress(p)

    compress_once.__qualname__ = compress.__qualname__  # which of them it is
    return compress_once


def in_turn(case: Case, generator: torch.Generator) -> list[dict[str, Any]]:
    """Draw a tensor for each step and key; every second step is small beside what has gathered.

    The keys have the shapes of `SHAPES`.
    """
    drawn = []
    for _ in range(case.world_size):
        own: dict[str, Any] = {
            "compress": case.parameters["compress"],
            "keys": list(case.parameters["keys"]),
        }
        for i in range(case.parameters["steps"]):
            unit = 2.0 ** (-9 if i % 2 else -1)
            own[f"step {i}"] = [
                (torch.randint(-8, 8, shape, generator=generator) * 2 + 1) * unit
                for _, shape in zip(own["keys"], SHAPES, strict=False)
            ]
        drawn.append(own)
    return drawn


def run_feedback(
    with_feedback: Callable[..., Any], mine: dict[str, Any], given: Given
) -> dict[str, Tensor]:
    """Two senders with one `compress` take turns; what they got and returned is overwritten."""
    compress = _once(COMPRESS[mine["compress"]])
    senders = {
        name: called(with_feedback(compress), "what with_feedback returns")
        for name in ("first", "second")
    }
    found = {}
    for step in [name for name in mine if name.startswith("step")]:
        for x, key in zip(mine[step], mine["keys"], strict=True):
            for name, send in senders.items():
                gradient = x.clone() if name == "first" else 4 * x
                before = gradient.clone()
                sent = send(gradient, key)
                if not isinstance(sent, Tensor):
                    raise TypeError(f"send returns {type(sent).__name__}, expected a tensor")
                found[f"{name} sender, {step}, key {key}"] = sent.clone()
                found[f"{name} sender, {step}, key {key}: x afterwards"] = gradient - before
                gradient.fill_(7), sent.fill_(9)
    return found


Keep = Callable[[Tensor, Tensor, Tensor], Tensor]


def _left(x: Tensor, e: Tensor, c: Tensor) -> Tensor:
    return x + e - c


def replayed(
    keep: Keep = _left,
    memory: Callable[[str, str], Hashable] = lambda sender, key: (sender, key),
    weight: float = 1,
    coarse: bool = False,
) -> Oracle:
    """Return an oracle of senders that add `weight` times what they `keep`, under such a name.

    `coarse`: what they would give if they calculated x + e in bfloat16.
    """

    def oracle(case: Case, inputs: Sequence[Any], me: int) -> dict[str, Tensor]:
        own, found = inputs[me], {}
        residuals: dict[Hashable, Tensor] = {}
        for step in [name for name in own if name.startswith("step")]:
            for x, key in zip(own[step], own["keys"], strict=True):
                for sender, g in (("first", x), ("second", 4 * x)):
                    place = f"{sender} sender, {step}, key {key}"
                    e = residuals.get(memory(sender, key), torch.zeros(()))
                    if e.shape != x.shape:  # of another key: no mistake gets that far
                        e = torch.zeros(x.shape)
                    p = g.float() + weight * e
                    sent = COMPRESS[own["compress"]](p.bfloat16().float() if coarse else p)
                    kept = keep(g.float(), e, sent)
                    residuals[memory(sender, key)] = kept
                    found[place], found[f"{place}: x afterwards"] = sent.to(x.dtype), 0 * x
        return found

    return oracle


equals_feedback = equals(
    replayed(),
    {
        "C(x): what was left out is not added to the next": replayed(weight=0),
        "C(x + 2 e): the residual is added twice": replayed(weight=2),
        "C(x - e): the residual has the wrong sign": replayed(weight=-1),
        "one residual for all keys: each key needs its own": replayed(memory=lambda s, key: s),
        "residuals that two senders share: each call of with_feedback begins anew": replayed(
            memory=lambda sender, key: key
        ),
        "what x - C(x + e) leaves: e = x + e - C(x + e)": replayed(lambda x, e, c: x - c),
        "all of x + e kept, also what was sent": replayed(lambda x, e, c: x + e),
        "what C(p) in the dtype of x leaves: e is p - C(p) before C(p) is converted": replayed(
            lambda x, e, c: x + e - c.bfloat16().float()
        ),
        "x + e in the dtype of x: convert x before you add": replayed(
            lambda x, e, c: ((x + e).bfloat16() - c.bfloat16()).float(), coarse=True
        ),
        "a residual rounded to the dtype of x: keep it in float32": replayed(
            lambda x, e, c: (x + e - c).bfloat16().float()
        ),
    },
    tolerance=EXACT,
)
"""Judge what both senders return in each step, for each key, and that they leave x as it is."""
