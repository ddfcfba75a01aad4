"""Explain the hangs of a ``torchrun`` job: who waits for whom, and on which line of the script.

This command runs ``train.py --lr 0.1``, unchanged, on four ranks:

    python -m torch.distributed.run --nproc-per-node 4 -m course_lib.ranks.watch train.py --lr 0.1

Or write ``import course_lib.ranks.watch`` as the first line of a script and start it as usual. When
the ranks wait for one another, when a rank fails or ends while others wait, or when the ranks
disagree about a collective, one of them prints the error that `Ranks` would raise in a notebook.
It is printed only once. The watch never ends a job: a hang goes on until the time limit of the
process group. `Watch` explains how it works.

Ranks with gloo are tested. With NCCL the same code runs, but no test has run it on GPUs.

At most 64 ranks are watched, all on one machine. One rank may use 64 process groups, and 1024
different tags and peers.
Only groups that ``dist.init_process_group`` has made, and groups made after it, are watched.
"""

from __future__ import annotations

import atexit
import ctypes
import inspect
import json
import math
import os
import runpy
import select
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

from course_lib.ranks._torch.versions import warn_if_untried
from course_lib.ranks.explain.errors import RanksError, RankState
from course_lib.ranks.explain.failure import Failure, describe
from course_lib.ranks.explain.lines import line_of_thread, locator
from course_lib.ranks.explain.words import names, names_inside, one_or_many
from course_lib.ranks.processes.board import MAX_BOARD_RANKS, Board
from course_lib.ranks.processes.board_diagnosis import (
    DeadlockWatch,
    board_states,
    find_mismatch,
    out_of_step,
    process_ended,
    some_raised,
)
from course_lib.ranks.processes.board_views import RankPhase, RankView
from course_lib.ranks.processes.member import cpu_state
from course_lib.ranks.processes.rank_recorder import RankRecorder
from course_lib.ranks.processes.world import count_new_groups, install

_EVERY = 0.25
"""Seconds between two looks. At each look, this rank publishes what it does."""
_PATIENCE = 1.5
"""Seconds without a change before a deadlock is reported."""
_LONG = 15.0
"""Seconds that all other ranks wait for a running rank before it is reported."""
_GRACE = 0.4
"""Seconds that other ranks get, after a rank has failed, to fail too or publish where they wait."""
_STAY = 2 * _PATIENCE
"""Longest time, in seconds, that a rank whose script has ended stays while others still run."""
_POLL = 0.05
"""Seconds between two looks of such a rank at the others."""
_NCCL_LIMIT = timedelta(minutes=10)
"""PyTorch's own default for NCCL; for gloo it is half an hour."""
_LEAVE = b"\0"
"""The byte that ends the watch's thread. The other bytes are numbers of signals, from 1."""
_ENDED = (RankPhase.FINISHED, RankPhase.RAISED)


class Watch:
    """One rank's part in watching its job.

    The ranks share a board, as the ranks of a notebook do. So a collective is compared with what
    the others entered before gloo sees it. Each rank has a thread that publishes, in the job's
    store, which line the rank runs. While its rank waits, this thread also reads what the others
    do. The first rank that finds out what is wrong prints it.

    Args:
        store: the job's store, through a connection that only the watch uses, as the main thread
            may be waiting in its own connection.
        rank: this rank.
        world_size: number of ranks.
        limit: time limit of the process group: how long a message waits for its other side.

    """

    def __init__(self, store: Any, rank: int, world_size: int, limit: timedelta) -> None:
        self._store = store
        self._rank = rank
        self._pid = os.getpid()
        self._board = self._share_board(world_size)
        self.recorder = RankRecorder(
            self._board,
            rank,
            deque(maxlen=0),  # type: ignore[arg-type]  # a job has no end, so it keeps no log
            locator({}),
            blocked=deque(maxlen=0),  # type: ignore[arg-type]
            limit=limit.total_seconds(),
        )
        self._deadlocks = DeadlockWatch(_PATIENCE)
        self._ticks = -1
        self._reporting = threading.Lock()
        self._ended: Callable[..., None] = lambda *_: None
        self._board.set_state(rank, RankPhase.RUNNING)
        self._publish()

    def _share_board(self, world_size: int) -> Board:
        """Return the board of the job. The first rank makes it, and the others open it."""
        if self._rank == 0:
            fd, path = tempfile.mkstemp(prefix="board-")
            self._store.set("board", path)
        else:
            path = self._store.get("board").decode()
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if self._store.add("board opened", 1) == world_size:
            os.unlink(path)  # the file disappears with the last rank
        return Board(fd, world_size)

    def start(self) -> None:
        """Start to watch this rank's communication, its uncaught exception and its end."""
        self._hook, sys.excepthook = sys.excepthook, self._raised
        atexit.register(self._finished)
        heard, self._tell_thread = os.pipe()
        os.set_blocking(self._tell_thread, False)
        if threading.current_thread() is threading.main_thread():
            self._hear_sigterm(self._tell_thread)
        self._thread = threading.Thread(
            target=self._look_on, args=[heard], name="watch", daemon=True
        )
        self._thread.start()

    # What this rank does ----------------------------------------------------------------------

    def _publish(self) -> None:
        """Write into the store what the board does not show of this rank."""
        view = self._board.view(self._rank)
        note = {
            "pid": os.getpid(),
            "changes": view.changes,
            "line": line_of_thread(threading.main_thread().ident, {}),
            "asleep": self._is_asleep(view),
        }
        self._store.set(f"rank {self._rank}", json.dumps(note))

    def _is_asleep(self, view: RankView) -> bool:
        """Return whether this rank waits in autograd's compiled code, as DDP does for buckets."""
        before = self._ticks
        state = cpu_state(os.getpid(), whole_process=torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
        if state is None or state[0] != "S" or view.state is not RankPhase.RUNNING:
            self._ticks = -1
            return False
        self._ticks = state[1]
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        inside = frame is not None and frame.f_code.co_name == "_engine_run_backward"
        return inside and state[1] == before

    # What all do ------------------------------------------------------------------------------

    def _look_on(self, heard: int) -> None:
        poll = select.poll()
        poll.register(heard, select.POLLIN)
        with suppress(RuntimeError):  # the store is gone, because the job ends
            while True:
                news = os.read(heard, 64) if poll.poll(1000 * _EVERY) else b""
                if signal.SIGTERM in news:
                    self._stop()
                if _LEAVE in news:
                    return
                self._publish()
                view = self._board.view(self._rank)
                if view.state is RankPhase.BLOCKED or self._ticks >= 0:
                    self._look()

    def _look(self) -> None:
        """Report a deadlock or mismatch, if that is why this rank waits."""
        notes = self._notes()
        if notes is None:
            return
        views = self._board.views()
        asleep = [rank for rank, note in enumerate(notes) if note["asleep"]]
        error = self._deadlocks.look(views, asleep)
        if error is None:
            self._look_for_slow(views, notes)
            return
        report = find_mismatch(views) or error
        sooner = ""
        if ended := [view.rank for view in views if view.state in _ENDED]:
            noticed = f"{names_inside(ended)} {one_or_many(ended, 'has', 'have')} exited"
            sooner = f", or sooner if the backend notices that {noticed}"
        report.add_detail(
            "course_lib.ranks.watch does not end the job. It ends at the time limit of the process "
            f"group ({self.recorder.limit:g} s){sooner}."
        )
        self._report(report, notes)

    def _look_for_slow(self, views: list[RankView], notes: list[dict[str, Any]]) -> None:
        """Report, once, running ranks for which all others have waited for `_LONG` seconds.

        It may be right that they take so long. But they may also wait outside of communication, for
        example for a file lock that a waiting rank holds.
        """
        running = [view.rank for view in views if view.state is RankPhase.RUNNING]
        waiting = [view for view in views if view.state is RankPhase.BLOCKED]
        since = max((view.since for view in waiting), default=math.inf)
        if not running or time.monotonic() - since < _LONG:
            return
        verb = one_or_many(running, "is", "are")
        report = RanksError(
            f"{names(running)} {verb} in no communication, and the other ranks have waited for "
            f"{_LONG:g} s.",
            board_states(views),
            f"If {names_inside(running)} only {one_or_many(running, 'takes', 'take')} long, this "
            "is no error, and the job goes on. Otherwise the line in the table shows what is "
            "waited for: a file lock that another rank holds, a download, a loop without an end.",
        )
        self._report(report, notes, "reported slow ranks")

    def _notes(self) -> list[dict[str, Any]] | None:
        """Return what every rank has published; ``None`` if one has not joined yet."""
        keys = [f"rank {rank}" for rank in range(self._board.world_size)]
        if not self._store.check(keys):
            return None
        return [json.loads(text) for text in self._store.multi_get(keys)]

    def _dead(self, notes: list[dict[str, Any]], views: list[RankView]) -> list[int]:
        """Return the ranks whose processes ended without a note in the store or on the board."""
        gone = []
        for view in views:
            state = cpu_state(notes[view.rank]["pid"], whole_process=True)
            ended = view.state in _ENDED or self._store.check([f"stopped {view.rank}"])
            if not ended and (state is None or state[0] in "ZX"):
                gone.append(view.rank)
        return gone

    def _report_why(self) -> None:
        """Report why the job is about to end, unless it ends because it is done."""
        notes = self._notes()
        if notes is None:
            return
        views = self._board.views()
        dead = self._dead(notes, views)
        failures = self._failures()
        if dead:
            rank = dead[0]
            fresh = notes[rank]["changes"] == views[rank].changes
            line = (fresh and notes[rank]["line"]) or views[rank].where
            error: RanksError | None = process_ended(rank, None, "", views, line)
        else:
            # `out_of_step` comes first: on a rank that needs an ended rank, gloo raises only
            # "Connection closed".
            error = out_of_step(views) or (some_raised(failures, views) if failures else None)
        if error is not None:
            self._report(error, notes)

    def _failures(self) -> dict[int, Failure]:
        """Return the exceptions that ended ranks."""
        keys = {rank: f"failure {rank}" for rank in range(self._board.world_size)}
        return {
            rank: Failure(**json.loads(self._store.get(key)))
            for rank, key in keys.items()
            if self._store.check([key])
        }

    def _report(
        self, error: RanksError, notes: list[dict[str, Any]], key: str = "reported"
    ) -> None:
        """Print what is wrong, if no rank has printed it yet, with the lines of running ranks."""
        with self._reporting:  # SIGTERM must not end this process before the report is complete
            if self._store.add(key, 1) == 1:
                self._print(error, notes)

    def _print(self, error: RanksError, notes: list[dict[str, Any]]) -> None:
        failures = self._failures()
        states = []
        for state in error.states:
            if state.running:
                state = replace(state, where=state.where or notes[state.rank]["line"])
            elif state.raised and state.rank in failures:
                failure = failures[state.rank]
                state = RankState(state.rank, f"raised {failure.kind}", failure.where)
            states.append(state)
        report = "\n\n".join(
            filter(None, [error.summary, RanksError("", states).args[0], error.detail])
        )
        kind = "Note" if type(error) is RanksError else type(error).__name__
        stream = sys.__stderr__ or sys.stderr
        # In one piece, because all ranks write to one terminal.
        stream.write(f"\n{kind}, reported by course_lib.ranks.watch: {report}\n\n")
        stream.flush()

    # Ends -------------------------------------------------------------------------------------

    def _raised(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Replace ``sys.excepthook``: print the traceback, then what the other ranks do."""
        self._hook(kind, error, trace)
        self.failed(error)

    def failed(self, error: BaseException) -> None:
        """Publish the exception that ends this rank, and report it with what the others do."""
        self._board.set_state(self._rank, RankPhase.RAISED)
        failure = asdict(replace(describe(error, {}), pickled=None))
        with suppress(RuntimeError):
            self._store.set(f"failure {self._rank}", json.dumps(failure))
            self._publish()
            time.sleep(_GRACE)
            self._report_why()

    def _finished(self) -> None:
        """Publish that the script has ended, and end the watch too."""
        if os.getpid() != self._pid:
            return  # a process that the script forked
        if self._board.view(self._rank).state not in _ENDED:
            self._board.set_state(self._rank, RankPhase.FINISHED)
            self._wait_for_others()
        # If the thread were still inside the store's compiled code, Python's exit would abort.
        os.write(self._tell_thread, _LEAVE)
        self._thread.join(_STAY)

    def _wait_for_others(self) -> None:
        """Stay for a moment if others have not ended; the last rank reports what was not finished.

        If this process ended now, ranks that wait for it would get an error before it is clear
        that they wait forever.
        """
        until = time.monotonic() + _STAY
        with suppress(RuntimeError):
            self._publish()
            while (notes := self._notes()) is not None and not self._store.check(["reported"]):
                views = self._board.views()
                if all(view.state in _ENDED for view in views):
                    if (error := out_of_step(views)) is not None:
                        self._report(error, notes)
                    return
                if time.monotonic() > until:
                    return
                time.sleep(_POLL)

    def _hear_sigterm(self, tell: int) -> None:
        """Pass SIGTERM on to the thread: ``torchrun`` sends it to the ranks when one has failed.

        Otherwise a rank that waits in compiled code would not notice it.
        """

        def ended(*_: Any) -> None:
            # Needed if the script replaces our wakeup descriptor.
            os.write(tell, bytes([signal.SIGTERM]))

        self._ended = ended
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, ended)
        signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self._forget_sigterm)

    def _forget_sigterm(self) -> None:
        """Undo `_hear_sigterm` in a process that the script forks, where no thread listens."""
        signal.set_wakeup_fd(-1)
        if signal.getsignal(signal.SIGTERM) is self._ended:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _stop(self) -> None:
        """Report why the job ends; then let SIGTERM end this process, if the script allows it."""
        with suppress(RuntimeError):
            self._store.set(f"stopped {self._rank}", "")
            self._publish()
            time.sleep(_GRACE)
            self._report_why()
        if signal.getsignal(signal.SIGTERM) is self._ended:
            # Python's signal.signal works only in the main thread, which may wait in compiled code.
            ctypes.CDLL(None).signal(signal.SIGTERM, ctypes.c_void_p(0))
            with self._reporting:
                os.kill(os.getpid(), signal.SIGTERM)


def _can_watch(world_size: int) -> bool:
    """Return whether the ranks can share a board: they are on one machine."""
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return local_ranks == world_size <= MAX_BOARD_RANKS


_watch: Watch | None = None


def _watched(init: Callable[..., None]) -> Callable[..., None]:
    """Return an ``init_process_group`` that makes metered groups and watches them."""
    signature = inspect.signature(init)

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        global _watch
        bound = signature.bind(*args, **kwargs)
        arguments = bound.arguments
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        if arguments.get("backend"):
            backend = "nccl" if "nccl" in str(arguments["backend"]) else str(arguments["backend"])
        if backend not in ("nccl", "gloo", "cpu:gloo") or "RANK" not in os.environ:
            init(*args, **kwargs)
            return
        backend = backend.removeprefix("cpu:")
        if arguments.get("timeout") is None:
            arguments["timeout"] = _NCCL_LIMIT if backend == "nccl" else c10d.default_pg_timeout
        if arguments.get("store") is None:
            url, rank = arguments.pop("init_method", None) or "env://", arguments.get("rank", -1)
            size = arguments.get("world_size", -1)
            meeting = rendezvous(url, rank, size, timeout=arguments["timeout"])
            job_store, arguments["rank"], arguments["world_size"] = next(meeting)
            job_store.set_timeout(arguments["timeout"])
            arguments["store"] = dist.PrefixStore("default_pg", job_store)  # type: ignore[attr-defined]
        if not _can_watch(arguments["world_size"]):
            if arguments["rank"] == 0:
                print(
                    "course_lib.ranks.watch: this job is not watched, because not all its ranks "
                    f"are on one machine, or they are more than {MAX_BOARD_RANKS}"
                )
            init(*bound.args, **bound.kwargs)
            return
        first = _watch is None
        if _watch is None:
            if arguments["rank"] == 0:
                warn_if_untried()
            store = dist.PrefixStore("course_lib.ranks.watch", arguments["store"].clone())  # type: ignore[attr-defined]
            _watch = Watch(store, arguments["rank"], arguments["world_size"], arguments["timeout"])
            count_new_groups(_watch.recorder)
        install(_watch.recorder, backend=backend)
        arguments["backend"] = "metered"
        for name in ("device_id", "pg_options"):  # only for NCCL's own groups
            arguments.pop(name, None)
        init(*bound.args, **bound.kwargs)
        if first:
            _watch.start()  # after PyTorch has installed its own hook for exceptions

    return init_process_group


def main(arguments: list[str]) -> None:
    """Run a script."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return
    try:
        sys.argv = arguments
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
        runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        if end.code and _watch is not None:
            _watch.failed(end)
        raise


if __name__ == "__main__":
    # Import this module under its own name. A script that also imports it then gets the same one,
    # so no second watch is started.
    from course_lib.ranks.watch import main as run

    run(sys.argv[1:])
else:
    dist.init_process_group = c10d.init_process_group = _watched(c10d.init_process_group)
