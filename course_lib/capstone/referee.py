"""The referee: play the ranks' tapes on a draw that no student's code has seen.

A run is recorded on one draw and scored on others. So anything that a rank learned about its draw
outside the tape is useless, because the numbers are now different.
"""

from __future__ import annotations

import contextlib
import io
import math
import resource
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from course_lib.capstone.player import Played, Player
from course_lib.capstone.race import DEVICE, Race, draw, loss_of
from course_lib.capstone.tape import Tape, TapeError
from course_lib.ranks import Ranks, RanksError, RankTimeout, Trace, per_rank

_MEMORY = 8 << 30
"""Bytes of address space that the referee's process may use in addition to what it uses now."""
SECONDS = 300.0
"""Time limit for all draws together, in seconds on the wall clock."""


@dataclass(frozen=True)
class Score:
    """The referee's result.

    Attributes:
        seconds: the score, in virtual seconds until the last rank has finished.
        losses: the loss of rank 0's weights on held-out rows, one number per draw.
        equal: whether all ranks have the same bits at the end.
        flops: floating-point operations of the rank with the most.
        sent: bytes that each rank sends.
        received: bytes that each rank receives.
        gradients: gradients that rank 0 computed.
        computed: seconds of computation on the busiest rank.
        claimed: bytes that each rank says it has sent; -1 if it gives no such number.
        light: the speed of light, in seconds; see `speed_of_light`.

    """

    seconds: float
    losses: tuple[float, ...]
    equal: bool
    flops: int
    sent: tuple[int, ...]
    received: tuple[int, ...]
    gradients: int
    computed: float
    claimed: tuple[int, ...]
    light: float

    @property
    def worst(self) -> float:
        """The largest of the losses."""
        return max(self.losses)


def speed_of_light(
    flops: Sequence[int], sent: Sequence[int], received: Sequence[int], race: Race
) -> float:
    """Return the seconds that no schedule of the same arithmetic and the same bytes can beat.

    It is the maximum over ranks k of max(F_k/φ, S_k/β, R_k/β). F_k is the number of floating-point
    operations of rank k, and S_k and R_k are the bytes that it sends and receives. φ is the
    device's FLOP/s, and β is the network's bytes per second. A real run also loses time to latency,
    launches, memory traffic and waiting.
    """
    return max(
        max(f / DEVICE.flops, s / race.bandwidth, r / race.bandwidth)
        for f, s, r in zip(flops, sent, received, strict=True)
    )


def referee(race: Race, tapes: Sequence[Tensor], seeds: Sequence[str]) -> tuple[Score, Trace]:
    """Play the tapes of all ranks once for each seed; return the score and the last trace.

    Raises:
        TapeError: a rank did something that is not allowed, or that cannot be repeated.

    """
    for tape in tapes:
        Tape.decode(tape)
    told = _player.get()(asdict(race), [*tapes], [*seeds])
    if "error" in told:
        raise TapeError(told["error"])
    return Score(**told["score"]), Trace(told["events"], race.world_size, network=race.network)


Plays = Callable[[dict[str, Any], list[Tensor], list[str]], dict[str, Any]]
"""A function that plays tapes like `play`, perhaps in another process."""


def in_a_process(parameters: dict[str, Any], tapes: list[Tensor], seeds: list[str]) -> Any:
    """Call `play` in a separate process, because a tape may crash it."""
    with Ranks(1, on="cpu", timeout=SECONDS) as host:
        try:
            host.start()
        except RanksError as error:
            raise TapeError(
                f"the process that plays the tapes did not start: {error.summary} This is not the "
                "tape's fault: try again when the machine is less busy"
            ) from error
        try:
            (told,) = host.run(play, parameters, tapes, seeds)
        except RankTimeout as error:  # the cause names the process's position, perhaps a loop in C
            raise TapeError(f"playing the tapes takes more than {SECONDS:g} s") from error
        except RanksError as error:
            raise TapeError(f"the tapes cannot be played: {error.summary}") from None
    return told


_player: ContextVar[Plays] = ContextVar("_player", default=in_a_process)


@contextlib.contextmanager
def played_by(plays: Plays) -> Iterator[None]:
    """Let `referee` play tapes with `plays`; a grader plays them in a sandbox for untrusted code.

    A tape calls PyTorch's operators with untrusted numbers, and not every operator checks them.
    """
    before = _player.set(plays)
    try:
        yield
    finally:
        _player.reset(before)


def play(parameters: dict[str, Any], tapes: list[Tensor], seeds: list[str]) -> dict[str, Any]:
    """Play tapes on simulated ranks of this process, once for each seed.

    Args:
        parameters: the parameters of the `Race`.
        tapes: the tapes of all ranks.
        seeds: the seeds of the draws.

    Returns plain values: either the ``error``, or the ``score`` (the fields of `Score`) and the
    last run's ``events``.

    """
    used = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (_addresses() + _MEMORY, used[1]))
    race = Race(**parameters)
    torch.set_num_threads(1)  # so that sums do not depend on the number of cores
    losses, seconds, equal = [], set(), True
    ranks = Ranks(
        *(race.world_size, "simulated"), network=race.network, misuse="ignore", timeout=SECONDS
    )
    for seed in seeds:
        drawn = draw(race, seed)
        mine = [[x, y, *drawn.weights] for x, y in zip(drawn.x, drawn.y, strict=True)]
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                played = ranks.run(_play_rank, per_rank(tapes), per_rank(mine))
        except RanksError as error:
            return {"error": _told(error)}
        shapes = [each.shape for each in drawn.weights]
        if any([each.shape for each in rank.weights] != shapes for rank in played):
            return {"error": "the trained weights do not have the shapes of the model"}
        losses.append(_loss(race, played[0].weights, drawn.held))
        equal = equal and all(_same(rank.weights, played[0].weights) for rank in played)
        seconds.add(ranks.trace.makespan)
    if len(seconds) != 1:
        return {"error": "the tape takes a different time when the data are drawn again"}
    score = _score(race, played, tapes, ranks.trace, losses, equal)
    return {"score": score, "events": ranks.trace.events}


def _play_rank(tape: Tensor, given: list[Tensor]) -> Played:
    with torch.no_grad():
        return Player(Tape.decode(tape), [each.clone() for each in given], DEVICE).play()


def _score(
    race: Race,
    played: list[Played],
    tapes: list[Tensor],
    trace: Trace,
    losses: list[float],
    equal: bool,
) -> dict[str, Any]:
    ranks = range(race.world_size)
    measured = Trace(trace.events, race.world_size, network=race.network)
    sent = tuple(measured.bytes_sent(rank) for rank in ranks)
    received = tuple(_received(measured, rank) for rank in ranks)
    return {
        "seconds": trace.makespan,
        "losses": tuple(losses),
        "equal": equal,
        "flops": max(rank.flops for rank in played),
        "sent": sent,
        "received": received,
        "gradients": played[0].gradients,
        "computed": max(rank.computed for rank in played),
        "claimed": tuple(Tape.decode(tape).claimed for tape in tapes),
        "light": speed_of_light([rank.flops for rank in played], sent, received, race),
    }


def _received(trace: Trace, rank: int) -> int:
    """Return the bytes that a rank receives; in a collective, it receives as many as it sends."""
    come = sum(e.bytes for e in trace.operations if e.rank == rank and e.kind == "recv")
    return (
        come
        + trace.bytes_sent(rank)
        - sum(e.bytes for e in trace.operations if e.rank == rank and e.kind == "send")
    )


def _loss(race: Race, weights: list[Tensor], held: tuple[Tensor, Tensor]) -> float:
    loss = loss_of(race, [each.float() for each in weights], held)
    return loss if math.isfinite(loss) else math.inf


def _same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _addresses() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _told(error: RanksError) -> str:
    """Return a sentence about why a tape could not be played."""
    cause = error.__cause__ or error.__context__
    return str(cause) if isinstance(cause, TapeError) else error.summary
