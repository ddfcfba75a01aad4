"""Play the capstone's tapes in a cell, like all student code.

A tape is no code, but it calls PyTorch's operators with a student's numbers. With unusual numbers,
some operators write past their memory. In a cell, such a crash ends only the cell.
"""

from __future__ import annotations

import socket
from typing import Any

from autograder.inside.examinee import silence
from course_lib.capstone.referee import play
from course_lib.checking.on_ranks.frames import Frame, recv_frame, send_frame
from course_lib.checking.on_ranks.wire import decode, encode


def serve(fds: list[int], config: dict[str, Any]) -> None:
    """Play the tapes of one race; answer with the score, or with an error message about them."""
    silence()
    channel = socket.socket(fileno=fds[0])
    _, payload = recv_frame(channel)
    given = decode(payload)
    send_frame(channel, Frame.READY, b"")
    told = play(**given)  # type: ignore[arg-type]
    told.pop("events", None)  # the leaderboard does not show events
    send_frame(channel, Frame.DONE, encode(told))
