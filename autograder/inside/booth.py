"""Play the capstone's tapes in a cell, as all student code runs.

A tape is no code, but it calls PyTorch's operators with a student's numbers. With odd numbers some
operators write past their memory. In a cell this ends only the cell.
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
    told.pop("events", None)  # a board does not show them
    send_frame(channel, Frame.DONE, encode(told))
