"""How a race is judged: the weights that the ranks trained, their bytes, and their time.

The task `train` has no reference: every way to train is right that reaches the target.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from course_lib.capstone import Race, Score, loss_of, score_of
from course_lib.checking import Case, Expectation, Observed, Wrong
from course_lib.ranks import Trace


def reaches_the_target(case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> None:
    """Raise `Wrong` unless the ranks agree and reach the target on rows that no rank has."""
    race = Race.of(case.parameters)
    trained = [value["weights"] for value in values]
    shapes = [tensor.shape for tensor in inputs[0]["weights"]]
    for rank, weights in enumerate(trained):
        if [tensor.shape for tensor in weights] != shapes:
            raise Wrong(
                f"the parameters of rank {rank} no longer have the shapes of the model",
                "Train job.model in place.",
            )
    loss = loss_of(race, inputs[0]["seed"], trained[0])
    if loss == math.inf:
        raise Wrong(
            "the loss with the trained weights of rank 0 is not finite",
            "Training diverges. Is the learning rate too large? Do you divide sums over the ranks "
            "by K?",
        )
    if not all(all(map(torch.equal, weights, trained[0])) for weights in trained):
        raise Wrong(
            "the ranks end with different weights",
            "After the last step, average all parameters over the ranks, also the biases.",
        )
    if loss > race.target:
        digits = f"{loss:.3f}" if loss < 100 else f"{loss:.1e}"
        raise Wrong(
            f"the loss on test rows, which no rank has, is {digits}, expected at most "
            f"{race.target:g}",
            "The model trains, but not far enough: take more steps, average more often, or change "
            "the learning rate. rehearse(train, Race()) tells you the loss quickly."
            if loss < math.log(race.classes)
            else "This is no better than guessing. Do you train job.model itself? Do you divide "
            "sums over the ranks by K? Is the learning rate too large?",
        )


def in_time(part: str, hint: str = "") -> Expectation:
    """Expect at most as many seconds as the case's ``limits`` have for this part, if any."""

    def test(case: Case, observed: Observed, trace: Trace) -> None:
        if observed.network is None:
            return  # on real ranks there is no virtual clock
        score, limits = score_of(trace, Race.of(case.parameters)), case.parameters["limits"]
        missed = [name for name, limit in limits.items() if score.seconds > limit]
        if part not in missed:
            return
        limit = f"at most {1e3 * limits[part]:g} ms for the points of ‘{part}’"
        if part != missed[0]:  # the sentences about the first one say the rest
            raise Wrong(f"training may take {limit}", hint)
        raise Wrong(
            f"training takes {1e3 * score.seconds:.1f} ms on the virtual clock, expected {limit}",
            f"{1e3 * score.computed:.1f} ms of this is for gradients. "
            f"{bounded(score, limits[part])} {hint}".rstrip(),
        )

    return Expectation(test, part)


def bounded(score: Score, limit: float) -> str:
    """Return a sentence on the speed of light for this run's own operations and bytes."""
    light = f"With a perfect schedule your bytes and operations take {1e3 * score.light:.1f} ms"
    if score.light > limit:
        return f"{light.replace('With', 'Even with')}: use fewer of them."
    return f"{light}: the rest is latency, overhead and waiting."


def says_its_bytes(case: Case, observed: Observed, trace: Trace) -> None:
    """Raise `Wrong` unless each rank returns the bytes that it has sent, to one per cent."""
    for rank, output in enumerate(observed.outputs):
        returned, sent = output["value"]["bytes"], trace.bytes_sent(rank)
        if returned < 0:
            raise Wrong(
                f"rank {rank} does not return a number of bytes, expected {sent:,}",
                "Count the bytes while you send, and return the sum as an int, not as a tensor.",
            )
        if abs(returned - sent) > 0.01 * sent:
            raise Wrong(
                f"rank {rank} says that it sent {returned:,} bytes, but it sent {sent:,}",
                "A ring all-reduce of n bytes sends 2 (K - 1)/K n from each rank.",
            )
