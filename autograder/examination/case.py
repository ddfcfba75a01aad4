"""The ranks of one case, seen from the examiner: fork, feed, watch, collect, kill."""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autograder.sandbox.place import SandboxedPlace
from course_lib.checking.cases import Case
from course_lib.checking.frames import Frame, FrameReader, send_frame
from course_lib.checking.wire import Plain, WireError, decode, encode
from course_lib.ranks.board.board import Board
from course_lib.ranks.board.diagnosis import DeadlockWatch, board_states, find_mismatch
from course_lib.ranks.board.failures import out_of_step, process_ended, some_raised
from course_lib.ranks.board.views import RankPhase
from course_lib.ranks.explain.errors import RankError, RanksError
from course_lib.ranks.explain.failure import Failure, timed_out
from course_lib.ranks.processes.fork_client import ForkServer, ForkServerError

MAX_ANSWER = 64 * 2**20
_LOOK_EVERY = 0.05
_GRACE = 0.5
"""Seconds that the other ranks get to tell what happened to them, once one has failed."""


class SubmissionError(RanksError):
    """The submission's own code kept a case from being run at all."""


@dataclass
class _Rank:
    pid: int
    channel: socket.socket
    reader: FrameReader
    ready: bool = False
    answer: tuple[int, Any] | None = None


class CaseRanks:
    """The ranks of one case, from fork to kill."""

    def __init__(
        self, server: ForkServer, case: Case, function: str, check: str, place: SandboxedPlace
    ) -> None:
        self._server = server
        self._board = Board.create(case.world_size)
        self._ranks: list[_Rank] = []
        store = f"{place.scratch}/store-{os.urandom(8).hex()}"
        for rank in range(case.world_size):
            ours, theirs = socket.socketpair()
            config = {
                "rank": rank,
                "world_size": case.world_size,
                "device": "cpu",
                "threads": 1,
                "store": store,
                "function": function,
                "check": check,
                "checks": place.checks,
            }
            with theirs:
                try:
                    pid = server.fork(
                        "examinee:serve_rank", config, [theirs.fileno(), self._board.fd]
                    )
                except ForkServerError:
                    ours.close()
                    self.__exit__()
                    raise SubmissionError("the process that starts the ranks has ended") from None
            self._ranks.append(_Rank(pid, ours, FrameReader(MAX_ANSWER)))

    def __enter__(self) -> CaseRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.kill([rank.pid for rank in self._ranks])
        for rank in self._ranks:
            rank.channel.close()
        self._board.close()

    def run(self, inputs: Sequence[Plain], seconds: float) -> list[Any]:
        """Give every rank its input; return their outputs in rank order."""
        deadline = time.monotonic() + seconds
        watch = DeadlockWatch()
        failed_at: float | None = None
        with selectors.DefaultSelector() as selector:
            for number, rank in enumerate(self._ranks):
                rank.channel.settimeout(seconds)
                selector.register(rank.channel, selectors.EVENT_READ, number)
            while any(rank.answer is None for rank in self._ranks):
                for key, _ in selector.select(_LOOK_EVERY):
                    number = key.data
                    self._read(number, inputs[number])
                    if self._ranks[number].answer is not None:
                        selector.unregister(key.fileobj)
                views = self._board.views()
                now = time.monotonic()
                failures = self._failures()
                if failures:
                    failed_at = failed_at or now
                    waits = (RankPhase.BLOCKED, RankPhase.FINISHED, RankPhase.RAISED)
                    stuck = all(view.state in waits for view in views)
                    mismatch = any(failure.mismatch for failure in failures.values())
                    if mismatch or now - failed_at > (_GRACE if stuck else 5 * _GRACE):
                        break
                elif (deadlock := watch.look(views)) is not None:
                    raise find_mismatch(views) or deadlock
                if now > deadline:
                    raise timed_out("case", seconds, board_states(views))
        if failures := self._failures():
            raise some_raised(failures, self._board.views())
        if (unfinished := out_of_step(self._board.views())) is not None:
            raise unfinished
        return [rank.answer[1] for rank in self._ranks if rank.answer is not None]

    def _read(self, number: int, value: Plain) -> None:
        rank = self._ranks[number]
        try:
            data = rank.channel.recv(1 << 20)
            frames = rank.reader.feed(data)
            for kind, payload in frames:
                if kind == Frame.READY and not rank.ready:
                    rank.ready = True
                    send_frame(rank.channel, Frame.INPUT, encode(value))
                elif kind in (Frame.OUTPUT, Frame.FAILURE) and rank.answer is None:
                    rank.answer = (kind, decode(payload, MAX_ANSWER))
        except (OSError, WireError) as error:
            raise RankError(f"Rank {number} answered nonsense: {error}", rank=number) from None
        if not data and rank.answer is None:
            raise self._death(number)

    def _failures(self) -> dict[int, Failure]:
        """Return what the ranks told of their exceptions: texts, and never an object."""
        failures = {}
        for number, rank in enumerate(self._ranks):
            if rank.answer is not None and rank.answer[0] == Frame.FAILURE:
                told = rank.answer[1] if isinstance(rank.answer[1], dict) else {}
                failures[number] = Failure(
                    kind=str(told.get("kind", "")),
                    message=str(told.get("message", "")),
                    where=str(told.get("where", "")),
                    trace=str(told.get("trace", "")),
                    mismatch=bool(told.get("mismatch")),
                    pickled=None,
                )
        return failures

    def _death(self, number: int) -> RanksError:
        status = self._server.exit_status(self._ranks[number].pid, wait=2)
        return process_ended(number, status, "", self._board.views(), "")
