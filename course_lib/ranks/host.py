"""The host: the one process whose threads are the simulated ranks of this process.

It is a fork of the fork server, as the ranks on the CPU are. So a rank that ends its process, or
never ends, costs the host and not the notebook; the next call starts a new host. All `Ranks` of a
notebook share the host. It keeps the groups and variables of each until the `Ranks` object is gone.

A message to the host is a `Job` and what has changed in the notebook, or nothing: end the call. The
host answers a job with any number of pairs (rank, line or display), and then the `Outcome`.
"""

from __future__ import annotations

import math
import os
import queue
import select
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from cloudpickle import cloudpickle as trackers

from course_lib.ranks.calls import Call, cell_labels, pack_call, read_results
from course_lib.ranks.costs.network import Device, Network
from course_lib.ranks.explain.errors import RanksError, RankState
from course_lib.ranks.explain.failure import (
    closed_meanwhile,
    exit_reason,
    interrupted,
    rank_error,
    timed_out,
)
from course_lib.ranks.memory import Packed, pack
from course_lib.ranks.output.displays import send_displays_to
from course_lib.ranks.output.printer import Item, Printer
from course_lib.ranks.placement import Placement
from course_lib.ranks.processes.fork_client import ForkServer, preload, shared_server
from course_lib.ranks.processes.main_module import become_main
from course_lib.ranks.processes.member import Member, fork_member
from course_lib.ranks.processes.object_pipe import Read
from course_lib.ranks.processes.surroundings import Surroundings, enter
from course_lib.ranks.processes.worker import open_process, reload_changed
from course_lib.ranks.simulated.baton import Stopped
from course_lib.ranks.simulated.fabric_diagnosis import report_misuse, warn_each_time
from course_lib.ranks.simulated.personal import Worlds, functions_of_rank
from course_lib.ranks.simulated.threads import Job, Outcome, Run
from course_lib.ranks.stopping import uninterrupted
from course_lib.ranks.trace.event import Event
from course_lib.ranks.trace.trace import Trace
from course_lib.ranks.variables import forget_variables

MAX_RANKS = 1024
_LOOK_EVERY = 0.1
"""Longest wait, in seconds, until a request to close the ranks is noticed."""
_GRACE = 5.0
"""Seconds that the host has to end a call, after the time limit or a request."""
_one_at_a_time = threading.Lock()
_starting = threading.Lock()
_is_host = False
"""Whether this process is a host."""


class Simulated:
    """K simulated ranks. Every call starts from clock zero, with fresh threads and random numbers.

    Args:
        world_size: K.
        owner: the key of the ranks' variables in the host.
        network: what messages cost; by default 20 µs and 10 GB/s.
        device: what computation costs; without one, only `compute` costs time.

    Attributes:
        placement: a "device" for every rank, and the reason in a sentence.
        trace: the trace of the last call, even if that call failed.
        closing: set when the ranks must end; a call that runs in another thread then raises.

    """

    def __init__(
        self,
        world_size: int,
        owner: str,
        network: Network | None = None,
        device: Device | None = None,
    ) -> None:
        self.placement = Placement(
            ("simulated",) * world_size, "fabric", "simulated, virtual clock"
        )
        self._network = network or Network(latency=20e-6, bandwidth=10e9)
        self._device = device
        self._world_size = world_size
        self._owner = owner
        self.trace = Trace([], world_size)
        self.closing = threading.Event()
        self._forget = weakref.finalize(self, _gone.append, owner)
        self._forget.atexit = False

    def run(self, call: Call) -> list[Any]:
        """Run one call; see `Ranks.run`."""
        k, network = self._world_size, self._network
        inline = partial(pack, inline=sys.maxsize)
        packed = pack_call(call, k, inline)
        known_classes = frozenset(trackers._DYNAMIC_CLASS_TRACKER_BY_ID)
        job = Job(self._owner, k, network, self._device, call.timeout, *packed, known_classes)
        self.trace = Trace([], k)
        if _is_host or not _one_at_a_time.acquire(blocking=False):
            raise RanksError(
                "only one call can run on simulated ranks at a time, and a function on simulated "
                "ranks cannot start another such call"
            )
        try:
            outcome = _host().run(job, self.closing)
        finally:
            _one_at_a_time.release()
        read = partial(_events, outcome.log)
        self.trace = Trace(read, k, network=network)
        for library in sorted(outcome.libraries):
            warn_each_time(
                UserWarning(
                    f"{library} was imported on simulated ranks. It keeps the rank in its process, "
                    "but simulated ranks are threads of one process: all of them may take the rank "
                    f'of one, also in later calls. Use {library} on Ranks(…, on="cpu").'
                )
            )
        if outcome.failures:
            first = next(iter(outcome.failures))
            original = outcome.failures[first].original()
            raise rank_error(outcome.failures, first, outcome.states, original)
        if outcome.error is not None:
            raise outcome.error
        report_misuse(outcome.misused)
        return read_results(result.read_last for result in outcome.results)

    def start(self) -> None:
        """Start the host, if there is none."""
        _host()

    def pids(self) -> list[int]:
        """Return an empty list: the ranks have no processes of their own."""
        return []

    def close(self) -> None:
        """Let the host drop what it keeps for these ranks."""
        self._forget()


def _events(log: Packed) -> list[Event]:
    return [Event(*event) for event in log.read_last()]


_gone: list[str] = []
"""Owners whose variables and groups the host can drop."""


class Host:
    """The notebook's side of the host."""

    def __init__(self) -> None:
        preload([__name__])
        self._server = shared_server()
        self._surroundings = Surroundings()
        with uninterrupted():
            # What a rank's thread prints comes through the pipe. The output is the rest, such as
            # that of compiled code; it belongs to no rank.
            serving = f"{__name__}:serve"
            self._process = fork_member(self._server, serving, {}, {}, _show_unlabelled)
            self._pipe, self._output = self._process.pipe, self._process.output
            self._poll = select.poll()
            self._poll.register(self._pipe, select.POLLIN)
            self._poll.register(self._output, select.POLLIN)
            self.end = weakref.finalize(self, _end, self._server, self._process)

    def usable(self) -> bool:
        """Return whether the host lives and belongs to this process."""
        return self.end.alive and self._server.all_live([self._process.pid])

    def run(self, job: Job, closing: threading.Event) -> Outcome:
        """Run one call, and print what the ranks print.

        Raises:
            RanksError: the host has ended, or did not end the call in time.

        """
        printer = Printer(job.world_size)
        timeout = job.timeout
        until = math.inf if timeout is None else time.monotonic() + timeout + _GRACE
        try:
            with uninterrupted():  # half a message cannot be taken back
                gone = [_gone.pop() for _ in range(len(_gone))]
                self._pipe.send(pack(job), pack((self._surroundings.news(), gone)))
            while (outcome := self._listen(printer)) is None:
                if closing.is_set():
                    raise closed_meanwhile(self._stop(printer))
                if time.monotonic() > until:
                    self.end()
                    assert timeout is not None
                    raise timed_out("call", timeout, [])
        except BrokenPipeError:
            raise self._death() from None
        except KeyboardInterrupt:
            states = self._stop(printer)
            print(interrupted(states, alive=self.end.alive), file=sys.stderr)
            raise
        finally:
            with uninterrupted():
                self._output.drain()
                printer.end_call()
        if outcome.stuck:
            self.end()
        return outcome

    def _stop(self, printer: Printer) -> list[RankState]:
        """End the call; return what its ranks were doing. If they do not react, end the host."""
        until = time.monotonic() + _GRACE
        try:
            with uninterrupted():
                self._pipe.send()
                while time.monotonic() < until:
                    if (outcome := self._listen(printer)) is not None:
                        if outcome.stuck:
                            self.end()
                        return outcome.states
        except (RanksError, OSError):
            pass
        self.end()
        return []

    def _listen(self, printer: Printer) -> Outcome | None:
        """Take messages and output for a moment; return the outcome, if it has come."""
        outcome = None
        for fd, _ in self._poll.poll(1000 * _LOOK_EVERY):
            if fd == self._output.fileno():
                if not self._output.forward():
                    self._poll.unregister(fd)
                continue
            with uninterrupted():  # after half a message, the next one could not be read
                try:
                    (read,) = self._pipe.receive()
                except (OSError, EOFError):
                    raise self._death() from None
                message = read()
            if isinstance(message, Outcome):
                outcome = message
            else:
                printer.add(*message)
        printer.release()
        return outcome

    def _death(self) -> RanksError:
        status, dump, line = self._process.last_words(self._server, cell_labels())
        self.end()
        gone = (
            "The next call starts a new process. Variables that simulated ranks kept are gone. "
            'With Ranks(…, on="cpu") each rank has a process of its own.'
        )
        return RanksError(
            f"A rank ended the process that all simulated ranks share: {exit_reason(status)}."
            + (f"  ({line})" if line else ""),
            detail="\n\n".join(filter(None, [dump.rstrip(), gone])),
        )


def _show_unlabelled(rank: int, line: str) -> None:
    print(line)


def _end(server: ForkServer, process: Member) -> None:
    if server.alive():
        server.kill([process.pid])
    process.close()


_current: Host | None = None


def _host() -> Host:
    """Return the host of this process; start it on first use, and again if it has ended."""
    global _current
    with _starting:
        if _current is None or not _current.usable():
            if _current is not None:
                _current.end()
            _current = Host()
        return _current


# In the host ------------------------------------------------------------------------------------


def serve(fds: list[int], config: dict[str, Any]) -> None:
    """Run jobs until the notebook closes the pipe; ``config["fds"]`` has the names of `fds`."""
    global _is_host
    _is_host = True
    pipe, _ = open_process(fds, config)
    become_main(functions_of_rank)
    # What a thread shows that a rank has started; the ranks' own displays go with their lines.
    send_displays_to(lambda bundle: print(bundle.get("text/plain", "")))
    _hide_stopped()
    inbox: queue.SimpleQueue[list[Read]] = queue.SimpleQueue()
    halt = threading.Event()

    def listen() -> None:
        while True:
            try:
                parts = pipe.receive()
            except (OSError, EOFError):
                os._exit(0)
            if parts:
                inbox.put(parts)
            else:
                halt.set()

    threading.Thread(target=listen, name="notebook", daemon=True).start()

    def show(rank: int, item: Item) -> None:
        pipe.send(pack((rank, item)))

    labels: dict[str, str] = {}
    worlds_by_owner: dict[str, Worlds] = {}
    while True:
        read_job, read_news = inbox.get()
        halt.clear()  # a request that came after its call had ended
        job, (news, gone) = read_job(), read_news()
        if news is not None:
            labels.update(enter(*news))
        for owner in gone:
            forget_variables(owner)
            worlds_by_owner.pop(owner, None)
        if changed := reload_changed():
            print(changed)
        outcome = _run(job, worlds_by_owner, labels, show, halt)
        sys.stdout.flush()
        pipe.send(pack(outcome))
        del job, outcome, read_job


def _run(
    job: Job,
    worlds_by_owner: dict[str, Worlds],
    labels: dict[str, str],
    show: Callable[[int, Item], None],
    halt: threading.Event,
) -> Outcome:
    size = str(job.world_size)
    os.environ.update(WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    if job.owner not in worlds_by_owner:
        worlds_by_owner[job.owner] = Worlds(job.world_size)
    run = Run(job, worlds_by_owner[job.owner], labels, show, halt)
    outcome = run.go()
    run.forget()
    if not outcome.results:
        # The failed call may have made different groups on different ranks.
        del worlds_by_owner[job.owner]
    return outcome


def _hide_stopped() -> None:
    """Print nothing about the exception that unwinds a rank, wherever it reaches the rank."""
    in_thread, unraisable = threading.excepthook, sys.unraisablehook

    def thread_hook(args: Any) -> None:
        if args.exc_type is not Stopped:
            in_thread(args)

    def unraisable_hook(args: Any) -> None:
        if args.exc_type is not Stopped:
            unraisable(args)

    threading.excepthook, sys.unraisablehook = thread_hook, unraisable_hook
