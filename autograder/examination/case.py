"""Run the ranks of one case from the examiner's side: fork them, carry their messages, kill them.

Each rank is a process in a separate cell. Its messages go through the fabric here, outside the
sandbox, on a virtual clock. So a deadlock is known when it happens, and the grader knows what was
sent, even if the ranks report something different.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autograder.examination._channel import Channel, wait_at_most
from autograder.examination.budget import LOOK_EVERY, Deadline
from autograder.sandbox.place import Cell, SandboxedPlace
from course_lib.checking.cases import Case
from course_lib.checking.limits import CARRIED, MAX_ANSWERS, MAX_TEXT
from course_lib.checking.on_ranks.frames import Frame
from course_lib.checking.on_ranks.wire import Plain, WireError, decode, encode
from course_lib.ranks.costs.network import Network
from course_lib.ranks.explain.errors import (
    MismatchError,
    RankError,
    RanksError,
    RankState,
    RankTimeout,
)
from course_lib.ranks.explain.failure import Failure, rank_error, timed_out
from course_lib.ranks.for_graders import MAX_MISUSES, FabricServer, Misuse, explain_misuse
from course_lib.ranks.trace.trace import Trace

GRACE = 0.5
"""Seconds that the other ranks get to report what happened to them after one rank has failed."""


_LOOP = (
    "A rank that still runs is computing, sleeping or in a loop: look for a loop that does not end."
)


class SubmissionError(RanksError):
    """The submission's own code prevented a case from being run at all."""


class OverMemory(RanksError):
    """The submission's processes together took more memory than they may."""


@dataclass
class _Rank:
    channel: Channel
    cell: Cell
    touched: list[Misuse] = field(default_factory=list)
    answer: Any = None
    answered: bool = False
    failure: Failure | None = None


class CaseRanks:
    """The ranks of one case, from fork to kill. A context manager.

    Args:
        place: the sandbox in which they run.
        case: the case of these ranks.
        program: the check's program, packed.
        function: the student's function, as the notebook process handed it over.
        network: the cost of messages.
        computes: for each rank, seconds → how often its program may report computing that long.
        answers: answers the ranks' questions; see `FabricServer`.
        only_on: the ranks that get the function; empty: all of them.

    """

    def __init__(
        self,
        place: SandboxedPlace,
        case: Case,
        program: bytes,
        function: bytes,
        network: Network,
        computes: Sequence[Mapping[float, int]] = (),
        answers: Callable[[int, bytes], tuple[bytes, float]] | None = None,
        only_on: Sequence[int] = (),
    ) -> None:
        self._place = place
        self._k = case.world_size
        self._ranks: list[_Rank] = []
        self._kept = contextlib.ExitStack()
        ends = []
        for rank in range(self._k):
            pairs = (socket.socketpair(), socket.socketpair())
            (ours, theirs), (our_end, their_end) = pairs
            ends.append(our_end)
            config = {"rank": rank, "world_size": self._k}
            with theirs, their_end:
                try:
                    fds = [theirs.fileno(), their_end.fileno()]
                    cell = place.cell("autograder.inside.examinee:serve_rank", config, fds)
                except BaseException:
                    for end in (ours, *ends):
                        end.close()
                    self._kept.close()
                    raise
            channel = Channel(ours, MAX_ANSWERS // self._k)
            self._kept.callback(channel.close)
            self._ranks.append(_Rank(channel, cell))
            channel.queue(Frame.PROGRAM, program)
            channel.queue(Frame.FUNCTION, function if rank in (only_on or [rank]) else b"")
        nothing: Sequence[Mapping[float, int]] = [{}] * self._k
        self._server = FabricServer(
            ends,
            network,
            computes=computes or nothing,
            answers=answers,
            bounds=CARRIED,
        )

    def __enter__(self) -> CaseRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()
        self._kept.close()
        self._place.kill([rank.cell for rank in self._ranks])

    @property
    def trace(self) -> Trace:
        """The messages of the ranks and their times, as the fabric here carried them."""
        return Trace(self._server.fabric.events, self._k)

    @property
    def touched(self) -> list[str]:
        """Sentences on the buffers that the ranks, by their own reports, used too early."""
        return explain_misuse([each for rank in self._ranks for each in rank.touched]).splitlines()

    def start(self, inputs: Sequence[Plain]) -> None:
        """Give every rank its input, and wait until it is about to run the student's code.

        Raises:
            MachineFailure: a rank did not start.

        """
        for rank, value in zip(self._ranks, inputs, strict=True):
            rank.channel.queue(Frame.INPUT, encode(value))
            rank.channel.serve()
        for number, rank in enumerate(self._ranks):
            if not rank.channel.wait_until_ready():
                raise self._place.broken(f"Rank {number} did not start")

    def run(self, deadline: Deadline) -> list[Any]:
        """Return the outputs of the started ranks, in rank order.

        Raises:
            RanksError: not all ranks answered; the message says why. Call `blame` to confirm that
                the student's code caused it.

        """
        stuck: RanksError | None = None
        with selectors.DefaultSelector() as selector:
            selector.register(self._server, selectors.EVENT_READ, None)
            for number, rank in enumerate(self._ranks):
                selector.register(rank.channel.socket, rank.channel.events, number)
                self._serve(selector, number)  # messages that came with its sign of readiness
            looked = time.monotonic()
            while not all(rank.answered or rank.failure for rank in self._ranks):
                if (left := deadline.left) <= 0:
                    break
                turn = False
                for key, _ in selector.select(wait_at_most(left)):
                    if key.data is None:
                        turn = True
                    else:
                        self._serve(selector, key.data)
                # Read answers first: a rank's exception says more than the end of its process.
                if turn and stuck is None:
                    stuck = self._turn(selector)
                    if stuck is not None:
                        deadline.shorten(GRACE)
                if self._server.ended_badly or any(rank.failure for rank in self._ranks):
                    deadline.shorten(GRACE)
                if time.monotonic() - looked > LOOK_EVERY:
                    looked = time.monotonic()
                    if over := self._place.over_memory():
                        raise OverMemory(f"{over[0].upper()}{over[1:]}.", self._states())
                if stuck is not None and not isinstance(stuck, RankError):
                    raise stuck
        return self._outcome(stuck, deadline.seconds)

    def _outcome(self, stuck: RanksError | None, seconds: float) -> list[Any]:
        failures = {n: rank.failure for n, rank in enumerate(self._ranks) if rank.failure}
        if failures:
            raise rank_error(failures, min(failures), self._states(), None)
        if stuck is not None:
            raise stuck
        if self._server.ended_badly and (outcome := self._server.outcome()) is not None:
            raise outcome
        if not all(rank.answered for rank in self._ranks):
            late = timed_out("case", seconds, self._states())
            raise RankTimeout(late.summary, late.states, late.detail and _LOOP)
        # Every answer has arrived. Right after its answer, a rank reports that it has finished.
        until = time.monotonic() + GRACE
        while not self._server.over and time.monotonic() < until:
            if (stuck := self._turn(None, LOOK_EVERY)) is not None:
                raise stuck
        if (outcome := self._server.outcome()) is not None:
            raise outcome
        return [rank.answer for rank in self._ranks]

    def _turn(self, selector: Any, wait: float = 0.0) -> RanksError | None:
        try:
            self._server.turn(wait)
        except RanksError as error:
            if selector is not None:
                selector.unregister(self._server)
            return error
        return None

    def _serve(self, selector: selectors.BaseSelector, number: int) -> None:
        rank = self._ranks[number]
        try:
            rank.channel.serve()
            for kind, payload in rank.channel.take():
                if rank.answered or rank.failure:
                    continue
                if kind == Frame.TOUCHED:
                    rank.touched = touched_told(number, decode(payload))
                elif kind == Frame.OUTPUT:
                    rank.answer, rank.answered = decode(payload), True
                elif kind == Frame.FAILURE:
                    rank.failure = failure_told(decode(payload))
        except WireError as error:
            if not (rank.answered or rank.failure):
                raise RankError(
                    f"Rank {number} gave an answer that cannot be read: {error}", rank=number
                ) from None
        if rank.channel.ended or rank.answered or rank.failure:
            selector.unregister(rank.channel.socket)
            if not (rank.answered or rank.failure):
                mismatch = self._turn(None)  # its last message may explain its end
                if isinstance(mismatch, MismatchError):
                    raise mismatch
                raise _HungUp(f"Rank {number} ended.", rank=number)
        else:
            selector.modify(rank.channel.socket, rank.channel.events, number)

    def _states(self) -> list[RankState]:
        return self._server.states()

    def blame(self, error: RanksError) -> RanksError:
        """Return the error of `run`, after confirming that the student's code caused it.

        This takes a while if a rank has closed its connection but has not ended. The student's
        clock does not run meanwhile.

        Raises:
            MachineFailure: the student's code did not cause it.

        """
        self._place.make_sure()
        why = {
            number: self._place.why_ended(rank.cell)
            for number, rank in enumerate(self._ranks)
            if number in self._server.hung_up
            or (rank.channel.ended and not (rank.answered or rank.failure))
        }
        if not isinstance(error, _HungUp):
            return error
        number = error.rank
        states = [
            RankState(state.rank, "process ended", state.where) if state.rank == number else state
            for state in self._states()
        ]
        if over := self._place.over_memory():
            return OverMemory(f"{over[0].upper()}{over[1:]}.", states)
        detail = "The other ranks were stopped." if self._k > 1 else ""
        told = f"Rank {number}'s process ended: {why[number]}."
        return RankError(told, states, detail, rank=number)


class _HungUp(RankError):
    """A rank has closed its connection without an answer; `CaseRanks.blame` finds out why."""


def failure_told(told: Any) -> Failure:
    """Return a rank's report of its exception, as texts and never as an object."""
    told = told if isinstance(told, dict) else {}
    kind, message, where, trace = (
        value[:MAX_TEXT] if isinstance(value := told.get(key), str) else ""
        for key in ("kind", "message", "where", "trace")
    )
    return Failure(kind, message, where, trace, told.get("mismatch") is True, pickled=None)


def touched_told(rank: int, told: Any) -> list[Misuse]:
    """Return the buffers that a rank reports to have used too early, from lines of texts."""
    found = []
    for each in told[:MAX_MISUSES] if isinstance(told, list) else []:
        match each:
            case [str(what), "read" | "wrote to" as did, str(launched), str(where)]:
                texts = (" ".join(text[: CARRIED.text].split()) for text in (launched, where))
                found.append(Misuse(rank, what[:100], did, *texts))
    return found
