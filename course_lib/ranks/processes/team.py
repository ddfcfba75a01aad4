"""Ranks that are processes of this machine: the engine behind ``on="cpu"`` and ``on="gpu"``.

`Processes` keeps a `Team` of K processes from call to call, and replaces it if a failure has made
it unusable. A call sends every rank its part, and then watches four things: the answers, the output
of the ranks, the board (does anything still move?) and the clock.
"""

from __future__ import annotations

import math
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from course_lib.ranks.calls import Call, pack_call, read_results
from course_lib.ranks.explain.errors import DeadlockError, RanksError, RankState
from course_lib.ranks.explain.failure import Failure, closed_meanwhile, interrupted, timed_out
from course_lib.ranks.explain.lines import line_in_dump
from course_lib.ranks.memory import Packed, anonymous_file, pack, path_of
from course_lib.ranks.output.printer import Printer
from course_lib.ranks.output.progress import Progress
from course_lib.ranks.placement import Placement
from course_lib.ranks.processes.board import Board
from course_lib.ranks.processes.board_diagnosis import (
    DeadlockWatch,
    board_states,
    find_mismatch,
    out_of_step,
    process_ended,
    some_raised,
    stuck_ranks,
)
from course_lib.ranks.processes.board_views import RankPhase, RankView
from course_lib.ranks.processes.fork_client import ForkServer, shared_server
from course_lib.ranks.processes.member import Member, ask_for_stacks, find_asleep, fork_member
from course_lib.ranks.processes.object_pipe import DISPLAY, FAILURE, GIVEN_UP, Answer, CallHead
from course_lib.ranks.processes.surroundings import Surroundings
from course_lib.ranks.stopping import uninterrupted
from course_lib.ranks.trace.event import Event
from course_lib.ranks.trace.trace import Trace

_START_LIMIT = 60.0
_MAX_GIVEN_UP = 50
"""Most given-up calls that ranks survive: each leaves connections that gloo cannot close."""
_LOOK_EVERY = 0.05
_STUCK_GRACE = 0.1
"""Seconds after a failure in which ranks that wait for the failed rank can show that they do."""
_GIVE_UP_LIMIT = 2.0
"""Seconds that ranks get to end a call that failed elsewhere; then their processes are ended."""
_SIGNAL_EVERY = 0.25
"""Seconds after which a rank is told again to end its call; it may have been importing."""
_GRACE = 1.0
"""Seconds after a rank's failure that the ranks which still compute get."""


class Processes:
    """Keeps a team of rank processes from call to call, and replaces it when it has failed.

    Attributes:
        placement: a device for every rank, and the reason for this choice in a sentence.
        trace: the trace of the last call, even if that call failed.
        closing: set when the ranks must end; a call that runs in another thread then raises.

    """

    def __init__(self, placement: Placement, *, metered: bool = True) -> None:
        self.placement = placement
        self.world_size = len(placement.devices)
        self.trace = Trace([], self.world_size)
        self.closing = threading.Event()
        self.team: Team | None = None
        self._new_team = partial(Team, placement, self.closing, metered)

    def start(self) -> None:
        """See `Ranks.start`."""
        self._ready_team()

    def run(self, call: Call) -> list[Any]:
        """Run one call; see `Ranks.run`."""
        common, own_parts = pack_call(call, self.world_size)
        self.trace = Trace([], self.world_size)
        try:
            return self._ready_team().call(common, own_parts, call.timeout)
        finally:
            for packed in (common, *own_parts):
                packed.close()
            if self.team is not None:
                self.trace = self._trace(self.team.members)
                # An interrupt, too, may have left a call half run: such ranks are not used again.
                if not self.team.reusable:
                    self.close()

    def _trace(self, members: Sequence[Member]) -> Trace:
        answers = [member.answer for member in members if member.answer is not None]

        def read() -> list[Event]:
            return [event for answer in answers for event in answer.events()]

        dropped = sum(answer.head.dropped for answer in answers)
        return Trace(read, self.world_size, dropped=dropped)

    def _ready_team(self) -> Team:
        if self.team is not None and not self.team.healthy():
            self.close()
        if self.team is None:
            self.team = self._new_team()
        return self.team

    def pids(self) -> list[int]:
        """Return the pids of the ranks, in rank order; empty if there are no ranks."""
        return [member.pid for member in self.team.members] if self.team is not None else []

    def close(self) -> None:
        """End the processes; the next `run` would start new ones."""
        if self.team is not None:
            self.team.end()
            self.team = None


class Team:
    """K processes that were started together and end together."""

    def __init__(self, placement: Placement, closing: threading.Event, metered: bool) -> None:
        self.placement = placement
        self.world_size = len(placement.devices)
        self.members: list[Member] = []
        self.reusable = False
        self._closing = closing
        self._labels: dict[str, str] = {}
        """File name → its name in messages for people."""
        self._surroundings = Surroundings()
        self._started = False
        self._calls = self._generation = 0
        self._keeps = metered and all(device == "cpu" for device in placement.devices)
        self._server: ForkServer = shared_server()
        self._printer = Printer(self.world_size)
        self._poll = select.poll()
        """Watches the outputs of all ranks, and the pipe of each rank that has yet to answer."""
        self._by_fd: dict[int, Member] = {}
        with uninterrupted():
            self._board = Board.create(self.world_size)
            store = anonymous_file("store")
            # If a file without a name cannot be opened by path, the store needs a folder.
            folder = None if path_of(store) else tempfile.mkdtemp(prefix="ranks-")
            if folder is not None:
                self._server.remove_at_end(folder)  # also if the kernel is killed
            self._end = weakref.finalize(
                self, _end_team, self._server, self._board, folder, self.members, os.getpid()
            )
            config = {
                "world_size": self.world_size,
                "threads": placement.threads,
                "environment": placement.environment
                | _as_torchrun(self.world_size)
                | _chosen_gpus(),
                "store": os.path.join(folder or "", "store"),
                "backend": placement.backend,
                "bare": not metered,
            }
            fds = {"board": self._board.fd, **({} if folder else {"store": store})}
            try:
                for rank in range(self.world_size):
                    self._fork(rank, config, fds)
            except BaseException:
                self._end()
                raise
            finally:
                os.close(store)

    def _fork(self, rank: int, config: dict[str, Any], fds: dict[str, int]) -> None:
        device = self.placement.devices[rank]
        numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        environment = {**config["environment"], **numbers}
        member = fork_member(
            self._server,
            "course_lib.ranks.processes.worker:serve_calls",
            {**config, "rank": rank, "device": device, "environment": environment},
            fds,
            self._printer.add,
            rank=rank,
            on_gpu=device != "cpu",
        )
        self.members.append(member)
        self._poll.register(member.output, select.POLLIN)
        self._by_fd[member.output.fileno()] = self._by_fd[member.pipe.fileno()] = member

    def healthy(self) -> bool:
        """Return whether the fork server and all ranks live."""
        return self._server.all_live(member.pid for member in self.members)

    def end(self) -> None:
        """End the processes and remove what they left."""
        with uninterrupted():
            self._end()

    # One call -----------------------------------------------------------------------------------

    def call(self, common: Packed, own_parts: Sequence[Packed], timeout: float | None) -> list[Any]:
        """Run one call on all ranks; return the results.

        Args:
            common: the part of the call that all ranks share.
            own_parts: what only one rank gets, in rank order; empty if there is no such part.
            timeout: the call's limit in seconds; ``None`` for no limit.

        Raises:
            RanksError: the call went wrong.
            TypeError: a result cannot be read here.

        """
        self.reusable = False
        try:
            if not self._started:
                self._collect("start of the ranks", _START_LIMIT)
                self._started = True
            self._begin()
            with uninterrupted():  # a rank without its call could not end it
                self._send(common, own_parts)
            self._collect("call", timeout)
        except BaseException as error:
            states = self.states() if isinstance(error, KeyboardInterrupt) else []
            self.reusable = self._give_up()
            if isinstance(error, KeyboardInterrupt):
                print(interrupted(states, alive=self.reusable), file=sys.stderr)
            if isinstance(error, RanksError):
                error.add_notes(self._notes())
            raise
        self._check_end()
        return read_results(member.answer.value for member in self.members if member.answer)

    def _begin(self) -> None:
        if not self._board.pending():
            self._board.clear()  # numbers restart: students count the operations of one call
        # A rank that has not picked up this call yet must not look as if it had finished it.
        self._board.set_all(RankPhase.RUNNING)
        for member in self.members:
            member.answer = member.failure = member.asleep_since = None
        self._calls += 1

    def _send(self, common: Packed, own_parts: Sequence[Packed]) -> None:
        news = self._surroundings.news()
        if news is not None:
            self._labels.update(news[0].labels)
        head, news_packed = pack(CallHead(self._calls, self._generation)), pack(news)
        empty_part = pack([])
        for member in self.members:
            own_part = own_parts[member.rank] if own_parts else empty_part
            with suppress(BrokenPipeError, ConnectionResetError):  # the wait finds the dead rank
                member.pipe.send(head, news_packed, common, own_part)

    def _check_end(self) -> None:
        """Raise what went wrong in a call to which all ranks have answered.

        If no communication is left behind, the ranks can be used again.
        """
        failures = self._failures()
        views = self._board.views()
        left_behind = out_of_step(views)
        left = left_behind is not None or (failures and self._board.pending())
        self.reusable = not left or self._give_up()
        for member in self.members:
            if member.answer is None or not member.answer.head.joined:
                self.reusable = False
        if failures:
            raise some_raised(failures, views)
        if left_behind is not None:
            raise left_behind

    def _collect(self, activity: str, timeout: float | None) -> None:
        """Return when every rank has answered.

        Args:
            activity: what is awaited, in the words of messages: "start of the ranks" or "call".
                Only in a call, deadlocks are looked for.
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
                if failed_at is None and self._failures():
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
                elif activity == "call":
                    self._raise_deadlock(deadlocks, views, now)
                if timeout is not None and now - start > timeout:
                    raise timed_out(activity, timeout, self.states())
                if progress.due():
                    progress.update(view.in_short for view in views)
        finally:
            if progress is not None:
                progress.clear()
            with uninterrupted():  # an interrupt could split the output
                for member in self.members:
                    member.output.drain()
                self._printer.end_call()

    def _after_failure(self, views: Sequence[RankView], seconds: float) -> None:
        """Raise the error of a failed rank as soon as waiting longer would show nothing more."""
        failures = self._failures()
        stuck = stuck_ranks(views)
        waits = all(m.answer is not None or m.rank in stuck for m in self.members)
        # The board explains a mismatch, so there is no need to wait for other ranks.
        mismatch = any(failure.mismatch for failure in failures.values())
        if mismatch or seconds > (_STUCK_GRACE if waits else _GRACE):
            raise some_raised(failures, views, self.states())

    def _raise_deadlock(
        self, deadlocks: DeadlockWatch, views: Sequence[RankView], now: float
    ) -> None:
        """Raise if the ranks wait for one another."""
        asleep = find_asleep(self._server, self.members, views, now)
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

    # What the ranks say and do ------------------------------------------------------------------

    def states(self) -> list[RankState]:
        """Return what every rank does; for running ranks, also the line."""
        views = self._board.views()
        running = [m for m in self.members if views[m.rank].state is RankPhase.RUNNING]
        dumps = ask_for_stacks(self._server, running)
        return [
            replace(s, where=line_in_dump(dumps[s.rank], self._labels)) if s.rank in dumps else s
            for s in board_states(views)
        ]

    def _failures(self) -> dict[int, Failure]:
        """Return the exceptions that the ranks have answered with."""
        return {m.rank: m.failure for m in self.members if m.failure is not None}

    def _notes(self) -> Iterator[str]:
        """Yield the notes on the exceptions that ended the call on its ranks."""
        for member in self.members:
            if member.failure is not None:
                yield from member.failure.notes
            elif member.answer is not None and member.answer.head.kind == GIVEN_UP:
                yield from member.answer.value()

    def _await(self) -> set[int]:
        """Start to listen to the pipes of the ranks that have yet to answer; return these ranks."""
        waiting = {member.rank for member in self.members if member.answer is None}
        for rank in waiting:
            self._poll.register(self.members[rank].pipe, select.POLLIN)
        return waiting

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
                head, *parts = member.pipe.receive()
            except (EOFError, OSError):
                status, dump, line = member.last_words(self._server, self._labels)
                views = self._board.views()
                raise process_ended(member.rank, status, dump, views, line) from None
            if (answer := head()).kind == DISPLAY:
                member.output.drain()
                self._printer.add(member.rank, parts[0]())
                return False
            member.answer = Answer(answer, *parts)
            if answer.kind == FAILURE:
                member.failure = member.answer.value()
            return True

    # Giving a call up ---------------------------------------------------------------------------

    def _give_up(self) -> bool:
        """End the call on the ranks that are still in it; return whether all can be used again.

        If so, their processes and their memory stay. Data may be left in their connections, so
        every group connects again before the next call.
        """
        if not self._started or not self._keeps or self._generation >= _MAX_GIVEN_UP:
            return False
        if not self._end_call():
            return False
        self._generation += 1
        self._board.clear()
        return True

    def _end_call(self) -> bool:
        """Tell the ranks to end their call, until they have; return whether all end in time."""
        self._board.give_up(self._calls)
        left = self._await()
        signalled = -math.inf
        until = time.monotonic() + _GIVE_UP_LIMIT
        try:
            with uninterrupted():
                while left and (now := time.monotonic()) < until:
                    if now - signalled > _SIGNAL_EVERY:
                        signalled = now
                        pids = [self.members[rank].pid for rank in left]
                        self._server.signal(pids, signal.SIGUSR2)
                    left -= self._read()
        except RanksError:  # a rank's process has ended
            return False
        return not left


def _as_torchrun(world_size: int) -> dict[str, str]:
    """Return the environment variables that ``torchrun`` sets, except those with the rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _chosen_gpus() -> dict[str, str]:
    """Return the environment variables by which the notebook chooses GPUs.

    The notebook may set them after the fork server has started. A rank needs them early: it opens
    CUDA before its first call, with which it gets the rest of the environment.
    """
    names = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
    return {name: os.environ[name] for name in names if name in os.environ}


def _end_team(
    server: ForkServer, board: Board, folder: str | None, members: list[Member], owner: int
) -> None:
    if owner != os.getpid():
        return
    server.kill([member.pid for member in members])
    for member in members:
        member.close()
    board.close()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
