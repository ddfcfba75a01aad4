"""One generation of K rank processes, and one call on them. `Processes` says what a failure costs.

A call sends every rank its part and then waits for the answers; `watch` does the waiting.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from course_lib.ranks.board.board import Board
from course_lib.ranks.board.failures import out_of_step, some_raised
from course_lib.ranks.board.memory import anonymous_file, path_of
from course_lib.ranks.board.views import State
from course_lib.ranks.costs.network import Network
from course_lib.ranks.output.printer import Printer, RankOutput
from course_lib.ranks.placement import Placement
from course_lib.ranks.processes.fork_client import ForkServer, shared_server
from course_lib.ranks.processes.interrupts import uninterrupted
from course_lib.ranks.processes.member import Member
from course_lib.ranks.processes.object_pipe import ObjectPipe, Packed
from course_lib.ranks.processes.watch import Watch

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
            self.watch = Watch(self._server, self.board, self.members, self._printer, self.labels)
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
        pipe = ObjectPipe(ours, private=False)
        self.members.append(Member(rank, pid, on_gpu, pipe, output, dump))

    def healthy(self) -> bool:
        """Return whether the fork server and all ranks live."""
        return self._server.all_live(member.pid for member in self.members)

    def start(self) -> None:
        """Wait until the ranks have joined their process group."""
        if not self._started:
            self.watch.collect("start", _START_LIMIT)
            self._started = True

    def call(
        self,
        surroundings: Packed,
        common: Packed,
        each: Sequence[Packed],
        timeout: float | None,
    ) -> list[Any]:
        """Run one call on all ranks; return the results.

        Args:
            surroundings: the notebook's sources, folder, module path and environment, if changed.
            common: what all ranks share of the call.
            each: what each rank alone gets of it, in rank order.
            timeout: limit in seconds; None for none.

        Raises:
            RanksError: the call went wrong.
            TypeError: a result cannot be read here.

        """
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
                member.pipe.send(surroundings, common, mine)
        self.watch.collect("call", timeout)
        # All ranks have answered; if they also left the group in step, they are as good as new.
        views = self.board.views()
        wrong = out_of_step(views)
        self.reusable = wrong is None
        if failures := self.watch.failures():
            raise some_raised(failures, views)
        if wrong is not None:
            raise wrong
        try:
            return [member.value() for member in self.members]
        except Exception as error:
            raise TypeError(f"a result cannot be read here: {error}") from error

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
        member.pipe.close()
        member.output.close()
        os.close(member.dump_fd)
    board.close()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
