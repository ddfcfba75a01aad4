"""An exception of a rank: as text that can be sent, and as the error that the caller gets."""

from __future__ import annotations

import itertools
import pickle
import signal
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from course_lib.ranks.explain.errors import (
    CollectiveMismatch,
    RankError,
    RanksError,
    RankState,
    RankTimeout,
    format_states,
)
from course_lib.ranks.explain.lines import innermost, is_installed, is_ours, named
from course_lib.ranks.explain.pickling import dumps
from course_lib.ranks.explain.words import counted, names, one_or_many

_HEADING = 200
"""Number of characters of an exception's message that are shown above the table."""
_CALLS_SHOWN = 1
"""Up to this number of consecutive calls inside installed packages, a traceback shows them all."""
_ENDS = 10
"""Number of entries that are shown at each end of a very long traceback."""


@dataclass(frozen=True)
class Failure:
    """An exception on a rank, in the form in which it is sent to the caller."""

    kind: str
    """Name of the exception's class."""
    message: str
    where: str
    """The line of the user's code, for example ``Cell In[3], line 7``."""
    trace: str
    """The traceback, without the lines of `ranks`."""
    mismatch: bool
    """Whether it is a `CollectiveMismatch`, which a report about all ranks explains better."""
    pickled: bytes | None
    """The exception itself, if it can be sent."""
    undefined: str = ""
    """Of a `NameError`, the name that is not defined."""
    notes: tuple[str, ...] = ()
    """What was added to it with ``add_note``."""

    def original(self) -> BaseException | None:
        """Return the exception as it was raised, if it could be sent; else ``None``."""
        if self.pickled is not None:
            with suppress(Exception):
                error = pickle.loads(self.pickled)
                return error if isinstance(error, BaseException) else None
        return None


def describe(error: BaseException, labels: Mapping[str, str]) -> Failure:
    """Return the exception as text that names the user's own lines.

    `labels`: file name → its name for people, for example ``Cell In[3]``.
    """
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not is_ours(f.filename)]
    line = innermost(((f.filename, f.lineno) for f in reversed(frames)), labels)
    where = named(*line, labels) if line else ""
    if not where and isinstance(error, SyntaxError) and error.filename:
        where = named(error.filename, error.lineno, labels)
    shown = _without_libraries(frames, labels)
    text = "".join([*shown, *traceback.format_exception_only(error)])
    try:
        pickled = dumps(error)
    except Exception:
        pickled = None
    return Failure(
        kind=type(error).__name__,
        message=str(error),
        where=where,
        trace=with_labels(text, labels).rstrip(),
        mismatch=isinstance(error, CollectiveMismatch),
        pickled=pickled,
        undefined=(error.name or "") if isinstance(error, NameError) else "",
        notes=notes_on(error),
    )


def notes_on(error: BaseException) -> tuple[str, ...]:
    """Return what was added to an exception with ``add_note``."""
    return tuple(getattr(error, "__notes__", ()))


def _without_libraries(
    frames: Sequence[traceback.FrameSummary], labels: Mapping[str, str]
) -> list[str]:
    """Return the lines of a traceback, with the calls inside packages and a recursion shortened.

    If the innermost line of the user's code leads to several calls inside packages, the last one is
    shown. Lines that repeat are shown three times, as Python does; of longer tracebacks, the
    outermost and the innermost lines are shown.
    """

    def inside(frame: traceback.FrameSummary) -> bool:
        return frame.filename not in labels and is_installed(frame.filename)

    runs = [(installed, list(run)) for installed, run in itertools.groupby(frames, inside)]
    shown: list[str] = []
    for number, (installed, run) in enumerate(runs):
        if installed and number > 0 and len(run) > _CALLS_SHOWN:
            visible = run[-1:] if number == len(runs) - 1 else []
            hidden = run[: len(run) - len(visible)]
            shown.append(f"  … {counted(len(hidden), 'call')} inside packages\n")
            run = visible
        shown += traceback.format_list(run)
    if (left_out := len(shown) - 2 * _ENDS) > 0:
        shown[_ENDS:-_ENDS] = [f"  … {counted(left_out, 'more line')} of the traceback\n"]
    return shown


def with_labels(text: str, labels: Mapping[str, str]) -> str:
    """Return a traceback in which cells have their labels, such as ``Cell In[3]``."""
    for name, label in labels.items():
        text = text.replace(f'File "{name}"', label)
    return text


def rank_error(
    failures: Mapping[int, Failure],
    first: int,
    states: Sequence[RankState],
    original: BaseException | None,
) -> RankError:
    """Return the error for `failures`. The failure on rank `first` is shown in full."""
    failure = failures[first]
    shown = failure.kind, failure.where, failure.message
    same = [r for r, f in sorted(failures.items()) if (f.kind, f.where, f.message) == shown]
    # The message of a SyntaxError already names its line.
    location = f"  ({failure.where})" if failure.where and failure.kind != "SyntaxError" else ""
    message = f": {_first_line(failure.message)}" if failure.message.strip() else ""
    error = RankError(
        f"{names(same)} raised {failure.kind}{message}{location}",
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
    error.kind, error.message, error.where = failure.kind, failure.message, failure.where
    error.undefined = failure.undefined
    error.__cause__ = original
    return error


def _first_line(message: str) -> str:
    """Return the part of a message that fits into a heading; the traceback shows all of it."""
    line = next(iter(message.strip().splitlines()), "")
    return line if len(line) <= _HEADING else line[: line.rfind(" ", 0, _HEADING)] + " …"


def timed_out(activity: str, timeout: float, states: Sequence[RankState]) -> RankTimeout:
    """Return the error for a call that exceeded its time limit."""
    busy = [state.rank for state in states if state.running]
    hint = ""
    if busy:
        hint = (
            f"{names(busy)} {one_or_many(busy, 'is', 'are')} computing, sleeping or looping: "
            "look for a loop that does not end"
        )
        # A student cannot change the time limit of a check's case.
        hint += ", or give more time with Ranks(…, timeout=seconds)." if activity == "call" else "."
    return RankTimeout(f"The {activity} took longer than its limit of {timeout:g} s.", states, hint)


def closed_meanwhile(states: Sequence[RankState]) -> RanksError:
    """Return the error for a call during which another thread closed the ranks."""
    return RanksError("Another thread closed the ranks while they ran this call.", states)


def interrupted(states: Sequence[RankState], *, alive: bool = False) -> str:
    """Return the text to print when a person stops a call. `alive`: whether the ranks live on."""
    now = "keep their variables" if alive else "were ended"
    heading = f"Interrupted. The ranks {now}. When you interrupted, they did this:"
    return f"{heading}\n\n{format_states(states)}\n"


def exit_reason(status: int | None) -> str:
    """Return what an exit status means. A negative one is the signal that ended the process."""
    if status is None:
        return "the reason is unknown"
    if status >= 0:
        return f"it called exit with status {status}"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else str(-status)
    hint = {
        "SIGSEGV": " (a segmentation fault in compiled code)",
        "SIGKILL": " (killed from outside, or out of memory)",
        "SIGABRT": " (compiled code called abort)",
    }.get(name, "")
    return f"signal {name}{hint}"
