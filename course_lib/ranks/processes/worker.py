"""One rank: joins its process group, then runs the calls that its parent sends."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from io import BufferedWriter, FileIO, TextIOWrapper
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from course_lib.ranks.board.board import Board, State
from course_lib.ranks.board.memory import path_of
from course_lib.ranks.calls import Sources, install_sources, join_call
from course_lib.ranks.costs.network import Network
from course_lib.ranks.metered.emulated_link import EmulatedLink
from course_lib.ranks.metered.process_group import CollectiveMismatch, Recorder, install, locator
from course_lib.ranks.output.displays import send_displays_to
from course_lib.ranks.processes.channel import Channel, pack

OURS = (str(Path(__file__).parents[1]) + os.sep, str(Path(torch.__file__).parent) + os.sep)
"""Folders whose lines are not the user's: this package and PyTorch."""
_NO_LIMIT = timedelta(days=7)  # the parent decides when a wait is too long: it can say why


@dataclass(frozen=True)
class Failure:
    """An exception on a rank, as it travels to the parent."""

    kind: str
    message: str
    where: str
    trace: str
    mismatch: bool
    pickled: bytes | None


def join(board_fd: int, config: dict[str, Any], labels: dict[str, str]) -> Recorder:
    """Join the process group as rank ``config["rank"]``; return this rank's recorder.

    `config` has ``rank``, ``world_size``, ``device``, ``threads`` and ``store``, a path; it may
    have ``metered`` (default true) and ``network``, the arguments of an emulated `Network`.
    `labels` may grow later: file name → how a person calls it.
    """
    rank, world_size = config["rank"], config["world_size"]
    board = Board(board_fd, world_size)
    torch.set_num_threads(config["threads"])
    if config["device"].startswith("cuda"):
        torch.cuda.set_device(config["device"])
        torch.cuda.init()  # type: ignore[no-untyped-call]
    recorder = Recorder(board, rank, [], locator(OURS, lambda name: labels.get(name, _short(name))))
    if config.get("network") is not None:
        recorder.link = EmulatedLink(Network(**config["network"]), board, rank)
    backend = config.get("backend", "metered")
    if backend == "metered":
        install(recorder)
    dist.init_process_group(
        backend,
        store=dist.FileStore(config["store"], world_size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=world_size,
        timeout=_NO_LIMIT,
    )
    return recorder


def serve_calls(fds: list[int], config: dict[str, Any]) -> None:
    """Run calls until the parent closes the channel.

    `fds`: channel, output, board, a file for stack dumps, and perhaps the store's file.
    """
    channel = Channel(socket.socket(fileno=fds[0]), private=True)
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
    send_displays_to(lambda bundle: channel.send(pack(("display", bundle))))
    board.set_state(rank, State.IDLE)
    channel.send(pack(("ready",)))
    while True:
        try:
            message = channel.receive()
        except (EOFError, ConnectionResetError):
            return
        surroundings = message()
        if surroundings is not None:
            _enter(labels, *surroundings)
        common, mine = channel.receive(), channel.receive()
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
        channel.send(pack((kind, events, recorder.dropped)), reply)
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


def describe(error: BaseException, labels: dict[str, str]) -> Failure:
    """Return the exception as text, in terms of the user's own lines."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(OURS[0])
    ]
    own = [frame for frame in frames if not frame.filename.startswith(OURS)]
    where = ""
    if own:
        where = f"{labels.get(own[-1].filename, _short(own[-1].filename))}, line {own[-1].lineno}"
    elif isinstance(error, SyntaxError) and error.filename:
        where = f"{labels.get(error.filename, _short(error.filename))}, line {error.lineno}"
    lines = traceback.format_list(frames) + traceback.format_exception_only(error)
    text = "".join(lines)
    for name, label in labels.items():
        text = text.replace(f'File "{name}"', label)
    try:
        pickled = cloudpickle.dumps(error)
    except Exception:
        pickled = None
    return Failure(
        kind=type(error).__name__,
        message=str(error),
        where=where,
        trace=text.rstrip(),
        mismatch=isinstance(error, CollectiveMismatch),
        pickled=pickled,
    )


def _short(name: str) -> str:
    return os.path.basename(name)
