"""Run the ranks of one case in the sandbox: fork them, exchange their messages, kill them."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from autograder.examination._channel import Channel
from autograder.examination.budget import Deadline
from autograder.examination.exchange import Ended, Exchange
from autograder.examination.fabric import Answers, Bounds, ExaminersFabric
from autograder.examination.gpus import alone_on
from autograder.sandbox.place import Cell, SandboxedPlace
from course_lib.checking.cases import Case
from course_lib.ranks.explain.errors import RankError, RanksError
from course_lib.ranks.explain.failure import exit_reason
from course_lib.ranks.placement import place as placement
from course_lib.ranks.trace.trace import Trace
from course_lib.ranks.wire import Plain, encode

On = Literal["cpu", "gpu"]


class SubmissionError(RanksError):
    """The submission's own code prevented a case from being run at all."""

    @property
    def in_short(self) -> str:  # type: ignore[override]
        return self.summary


class OverMemory(RanksError):
    """The submission's processes together took more memory than they may."""

    limit = "memory"


class CaseRanks:
    """The ranks of one case, from fork to kill. A context manager.

    Args:
        sandbox: the sandbox in which they run.
        case: the case of these ranks.
        program: the check's program, packed.
        function: the student's function, as the notebook process handed it over.
        on: ``None``: each rank is a process in a cell of its own, and the fabric here carries its
            messages. ``cpu`` or ``gpu``: they are real ranks in one cell, on gloo or on GPUs, which
            are shared if there are fewer than ranks. They can see one another. That is no danger,
            because only submissions that passed on the fabric run there.
        computes: for each rank, seconds → how often its program may report computing that long.
        answers: answers the ranks' questions; see `ExaminersFabric`.
        only_on: the ranks that get the function; empty: all of them.

    """

    def __init__(
        self,
        sandbox: SandboxedPlace,
        case: Case,
        program: bytes,
        function: bytes,
        on: On | None = None,
        computes: Sequence[Mapping[float, int]] = (),
        answers: Answers | None = None,
        only_on: Sequence[int] = (),
    ) -> None:
        k = case.world_size
        self._sandbox = sandbox
        whole = encode(("work", {"program": program, "function": function}))
        without = encode(("work", {"program": program, "function": b""}))
        self._work = [whole if rank in (only_on or [rank]) else without for rank in range(k)]
        self._channels: list[Channel] = []
        self._cells: list[Cell] = []
        self._kept = contextlib.ExitStack()
        self._fabric: ExaminersFabric | None = None
        words = "case" if on is None else f"case on {on.upper()} ranks"
        if on is None:
            self._fabric = ExaminersFabric(k, case.network, self._send, computes, answers)
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as theirs:
            undo.callback(self.__exit__)
            ends = []
            for _ in range(k):
                ours, their_end = socket.socketpair()
                ends.append(theirs.enter_context(their_end).fileno())
                self._channels.append(Channel(ours, Bounds().shared_by(k).message))
            if on is None:
                for rank, end in enumerate(ends):
                    config = {"rank": rank, "world_size": k}
                    run = "autograder.inside.examinee:serve_rank"
                    self._cells.append(sandbox.cell(run, config, [end]))
            else:
                self._cells.append(self._node(k, ends, on))
            undo.pop_all()
        self._exchange = Exchange(self._channels, self._fabric, words)

    def _node(self, world_size: int, ends: Sequence[int], on: On) -> Cell:
        chosen = placement(world_size, on)
        config = {
            "backend": chosen.backend,
            "devices": list(chosen.devices),
            "environment": chosen.environment,
        }
        self._kept.enter_context(alone_on(chosen.devices))
        run = "autograder.inside.node:serve_node"
        return self._sandbox.cell(run, config, ends, gpu=on == "gpu")

    def _send(self, rank: int, kind: str, value: Any) -> None:
        if self._channels[rank].socket.fileno() >= 0:
            self._channels[rank].queue(kind, value)
            self._channels[rank].write()

    def __enter__(self) -> CaseRanks:
        return self

    def __exit__(self, *_: object) -> None:
        for channel in self._channels:
            channel.close()
        self._sandbox.kill(self._cells)
        self._kept.close()

    @property
    def trace(self) -> Trace | None:
        """The messages of the ranks and their times, as the fabric here carried them."""
        if self._fabric is None:
            return None
        return Trace(self._fabric.fabric.events, len(self._channels))

    @property
    def touched(self) -> list[str]:
        """Sentences on the buffers that the ranks, by their own reports, used too early."""
        return self._exchange.touched

    def start(self, inputs: Sequence[Plain]) -> None:
        """Give every rank its input, and wait until each is about to run the student's code.

        Raises:
            MachineFailure: a rank did not start.

        """
        for channel, work, own in zip(self._channels, self._work, inputs, strict=True):
            channel.queue_encoded(work)
            channel.queue("input", own)
            channel.write()
        for number, channel in enumerate(self._channels):
            if not channel.wait_until_ready():
                raise self._sandbox.broken(f"Rank {number} did not start")

    def run(self, deadline: Deadline) -> list[Any]:
        """Let the ranks go, and return their outputs in rank order.

        Raises:
            RanksError: not all ranks answered; the message says why. Call `blame` to confirm that
                the student's code caused it.

        """
        return self._exchange.run(deadline, self._look)

    def _look(self) -> None:
        if over := self._sandbox.over_memory():
            raise OverMemory(f"{over[0].upper()}{over[1:]}.", self._exchange.states())

    def blame(self, error: RanksError) -> RanksError:
        """Return the error of `run`, after confirming that the student's code caused it.

        This takes a while if a rank has closed its connection but has not ended. The student's
        clock does not run meanwhile.

        Raises:
            MachineFailure: the student's code did not cause it.

        """
        self._sandbox.make_sure()
        status = error.status if isinstance(error, Ended) else None
        why = {} if status is not None else {n: self._why(n) for n in self._exchange.hung_up}
        if not isinstance(error, Ended):
            return error
        if over := self._sandbox.over_memory():
            return OverMemory(f"{over[0].upper()}{over[1:]}.", error.states)
        if status == -signal.SIGKILL:
            raise self._sandbox.broken("A rank was killed from outside, by signal SIGKILL")
        reason = why[error.rank] if status is None else exit_reason(status)
        detail = "The other ranks were stopped." if len(self._channels) > 1 else ""
        words = f"Rank {error.rank}'s process ended: {reason}."
        return RankError(words, error.states, detail, rank=error.rank)

    def _why(self, rank: int) -> str:
        return self._sandbox.why_ended(self._cells[min(rank, len(self._cells) - 1)])
