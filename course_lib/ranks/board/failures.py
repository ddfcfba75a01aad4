"""From what one call left behind to one exception that explains it."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress

import cloudpickle

from course_lib.ranks.board.diagnosis import find_mismatch, find_unfinished, names, rank_states
from course_lib.ranks.board.views import RankView
from course_lib.ranks.explain.errors import RankError, RanksError, RankState, RankTimeout
from course_lib.ranks.processes.worker import Failure


def raised(failures: Mapping[int, Failure], views: Sequence[RankView]) -> RanksError:
    """Return the error for exceptions on some ranks."""
    if any(failure.mismatch for failure in failures.values()):
        mismatch = find_mismatch(views)
        if mismatch is not None:
            return mismatch
    # The one whose board entry stopped changing first failed first.
    first = min(failures, key=lambda rank: views[rank].since)
    original = None
    if (pickled := failures[first].pickled) is not None:
        with suppress(Exception):
            original = cloudpickle.loads(pickled)
    return rank_error(failures, first, rank_states(views), original)


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
    return error


def process_ended(
    rank: int, status: int | None, dump: str, views: Sequence[RankView], where: str
) -> RanksError:
    """Return the error for a rank whose process ended; `status` as in `exit_reason`."""
    if (mismatch := find_mismatch(views)) is not None:
        return mismatch
    states = [
        RankState(rank, "process ended", where or state.where) if state.rank == rank else state
        for state in rank_states(views)
    ]
    detail = "The other ranks were stopped." if len(views) > 1 else ""
    if dump:
        detail = f"{dump.rstrip()}\n\n{detail}".rstrip()
    return RankError(
        f"Rank {rank}'s process ended: {exit_reason(status)}.", states, detail, rank=rank
    )


def out_of_step(views: Sequence[RankView]) -> RanksError | None:
    """Return the error for a call in which all ranks ended but not all communication."""
    return find_mismatch(views) or find_unfinished(views)


def timed_out(what: str, timeout: float, states: Sequence[RankState]) -> RankTimeout:
    """Return the error for a call that outran its limit."""
    busy = [state.rank for state in states if state.doing.startswith("running")]
    hint = ""
    if busy:
        hint = (
            f"{names(busy)} {'is' if len(busy) == 1 else 'are'} computing, sleeping or looping: "
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
