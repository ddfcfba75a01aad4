"""Ranks that are processes of this machine: the engine behind ``on="cpu"`` and ``on="gpu"``.

`Processes` keeps a `Team` of K processes from call to call, and replaces it if a failure has made
it unusable. A call sends every rank its part and then waits for the answers; `watch` does the
waiting.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from course_lib.ranks.calls import Call, pack_call
from course_lib.ranks.costs.network import Network
from course_lib.ranks.explain.errors import RanksError, RankState
from course_lib.ranks.explain.failure import interrupted
from course_lib.ranks.memory import Packed, anonymous_file, pack, path_of
from course_lib.ranks.output.printer import Printer, RankOutput
from course_lib.ranks.placement import Placement
from course_lib.ranks.processes.board import Board
from course_lib.ranks.processes.board_diagnosis import out_of_step, some_raised
from course_lib.ranks.processes.board_views import RankPhase
from course_lib.ranks.processes.emulated_network import EmulatedNetwork
from course_lib.ranks.processes.fork_client import ForkServer, shared_server
from course_lib.ranks.processes.member import Member
from course_lib.ranks.processes.object_pipe import GIVEN_UP, Answer, CallHead, ObjectPipe
from course_lib.ranks.processes.surroundings import Surroundings
from course_lib.ranks.processes.watch import TeamWatch
from course_lib.ranks.stopping import uninterrupted
from course_lib.ranks.trace.trace import Trace


class Processes:
    """Keeps a team of rank processes from call to call, and replaces it when it has failed."""

    def __init__(
        self, placement: Placement, *, metered: bool = True, network: Network | None = None
    ) -> None:
        self.placement = placement
        self.world_size = len(placement.devices)
        self._trace: Trace | Callable[[], Trace] = Trace([], self.world_size)
        self.team: Team | None = None
        self._metered = metered
        self._network = network
        self._surroundings = Surroundings()
        self.closing = threading.Event()

    @property
    def trace(self) -> Trace:
        """The trace of the last call; it is made on first use."""
        if not isinstance(self._trace, Trace):
            self._trace = self._trace()
        return self._trace

    @trace.setter
    def trace(self, trace: Trace) -> None:
        self._trace = trace

    def start(self) -> None:
        """See `Ranks.start`."""
        self._ready_team()

    def run(self, call: Call) -> list[Any]:
        """Run one call; see `Ranks.run`."""
        common, each = pack_call(call.fn, call.args, call.kwargs, self.world_size, pack)
        self._trace = partial(Trace, [], self.world_size)
        try:
            team = self._ready_team()
            news = self._surroundings.news()
            if news is not None:
                team.labels.update(news[0].labels)
            return team.call(news, common, each, call.timeout)
        except KeyboardInterrupt:
            self._say_interrupted()
            raise
        finally:
            for packed in (common, *each):
                packed.close()
            if self.team is not None:
                answers = [member.answer for member in self.team.members]
                self._trace = partial(_trace, answers, self.world_size, self._network)
                # An interrupt, too, may have left a call half run: such ranks are not used again.
                if not self.team.reusable:
                    self.close()

    def _ready_team(self) -> Team:
        if self.team is not None and not self.team.healthy():
            self.close()
        if self.team is None:
            self._surroundings = Surroundings()
            self.team = Team(
                self.placement, self.closing, metered=self._metered, network=self._network
            )
        return self.team

    def _say_interrupted(self) -> None:
        team = self.team
        if team is not None and len(team.members) == self.world_size:
            states = team.interrupted or team.watch.states()
            print(interrupted(states, kept=team.reusable), file=sys.stderr)

    def states(self) -> list[RankState]:
        """Return what the ranks do now; empty if there are no ranks."""
        return self.team.watch.states() if self.team is not None else []

    def pids(self) -> list[int]:
        """Return the pids of the ranks, in rank order; empty if there are no ranks."""
        return [member.pid for member in self.team.members] if self.team is not None else []

    def close(self) -> None:
        """End the processes; the next `run` would start new ones."""
        if self.team is not None:
            self.team.end()
            self.team = None


def _trace(answers: Sequence[Answer | None], world_size: int, network: Network | None) -> Trace:
    there = [answer for answer in answers if answer is not None]
    events = [event for answer in there for event in answer.events()]
    dropped = sum(answer.head.dropped for answer in there)
    return Trace(events, world_size, dropped=dropped, network=network)


_START_LIMIT = 60.0
_MAX_GIVEN_UP = 50
"""Most given-up calls that ranks survive: each leaves connections that gloo cannot close."""


class Team:
    """K processes that were started together and end together."""

    def __init__(
        self,
        placement: Placement,
        closing: threading.Event,
        *,
        metered: bool,
        network: Network | None,
    ) -> None:
        self.placement = placement
        self.world_size = len(placement.devices)
        self.members: list[Member] = []
        self.reusable = False
        self.interrupted: list[RankState] = []
        """The states of the ranks when an interrupt last ended a call."""
        self.labels: dict[str, str] = {}
        self._started = False
        self._calls = self._generation = 0
        self._keeps = metered and all(device == "cpu" for device in placement.devices)
        self._server: ForkServer = shared_server()
        with uninterrupted():
            self.board = Board.create(self.world_size)
            store = anonymous_file("store")
            # If a file without a name cannot be opened by path, the store needs a folder.
            folder = None if path_of(store) else tempfile.mkdtemp(prefix="ranks-")
            self._printer = Printer(self.world_size)
            self.watch = TeamWatch(
                self._server, self.board, self.members, self._printer, self.labels, closing
            )
            self._end = weakref.finalize(
                self, _end_team, self._server, self.board, folder, self.members, os.getpid()
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
            links: list[Connection] = []
            try:
                for rank in range(self.world_size):
                    more = {} if folder else {"store": store}
                    with ExitStack() as stack:
                        if network is not None:
                            ours, theirs = Pipe()
                            links.append(ours)
                            more["link"] = stack.enter_context(theirs).fileno()
                        self._fork(rank, config, more)
            except BaseException:
                self._end()
                raise
            finally:
                os.close(store)
            self._network = EmulatedNetwork(network, links) if network is not None else None

    def _fork(self, rank: int, config: dict[str, Any], more: dict[str, int]) -> None:
        ours, theirs = socket.socketpair()
        read, write = os.pipe()
        dump = anonymous_file("stacks")
        fds = {"pipe": theirs.fileno(), "output": write, "board": self.board.fd, "dump": dump}
        fds |= more
        config = {**config, "rank": rank, "device": self.placement.devices[rank]}
        config["fds"] = list(fds)
        config["environment"] = {
            **config["environment"],
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
        }
        try:
            function = "course_lib.ranks.processes.worker:serve_calls"
            # If each rank has its own core, it imports as fast by itself and need not wait.
            early = self.placement.core_each
            pid = self._server.fork(function, config, list(fds.values()), early)
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
            self.watch.collect("start of the ranks", _START_LIMIT)
            self._started = True

    def call(
        self,
        surroundings: tuple[Any, ...] | None,
        common: Packed,
        each: Sequence[Packed],
        timeout: float | None,
    ) -> list[Any]:
        """Run one call on all ranks; return the results.

        Args:
            surroundings: the notebook's sources, folder, module path and environment, if changed.
            common: the part of the call that all ranks share.
            each: what only one rank gets, in rank order; empty if there is no such part.
            timeout: the call's limit in seconds; ``None`` for no limit.

        Raises:
            RanksError: the call went wrong.
            TypeError: a result cannot be read here.

        """
        self.reusable = False
        self.start()
        if not self.board.untouched() and not self.board.pending():
            self.board.clear()  # numbers restart: students count the operations of one call
        # A rank that has not picked up this call yet must not look as if it had finished it.
        self.board.set_all(RankPhase.RUNNING)
        for member in self.members:
            member.answer = member.failure = member.asleep_since = None
        self._calls += 1
        try:
            with uninterrupted():  # a rank without its call could not end it
                self._send(surroundings, common, each)
            self.watch.collect("call", timeout)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                self.interrupted = self.watch.states()
            self.reusable = self._give_up()
            if isinstance(error, RanksError):
                error.add_notes(self._notes())
            raise
        # All ranks have answered. If no communication is left behind, they can be used again.
        failures = self.watch.failures()
        views = self.board.views() if failures or not self.board.untouched() else []
        wrong = out_of_step(views) if views else None
        left = wrong is not None or (failures and self.board.pending())
        self.reusable = not left or self._give_up()
        for member in self.members:
            if member.answer is None or not member.answer.head.joined:
                self.reusable = False
        if failures:
            raise some_raised(failures, views)
        if wrong is not None:
            raise wrong
        try:
            return [member.answer.value() for member in self.members if member.answer]
        except Exception as error:
            raise TypeError(
                f"a result of a rank cannot be read in this process: {error}"
            ) from error

    def _send(
        self, surroundings: tuple[Any, ...] | None, common: Packed, each: Sequence[Packed]
    ) -> None:
        head = pack(CallHead(self._calls, self._generation))
        news, nothing = pack(surroundings), pack([])
        for member in self.members:
            own = each[member.rank] if each else nothing
            with suppress(BrokenPipeError, ConnectionResetError):  # the wait finds the dead rank
                member.pipe.send(head, news, common, own)

    def _give_up(self) -> bool:
        """End the call on the ranks that are still in it; return whether all can be used again.

        If so, their processes and their memory stay. Data may be left in their connections, so
        every group connects again before the next call.
        """
        if not self._keeps or self._generation >= _MAX_GIVEN_UP:
            return False
        if not self.watch.end_call(self._calls):
            return False
        self._generation += 1
        if self._network is not None:
            self._network.forget()
        self.board.clear()
        return True

    def _notes(self) -> Iterator[str]:
        """Yield the notes on the exceptions that ended the call on its ranks."""
        for member in self.members:
            if member.failure is not None:
                yield from member.failure.notes
            elif member.answer is not None and member.answer.head.kind == GIVEN_UP:
                yield from member.answer.value()

    def end(self) -> None:
        """End the processes and remove what they left."""
        with uninterrupted():
            self._end()


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
        member.pipe.close()
        member.output.close()
        os.close(member.dump_fd)
    board.close()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
