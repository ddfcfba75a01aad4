"""Run real ranks of one case in one cell, if a grader wants them in addition to the fabric's.

Nothing outside the sandbox carries their messages, so their reports of messages prove nothing.
Only their values are judged. Their communication is judged when the same case runs on the
examiner's network.
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
import time
from collections.abc import Sequence
from typing import Any, Literal

from autograder.examination._channel import Channel, wait_at_most
from autograder.examination.budget import LOOK_EVERY, Deadline
from autograder.examination.case import GRACE, OverMemory, failure_told
from autograder.examination.gpus import alone_on
from autograder.sandbox.place import SandboxedPlace
from course_lib.checking.on_ranks.frames import Frame
from course_lib.checking.on_ranks.wire import Plain, WireError, decode, encode
from course_lib.ranks.explain.errors import RankError, RanksError, RankState
from course_lib.ranks.explain.failure import Failure, exit_reason, rank_error, timed_out
from course_lib.ranks.for_graders import place as placement

On = Literal["cpu", "gpu"]


class NodeRanks:
    """Real ranks of one case, from fork to kill. A context manager.

    Args:
        place: the sandbox in which they run.
        world_size: number of ranks.
        program: the check's program, packed.
        function: the student's function, as the notebook process handed it over.
        on: ``cpu`` to run on gloo, or ``gpu`` to run on GPUs, shared if there are fewer than ranks.

    """

    def __init__(
        self, place: SandboxedPlace, world_size: int, program: bytes, function: bytes, on: On
    ) -> None:
        chosen = placement(world_size, on)
        config = {
            "backend": chosen.backend,
            "devices": list(chosen.devices),
            "environment": chosen.environment,
        }
        self._place = place
        self._words = {"cpu": "CPU", "gpu": "GPU"}[on]
        self._answers: dict[int, Any] = {}
        self._failures: dict[int, Failure] = {}
        self._kept = contextlib.ExitStack()
        with contextlib.ExitStack() as theirs:
            pairs = [socket.socketpair() for _ in range(world_size)]
            ends = [theirs.enter_context(end).fileno() for _, end in pairs]
            self._kept.enter_context(alone_on(chosen.devices))
            self._channels = [Channel(ours) for ours, _ in pairs]
            for channel in self._channels:
                self._kept.callback(channel.close)
                channel.queue(Frame.PROGRAM, program)
                channel.queue(Frame.FUNCTION, function)
            try:
                cell = place.cell(
                    "autograder.inside.node:serve_node", config, ends, gpu=on == "gpu"
                )
            except BaseException:
                self._kept.close()
                raise
            self._kept.callback(cell.close)
            self._cell = cell

    def __enter__(self) -> NodeRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self._kept.close()

    def start(self, inputs: Sequence[Plain]) -> None:
        """Wait until all ranks are connected; then give every rank its input.

        No rank may run before that, because a rank that ends would keep the others from starting.

        Raises:
            MachineFailure: a rank did not start.

        """
        for channel in self._channels:
            if not channel.wait_until_ready():
                raise self._place.broken(f"{self._words} ranks did not start")
        for channel, value in zip(self._channels, inputs, strict=True):
            channel.queue(Frame.INPUT, encode(value))

    def run(self, deadline: Deadline) -> list[Any]:
        """Return the outputs of the started ranks, in rank order.

        Raises:
            RanksError: not all ranks answered; the message says why. Call `blame` to confirm that
                the student's code caused it.

        """
        looked = time.monotonic()
        with selectors.DefaultSelector() as selector:
            for rank, channel in enumerate(self._channels):
                selector.register(channel.socket, channel.events, rank)
                self._serve(selector, rank)  # messages that came with its sign of readiness
            while len(self._answers) + len(self._failures) < len(self._channels):
                if (left := deadline.left) <= 0:
                    break
                for key, _ in selector.select(wait_at_most(left)):
                    self._serve(selector, key.data)
                if self._failures:  # ranks that wait for a failed rank will never answer
                    deadline.shorten(GRACE)
                if time.monotonic() - looked > LOOK_EVERY:
                    looked = time.monotonic()
                    if over := self._place.over_memory():
                        raise OverMemory(f"{over[0].upper()}{over[1:]}.", self._states())
        if self._failures:
            first = min(self._failures)
            raise rank_error(self._failures, first, self._states(), None)
        if len(self._answers) < len(self._channels):
            raise timed_out(f"case on {self._words} ranks", deadline.seconds, self._states())
        return [self._answers[rank] for rank in range(len(self._channels))]

    def blame(self, error: RanksError) -> RanksError:
        """Return the error of `run`, after confirming that the student's code caused it.

        Raises:
            MachineFailure: the student's code did not cause it.

        """
        self._place.make_sure()
        if isinstance(error, _Ended):
            if error.status is None:
                reason = self._place.why_ended(self._cell)
            elif over := self._place.over_memory():
                return OverMemory(f"{over[0].upper()}{over[1:]}.", error.states)
            elif error.status == -signal.SIGKILL:
                raise self._place.broken("A rank was killed from outside, by signal SIGKILL")
            else:
                reason = exit_reason(error.status)
            told = f"Rank {error.rank}'s process ended: {reason}."
            return RankError(told, error.states, rank=error.rank)
        return error

    def _serve(self, selector: selectors.BaseSelector, rank: int) -> None:
        channel = self._channels[rank]
        ended: _Ended | None = None
        try:
            channel.serve()
            for kind, payload in channel.take():
                if rank in self._answers or rank in self._failures:
                    continue
                if kind == Frame.OUTPUT:
                    self._answers[rank] = decode(payload)
                elif kind == Frame.FAILURE:
                    self._failures[rank] = failure_told(decode(payload))
                elif kind == Frame.DONE:
                    ended = self._death(rank, decode(payload))
        except WireError as error:
            if not (rank in self._answers or rank in self._failures):
                raise RankError(
                    f"Rank {rank} gave an answer that cannot be read: {error}", rank=rank
                ) from None
        if rank in self._answers or rank in self._failures:
            selector.unregister(channel.socket)
        elif ended or channel.ended:
            raise ended or self._death(rank, None)
        else:
            selector.modify(channel.socket, channel.events, rank)

    def _death(self, rank: int, told: Any) -> _Ended:
        status = told.get("status") if isinstance(told, dict) else None
        states = self._states()
        states[rank] = RankState(rank, "process ended", "")
        return _Ended(rank, status if type(status) is int else None, states)

    def _states(self) -> list[RankState]:
        done = {
            **dict.fromkeys(self._answers, "finished"),
            **dict.fromkeys(self._failures, "raised"),
        }
        return [
            RankState(rank, done.get(rank, "has not answered"), "")
            for rank in range(len(self._channels))
        ]


class _Ended(RankError):
    """A rank's process has ended; `NodeRanks.blame` finds out why.

    Attributes:
        status: its exit status as the node's first process reported it; ``None`` without a report.

    """

    def __init__(self, rank: int, status: int | None, states: Sequence[RankState]) -> None:
        super().__init__(f"Rank {rank} ended.", states, rank=rank)
        self.status = status
