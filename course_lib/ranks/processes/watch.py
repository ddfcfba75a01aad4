"""Waits for the answers to one call, and watches four things meanwhile.

They are the answers, the output of the ranks, the board (does anything still move?) and the clock.
"""

from __future__ import annotations

import math
import select
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from course_lib.ranks.explain.errors import DeadlockError, RanksError, RankState
from course_lib.ranks.explain.failure import Failure, closed_meanwhile, timed_out, with_labels
from course_lib.ranks.explain.lines import line_in_dump
from course_lib.ranks.output.printer import Printer
from course_lib.ranks.output.progress import Progress
from course_lib.ranks.processes.board import Board
from course_lib.ranks.processes.board_diagnosis import (
    DeadlockWatch,
    board_states,
    find_mismatch,
    process_ended,
    some_raised,
    stuck_ranks,
)
from course_lib.ranks.processes.board_views import RankPhase, RankView
from course_lib.ranks.processes.fork_client import ForkServer
from course_lib.ranks.processes.member import Member, ask_for_stacks, find_asleep, read_dump
from course_lib.ranks.processes.object_pipe import DISPLAY, FAILURE, Answer
from course_lib.ranks.stopping import uninterrupted

_LOOK_EVERY = 0.05
_STUCK_GRACE = 0.1
"""Seconds after a failure in which ranks that wait for the failed rank can show that they do."""
_GIVE_UP_LIMIT = 2.0
"""Seconds that ranks get to end a call that failed elsewhere; then their processes are ended."""
_SIGNAL_EVERY = 0.25
"""Seconds after which a rank is told again to end its call; it may have been importing."""
_GRACE = 1.0
"""Seconds after a rank's failure that the ranks which still compute get."""


class TeamWatch:
    """Watches the ranks of a team from call to call.

    Args:
        server: the fork server, which starts the ranks' processes and reports their end.
        board: shows what the ranks are doing.
        members: the ranks; the list may grow until the first `collect`.
        printer: takes what the ranks print.
        labels: file name → its name in messages for people.
        closing: set when the ranks must end.

    """

    def __init__(
        self,
        server: ForkServer,
        board: Board,
        members: Sequence[Member],
        printer: Printer,
        labels: Mapping[str, str],
        closing: threading.Event,
    ) -> None:
        self._closing = closing
        self._server = server
        self._board = board
        self._members = members
        self._printer = printer
        self._labels = labels
        self._poll = select.poll()
        """Watches the outputs of all ranks, and the pipe of each rank that has yet to answer."""
        self._by_fd: dict[int, Member] = {}

    def collect(self, what: str, timeout: float | None) -> None:
        """Return when every rank has answered.

        Args:
            what: what is awaited, in the words of messages: "start of the ranks" or "call". Only in
                a call, deadlocks are looked for.
            timeout: its limit, in seconds; None for no limit.

        Raises:
            RanksError: it is certain that not all ranks will answer, or the time limit is over.

        """
        start = time.monotonic()
        progress: Progress | None = None
        look_at = start + _LOOK_EVERY
        try:
            left = self._await()
            deadlocks, progress = DeadlockWatch(), Progress(start)
            failed_at: float | None = None
            while left:
                left -= self._read()
                now = time.monotonic()
                if failed_at is None and self.failures():
                    failed_at = now
                if not left or now < look_at:
                    continue
                look_at = now + _LOOK_EVERY
                if self._closing.is_set():
                    raise closed_meanwhile(self.states())
                self._printer.release()
                views = self._board.views()
                if failed_at is not None:
                    self._after_failure(views, now - failed_at)
                elif what == "call":
                    self._raise_deadlock(deadlocks, views, now)
                if timeout is not None and now - start > timeout:
                    raise timed_out(what, timeout, self.states())
                if progress.due():
                    progress.update(view.in_short for view in views)
        finally:
            if progress is not None:
                progress.clear()
            # Only a call that prints needs protection: an interrupt could split its output.
            if self._poll.poll(0) or self._printer.waiting() or self._unfinished_lines():
                with uninterrupted():
                    for member in self._members:
                        member.output.drain()
                    self._printer.end_call()

    def _unfinished_lines(self) -> bool:
        for member in self._members:  # noqa: SIM110  # runs in every call, so it must be fast
            if member.output.unfinished:
                return True
        return False

    def _await(self) -> set[int]:
        """Start to listen to the pipes of the ranks that have yet to answer; return these ranks."""
        if not self._by_fd:
            for member in self._members:
                self._poll.register(member.output, select.POLLIN)
                self._by_fd[member.output.fileno()] = member
                self._by_fd[member.pipe.fileno()] = member
        waiting = {member.rank for member in self._members if not member.answered}
        for rank in waiting:
            self._poll.register(self._members[rank].pipe, select.POLLIN)
        return waiting

    def end_call(self, call: int) -> bool:
        """End call number `call` on the ranks that are in it; return whether all end in time."""
        self._board.give_up(call)
        left = self._await()
        signalled = -math.inf
        until = time.monotonic() + _GIVE_UP_LIMIT
        try:
            with uninterrupted():
                while left and (now := time.monotonic()) < until:
                    if now - signalled > _SIGNAL_EVERY:
                        signalled = now
                        pids = [self._members[rank].pid for rank in left]
                        self._server.signal(pids, signal.SIGUSR2)
                    left -= self._read()
        except RanksError:  # a rank's process has ended
            return False
        return not left

    def failures(self) -> dict[int, Failure]:
        """Return the exceptions that the ranks have answered with."""
        return {m.rank: m.failure for m in self._members if m.failure is not None}

    def states(self) -> list[RankState]:
        """Return what every rank does; for running ranks, also the line."""
        views = self._board.views()
        running = [m for m in self._members if views[m.rank].state is RankPhase.RUNNING]
        dumps = ask_for_stacks(self._server, running)
        return [
            replace(s, where=line_in_dump(dumps[s.rank], self._labels)) if s.rank in dumps else s
            for s in board_states(views)
        ]

    # Answers of the ranks -----------------------------------------------------------------------

    def _read(self) -> set[int]:
        """Take messages and output for a moment; return the ranks that have answered."""
        answered = set()
        for fd, _ in self._poll.poll(1000 * _LOOK_EVERY):
            member = self._by_fd[fd]
            if fd == member.output.fileno():
                if not member.output.forward():
                    self._poll.unregister(fd)
            elif self._receive(member):
                self._poll.unregister(fd)
                answered.add(member.rank)
        return answered

    def _receive(self, member: Member) -> bool:
        """Take one message of a rank; return whether it was its answer to the call."""
        with uninterrupted():  # after half a message, the next one could not be read
            try:
                head, *rest = member.pipe.receive()
            except (EOFError, OSError):
                raise self._death(member) from None
            if (answer := head()).kind == DISPLAY:
                member.output.drain()
                self._printer.add(member.rank, rest[0]())
                return False
            member.answer = Answer(answer, *rest)
            if answer.kind == FAILURE:
                member.failure = member.answer.value()
            return True

    # Failures -----------------------------------------------------------------------

    def _after_failure(self, views: Sequence[RankView], seconds: float) -> None:
        """Raise the error of a failed rank as soon as waiting longer would show nothing more."""
        failures = self.failures()
        stuck = stuck_ranks(views)
        waits = all(member.answered or member.rank in stuck for member in self._members)
        # The board explains a mismatch, so there is no need to wait for other ranks.
        mismatch = any(failure.mismatch for failure in failures.values())
        if mismatch or seconds > (_STUCK_GRACE if waits else _GRACE):
            raise some_raised(failures, views, self.states())

    def _raise_deadlock(
        self, deadlocks: DeadlockWatch, views: Sequence[RankView], now: float
    ) -> None:
        """Raise if the ranks wait for one another."""
        asleep = find_asleep(self._server, self._members, views, now)
        deadlock = deadlocks.look(views, asleep)
        if deadlock is None:
            return
        if (mismatch := find_mismatch(views)) is not None:
            raise mismatch
        if any(state.running for state in deadlock.states):
            lines = self.states()
            states = [lines[state.rank] if state.running else state for state in deadlock.states]
            raise DeadlockError(deadlock.summary, states, deadlock.detail)
        raise deadlock

    def _death(self, member: Member) -> RanksError:
        status = self._server.exit_status(member.pid, wait=2)
        dump = read_dump(member.dump_fd, member.dump_at)
        where = line_in_dump(dump, self._labels)
        dump = with_labels(dump, self._labels)
        return process_ended(member.rank, status, dump, self._board.views(), where)
