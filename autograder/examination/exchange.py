"""The messages of the ranks of one case, from the first to the last answer.

Each rank has one channel. On it, it asks for what its communication needs, and tells its answer or
its exception. The examiner's fabric carries the communication outside the sandbox, on a virtual
clock. So a deadlock is known when it happens, and the grader knows what was sent, even if the
ranks report something different. Real ranks (`On`) have no fabric: nobody outside carries their
messages, so only their values are judged.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Sequence
from typing import Any

from autograder.examination._channel import Channel, wait_at_most
from autograder.examination.budget import LOOK_EVERY, Deadline
from autograder.examination.fabric import ExaminersFabric, ProtocolError
from course_lib.checking.limits import MAX_TEXT
from course_lib.ranks.explain.errors import (
    MismatchError,
    RankError,
    RanksError,
    RankState,
    RankTimeout,
)
from course_lib.ranks.explain.failure import Failure, rank_error, timed_out
from course_lib.ranks.for_graders import explain_misuse
from course_lib.ranks.wire import WireError, decode

GRACE = 0.5
"""Seconds that the other ranks get to report what happened to them after one rank has failed."""
_LOOP = (
    "A rank that still runs is computing, sleeping or in a loop: look for a loop that does not end."
)
_MAX_TOUCHED, _MAX_WORDS = 100, 600


class Ended(RankError):
    """A rank's process has ended without an answer; who caused it is not known yet.

    Attributes:
        status: its exit status, if real ranks' first process reported it; else ``None``.

    """

    def __init__(self, rank: int, status: int | None, states: Sequence[RankState]) -> None:
        super().__init__(f"Rank {rank} ended.", states, rank=rank)
        self.status = status


class Exchange:
    """The channels of the ranks of one case.

    Args:
        channels: one per rank, in rank order.
        fabric: carries the ranks' communication; ``None`` for real ranks.
        words: what a case is called in a report of its time limit.

    Attributes:
        answers: rank → what its program returned.
        failures: rank → the exception that its program raised.

    """

    def __init__(
        self, channels: Sequence[Channel], fabric: ExaminersFabric | None, words: str = "case"
    ) -> None:
        self.answers: dict[int, Any] = {}
        self.failures: dict[int, Failure] = {}
        self._channels = channels
        self._fabric = fabric
        self._words = words
        self._touched: dict[int, list[str]] = {}

    @property
    def touched(self) -> list[str]:
        """Sentences on the buffers that the ranks, by their own reports, used too early."""
        touched = [(rank, words) for rank, lines in self._touched.items() for words in lines]
        return explain_misuse(touched).splitlines()

    @property
    def hung_up(self) -> list[int]:
        """The ranks that have closed their connection, and have neither answered nor failed."""
        return [n for n, each in enumerate(self._channels) if each.ended and not self._is_over(n)]

    def states(self) -> list[RankState]:
        """Return what every rank does."""
        if self._fabric is not None:
            return self._fabric.states()
        done = {
            **dict.fromkeys(self.answers, "finished"),
            **dict.fromkeys(self.failures, "raised"),
        }
        ranks = range(len(self._channels))
        return [RankState(rank, done.get(rank, "has not answered")) for rank in ranks]

    def run(self, deadline: Deadline, look: Callable[[], object] = lambda: None) -> list[Any]:
        """Let the started ranks go, and return their answers in rank order.

        Args:
            deadline: when the ranks must have answered.
            look: called now and then; it may raise an error, which ends the run.

        Raises:
            RanksError: not all ranks answered; the message says why.

        """
        stuck: RanksError | None = None
        looked = time.monotonic()
        with selectors.DefaultSelector() as selector:
            for rank, channel in enumerate(self._channels):
                channel.queue("go", None)
                selector.register(channel.socket, channel.events, rank)
                self._serve(rank)  # what came with its sign of readiness
            while not self._all_over:
                if (left := deadline.left) <= 0:
                    break
                for key, _ in selector.select(wait_at_most(left)):
                    self._serve(key.data)
                # Read answers first: a rank's exception says more than the end of its process.
                if stuck is None:
                    stuck = self._settle()
                if stuck is not None and not isinstance(stuck, RankError):
                    raise stuck
                if stuck is not None or self.failures or self._broken:
                    deadline.shorten(GRACE)  # ranks that wait for a failed rank never answer
                for key in list(selector.get_map().values()):
                    channel = self._channels[key.data]
                    if self._is_over(key.data) or channel.socket.fileno() < 0:
                        selector.unregister(key.fileobj)
                    elif key.events != channel.events:
                        selector.modify(key.fileobj, channel.events, key.data)
                if time.monotonic() - looked > LOOK_EVERY:
                    looked = time.monotonic()
                    look()
        if stuck is None and self._all_over:
            stuck = self._settle()  # all may have answered before the first look at the fabric
        return self._outcome(stuck, deadline.seconds)

    @property
    def _broken(self) -> bool:
        """Whether the fabric has ended a rank because of what it asked for."""
        return self._fabric is not None and bool(self._fabric.failures)

    @property
    def _all_over(self) -> bool:
        return all(map(self._is_over, range(len(self._channels))))

    def _is_over(self, rank: int) -> bool:
        return rank in self.answers or rank in self.failures

    def _outcome(self, stuck: RanksError | None, seconds: float) -> list[Any]:
        if self.failures:
            raise rank_error(self.failures, min(self.failures), self.states(), None)
        if stuck is not None:
            raise stuck
        over = len(self.answers) == len(self._channels)
        outcome = self._fabric.outcome() if self._fabric and (over or self._broken) else None
        if outcome is not None:
            raise outcome
        if not over:
            late = timed_out(self._words, seconds, self.states())
            detail = _LOOP if late.detail and self._fabric is not None else late.detail
            raise RankTimeout(late.summary, late.states, detail)
        return [self.answers[rank] for rank in range(len(self._channels))]

    def _settle(self) -> RanksError | None:
        try:
            if self._fabric is not None:
                self._fabric.settle()
        except RanksError as error:
            return error
        return None

    def _serve(self, rank: int) -> None:
        channel = self._channels[rank]
        try:
            channel.serve()
            for kind, value in channel.take():
                if not self._is_over(rank):
                    self._handle(rank, kind, value)
            if self._fabric is not None:
                self._fabric.bounds.expect("held", channel.held + self._fabric.held(rank))
        except ProtocolError as error:
            channel.close()
            assert self._fabric is not None
            self._fabric.end(rank, str(error))
        except WireError as error:
            if not self._is_over(rank):
                raise RankError(
                    f"Rank {rank} gave an answer that cannot be read: {error}", rank=rank
                ) from None
        if channel.ended and not self._is_over(rank):
            mismatch = self._settle()  # its last message may explain its end
            raise mismatch if isinstance(mismatch, MismatchError) else self._death(rank, None)

    def _handle(self, rank: int, kind: str, value: Any) -> None:
        match kind, value:
            case ("output", bytes()):
                answer = decode(value)
                self._end(rank)
                self.answers[rank] = answer
            case ("failure", {**failure}):
                self._end(rank, "it raised an exception")
                self.failures[rank] = _failure(failure)
            case ("touched", [*lines]):
                texts = [each for each in lines[:_MAX_TOUCHED] if isinstance(each, str)]
                self._touched[rank] = [" ".join(each[:_MAX_WORDS].split()) for each in texts]
            case ("ended", int(status)) if self._fabric is None:
                raise self._death(rank, status)
            case _ if self._fabric is not None:
                self._fabric.handle(rank, kind, value)
            case _:
                raise WireError(f"a message that no rank sends: {kind[:40]!r}")

    def _end(self, rank: int, reason: str = "") -> None:
        if self._fabric is not None:
            self._fabric.end(rank, reason)

    def _death(self, rank: int, status: int | None) -> Ended:
        states = self.states()
        states[rank] = RankState(rank, "process ended", states[rank].where)
        return Ended(rank, status, states)


def _failure(report: dict[Any, Any]) -> Failure:
    """Return a rank's report of its exception, as texts and never as an object."""
    kind, message, where, trace = (
        value[:MAX_TEXT] if isinstance(value := report.get(key), str) else ""
        for key in ("kind", "message", "where", "trace")
    )
    return Failure(kind, message, where, trace, report.get("mismatch") is True, pickled=None)
