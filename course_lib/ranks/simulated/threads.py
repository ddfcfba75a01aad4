"""Simulated ranks as threads: the engine behind ``on="simulated"``, and one call of it.

A call starts K threads on a fabric, passes on what they print, and reports what went wrong.
"""

from __future__ import annotations

import importlib
import math
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args

import torch

from course_lib.ranks._torch.thread_worlds import (
    join_world,
    leave_world,
    thread_worlds,
)
from course_lib.ranks.calls import (
    Call,
    CallOptions,
    cell_sources,
    join_call,
    pack_call,
    pack_result,
)
from course_lib.ranks.costs.computation import CountedOperators, enter_rank
from course_lib.ranks.costs.network import Device, Network
from course_lib.ranks.explain.errors import RanksError, RankState
from course_lib.ranks.explain.failure import (
    closed_meanwhile,
    describe,
    interrupted,
    rank_error,
    timed_out,
)
from course_lib.ranks.explain.lines import line_of_thread, locator
from course_lib.ranks.explain.words import names
from course_lib.ranks.memory import Packed, pack
from course_lib.ranks.output.displays import send_displays_of_thread_to
from course_lib.ranks.output.printer import Item, Printer
from course_lib.ranks.placement import Placement
from course_lib.ranks.simulated.baton import Baton, Stopped, ThreadEndpoint
from course_lib.ranks.simulated.fabric import Fabric, Phase
from course_lib.ranks.simulated.fabric_diagnosis import (
    explain_leftovers,
    fabric_states,
    report_misuse,
)
from course_lib.ranks.simulated.personal import Classes, PersonalState, Worlds, state_kept
from course_lib.ranks.simulated.rank_streams import RankStreams
from course_lib.ranks.simulated.simulated_group import SimulatedRank
from course_lib.ranks.simulated.virtual_time import virtual_time
from course_lib.ranks.stopping import is_importing, raise_in_thread
from course_lib.ranks.trace.trace import Trace

_PATIENCE = 1.0
"""Seconds that a rank has to end after it was told to end."""
_AGAIN = 0.2
"""Seconds after which it is told once more; not sooner, because it may be cleaning up."""
_LOOK_EVERY = 0.2
"""Longest wait, in seconds: an interrupt on a different thread does not end this thread's wait."""


class Run:
    """One call on simulated ranks: its threads, its fabric, its results."""

    def __init__(
        self,
        world_size: int,
        network: Network,
        device: Device,
        computation: str,
        call: tuple[Packed, Sequence[Packed]],
        worlds: Worlds,
        options: CallOptions,
        misuse: str,
        closing: threading.Event,
    ) -> None:
        self.world_size = world_size
        self.closing = closing
        self.device = device
        self.computation = computation
        self.call = call
        self.fabric = Fabric(world_size, network, worlds.made)
        self.baton = Baton(self.fabric, measured=computation == "measured")
        self.known = frozenset(Classes.of_process().by_name)
        self.worlds = worlds
        self.options = options
        self.misuse = misuse
        self.stopped: list[int] = []
        self.results: list[Any] = [None] * world_size
        self.failures: dict[int, tuple[float, Callable[[], BaseException]]] = {}
        self.messages: queue.SimpleQueue[tuple[int, Item | None]] = queue.SimpleQueue()
        self.labels = cell_sources(set()).labels
        self.locate = locator(self.labels)
        self.endpoints = [
            ThreadEndpoint(self.baton, rank, self._spender(rank)) for rank in range(world_size)
        ]
        self.ranks = [self._rank(rank) for rank in range(world_size)]
        self.threads = [
            threading.Thread(target=self._run, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(world_size)
        ]

    # On the calling thread --------------------------------------------------------------------

    def go(self) -> None:
        """Run to the end, print what the ranks print, and raise what went wrong."""
        # Keep the present sys.stdout, because a rank may redirect sys.stdout later.
        printer = Printer(self.world_size, sys.stdout)
        with ExitStack() as stack:
            stack.enter_context(thread_worlds())
            stack.enter_context(state_kept())
            put = self.messages.put
            streams = stack.enter_context(RankStreams(self.threads, lambda *line: put(line)))
            stack.enter_context(virtual_time())
            self.baton.states = [PersonalState(classes) for classes in self.worlds.classes]
            for thread in self.threads:
                thread.start()
            self.baton.start()
            try:
                self._listen(printer, self.options.timeout)
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
        if self.stopped:
            raise RanksError(
                f"{names(sorted(self.stopped))} stopped in the middle of the call for an "
                "unknown reason. This is a fault of the simulation: please report it, with the "
                "code of the call.",
                fabric_states(self.fabric),
            )
        found = [each for rank in self.ranks for each in rank.handles.found]
        report_misuse(found, self.misuse, fabric_states(self.fabric))

    def forget(self) -> None:
        """Drop all references after a successful call.

        These objects refer to each other in cycles. Python's garbage collector runs rarely in a
        process with PyTorch, so thousands of calls could pile up before it frees them.
        """
        for rank in self.ranks:
            rank.handles.forget()
        self.fabric.close()
        self.__dict__.clear()

    def _listen(self, printer: Printer, timeout: float | None) -> None:
        """Pass on what the ranks print until all have ended."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        running = len(self.threads)
        while running:
            if self.closing.is_set():
                raise closed_meanwhile(self._states())
            left = max(0.0, deadline - time.monotonic())
            running -= self._take(printer, min(left, _LOOK_EVERY))
            printer.release()
            if running and not left:
                assert timeout is not None
                raise timed_out("call", timeout, self._states())
        for thread in self.threads:
            thread.join()

    def _states(self) -> list[RankState]:
        """Return what every rank does; for the running rank, also its line."""
        return [
            replace(state, where=line_of_thread(thread.ident, self.labels))
            if state.doing == Phase.RUNNING.value
            else state
            for state, thread in zip(fabric_states(self.fabric), self.threads, strict=True)
        ]

    def _take(self, printer: Printer, patience: float) -> bool:
        """Take one message, if it comes in time; return whether it says that a rank has ended."""
        try:
            rank, line = self.messages.get(timeout=patience)
        except queue.Empty:
            return False
        if line is not None:
            printer.add(rank, line)
        return line is None

    def _stop(self) -> None:
        """Unwind the ranks from outside. A rank that never runs Python code again is left alone."""
        self.baton.abandon()
        until = time.monotonic() + _PATIENCE
        raised: dict[threading.Thread, float] = {}
        while alive := [thread for thread in self.threads if thread.is_alive()]:
            importing = False
            for thread in alive:
                assert thread.ident is not None
                # A stop during an import would leave a module half imported: wait for its end.
                if is_importing(thread.ident):
                    importing = True
                elif time.monotonic() - raised.get(thread, 0.0) > _AGAIN:
                    raise_in_thread(thread, Stopped)
                    raised[thread] = time.monotonic()
            alive[0].join(0.02)
            if not importing and time.monotonic() > until:
                return
            if importing:
                until = time.monotonic() + _PATIENCE

    def _raise_failures(self) -> None:
        if not self.failures:
            return
        errors = {rank: error() for rank, (_, error) in self.failures.items()}
        described = {rank: describe(error, self.labels) for rank, error in errors.items()}
        first = min(self.failures, key=lambda rank: (self.failures[rank][0], rank))
        states = self.baton.error.states if self.baton.error else fabric_states(self.fabric)
        raise rank_error(described, first, states, errors[first])

    # On the ranks' threads ----------------------------------------------------------------------

    def _rank(self, rank: int) -> SimulatedRank:
        return SimulatedRank(
            rank,
            self.world_size,
            self.endpoints[rank],
            self.locate,
            store=self.worlds.store,
            generation=self.worlds.store,
            options=self.options,
            watched=self.misuse != "ignore",
        )

    def _run(self, rank: int) -> None:
        raised = False
        try:
            self.baton.begin(rank)
            self._join(rank)
            with ExitStack() as stack:
                common, each = self.call
                call = join_call(common.read, each[rank].read() if each else [])
                self.worlds.classes[rank].publish(call.func)
                if self.computation == "counted":
                    stack.enter_context(CountedOperators(self.device, self._spender(rank)))
                self.baton.skip_time()
                value = call()
                self.ranks[rank].finish()
                self.baton.count_time(self._spender(rank))
                self.results[rank] = pack_result(value, self._pack)
        except Stopped:
            self.stopped.append(rank)
        except BaseException as error:
            raised = True
            if not self.baton.stopping:
                self.failures[rank] = (self.fabric.clock[rank], self._as_of_notebook(rank, error))
        finally:
            leave_world()
            with suppress(Stopped):  # a second one may arrive while the rank is ending
                self.ranks[rank].works.forget()
            with suppress(Stopped):
                self.baton.finish(rank, raised)
            self.messages.put((rank, None))

    def _as_of_notebook(self, rank: int, error: BaseException) -> Callable[[], BaseException]:
        """Return a function that returns the error; a copied class becomes the notebook's again."""
        if type(error) not in self.worlds.classes[rank].by_class:
            return lambda: error
        try:
            packed = self._pack(error)
        except Exception:
            return lambda: error

        def unpacked() -> BaseException:
            try:
                return packed.read_last().with_traceback(error.__traceback__)  # type: ignore[no-any-return]
            except Exception:  # the class defines its own pickling, and that fails
                return error

        return unpacked

    def _pack(self, value: Any) -> Packed:
        """Pack a value for the way back to the notebook."""
        return pack(value, inline=sys.maxsize, known=self.known)

    def _join(self, rank: int) -> None:
        send_displays_of_thread_to(lambda bundle: self.messages.put((rank, bundle)))
        torch.set_num_threads(1)  # otherwise sums would depend on the number of cores
        spend = self._spender(rank)
        join_world(self.ranks[rank], self.worlds.of_rank[rank])

        now = self.endpoints[rank].now
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


_LOADED_LATE = "torch._dynamo"
"""PyTorch's first operation imports it, which takes seconds; on a cold disk, twenty."""


def _load_the_rest() -> None:
    """Import in a separate thread what PyTorch's first operation imports.

    So an interrupt takes effect at once, while the import goes on. If a rank imported it, the
    interrupt would have to wait, because an import is never ended halfway.
    """
    if _LOADED_LATE in sys.modules and not _loading.is_alive():
        return
    if not _loading.is_alive():
        with suppress(RuntimeError):  # it has failed before; the operation will report why
            _loading.start()
    while _loading.is_alive():
        _loading.join(_LOOK_EVERY)


_loading = threading.Thread(target=importlib.import_module, args=(_LOADED_LATE,), daemon=True)


Computation = Literal["declared", "counted", "measured"]
Misuse = Literal["ignore", "warn", "error"]
MAX_RANKS = 1024
_LARGE = 1 << 20
"""From this size in bytes on, ranks map an argument and copy only the parts that they write to."""
_one_at_a_time = threading.Lock()


class Simulated:
    """K simulated ranks. Every call starts from clock zero, with fresh threads and random numbers.

    Args:
        world_size: K.
        network: what messages cost; by default 20 µs and 10 GB/s.
        device: what computation costs.
        computation: how the time of computation is found: ``"declared"``, ``"counted"`` or
            ``"measured"``; by default ``"counted"`` if there is a device, else ``"declared"``.
        misuse: what happens when a rank never waits for a handle, or touches a buffer before
            ``wait()``: ``"ignore"`` does nothing, ``"warn"`` gives a `MisuseWarning`, and
            ``"error"`` raises a `MisuseError`.

    """

    def __init__(
        self,
        world_size: int,
        network: Network | None = None,
        device: Device | None = None,
        computation: Computation | None = None,
        misuse: Misuse = "warn",
    ) -> None:
        if not isinstance(world_size, int) or not 1 <= world_size <= MAX_RANKS:
            raise ValueError(f"world_size must be 1 to {MAX_RANKS}, got {world_size!r}")
        known = ("declared", "counted", "measured")
        if misuse not in get_args(Misuse):
            raise ValueError(f'misuse must be "ignore", "warn" or "error", got {misuse!r}')
        if computation is not None and computation not in known:
            raise ValueError(f"computation must be one of {', '.join(known)}, got {computation!r}")
        if computation == "counted" and device is None:
            raise ValueError('computation="counted" needs device=Device(flops=…)')
        self.placement = Placement(
            ("simulated",) * world_size, "fabric", "simulated, virtual clock"
        )
        self.trace = Trace([], world_size)
        self._world_size = world_size
        self._network = network or Network(latency=20e-6, bandwidth=10e9)
        self._device = device or Device()
        self._misuse = misuse
        self.closing = threading.Event()
        self._worlds = Worlds(world_size)
        self._computation = computation or ("declared" if device is None else "counted")

    def run(self, call: Call) -> list[Any]:
        """Run one call; see `Ranks.run`."""
        send = partial(pack, inline=_LARGE)
        packed = pack_call(call.fn, call.args, call.kwargs, self._world_size, send)
        self.trace = Trace([], self._world_size)
        if not _one_at_a_time.acquire(blocking=False):
            raise RanksError(
                "only one call can run on simulated ranks at a time, and a function on simulated "
                "ranks cannot start another such call"
            )
        try:
            _load_the_rest()
            run = Run(
                self._world_size,
                self._network,
                self._device,
                self._computation,
                packed,
                self._worlds,
                call.options,
                self._misuse,
                self.closing,
            )
            try:
                run.go()
            except BaseException:
                # The failed call may have made different groups on different ranks.
                self._worlds = Worlds(self._world_size)
                raise
            finally:
                self.trace = Trace(run.fabric.events, self._world_size, network=self._network)
                run.fabric.forget()
            results = [result.read_last() for result in run.results]
            run.forget()
            return results
        finally:
            _one_at_a_time.release()

    def start(self) -> None:
        """Do nothing: threads start with the call that they run."""

    def pids(self) -> list[int]:
        """Return an empty list: the ranks are threads of this process."""
        return []

    def close(self) -> None:
        """Do nothing: between calls there are no threads."""
