"""One call on simulated ranks: K threads of this process, on a fabric.

The process is the host of the simulated ranks; see `course_lib.ranks.host`.
"""

from __future__ import annotations

import itertools
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from course_lib.ranks._torch.process_settings import adopt, settings
from course_lib.ranks._torch.thread_worlds import (
    join_world,
    leave_world,
    no_profiler,
    thread_worlds,
)
from course_lib.ranks.calls import join_call, pack_result
from course_lib.ranks.costs.computation import CountedOperators, enter_rank
from course_lib.ranks.costs.network import Device, Network
from course_lib.ranks.explain.errors import RanksError, RankState
from course_lib.ranks.explain.failure import Failure, describe, notes_on, timed_out
from course_lib.ranks.explain.lines import line_of_thread, locator
from course_lib.ranks.memory import Packed, pack
from course_lib.ranks.output.displays import send_displays_of_thread_to
from course_lib.ranks.output.printer import Item
from course_lib.ranks.simulated.baton import Baton, Stopped
from course_lib.ranks.simulated.fabric import Fabric
from course_lib.ranks.simulated.fabric_diagnosis import explain_leftovers, fabric_states
from course_lib.ranks.simulated.handles import Misuse
from course_lib.ranks.simulated.personal import PersonalState, Worlds
from course_lib.ranks.simulated.rank_streams import rank_streams
from course_lib.ranks.simulated.simulated_group import SimulatedRank
from course_lib.ranks.simulated.virtual_time import virtual_time
from course_lib.ranks.stopping import raise_in_thread

_PATIENCE = 1.0
"""Seconds that the ranks have to end after they were told to end."""
_AGAIN = 0.2
"""Seconds after which a rank is told once more; not sooner, because it may be cleaning up."""
_LARGE = 1 << 20
"""From this size in bytes on, ranks map an argument and copy only the parts that they write to."""
_LOOK_EVERY = 0.05
"""Longest wait, in seconds, until a request to end the call is noticed."""


@dataclass(frozen=True)
class Job:
    """One call, as it is sent to the host."""

    owner: str
    """The `Ranks` object to which the call belongs: its key in the host."""
    world_size: int
    network: Network
    device: Device | None
    """What computation costs; without one, only calls of `compute` cost time."""
    timeout: float | None
    """Limit in seconds of real time; ``None`` for no limit."""
    common: Packed
    """The part of the call that all ranks share."""
    own_parts: Sequence[Packed]
    """What only one rank gets, in rank order; empty if there is no such part."""
    known_classes: frozenset[str]
    """The classes of cells that the notebook has, by the names that cloudpickle gives them."""


@dataclass
class Outcome:
    """How a call ended, as it is sent back."""

    log: Packed
    """The events, as tuples of their fields."""
    states: list[RankState]
    """What every rank did at the end of the call."""
    results: list[Packed] = field(default_factory=list)
    """In rank order; empty if the call failed."""
    failures: dict[int, Failure] = field(default_factory=dict)
    """Rank → the exception that it raised; the rank that failed first comes first."""
    error: RanksError | None = None
    """What is wrong with the call as a whole."""
    misused: list[Misuse] = field(default_factory=list)
    libraries: set[str] = field(default_factory=set)
    """What ranks have imported that keeps the rank in a class or module."""
    stuck: bool = False
    """Whether a rank did not react when it was told to end."""


class Run:
    """One call on simulated ranks: its threads, its fabric, its results.

    Args:
        job: the call.
        worlds: what the ranks keep from earlier calls.
        labels: file name of a cell → its name for people.
        show: called with a rank and a line or display of it.
        halt: set if the call must end.

    """

    def __init__(
        self,
        job: Job,
        worlds: Worlds,
        labels: dict[str, str],
        show: Callable[[int, Item], None],
        halt: threading.Event,
    ) -> None:
        self.job = job
        self.common = job.common if job.common.size < _LARGE else job.common.moved_to_file()
        self.world_size = job.world_size
        self.fabric = Fabric(self.world_size, job.network, worlds.made)
        self.baton = Baton(self.fabric)
        self.worlds = worlds
        self.show = show
        self.halt = halt
        self.results: dict[int, Packed] = {}
        self.notes: list[str] = []
        self.failures: dict[int, tuple[float, Failure]] = {}
        self.messages: queue.SimpleQueue[tuple[int, Item | None]] = queue.SimpleQueue()
        self.labels = labels
        self.locate = locator(labels)
        self.ranks = [
            SimulatedRank(rank, self.world_size, self.baton, self.locate, worlds, labels=labels)
            for rank in range(self.world_size)
        ]
        self.threads = [
            threading.Thread(target=self._run, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(self.world_size)
        ]

    # On the calling thread --------------------------------------------------------------------

    def go(self) -> Outcome:
        """Run to the end, or until the time limit or a request ends it."""
        timeout = self.job.timeout
        halted: list[RankState] | None = None
        before = settings()
        with ExitStack() as stack:
            stack.callback(adopt, before)
            stack.enter_context(thread_worlds())
            stack.enter_context(no_profiler())
            put = self.messages.put
            stack.enter_context(rank_streams(self.threads, lambda *line: put(line)))
            stack.enter_context(virtual_time(self.fabric.clock, self._sleep))
            self.baton.states = [
                PersonalState(rank, classes, before)
                for rank, classes in enumerate(self.worlds.classes)
            ]
            for thread in self.threads:
                thread.start()
            self.baton.start()
            if not self._listen(math.inf if timeout is None else time.monotonic() + timeout):
                halted = self._states()
                self._stop()
        while not self.messages.empty():
            self._take(0.0)
        log = pack([tuple(event) for event in self.fabric.events], inline=sys.maxsize)
        if halted is not None:
            outcome = Outcome(log, halted, stuck=any(thread.is_alive() for thread in self.threads))
            if timeout is not None and not self.halt.is_set():
                outcome.error = timed_out("call", timeout, halted)
            return outcome
        error = self.baton.error
        outcome = Outcome(log, list(error.states) if error else fabric_states(self.fabric))
        outcome.libraries.update(*(rank.libraries for rank in self.ranks))
        in_order = sorted(self.failures, key=lambda rank: (self.failures[rank][0], rank))
        outcome.failures = {rank: self.failures[rank][1] for rank in in_order}
        outcome.error = error or explain_leftovers(self.fabric)
        if outcome.error is not None:
            failed = (failure.notes for failure in outcome.failures.values())
            outcome.error.add_notes([*self.notes, *itertools.chain(*failed)])
        outcome.misused = [misuse for rank in self.ranks for misuse in rank.handles.misuses]
        if not outcome.failures and outcome.error is None:
            outcome.results = [self.results[rank] for rank in range(self.world_size)]
        return outcome

    def forget(self) -> None:
        """Drop the references of a call that is over.

        These objects refer to each other in cycles. Python's garbage collector runs rarely in a
        process with PyTorch, so thousands of calls could pile up before it frees them.
        """
        for rank in self.ranks:
            rank.handles.forget()
        self.fabric.forget()
        del self.threads, self.ranks, self.baton

    def _listen(self, deadline: float) -> bool:
        """Pass on what the ranks print until all have ended; return whether they have."""
        running = len(self.threads)
        while running:
            left = deadline - time.monotonic()
            if self.halt.is_set() or left < 0:
                return False
            running -= self._take(min(left, _LOOK_EVERY))
        for thread in self.threads:
            thread.join()
        return True

    def _states(self) -> list[RankState]:
        """Return what every rank does; for the running rank, also its line."""
        return [
            replace(state, where=line_of_thread(thread.ident, self.labels))
            if state.running
            else state
            for state, thread in zip(fabric_states(self.fabric), self.threads, strict=True)
        ]

    def _take(self, patience: float) -> bool:
        """Take one message, if it comes in time; return whether it says that a rank has ended."""
        try:
            rank, item = self.messages.get(timeout=patience)
        except queue.Empty:
            return False
        if item is not None:
            self.show(rank, item)
        return item is None

    def _stop(self) -> None:
        """Unwind the ranks from outside. A rank that never runs Python code again is left alone."""
        self.baton.abandon()
        until = time.monotonic() + _PATIENCE
        raised: dict[threading.Thread, float] = {}
        while alive := [thread for thread in self.threads if thread.is_alive()]:
            now = time.monotonic()
            if now > until:
                return
            for thread in alive:
                if now - raised.get(thread, 0.0) > _AGAIN:
                    raise_in_thread(thread, Stopped)
                    raised[thread] = now
            alive[0].join(0.02)

    # On the ranks' threads ----------------------------------------------------------------------

    def _run(self, rank: int) -> None:
        raised = False
        try:
            self.baton.begin(rank)
            self._join(rank)
            with ExitStack() as stack:
                own_parts = self.job.own_parts
                call = join_call(self.common.read, own_parts[rank].read_last() if own_parts else [])
                self.worlds.classes[rank].publish(call.func)
                if (device := self.job.device) is not None:
                    stack.enter_context(CountedOperators(device, partial(self._spend, rank)))
                value = call()
                self.ranks[rank].finish()
                self.results[rank] = pack_result(value, self._pack)
        except Stopped as stopped:
            self.notes += notes_on(stopped)
        except BaseException as error:
            raised = True
            if not self.baton.stopping:
                self.failures[rank] = self.fabric.clock[rank], describe(error, self.labels)
        finally:
            with suppress(Stopped):  # a second one may arrive while the rank is ending
                leave_world()
            with suppress(Stopped):
                self.ranks[rank].works.forget()
            with suppress(Stopped):
                self.baton.finish(rank, raised)
            self.messages.put((rank, None))

    def _pack(self, value: Any) -> Packed:
        """Pack a value for the way back to the notebook."""
        return pack(value, inline=sys.maxsize, known_classes=self.job.known_classes)

    def _join(self, rank: int) -> None:
        send_displays_of_thread_to(lambda bundle: self.messages.put((rank, bundle)))
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        torch.set_num_threads(1)  # otherwise sums would depend on the number of cores
        join_world(self.ranks[rank], self.worlds.of_rank[rank])
        enter_rank(partial(self._spend, rank), lambda: self.fabric.clock[rank])

    def _spend(self, rank: int, seconds: float) -> None:
        """Let a rank compute for `seconds`, or longer if its device is slow."""
        factor = self.job.device.slowdown.get(rank, 1.0) if self.job.device else 1.0
        self.fabric.advance(rank, seconds * factor, self.locate())

    def _sleep(self, rank: int, seconds: float) -> None:
        self._spend(rank, seconds)
        self.baton.in_turn(rank)  # a rank that sleeps in a loop may wait for another rank
