"""Where the capstone's tapes are played: in a cell, as everything that a student has written.

A tape is no code, but it calls PyTorch's operators with a student's numbers, and some of those
write past their memory when the numbers are odd. In a cell that ends the cell.
"""

from __future__ import annotations

import socket
from typing import Any

from autograder.inside.examinee import silence
from course_lib.capstone.referee import play
from course_lib.checking.on_ranks.frames import Frame, recv_frame, send_frame
from course_lib.checking.on_ranks.wire import decode, encode


def serve(fds: list[int], config: dict[str, Any]) -> None:
    """Play the tapes of one race; answer with the score, or with what is wrong with them."""
    silence()
    channel = socket.socket(fileno=fds[0])
    _, payload = recv_frame(channel)
    given = decode(payload)
    send_frame(channel, Frame.READY, b"")
    told = play(**given)  # type: ignore[arg-type]
    told.pop("events", None)  # of which a board shows nothing
    send_frame(channel, Frame.DONE, encode(told))
