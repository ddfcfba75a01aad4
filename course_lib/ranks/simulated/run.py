"""One call on simulated ranks: start the threads, listen, and say what went wrong."""

from __future__ import annotations

import math
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from course_lib.ranks.calls import cell_sources, unpack_call
from course_lib.ranks.costs.computation import CountedOperators, enter_rank
from course_lib.ranks.costs.network import Device, Network
from course_lib.ranks.explain.errors import RankState
from course_lib.ranks.explain.failure import describe, interrupted, rank_error, timed_out
from course_lib.ranks.explain.lines import line_of_thread, locator
from course_lib.ranks.fabric.diagnosis import explain_leftovers, fabric_states
from course_lib.ranks.fabric.fabric import Fabric, Phase
from course_lib.ranks.fabric.operation import Operation
from course_lib.ranks.fabric.process_group import SimulatedProcessGroup
from course_lib.ranks.fabric.torch_hooks import (
    join_world,
    leave_world,
    raise_in_thread,
    thread_worlds,
)
from course_lib.ranks.fabric.work import WorkQueue
from course_lib.ranks.output.displays import send_displays_of_thread_to
from course_lib.ranks.output.printer import Item, Printer
from course_lib.ranks.simulated.baton import Baton, PersonalState, Stopped
from course_lib.ranks.simulated.streams import RankStreams

_LOOK_EVERY = 0.2
"""Seconds: an interrupt that arrives on another thread does not end a wait of this one."""


class Run:
    """One call on simulated ranks: its threads, its fabric, its results."""

    def __init__(
        self,
        world_size: int,
        network: Network,
        device: Device,
        computation: str,
        call: tuple[bytes, Sequence[bytes]],
    ) -> None:
        self.world_size = world_size
        self.device = device
        self.computation = computation
        self.call = call
        self.fabric = Fabric(world_size, network)
        self.baton = Baton(self.fabric, measured=computation == "measured")
        self.works = [WorkQueue() for _ in range(world_size)]
        self.results: list[Any] = [None] * world_size
        self.failures: dict[int, tuple[float, BaseException]] = {}
        self.messages: queue.SimpleQueue[tuple[int, Item | None]] = queue.SimpleQueue()
        self.labels = cell_sources(set()).labels
        self.locate = locator(self.labels)
        self.threads = [
            threading.Thread(target=self._rank, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(world_size)
        ]

    # The thread that called -------------------------------------------------------------------

    def go(self, timeout: float | None) -> None:
        """Run to the end, print what the ranks print, raise what went wrong."""
        printer = Printer(self.world_size)
        with ExitStack() as stack:
            stack.enter_context(thread_worlds())
            stack.enter_context(_process_state())
            put = self.messages.put
            streams = stack.enter_context(RankStreams(self.threads, lambda *line: put(line)))
            for thread in self.threads:
                thread.start()
            self.baton.start()
            try:
                self._listen(printer, timeout)
                streams.finish()
            except BaseException as error:
                states = self._states()
                self._stop()
                if isinstance(error, KeyboardInterrupt):
                    print(interrupted(states), file=sys.stderr)
                raise
            finally:
                while not self.messages.empty():
                    self._take(printer, 0.0)
                printer.end_call()
        self._raise_failures()
        if self.baton.error is not None:
            raise self.baton.error
        if (leftovers := explain_leftovers(self.fabric)) is not None:
            raise leftovers

    def _listen(self, printer: Printer, timeout: float | None) -> None:
        """Pass on what the ranks print until all have ended."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        running = len(self.threads)
        while running:
            left = max(0.0, deadline - time.monotonic())
            running -= self._take(printer, min(left, _LOOK_EVERY))
            printer.release()
            if running and not left:
                assert timeout is not None
                raise timed_out("call", timeout, self._states())
        for thread in self.threads:
            thread.join()

    def _states(self) -> list[RankState]:
        """Return what every rank does; of the one that runs, also its line."""
        return [
            replace(state, where=line_of_thread(thread.ident, self.labels))
            if state.doing == Phase.RUNNING.value
            else state
            for state, thread in zip(fabric_states(self.fabric), self.threads, strict=True)
        ]

    def _take(self, printer: Printer, patience: float) -> bool:
        """Take one line, if it comes in time; return whether instead a rank has ended."""
        try:
            rank, line = self.messages.get(timeout=patience)
        except queue.Empty:
            return False
        if line is not None:
            printer.add(rank, line)
        return line is None

    def _stop(self) -> None:
        """Unwind the ranks from outside. One that never runs Python code again stays behind."""
        self.baton.abandon()
        until = time.monotonic() + 1.0
        for thread in self.threads:
            if thread.is_alive():
                raise_in_thread(thread, Stopped)
        for thread in self.threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _raise_failures(self) -> None:
        if not self.failures:
            return
        described = {r: describe(error, self.labels) for r, (_, error) in self.failures.items()}
        first = min(self.failures, key=lambda rank: (self.failures[rank][0], rank))
        states = self.baton.error.states if self.baton.error else fabric_states(self.fabric)
        raise rank_error(described, first, states, self.failures[first][1])

    # The threads of the ranks -------------------------------------------------------------------

    def _rank(self, rank: int) -> None:
        raised = False
        try:
            self.baton.begin(rank)
            self._join(rank)
            with ExitStack() as stack:
                call = unpack_call(self.call[0], self.call[1][rank])
                if self.computation == "counted":
                    stack.enter_context(CountedOperators(self.device, self._spender(rank)))
                self.baton.skip_time()
                self.results[rank] = call()
                self.baton.count_time(self._spender(rank))
        except Stopped:
            pass
        except BaseException as error:
            raised = True
            if not self.baton.stopping:
                self.failures[rank] = (self.fabric.clock[rank], error)
        finally:
            leave_world()
            self.works[rank].forget()
            self.baton.finish(rank, raised)
            self.messages.put((rank, None))

    def _join(self, rank: int) -> None:
        send_displays_of_thread_to(lambda bundle: self.messages.put((rank, bundle)))
        torch.set_num_threads(1)  # else sums depend on the number of cores
        spend = self._spender(rank)
        endpoint = _ThreadEndpoint(self.baton, spend)
        works = self.works[rank]

        def create(members: tuple[int, ...], name: str) -> SimulatedProcessGroup:
            return SimulatedProcessGroup(rank, members, name, endpoint, works, self.locate)

        join_world(rank, self.world_size, create)

        def now() -> float:
            self.baton.count_time(spend)
            return self.fabric.clock[rank]

        enter_rank(lambda seconds, flops: spend(seconds + self._flops_time(flops)), now)

    def _flops_time(self, flops: float) -> float:
        if flops and self.device.flops == float("inf"):
            raise ValueError("compute(flops=…) needs Ranks(…, device=Device(flops=…))")
        return self.device.time(flops)

    def _spender(self, rank: int) -> Callable[[float], None]:
        count = 0

        def spend(seconds: float) -> None:
            nonlocal count
            factor = self.device.stretch(rank, count)
            count += 1
            self.fabric.advance(rank, seconds * factor, self.locate())

        return spend


class _ThreadEndpoint:
    """A rank's side of a fabric in the same process."""

    def __init__(self, baton: Baton, spend: Callable[[float], None]) -> None:
        self._baton = baton
        self._spend = spend

    def post(self, operation: Operation) -> None:
        self._baton.count_time(self._spend)
        self._baton.post(operation)
        self._baton.skip_time()

    def wait(self, operation: Operation) -> None:
        self._baton.count_time(self._spend)
        self._baton.wait(operation)
        self._baton.skip_time()

    def is_done(self, operation: Operation) -> bool:
        self._baton.count_time(self._spend)
        done = self._baton.is_done(operation)
        self._baton.skip_time()
        return done


@contextmanager
def _process_state() -> Iterator[None]:
    """Put back what the ranks share with the rest of the process: random numbers and the like."""
    before = PersonalState()
    before.take()
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        before.give()
        torch.set_num_threads(threads)
