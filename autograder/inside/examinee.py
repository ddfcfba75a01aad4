"""The side of an examination that runs inside the sandbox: nothing here is trusted.

This file is the sandbox's first process: a fork server with torch loaded. The examiner, outside,
has it fork

- one *notebook* process, which runs the submission's cells and hands over functions by name;
- for every case, K *rank* processes: each gets a function, its own input and nothing else, runs
  the check's program and answers with plain bytes.

It imports the course's package as a student's notebook does, and nothing of the autograder.
"""

from __future__ import annotations

import ctypes
import io
import os
import signal
import socket
import sys
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import cloudpickle
from IPython.core.interactiveshell import InteractiveShell

from course_lib.checking.frames import Frame, recv_frame, send_frame
from course_lib.checking.local import load_checks
from course_lib.checking.wire import decode, encode
from course_lib.ranks.board.views import RankPhase
from course_lib.ranks.calls import cell_sources, install_sources
from course_lib.ranks.explain.failure import Failure, describe
from course_lib.ranks.processes import fork_server
from course_lib.ranks.processes.worker import join, redirect_output

MAX_TEXT = 64 * 1024


class CappedText(io.StringIO):
    """Keeps the beginning of what is printed; counts the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.left_out = 0

    def write(self, text: str) -> int:
        room = MAX_TEXT - self.tell()
        super().write(text[: max(0, room)])
        self.left_out += max(0, len(text) - max(0, room))
        return len(text)

    def text(self) -> str:
        rest = f"\n… and {self.left_out} more characters\n" if self.left_out else ""
        return self.getvalue() + rest


def serve_notebook(fds: list[int], config: dict[str, Any]) -> None:
    """Run cells and hand over functions until the examiner closes the channel."""
    _silence()
    channel = socket.socket(fileno=fds[0])
    shell = InteractiveShell.instance()
    if shell.history_manager is not None:
        shell.history_manager.enabled = False
    # The error is told apart from the output.
    shell.showtraceback = lambda *_, **__: None  # type: ignore[method-assign]
    while True:
        try:
            kind, payload = recv_frame(channel)
        except (EOFError, OSError):
            return
        request: Any = decode(payload)
        if kind == Frame.CELL:
            send_frame(channel, Frame.DONE, encode(_run_cell(shell, **request)))
        elif kind == Frame.TAKE:
            send_frame(channel, Frame.DONE, encode(_take(shell, request["name"], request["path"])))


def _run_cell(shell: InteractiveShell, source: str, number: int) -> dict[str, Any]:
    shell.execution_count = number  # so that "Cell In[3]" is the third of the graded notebook
    printed, errors = CappedText(), CappedText()
    with redirect_stdout(printed), redirect_stderr(errors):
        result = shell.run_cell(source, store_history=True)
    error = result.error_before_exec or result.error_in_exec
    failure = None
    if error is not None:
        if error.__traceback__ is not None:
            error.__traceback__ = error.__traceback__.tb_next  # the frame that ran the cell
        failure = _texts(describe(error, cell_sources(set()).labels))
    return {"stdout": printed.text(), "stderr": errors.text(), "error": failure}


def _texts(failure: Failure) -> dict[str, Any]:
    """Return the failure as plain texts of bounded size."""
    return {k: getattr(failure, k)[:MAX_TEXT] for k in ("kind", "message", "where", "trace")}


def _take(shell: InteractiveShell, name: str, path: str) -> dict[str, Any]:
    """Write the function, with the sources of its cells, where the ranks can read it."""
    function = shell.user_ns.get(name)
    if not callable(function):
        return {"error": f"{name} is not defined as a function after the cells above were run"}
    try:
        # A module of the student's own making would not be there on the ranks.
        Path(path).write_bytes(cloudpickle.dumps((function, cell_sources(set()))))
    except Exception as error:
        return {"error": f"{name} cannot be sent to the ranks: {error}"[:MAX_TEXT]}
    return {"error": None}


def serve_rank(fds: list[int], config: dict[str, Any]) -> None:
    """Run one case's program as one rank. `fds`: channel, board."""
    _silence()
    channel = socket.socket(fileno=fds[0])
    labels: dict[str, str] = {}
    recorder = join(fds[1], config, labels)
    board, rank = recorder.board, recorder.rank
    board.set_state(rank, RankPhase.IDLE)
    send_frame(channel, Frame.READY, b"")
    _, payload = recv_frame(channel)
    board.set_state(rank, RankPhase.RUNNING)
    try:
        function, sources = cloudpickle.loads(Path(config["function"]).read_bytes())
        install_sources(sources)
        labels.update(sources.labels)
        program = load_checks(Path(config["checks"]))[config["check"]].program
        printed = CappedText()
        with redirect_stdout(printed), redirect_stderr(printed):
            output = program(function, decode(payload))
        reply = (Frame.OUTPUT, encode(output))
        board.set_state(rank, RankPhase.FINISHED)
    except BaseException as error:
        failure = describe(error, labels)
        reply = (Frame.FAILURE, encode({**_texts(failure), "mismatch": failure.mismatch}))
        board.set_state(rank, RankPhase.RAISED)
    with suppress(OSError):
        send_frame(channel, *reply)
        # Stay: leaving would close connections that other ranks may still use.
        channel.recv(1)


def _silence() -> None:
    """Give what compiled code prints nowhere to go; Python's prints are caught apart."""
    null = os.open(os.devnull, os.O_WRONLY)
    redirect_output(null)
    os.close(null)


def _close_to_each_other() -> None:
    """Forbid processes of the same user to read each other's memory: ranks, and this one."""
    pr_set_dumpable = 4
    ctypes.CDLL(None).prctl(pr_set_dumpable, 0)


def main() -> None:
    """Serve the examiner over the socket whose number is the first argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _close_to_each_other()
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    # Children find this file's functions under its own name, not under __main__.
    sys.modules["examinee"] = sys.modules["__main__"]
    fork_server.serve(control)


if __name__ == "__main__":
    main()
