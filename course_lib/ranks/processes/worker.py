"""One rank: joins its process group, then runs the calls that its parent sends."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import time
from datetime import timedelta
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import Any

import torch
import torch.distributed as dist

from course_lib.ranks.board.board import Board
from course_lib.ranks.board.memory import path_of
from course_lib.ranks.board.views import State
from course_lib.ranks.calls import Sources, install_sources, join_call
from course_lib.ranks.costs.network import Network
from course_lib.ranks.explain.failure import describe
from course_lib.ranks.explain.lines import locator
from course_lib.ranks.metered.emulated_link import EmulatedLink
from course_lib.ranks.metered.process_group import install
from course_lib.ranks.metered.recorder import Recorder
from course_lib.ranks.output.displays import send_displays_to
from course_lib.ranks.processes.object_pipe import ObjectPipe, pack

_NO_LIMIT = timedelta(days=7)  # the parent decides when a wait is too long: it can say why


def join(board_fd: int, config: dict[str, Any], labels: dict[str, str]) -> Recorder:
    """Join the process group as rank ``config["rank"]``; return this rank's recorder.

    `config` has ``rank``, ``world_size``, ``device``, ``threads`` and ``store``, a path; it may
    have ``backend`` (default ``metered``; else ``gloo`` or ``nccl``, bare) and ``network``, the
    arguments of an emulated `Network`. `labels` may grow later: file name → how a person calls it.
    """
    rank, world_size = config["rank"], config["world_size"]
    board = Board(board_fd, world_size)
    torch.set_num_threads(config["threads"])
    if config["device"].startswith("cuda"):
        torch.cuda.set_device(config["device"])
        torch.cuda.init()  # type: ignore[no-untyped-call]
    recorder = Recorder(board, rank, [], locator(labels))
    link = None
    if config.get("network") is not None:
        link = EmulatedLink(Network(**config["network"]), board, rank)
    backend = config.get("backend", "metered")
    if backend == "metered":
        install(recorder, link)
    dist.init_process_group(
        backend,
        store=dist.FileStore(config["store"], world_size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=world_size,
        timeout=_NO_LIMIT,
    )
    return recorder


def serve_calls(fds: list[int], config: dict[str, Any]) -> None:
    """Run calls until the parent closes the pipe.

    `fds`: pipe, output, board, a file for stack dumps, and perhaps the store's file.
    """
    pipe = ObjectPipe(socket.socket(fileno=fds[0]), private=True)
    redirect_output(fds[1])
    # On SIGUSR1, and when compiled code crashes: the stack, also of a rank that stands still.
    faulthandler.enable(file=fds[3], all_threads=False)
    faulthandler.register(signal.SIGUSR1, file=fds[3], all_threads=False)
    if len(fds) > 4:
        config["store"] = path_of(fds[4])
    os.environ.update(config["environment"])
    labels: dict[str, str] = {}
    recorder = join(fds[2], config, labels)
    board, rank = recorder.board, recorder.rank
    send_displays_to(lambda bundle: pipe.send(pack(("display", bundle))))
    board.set_state(rank, State.IDLE)
    pipe.send(pack(("ready",)))
    while True:
        try:
            message = pipe.receive()
        except (EOFError, ConnectionResetError):
            return
        surroundings = message()
        if surroundings is not None:
            _enter(labels, *surroundings)
        common, mine = pipe.receive(), pipe.receive()
        recorder.begin()
        board.set_state(rank, State.RUNNING)
        start = time.monotonic()
        try:
            value = join_call(common(), mine())()
            kind, end = "result", time.monotonic()
            reply = _pack_result(value)
        except BaseException as error:
            kind, value, end = "failure", describe(error, labels), time.monotonic()
            reply = pack(value)
        del common, mine
        board.set_state(rank, State.FINISHED if kind == "result" else State.RAISED)
        value = None  # a large result need not wait here for the next call
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        if kind == "result":
            recorder.settle()
        events = [tuple(event) for event in [*recorder.events, *recorder.compute(start, end)]]
        pipe.send(pack((kind, events, recorder.dropped)), reply)
        reply.close()


def _enter(
    labels: dict[str, str],
    sources: Sources,
    folder: str,
    path: list[str],
    environment: dict[str, str],
) -> None:
    """Make this rank see the notebook's sources, folder, module path and environment."""
    install_sources(sources)
    labels.update(sources.labels)
    if folder:
        os.chdir(folder)
    sys.path.extend(entry for entry in path if entry not in sys.path)
    os.environ.update(environment)


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


def _pack_result(value: Any) -> Any:
    try:
        return pack(value)
    except Exception as error:
        raise TypeError(
            f"the result ({type(value).__name__}) cannot be sent back: {error}. "
            "Return tensors, numbers, text, or lists and dicts of them."
        ) from None
