"""The race: a rank asks for gradients; the clock counts them, and the messages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from course_lib.capstone.problem import DEVICE, Race, draw, model_of
from course_lib.ranks import Device, Network, Ranks, Trace, clock, compute, per_rank

Ask = Callable[[Any], Any]
"""Ask for a gradient: weights and row numbers → loss and gradients. Time passes meanwhile."""


@dataclass
class Job:
    """The inputs of a rank's training.

    Attributes:
        model: the network, the same on all ranks.
        rows: number of rows of this rank; no other rank has them.
        target: the loss to reach, in nats.
        network: the cost of messages: `.latency` in seconds, `.bandwidth` in bytes per second.
        device: the cost of gradients: `.flops`, per second.
        curve: time and loss of each gradient so far.

    """

    model: nn.Module
    rows: int
    target: float
    network: Network
    device: Device
    ask: Ask = field(repr=False)
    curve: list[tuple[float, float]] = field(default_factory=list)

    def backward(self, rows: Tensor | Sequence[int] | slice) -> float:
        """Set ``.grad`` of the model's parameters to the gradient of these rows' mean loss.

        Args:
            rows: numbers from 0 to ``job.rows - 1``, or a slice of them.

        Returns:
            The mean loss of these rows, in nats.

        """
        if isinstance(rows, slice):
            rows = range(*rows.indices(self.rows))
        numbers = torch.as_tensor(rows, dtype=torch.int64).flatten()
        weights = [param.detach().float().contiguous() for param in self.model.parameters()]
        reply = self.ask({"weights": weights, "rows": numbers})
        for param, gradient in zip(self.model.parameters(), reply["gradients"], strict=True):
            param.grad = gradient.to(param.dtype)
        self.curve.append((clock(), reply["loss"]))
        return float(reply["loss"])


def answer(rank_input: dict[str, Any], question: Any) -> tuple[Any, float]:
    """Return loss and gradients of a rank's rows, and the virtual seconds that they cost.

    Args:
        rank_input: the rank's ``race`` (parameters), ``seed`` and ``rank``.
        question: ``weights`` of the model's shapes, float32; ``rows``, int64.

    Raises:
        ValueError: the question has another form.

    """
    race = Race.of(rank_input["race"])
    drawn = draw(race, rank_input["seed"])
    match question:
        case {"weights": [*weights], "rows": Tensor() as rows} if len(question) == 2:
            shapes = [weight.shape for weight in drawn.weights]
            if [getattr(w, "shape", None) for w in weights] != shapes or not all(
                w.dtype == torch.float32 for w in weights
            ):
                raise ValueError("the weights do not have the shapes of job.model")
            if rows.dtype != torch.int64 or rows.dim() != 1 or not 0 < len(rows) <= race.rows:
                raise ValueError(f"ask for 1 to {race.rows} rows, got {rows.numel()}")
            if int(rows.min()) < 0 or int(rows.max()) >= race.rows:
                raise ValueError(f"rows are numbered 0 to {race.rows - 1}")
        case _:
            raise ValueError("a question has weights and rows")
    model = model_of(race, weights)
    x, y = drawn.x[rank_input["rank"]][rows], drawn.y[rank_input["rank"]][rows]
    loss = F.cross_entropy(model(x), y)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return {"loss": float(loss.detach()), "gradients": list(gradients)}, race.seconds(len(rows))


def run_rank(train: Callable[[Job], Any], rank_input: dict[str, Any], ask: Ask) -> dict[str, Any]:
    """Call ``train(job)`` on this rank.

    Returns:
        The trained ``weights``, the ``bytes`` that the rank says it has sent (-1 if it says no
        number), and the ``curve`` of its losses.

    """
    race = Race.of(rank_input["race"])
    model = model_of(race, rank_input["weights"])
    job = Job(model, race.rows, race.target, race.network, DEVICE, ask)
    number: Any = train(job)
    is_number = isinstance(number, Real)  # NumPy's numbers, too
    nbytes = int(number) if is_number and 0 <= number < 2**63 else -1
    weights = [param.detach().float() for param in model.parameters()]
    return {"weights": weights, "bytes": nbytes, "curve": job.curve}


def loss_of(race: Race, seed: str, weights: Sequence[Tensor]) -> float:
    """Return the loss, in nats, of weights on held-out rows; infinite if it is not a number."""
    x, y = draw(race, seed).held
    with torch.no_grad():
        loss = float(F.cross_entropy(model_of(race, weights)(x), y))
    return loss if math.isfinite(loss) else math.inf


@dataclass(frozen=True)
class Score:
    """What a run has cost.

    Attributes:
        seconds: the score, in virtual seconds until the last rank has finished.
        computed: seconds of gradients on the busiest rank.
        rounds: operations of communication that rank 0 took part in.
        sent: bytes that each rank has sent.
        light: the speed of light: seconds that no schedule of these gradients and bytes can beat.

    """

    seconds: float
    computed: float
    rounds: int
    sent: tuple[int, ...]
    light: float


def score_of(trace: Trace, race: Race) -> Score:
    """Return what a run on simulated ranks has cost.

    Its speed of light is that of the seconds of its gradients, and of the bytes that it sends and
    receives. A real run also loses time to latency and waiting.
    """
    # An assignment asks for this function, so a sandbox cannot import it. It needs no score either.
    from course_lib.capstone.light import speed_of_light

    computed, sent, received = [], [], []
    for rank in range(race.world_size):
        events = [event for event in trace.events if event.rank == rank]
        computed.append(sum(e.end - e.start for e in events if e.kind == "compute"))
        sent.append(trace.bytes_sent(rank))
        # In a collective, a rank receives as many bytes as it sends.
        nbytes = {kind: sum(e.bytes for e in events if e.kind == kind) for kind in ("send", "recv")}
        received.append(sent[-1] - nbytes["send"] + nbytes["recv"])
    return Score(
        seconds=trace.makespan,
        computed=max(computed),
        rounds=sum(event.rank == 0 for event in trace.operations),
        sent=tuple(sent),
        light=speed_of_light(computed, sent, received, rate=1.0, bandwidth=race.bandwidth),
    )


def inputs(race: Race, seed: str) -> list[dict[str, Any]]:
    """Return what `run_rank` and `answer` need on each rank. A rank must not see the ``seed``."""
    weights = [weight.clone() for weight in draw(race, seed).weights]
    shared = {"race": asdict(race), "weights": weights, "seed": seed}
    return [{**shared, "rank": rank} for rank in range(race.world_size)]


def rehearse(
    train: Callable[[Job], Any], race: Race, *, seed: str = "rehearsal"
) -> tuple[Score, Trace, list[tuple[float, float]]]:
    """Run ``train(job)`` on simulated ranks of this notebook, as the check does.

    Args:
        train: the function that races.
        race: the problem and the network.
        seed: the seed of the draw.

    Returns:
        What the run has cost, its trace, and the curve: time and loss of each gradient of rank 0,
        and at the end the loss on held-out rows.

    Raises:
        RanksError: a rank failed.

    """

    def on_rank(rank_input: dict[str, Any]) -> dict[str, Any]:
        def ask(question: Any) -> Any:
            reply, seconds = answer(rank_input, question)
            compute(seconds)
            return reply

        return run_rank(train, rank_input, ask)

    with Ranks(race.world_size, on="simulated", network=race.network) as ranks:
        results = ranks.run(on_rank, per_rank(inputs(race, seed)))
        trace = ranks.trace
    final = loss_of(race, seed, results[0]["weights"])
    return score_of(trace, race), trace, [*results[0]["curve"], (trace.makespan, final)]
