"""Run the ranks of one case in the sandbox: fork them, exchange their messages, kill them.

Each rank has one channel. On it, it asks for what its communication needs, and tells its answer or
its exception. The examiner's fabric carries the communication outside the sandbox, on a virtual
clock. So a deadlock is known when it happens, and the grader knows what was sent, even if the
ranks report something different. Real ranks (`On`) have no fabric: nobody outside carries their
messages, so only their values are judged.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Sequence
from typing import Any, Literal

from autograder.examination._channel import Channel, ready
from autograder.examination.budget import LOOK_EVERY, Deadline
from autograder.examination.fabric import Bounds, ExaminersFabric, ProtocolError
from autograder.sandbox.sandbox import Cell, Sandbox
from course_lib.checking.cases import Case, Check
from course_lib.limits import MAX_TEXT
from course_lib.ranks.explain.errors import MismatchError, RankError, RanksError, RankState
from course_lib.ranks.explain.failure import Failure, exit_reason, rank_error, timed_out
from course_lib.ranks.for_graders import explain_misuse
from course_lib.ranks.placement import place as placement
from course_lib.ranks.trace.trace import Trace
from course_lib.ranks.wire import Plain, WireError, decode, encode

On = Literal["cpu", "gpu"]
GRACE = 0.5
"""Seconds that the other ranks get to report what happened to them after one rank has failed."""
_MAX_TOUCHED, _MAX_WORDS = 100, 600


class OverMemory(RanksError):
    """The submission's processes together took more memory than they may."""

    in_short = "The ranks took more memory than their limit."


class Ended(RankError):
    """A rank's process has ended without an answer; who caused it is not known yet.

    Attributes:
        status: its exit status, if real ranks' first process reported it; else ``None``.

    """

    def __init__(self, rank: int, status: int | None, states: Sequence[RankState]) -> None:
        super().__init__(f"Rank {rank} ended.", states, rank=rank)
        self.status = status


class Exchange:
    """The messages of the ranks of one case, whoever runs them.

    Args:
        channels: one per rank, in rank order; may still be empty.
        fabric: carries the ranks' communication; ``None`` for real ranks.
        case_name: what a case is called in a report of its time limit.

    Attributes:
        answers: rank → what its program returned.
        failures: rank → the exception that its program raised.

    """

    def __init__(
        self, channels: Sequence[Channel], fabric: ExaminersFabric | None, case_name: str = "case"
    ) -> None:
        self.answers: dict[int, Any] = {}
        self.failures: dict[int, Failure] = {}
        self._channels = channels
        self._fabric = fabric
        self._case_name = case_name
        self._touched: dict[int, list[str]] = {}

    @property
    def trace(self) -> Trace | None:
        """The messages of the ranks and their times, as the fabric here carried them."""
        if self._fabric is None:
            return None
        return Trace(self._fabric.fabric.events, len(self._channels))

    @property
    def touched(self) -> list[str]:
        """Sentences on the buffers that the ranks, by their own reports, used too early."""
        touched = [(rank, line) for rank, lines in self._touched.items() for line in lines]
        return explain_misuse(touched).splitlines()

    @property
    def hung_up(self) -> list[int]:
        """The ranks that have closed their connection, and have neither answered nor failed."""
        return [
            n for n, channel in enumerate(self._channels) if channel.ended and not self._is_over(n)
        ]

    def states(self) -> list[RankState]:
        """Return what every rank does."""
        if self._fabric is not None:
            return self._fabric.states()
        endings = {
            **dict.fromkeys(self.answers, "finished"),
            **dict.fromkeys(self.failures, "raised"),
        }
        ranks = range(len(self._channels))
        return [RankState(rank, endings.get(rank, "has not answered")) for rank in ranks]

    def _look(self) -> None:
        """Look after the ranks now and then while they run; an error ends the run."""

    def run(self, deadline: Deadline) -> list[Any]:
        """Let the started ranks go, and return their answers in rank order.

        Raises:
            RanksError: not all ranks answered before `deadline`; the message says why. In the
                sandbox, call `blame` to confirm that the student's code caused it.

        """
        stuck: RanksError | None = None
        looked = time.monotonic()
        for rank, channel in enumerate(self._channels):
            channel.send("go", None)
            self._serve(rank)  # what came with its sign of readiness
        while not self._all_over and (left := deadline.left) > 0:
            running = [c for rank, c in enumerate(self._channels) if not self._is_over(rank)]
            for channel in ready(running, left):
                self._serve(self._channels.index(channel))
            # Read answers first: a rank's exception says more than the end of its process.
            if stuck is None:
                stuck = self._settle()
            if stuck is not None and not isinstance(stuck, RankError):
                raise stuck
            if stuck is not None or self.failures or self._broken:
                deadline.shorten(GRACE)  # ranks that wait for a failed rank never answer
            if time.monotonic() - looked > LOOK_EVERY:
                looked = time.monotonic()
                self._look()
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
            raise timed_out(self._case_name, seconds, self.states())
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
                held = channel.held + self._fabric.held(rank)
                excess = "with its next message it would have {:,} bytes under way at once"
                self._fabric.bounds.expect("held", held, excess)
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
                texts = [text for text in lines[:_MAX_TOUCHED] if isinstance(text, str)]
                self._touched[rank] = [" ".join(text[:_MAX_WORDS].split()) for text in texts]
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


class CaseRanks(Exchange):
    """The ranks of one case in the sandbox, from fork to kill. A context manager.

    Args:
        sandbox: the sandbox in which they run.
        check: the check.
        case: the case of these ranks.
        inputs: the input of each rank; what the check withholds stays outside the sandbox.
        program: the check's program, packed.
        function: the student's function, as the notebook process handed it over.
        on: ``None``: each rank is a process in a cell of its own, and the fabric here carries its
            messages. ``cpu`` or ``gpu``: they are real ranks in one cell, on gloo or on GPUs, which
            are shared if there are fewer than ranks. They can see one another. That is no danger,
            because only submissions that passed on the fabric run there.

    """

    def __init__(
        self,
        sandbox: Sandbox,
        check: Check,
        case: Case,
        inputs: Sequence[Plain],
        program: bytes,
        function: bytes,
        on: On | None = None,
    ) -> None:
        k, channels, fabric, answers = case.world_size, list[Channel](), None, check.answers
        if on is None:
            fabric = ExaminersFabric(
                k,
                case.network,
                lambda rank, kind, value: channels[rank].send(kind, value),
                check.computes(case, inputs) if check.computes else (),
                answers and (lambda rank, question: answers(inputs[rank]["own"], question)),
            )
        super().__init__(channels, fabric, "case" if on is None else f"case on {on.upper()} ranks")
        self._sandbox, self._check, self._inputs = sandbox, check, inputs
        self._program, self._function = program, function
        self._cells: list[Cell] = []
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as child_ends:
            undo.callback(self.__exit__)
            ends = []
            for _ in range(k):
                ours, their_end = socket.socketpair()
                ends.append(child_ends.enter_context(their_end).fileno())
                channels.append(Channel(ours, Bounds().shared_by(k).message))
            if on is None:
                run = "autograder.inside.examinee:serve_rank"
                for rank, end in enumerate(ends):
                    cell = sandbox.cell(run, {"rank": rank, "world_size": k}, [end])
                    self._cells.append(cell)
            else:
                run, gpu = "autograder.inside.node:serve_node", on == "gpu"
                node = sandbox.cell(run, vars(placement(k, on)), ends, gpu=gpu, own_ranks=True)
                self._cells = [node] * k
            undo.pop_all()

    def __enter__(self) -> CaseRanks:
        return self

    def __exit__(self, *_: object) -> None:
        for channel in self._channels:
            channel.close()
        for cell in self._cells:
            cell.close()

    def start(self) -> None:
        """Give every rank its input, and wait until each is about to run the student's code.

        Raises:
            MachineFailure: a rank did not start.

        """
        # Encoded once, because a function may be large.
        full = encode(("work", {"program": self._program, "function": self._function}))
        bare = encode(("work", {"program": self._program, "function": b""}))
        for rank, channel in enumerate(self._channels):
            channel.queue_encoded(full if rank in (self._check.only_on or [rank]) else bare)
            channel.send("input", self._check.for_the_rank(self._inputs[rank]))
        for rank, channel in enumerate(self._channels):
            if not channel.wait_until_ready():
                raise self._sandbox.broken(f"Rank {rank} did not start")

    def _over_memory(self, states: Sequence[RankState]) -> OverMemory | None:
        over = self._sandbox.over_memory()
        return OverMemory(f"{over[0].upper()}{over[1:]}.", states) if over else None

    def _look(self) -> None:
        if over := self._over_memory(self.states()):
            raise over

    def blame(self, error: RanksError) -> RanksError:
        """Return the error of `run`, after confirming that the student's code caused it.

        This takes a while if a rank has closed its connection but has not ended. The student's
        clock does not run meanwhile.

        Raises:
            MachineFailure: the student's code did not cause it.

        """
        self._sandbox.make_sure()
        status = error.status if isinstance(error, Ended) else None
        reasons = {}
        if status is None:  # also for another error: a rank's end from outside may have caused it
            reasons = {rank: self._sandbox.why_ended(self._cells[rank]) for rank in self.hung_up}
        if not isinstance(error, Ended):
            return error
        if over := self._over_memory(error.states):
            return over
        if status == -signal.SIGKILL:
            raise self._sandbox.broken("A rank was killed from outside, by signal SIGKILL")
        reason = reasons[error.rank] if status is None else exit_reason(status)
        detail = "The other ranks were stopped." if len(self._channels) > 1 else ""
        summary = f"Rank {error.rank}'s process ended: {reason}."
        return RankError(summary, error.states, detail, rank=error.rank)


def _failure(report: dict[Any, Any]) -> Failure:
    """Return a rank's report of its exception, as texts and never as an object."""
    kind, message, place, trace = (
        value[:MAX_TEXT] if isinstance(value := report.get(key), str) else ""
        for key in ("kind", "message", "where", "trace")
    )
    return Failure(kind, message, place, trace, report.get("mismatch") is True, pickled=None)
