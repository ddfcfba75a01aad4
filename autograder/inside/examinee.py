"""The side of an examination that runs inside the sandbox, where nothing is trusted.

This file is the sandbox's first process: a fork server with torch loaded, which runs no student
code. The examiner, outside, makes it fork these processes, each into a separate cell (`cell`):

- one *notebook* process, which runs the submission's cells and hands over functions by name;
- for every case, K *rank* processes. Each gets only a program, a function and its own input. It
  runs the program and answers with plain bytes. Its only network is the examiner's.

This file imports the course's package as a student's notebook does, and no other part of the
autograder.
"""

from __future__ import annotations

import gc
import importlib
import io
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from types import ModuleType
from typing import Any

import cloudpickle
import torch
from IPython.core.interactiveshell import InteractiveShell

from autograder.inside import cell, handover, scratch
from autograder.inside.fabric_client import FabricClient, FabricStopped
from course_lib.learner.no_display import plain_shell, run_cell
from course_lib.limits import MAX_TEXT
from course_lib.ranks.calls import cell_sources, install_sources
from course_lib.ranks.explain.failure import Failure, describe
from course_lib.ranks.for_graders import NEEDED, collapse, lone_rank, redirect_output, serve
from course_lib.ranks.wire import decode, encode, receive, send

MAX_TOUCHED = 100
_REPORTERS = (
    ("course_lib.checking", "on_ranks"),
    ("autograder", "inside"),
    ("course_lib.ranks", "wire"),
)
"""Package and name of our code that reports on the student's code."""


class CappedText(io.StringIO):
    """Keeps the beginning of printed text and counts the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.left_out = 0

    def write(self, text: str) -> int:
        room = MAX_TEXT - self.tell()
        super().write(text[: max(0, room)])
        self.left_out += max(0, len(text) - max(0, room))
        return len(text)

    def text(self) -> str:
        note = f"\n… and {self.left_out} more characters\n" if self.left_out else ""
        return self.getvalue() + note


# The notebook -------------------------------------------------------------------------------


def serve_notebook(fds: list[int], config: dict[str, Any]) -> None:
    """Run cells and hand over functions until the examiner closes the channel."""
    silence()
    channel = socket.socket(fileno=fds[0])
    shell = _shell()
    sys.path.insert(0, "")  # as in a kernel: find modules in the notebook's folder
    usual_path = list(sys.path)
    send(channel, ("ready", None))
    while True:
        try:
            kind, request = receive(channel)
        except (EOFError, OSError):
            return
        if kind == "run":
            send(channel, ("ran", _run_cell(shell, **request)))
        elif kind == "take":
            try:
                function = handover.pack(shell.user_ns, request, usual_path)
                send(channel, ("function", function))
            except handover.Refused as refused:
                send(channel, ("refused", _clean(str(refused)[:MAX_TEXT])))


def _shell() -> InteractiveShell:
    shell = plain_shell()
    # The error is reported separately from the output.
    shell.showtraceback = lambda *_, **__: None  # type: ignore[method-assign]
    return shell


def _run_cell(shell: InteractiveShell, source: str, number: int) -> dict[str, Any]:
    printed, errors = CappedText(), CappedText()
    with redirect_stdout(printed), redirect_stderr(errors):
        _, error = run_cell(shell, source, number)
    failure = None
    if error is not None:
        if error.__traceback__ is not None:
            error.__traceback__ = error.__traceback__.tb_next  # drop the frame that ran the cell
        failure = _texts(_described(error, cell_sources(set()).labels))
    return {"stdout": _clean(printed.text()), "stderr": _clean(errors.text()), "error": failure}


# The ranks ----------------------------------------------------------------------------------


def serve_rank(fds: list[int], config: dict[str, Any]) -> None:
    """Run one case's program as one rank, whose only connection is its channel to the examiner."""
    silence()
    channel = socket.socket(fileno=fds[0])
    torch.set_num_threads(1)
    program, rank_input, packed = receive_work(channel)
    labels: dict[str, str] = {}
    rank, world_size = config["rank"], config["world_size"]
    client = FabricClient(channel)
    with suppress(FabricStopped), lone_rank(client, rank, world_size, labels) as context:
        wait_for_go(channel)
        reply = do_work(program, rank_input, packed, labels)
        with suppress(OSError):
            touched = [_clean(misuse.words) for misuse in context.handles.misuses if misuse.did]
            send(channel, ("touched", touched[:MAX_TOUCHED]))
            send(channel, reply)
    with suppress(OSError):
        channel.recv(1)  # stay alive until the examiner ends the case


Program = Callable[..., Any]
"""A check's program: it calls the student's function with a rank's input."""


def receive_work(channel: socket.socket) -> tuple[Program, Any, bytes]:
    """Return the program and input that the examiner sends to a rank, and the packed function.

    The function is empty on a rank that does not call it; see `Check.only_on`. No student code has
    run before this.
    """
    (_, work), (_, rank_input) = receive(channel), receive(channel)
    return cloudpickle.loads(work["program"]), rank_input, work["function"]


def wait_for_go(channel: socket.socket) -> None:
    """Tell the examiner that this rank is ready, and wait until all ranks are."""
    send(channel, ("ready", None))
    receive(channel)


def do_work(
    program: Program, rank_input: Any, packed: bytes, labels: dict[str, str]
) -> tuple[str, Any]:
    """Run the program; return the message that reports the result.

    Args:
        program: the program.
        rank_input: this rank's input.
        packed: the student's function, as `handover.pack` returned it, or nothing.
        labels: receives readable names for the files of the cells.

    """
    try:
        _hide_our_code()
        function = None
        if packed:
            function, sources = handover.unpack(packed)
            install_sources(sources)
            labels.update(sources.labels)
        try:
            output = program(function, rank_input)
        finally:
            _end_processes_left()
        return "output", encode(output)
    except FabricStopped:
        raise
    except BaseException as error:
        failure = _described(error, labels)
        return "failure", {**_texts(failure), "mismatch": failure.mismatch}


def _end_processes_left() -> None:
    """End what the student's function has started and left: the case goes on for other ranks.

    Only process 1 of a cell has a cell of its own. Real ranks share one, which ends with the case.
    """
    if os.getpid() == 1:
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # all processes of the cell but this one
        with suppress(ChildProcessError):
            while True:
                os.wait()  # they need a core to end; process 1 is the parent of all that is left


def _hide_our_code() -> None:
    """Forget the modules that report on the student's code, which could patch them by name.

    An import then gives the student new copies, which nobody uses.
    """
    for package, reporter in _REPORTERS:
        for name in [name for name in sys.modules if name.startswith(f"{package}.{reporter}")]:
            del sys.modules[name]
        vars(sys.modules[package]).pop(reporter, None)
    sys.modules["__main__"] = ModuleType("__main__")


# Texts --------------------------------------------------------------------------------------


def _described(error: BaseException, labels: dict[str, str]) -> Failure:
    """Return the exception as text, even if its class fails to give a message."""
    try:
        frame = error.__traceback__
        while frame is not None and not _is_theirs(frame.tb_frame.f_code.co_filename, labels):
            frame = frame.tb_next
        if frame is not None:
            return describe(error.with_traceback(frame), labels)
        # The traceback has no line of the student's code, and our own lines would not help them.
        failure = describe(error.with_traceback(None), labels)
        return replace(failure, where="") if not isinstance(error, SyntaxError) else failure
    except BaseException:
        return Failure(
            type(error).__name__, "the exception's message cannot be shown", "", "", False, None
        )


def _is_theirs(name: str, labels: dict[str, str]) -> bool:
    return name in labels or scratch.is_own(name)


def _texts(failure: Failure) -> dict[str, Any]:
    """Return the failure as plain texts of bounded size."""
    return {
        k: _clean(getattr(failure, k)[:MAX_TEXT]) for k in ("kind", "message", "where", "trace")
    }


def _clean(text: str) -> str:
    return text.encode(errors="replace").decode()


def silence() -> None:
    """Discard all output; what a notebook's cells print in Python is caught before."""
    null = os.open(os.devnull, os.O_WRONLY)
    redirect_output(null)
    os.close(null)


def warm_up() -> None:
    """Do once what every rank does first, because PyTorch sets up many things on first use.

    PyTorch uses one thread for operators here, so it starts no threads that the forks would lose.
    """
    near, far = socket.socketpair()
    with near, far, lone_rank(FabricClient(near), 0, 1):
        pass
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = torch.ones(2, 3, dtype=dtype)
        layer = torch.nn.Linear(3, 2).to(dtype)
        loss = torch.nn.functional.cross_entropy(layer(x).tanh(), torch.tensor([0, 1]))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.cat([x.flatten(), x.sum(0)]).view(torch.uint8).numpy().tobytes()
    decode(encode([x, {"a": (1, "b")}]))


def main() -> None:
    """Serve the examiner over the socket whose number is the first argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    forker = cell.Forker()
    scratch.keep_still()
    pr_set_dumpable = 4
    scratch.call("prctl", pr_set_dumpable, 0)
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    # Children look for this file's functions under the module's name, not under __main__.
    sys.modules["autograder.inside.examinee"] = sys.modules["__main__"]
    gc.disable()
    for name in (*NEEDED, "course_lib.checking.on_ranks.given", "autograder.inside.node"):
        importlib.import_module(name)
    warm_up()
    gc.collect()
    gc.freeze()
    collapse()
    gc.enable()
    serve(control, fork_process=forker)


if __name__ == "__main__":
    main()
