"""Run a node in the sandbox: K processes of one cell that are real ranks, on gloo or NCCL.

They are ranks of one machine, so they can see one another. That is no danger, because only
submissions that passed on the examiner's own network run here. Nothing here is trusted either.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from autograder.inside.examinee import do_work, receive_work, silence, wait_for_go
from course_lib.ranks.wire import send

_PORT = 29400
_NO_LIMIT = timedelta(days=1)  # the examiner decides when a case has taken too long


def serve_node(fds: list[int], config: dict[str, Any]) -> None:
    """Fork a rank for each channel in `fds`, and report how each rank ended.

    `config` has the fields of a `course_lib.ranks.placement.Placement`.
    """
    silence()
    os.environ.update(config["environment"])
    running = {}
    for rank, fd in enumerate(fds):
        pid = os.fork()
        if pid == 0:
            for other in fds:
                if other != fd:
                    os.close(other)
            _be_rank(socket.socket(fileno=fd), rank, len(fds), config)
        running[pid] = rank
    channels = [socket.socket(fileno=fd) for fd in fds]
    while running:
        pid, status = os.wait()
        if pid in running:
            channel = channels[running.pop(pid)]
            with suppress(OSError):
                send(channel, ("ended", os.waitstatus_to_exitcode(status)))
            channel.close()


def _be_rank(channel: socket.socket, rank: int, world_size: int, config: dict[str, Any]) -> None:
    status = 1
    try:
        torch.set_num_threads(1)
        program, rank_input, packed = receive_work(channel)
        device = config["devices"][rank]
        if device.startswith("cuda"):
            torch.cuda.set_device(device)
            torch.cuda.init()  # type: ignore[no-untyped-call]
        dist.init_process_group(
            config["backend"],
            # In the cell's own network, every port is free.
            store=dist.TCPStore(  # type: ignore[attr-defined]
                "127.0.0.1", _PORT, world_size, is_master=rank == 0
            ),
            rank=rank,
            world_size=world_size,
            timeout=_NO_LIMIT,
        )
        # A rank that ends early would keep the others from connecting, so none runs before all do.
        wait_for_go(channel)
        with suppress(OSError):
            send(channel, do_work(program, rank_input, packed, {}))
            channel.recv(1)  # stay alive for other ranks' messages until the examiner ends the case
        status = 0
    finally:
        os._exit(status)  # skip the interpreter's shutdown: student code could hang in it
