"""One generation of K rank processes, and one call on them. `Processes` says what a failure costs.

A call sends every rank its part and then waits, with four eyes: on the answers, on what the ranks
print, on the board (does anything still move?), and on the clock.
"""

from __future__ import annotations

import os
import selectors
import shutil
import socket
import tempfile
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from course_lib.ranks.board.board import Board, State
from course_lib.ranks.board.diagnosis import DeadlockWatch, find_mismatch, rank_states, stuck_ranks
from course_lib.ranks.board.failures import out_of_step, process_ended, raised, timed_out
from course_lib.ranks.board.memory import anonymous_file, path_of
from course_lib.ranks.board.views import RankView
from course_lib.ranks.costs.network import Network
from course_lib.ranks.explain.errors import DeadlockError, RanksError, RankState
from course_lib.ranks.metered.recorder import Event
from course_lib.ranks.output.printer import Printer, RankOutput
from course_lib.ranks.output.progress import Progress
from course_lib.ranks.placement import Placement
from course_lib.ranks.processes.channel import Channel, Packed
from course_lib.ranks.processes.fork_client import ForkServer, shared_server
from course_lib.ranks.processes.interrupts import uninterrupted
from course_lib.ranks.processes.member import Member, ask_for_stacks, find_asleep
from course_lib.ranks.processes.stacks import own_line, read_dump
from course_lib.ranks.processes.worker import Failure

_LOOK_EVERY = 0.05
_STUCK_GRACE = 0.1
"""Seconds that ranks which wait for a failed one get, to show that they do."""
_GRACE = 1.0
"""Seconds that ranks which still compute get, once another has failed."""
_START_LIMIT = 60.0


class Team:
    """K processes that were started together and end together."""

    def __init__(self, placement: Placement, *, metered: bool, network: Network | None) -> None:
        self.placement = placement
        self.world_size = len(placement.devices)
        self.members: list[Member] = []
        self.reusable = False
        self.labels: dict[str, str] = {}
        self._started = False
        self._server: ForkServer = shared_server()
        with uninterrupted():
            self.board = Board.create(self.world_size)
            store = anonymous_file("store")
            # Where a file without a name cannot be opened by path, it needs a folder.
            folder = None if path_of(store) else tempfile.mkdtemp(prefix="ranks-")
            self._printer = Printer(self.world_size)
            self._end = weakref.finalize(
                self, _end_team, self._server, self.board, folder, self.members, os.getpid()
            )
            config = {
                "world_size": self.world_size,
                "threads": placement.threads,
                "environment": placement.environment,
                "store": os.path.join(folder or "", "store"),
                "backend": "metered" if metered else placement.backend,
                "network": asdict(network) if network is not None else None,
            }
            try:
                for rank in range(self.world_size):
                    self._fork(rank, config, [] if folder else [store])
            except BaseException:
                self._end()
                raise
            finally:
                os.close(store)

    def _fork(self, rank: int, config: dict[str, Any], store: list[int]) -> None:
        ours, theirs = socket.socketpair()
        read, write = os.pipe()
        dump = anonymous_file("stacks")
        config = {**config, "rank": rank, "device": self.placement.devices[rank]}
        try:
            fds = [theirs.fileno(), write, self.board.fd, dump, *store]
            pid = self._server.fork("course_lib.ranks.processes.worker:serve_calls", config, fds)
        except BaseException:
            ours.close()
            os.close(read)
            os.close(dump)
            raise
        finally:
            theirs.close()
            os.close(write)
        output = RankOutput(rank, read, self._printer)
        on_gpu = self.placement.devices[rank] != "cpu"
        channel = Channel(ours, private=False)
        self.members.append(Member(rank, pid, on_gpu, channel, output, dump))

    def healthy(self) -> bool:
        """Return whether all ranks live and wait for a call."""
        return self._server.all_live(member.pid for member in self.members)

    def start(self) -> None:
        """Wait until the ranks have joined their process group."""
        if not self._started:
            self._collect("start", _START_LIMIT)
            self._started = True

    def call(
        self,
        surroundings: Packed,
        common: Packed,
        each: Sequence[Packed],
        timeout: float | None,
    ) -> list[Any]:
        """Run one call on all ranks; return the results. Raises one of the `RanksError`."""
        self.reusable = False
        self.start()
        if not self.board.pending():
            self.board.restart_counts()  # a student counts the operations of the call
        for member in self.members:
            # Until a rank has picked up this call, it must not look as if it had finished it.
            self.board.set_state(member.rank, State.STARTING)
            member.answered, member.value, member.events, member.dropped = False, None, [], 0
            member.asleep_since = None
        for member, mine in zip(self.members, each, strict=True):
            with suppress(BrokenPipeError, ConnectionResetError):  # found below, with its status
                member.channel.send(surroundings, common, mine)
        self._collect("call", timeout)
        # All ranks have answered; if they also left the group in step, they are as good as new.
        views = self.board.views()
        wrong = out_of_step(views)
        self.reusable = wrong is None
        if failures := self._failures():
            raise raised(failures, views)
        if wrong is not None:
            raise wrong
        try:
            return [member.value() for member in self.members]
        except Exception as error:
            raise TypeError(f"a result cannot be read here: {error}") from error

    def _failures(self) -> dict[int, Failure]:
        return {m.rank: m.value for m in self.members if isinstance(m.value, Failure)}

    # Waiting ---------------------------------------------------------------------------------

    def _collect(self, what: str, timeout: float | None) -> None:
        """Wait for every rank's answer, watch for hangs and deaths, pass on what they print."""
        start = time.monotonic()
        watch, progress = DeadlockWatch(), Progress()
        failed_at: float | None = None
        look_at = start + _LOOK_EVERY
        try:
            with selectors.PollSelector() as selector:
                for each in self.members:
                    selector.register(each.channel, selectors.EVENT_READ, each)
                    selector.register(each.output, selectors.EVENT_READ, each)
                left = set(range(self.world_size))
                while left:
                    for key, _ in selector.select(_LOOK_EVERY):
                        member: Member = key.data
                        output = member.output
                        if key.fileobj is output:
                            if not output.forward():
                                selector.unregister(key.fileobj)
                        elif self._receive(member):
                            selector.unregister(member.channel)
                            left.discard(member.rank)
                            if isinstance(member.value, Failure):
                                failed_at = failed_at or time.monotonic()
                    now = time.monotonic()
                    if not left or now < look_at:
                        continue
                    look_at = now + _LOOK_EVERY
                    self._printer.release()
                    views = self.board.views()
                    if failed_at is not None:
                        self._after_failure(views, now - failed_at)
                    elif what == "call":
                        asleep = find_asleep(self._server, self.members, views, now)
                        if (deadlock := watch.look(views, asleep)) is not None:
                            raise find_mismatch(views) or self._with_lines(deadlock)
                    if timeout is not None and now - start > timeout:
                        raise timed_out(what, timeout, self.states())
                    if progress.due():
                        progress.update(views)
        finally:
            progress.clear()
            with uninterrupted():
                for each in self.members:
                    each.output.drain()
                self._printer.end_call()

    def _receive(self, member: Member) -> bool:
        """Take what a rank has sent; return whether its answer to the call was there."""
        while not self._receive_one(member):
            if not member.channel.has_more():
                return False
        return True

    def _receive_one(self, member: Member) -> bool:
        """Take one message of a rank; return whether it was its answer to the call."""
        try:
            message = member.channel.receive()()
            if message[0] == "display":
                member.output.drain()
                self._printer.add(member.rank, message[1])
                return False
            if message[0] != "ready":
                member.events = [Event(*event) for event in message[1]]
                member.dropped = message[2]
                value = member.channel.receive()
                member.value = value() if message[0] == "failure" else value
        except (EOFError, OSError):
            raise self._death(member) from None
        member.answered = True
        return True

    def _after_failure(self, views: Sequence[RankView], seconds: float) -> None:
        """Raise, once one rank has failed, as soon as nothing more is to be learnt."""
        failures = self._failures()
        stuck = stuck_ranks(views)
        waits = all(member.answered or member.rank in stuck for member in self.members)
        # A mismatch is explained by the board, whatever the others do.
        mismatch = any(failure.mismatch for failure in failures.values())
        if mismatch or seconds > (_STUCK_GRACE if waits else _GRACE):
            raise raised(failures, views)

    def _death(self, member: Member) -> RanksError:
        status = self._server.exit_status(member.pid, wait=2)
        dump = read_dump(member.dump_fd, member.dump_at)
        where = own_line(dump, self.labels)
        for name, label in self.labels.items():
            dump = dump.replace(f'File "{name}"', label)
        return process_ended(member.rank, status, dump, self.board.views(), where)

    # Looking closer --------------------------------------------------------------------------

    def states(self) -> list[RankState]:
        """Return what every rank does; of those that run, also their line."""
        views = self.board.views()
        states = rank_states(views)
        running = [m for m in self.members if views[m.rank].state is State.RUNNING]
        lines = ask_for_stacks(self._server, running)
        return [
            RankState(s.rank, s.doing, own_line(lines[s.rank], self.labels), s.seconds)
            if s.rank in lines
            else s
            for s in states
        ]

    def _with_lines(self, deadlock: DeadlockError) -> DeadlockError:
        """Return the error with the lines of those ranks that run."""
        if not any(state.doing.startswith("running") for state in deadlock.states):
            return deadlock
        return DeadlockError(deadlock.summary, self.states(), deadlock.detail)

    def end(self) -> None:
        """End the processes and remove what they left."""
        with uninterrupted():
            self._end()


def _end_team(
    server: ForkServer, board: Board, folder: str | None, members: list[Member], owner: int
) -> None:
    if owner != os.getpid():
        return
    server.kill([member.pid for member in members])
    for member in members:
        member.channel.close()
        member.output.close()
        os.close(member.dump_fd)
    board.close()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
