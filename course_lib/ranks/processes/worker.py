"""One rank: joins its process group, then runs the calls that its parent sends, or gives them up.

On SIGUSR2 a rank gives up its call, and its process stays. The signal's handler raises an
exception, which ends Python code and waits for communication. A rank that waits in compiled code,
as PyTorch's DDP does for its last bucket, runs no handler. So a thread also receives the signal,
and fails the futures that the rank may be waiting for. An import is not ended in the middle,
because PyTorch's own imports do not work a second time. So the signal is sent several times, and
may come late: the board says which call it must end.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from datetime import timedelta
from io import BufferedWriter, FileIO, TextIOWrapper
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from course_lib.ranks.calls import join_call, pack_result
from course_lib.ranks.explain.failure import describe, notes_on
from course_lib.ranks.explain.lines import locator
from course_lib.ranks.memory import pack, path_of
from course_lib.ranks.output.displays import send_displays_to
from course_lib.ranks.output.questions import refuse_questions
from course_lib.ranks.processes.board import Board
from course_lib.ranks.processes.board_views import RankPhase
from course_lib.ranks.processes.main_module import OwnModules, become_main
from course_lib.ranks.processes.metered_work import GivenUp
from course_lib.ranks.processes.object_pipe import (
    DISPLAY,
    FAILURE,
    GIVEN_UP,
    READY,
    RESULT,
    AnswerHead,
    ObjectPipe,
    Read,
)
from course_lib.ranks.processes.rank_recorder import RankRecorder
from course_lib.ranks.processes.surroundings import enter
from course_lib.ranks.processes.world import World, joined_world
from course_lib.ranks.stopping import in_import

_modules = OwnModules()
os.register_at_fork(before=_modules.look)  # so ranks skip the modules that the server has loaded

_NO_LIMIT = timedelta(days=7)  # the parent ends waits that are too long, and can explain them


def join(board_fd: int, config: dict[str, Any], labels: dict[str, str]) -> RankRecorder:
    """Join the process group as rank ``config["rank"]``; return this rank's recorder.

    `config` has ``rank``, ``world_size``, ``device``, ``threads``, ``store`` (a path), ``backend``
    (``gloo`` or ``nccl``) and ``bare`` (whether it is not metered). `labels` maps a file name to
    its name in messages for people, and may grow later.
    """
    rank, world_size = config["rank"], config["world_size"]
    board = Board(board_fd, world_size)
    torch.set_num_threads(config["threads"])
    if (random := sys.modules.get("numpy.random")) is not None:
        random.seed()  # else all forks of one server would draw the same; Python seeds its own anew
    if config["device"].startswith("cuda"):
        torch.cuda.set_device(config["device"])
        torch.cuda.init()  # type: ignore[no-untyped-call]
    recorder = RankRecorder(board, rank, [], locator(labels))
    backend = config["backend"]
    if not config["bare"]:
        World(recorder, config["store"], _NO_LIMIT, backend)
        return recorder
    dist.init_process_group(
        backend,
        store=dist.FileStore(config["store"], world_size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=world_size,
        timeout=_NO_LIMIT,
    )
    return recorder


def open_process(fds: list[int], config: dict[str, Any]) -> tuple[ObjectPipe, dict[str, int]]:
    """Let a forked process talk to its parent; return the pipe, and its descriptors by name.

    ``config["fds"]`` has one name for each of the descriptors `fds`, among them ``pipe``,
    ``output``, and ``dump`` for the stack when compiled code crashes.
    """
    fds_by_name = dict(zip(config["fds"], fds, strict=True))
    redirect_output(fds_by_name["output"])
    refuse_questions()
    faulthandler.enable(file=fds_by_name["dump"], all_threads=False)
    return ObjectPipe(socket.socket(fileno=fds_by_name["pipe"]), private=True), fds_by_name


def serve_calls(fds: list[int], config: dict[str, Any]) -> None:
    """Run calls until the parent closes the pipe.

    ``config["fds"]`` has one name for each of the descriptors `fds`: those of `open_process`,
    ``board``, and perhaps ``store``.
    """
    pipe, fds_by_name = open_process(fds, config)
    # Write the stack on SIGUSR1, also if the rank hangs.
    faulthandler.register(signal.SIGUSR1, file=fds_by_name["dump"], all_threads=False)
    if "store" in fds_by_name:
        config["store"] = path_of(fds_by_name["store"])
    os.environ.update(config["environment"])
    become_main()
    labels: dict[str, str] = {}
    recorder = join(fds_by_name["board"], config, labels)
    _listen_for_giving_up(recorder)
    send_displays_to(lambda bundle: pipe.send(pack(AnswerHead(DISPLAY)), pack(bundle)))
    recorder.board.set_state(recorder.rank, RankPhase.IDLE)
    pipe.send(pack(AnswerHead(READY)), pack([]), pack(None))
    while True:
        try:
            head_of, news_of, *parts = pipe.receive()
        except (EOFError, ConnectionResetError):
            return
        head = head_of()
        if (news := news_of()) is not None:
            labels.update(enter(*news))
        recorder.begin()
        if (world := joined_world()) is not None:
            world.begin(head.call, head.generation)
        _run_call(pipe, recorder, labels, head.call, parts)


def _run_call(
    pipe: ObjectPipe, recorder: RankRecorder, labels: dict[str, str], call: int, parts: list[Read]
) -> None:
    """Run one call and send its answer: how it ended, the log, and the result.

    `call` is its number. `parts` are the part of the call that all ranks share and what only this
    rank gets. The list is emptied here, because arguments may be large.
    """
    global _current
    board, rank = recorder.board, recorder.rank
    start = time.monotonic()
    reply = None
    try:
        try:
            _begin(call)
            if (changed := reload_changed()) and rank == 0:
                print(changed)
            value = join_call(parts[0], parts[1]())()
            kind, end = RESULT, time.monotonic()
            reply = pack_result(value)
        finally:
            # Not in a separate function or a ``with`` block: the signal's handler may run at its
            # beginning or end, and its exception would leave `_current` unchanged.
            _current = 0
    except GivenUp as stopped:
        kind, value, end = GIVEN_UP, notes_on(stopped), time.monotonic()
    except BaseException as error:
        kind, value, end = FAILURE, describe(error, labels), time.monotonic()
    # Also needed if a wait in compiled code was ended, or if user code replaced the exception.
    if reply is None:
        reply = pack(value)
    parts.clear()
    board.set_state(rank, RankPhase.FINISHED if kind == RESULT else RankPhase.RAISED)
    value = None  # a large result must not stay in memory until the next call
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if kind == RESULT:
        recorder.settle()
    events = [*recorder.events, *recorder.compute(start, end)]
    log = pack([tuple(event) for event in events])
    head = AnswerHead(kind, recorder.dropped, dist.is_initialized() and not recorder.broken)
    pipe.send(pack(head), log, reply)
    log.close()
    reply.close()


_current = 0
"""The number of the running call; 0 if there is none."""
_failing = threading.Lock()


def _begin(call: int) -> None:
    """Note that a call begins, after the thread has failed the futures of the previous call."""
    global _current
    with _failing:
        _current = call


def _listen_for_giving_up(recorder: RankRecorder) -> None:
    """Prepare this rank to give up calls. Called once, in its main thread."""
    heard, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)

    def to_be_ended() -> bool:
        return bool(_current) and recorder.board.given_up(recorder.rank) == _current

    def end(number: int, frame: FrameType | None) -> None:
        if to_be_ended() and not in_import(frame):
            raise GivenUp

    def fail_futures() -> None:
        while True:
            came = os.read(heard, 64)
            with _failing:
                if signal.SIGUSR2 in came and to_be_ended():
                    recorder.give_up()

    signal.signal(signal.SIGUSR2, end)
    threading.Thread(target=fail_futures, name="giving-up", daemon=True).start()


def reload_changed() -> str:
    """Import again the user's modules whose files have changed; return a sentence about them."""
    changed = sorted(_modules.reload_changed())
    if not changed:
        return ""
    return f"The ranks imported these changed modules again: {', '.join(changed)}."


def redirect_output(fd: int) -> None:
    """Send what this process prints, from Python and from C, to `fd`, line by line."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    sys.stdout, sys.stderr = (
        TextIOWrapper(
            BufferedWriter(FileIO(n, "w", closefd=False)), errors="replace", line_buffering=True
        )
        for n in (1, 2)
    )
    faulthandler.enable()
