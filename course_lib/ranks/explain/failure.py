"""An exception of a rank: as text that travels, and as the error that the caller gets."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import cloudpickle

from course_lib.ranks.explain.errors import CollectiveMismatch, RankError, RankState, RankTimeout
from course_lib.ranks.explain.lines import innermost, is_ours, named
from course_lib.ranks.explain.post_mortem import describe_frames
from course_lib.ranks.explain.words import names, one_or_many


@dataclass(frozen=True)
class Failure:
    """An exception on a rank, as it travels to whoever called."""

    kind: str
    """Name of its class."""
    message: str
    where: str
    """The line of the user's code, for example ``Cell In[3], line 7``."""
    trace: str
    """The traceback, without the lines of `ranks`."""
    mismatch: bool
    """Whether it is a `CollectiveMismatch`, which the ranks together explain better."""
    pickled: bytes | None
    """The exception itself, where it can be sent."""
    frames: str = ""
    """The user's own frames, innermost first: each line of code, and its local variables."""

    def original(self) -> BaseException | None:
        """Return the exception as it was raised, where it could be sent; else ``None``."""
        if self.pickled is not None:
            with suppress(Exception):
                error = cloudpickle.loads(self.pickled)
                return error if isinstance(error, BaseException) else None
        return None


def describe(error: BaseException, labels: Mapping[str, str]) -> Failure:
    """Return the exception as text, in terms of the user's own lines.

    `labels`: file name → how a person calls it, for example ``Cell In[3]``.
    """
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not is_ours(f.filename)]
    found = innermost(((f.filename, f.lineno) for f in reversed(frames)), labels)
    where = named(*found, labels) if found else ""
    if not where and isinstance(error, SyntaxError) and error.filename:
        where = named(error.filename, error.lineno, labels)
    text = "".join([*traceback.format_list(frames), *traceback.format_exception_only(error)])
    try:
        pickled = cloudpickle.dumps(error)
    except Exception:
        pickled = None
    return Failure(
        kind=type(error).__name__,
        message=str(error),
        where=where,
        trace=with_labels(text, labels).rstrip(),
        mismatch=isinstance(error, CollectiveMismatch),
        pickled=pickled,
        frames=describe_frames(error, labels),
    )


def with_labels(text: str, labels: Mapping[str, str]) -> str:
    """Return a traceback in which cells are called what people call them."""
    for name, label in labels.items():
        text = text.replace(f'File "{name}"', label)
    return text


def rank_error(
    failures: Mapping[int, Failure],
    first: int,
    states: Sequence[RankState],
    original: BaseException | None,
) -> RankError:
    """Return the error for `failures`, of which that on rank `first` is told in full."""
    failure = failures[first]
    same = [r for r in sorted(failures) if failures[r].trace == failure.trace]
    # A SyntaxError says its place itself.
    where = f"  ({failure.where})" if failure.where and failure.kind != "SyntaxError" else ""
    message = f": {failure.message}" if failure.message else ""
    error = RankError(
        f"{names(same)} raised {failure.kind}{message}{where}",
        [
            RankState(r, f"raised {failures[r].kind}", failures[r].where)
            if r in failures
            else state
            for r, state in enumerate(states)
        ],
        f"Traceback of rank {first}:\n{failure.trace}",
        rank=first,
        original=original,
    )
    error.__cause__ = original
    error.frames = {rank: each.frames for rank, each in failures.items()}
    return error


def timed_out(what: str, timeout: float, states: Sequence[RankState]) -> RankTimeout:
    """Return the error for a call that outran its limit."""
    busy = [state.rank for state in states if state.doing.startswith("running")]
    hint = ""
    if busy:
        hint = (
            f"{names(busy)} {one_or_many(busy, 'is', 'are')} computing, sleeping or looping: "
            "look for a loop that does not end, or give more time with Ranks(…, timeout=seconds)."
        )
    return RankTimeout(f"The {what} took longer than its limit of {timeout:g} s.", states, hint)


def exit_reason(status: int | None) -> str:
    """Return what an exit status means; negative: the signal that ended the process."""
    if status is None:
        return "for an unknown reason"
    if status >= 0:
        return f"it called exit with status {status}"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else str(-status)
    hint = {
        "SIGSEGV": " (a segmentation fault in compiled code)",
        "SIGKILL": " (killed from outside, or out of memory)",
        "SIGABRT": " (compiled code gave up)",
    }.get(name, "")
    return f"signal {name}{hint}"
