"""From what one call left on the board to one exception that explains it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from course_lib.ranks.board.diagnosis import board_states, find_mismatch, find_unfinished
from course_lib.ranks.board.views import RankView
from course_lib.ranks.explain.errors import MismatchError, RankError, RanksError, RankState
from course_lib.ranks.explain.failure import Failure, exit_reason, rank_error


def some_raised(
    failures: Mapping[int, Failure],
    views: Sequence[RankView],
    states: Sequence[RankState] | None = None,
) -> RanksError:
    """Return the error for exceptions on some ranks; `states`: what the others do, if known."""
    rows = board_states(views) if states is None else states
    for failure in failures.values():
        if failure.mismatch:
            # A rank that has ended may have taken its side of a message from the board.
            words = f"{failure.message[:1].upper()}{failure.message[1:]}."
            return find_mismatch(views) or MismatchError(words, rows)
    # The one whose board entry stopped changing first failed first.
    first = min(failures, key=lambda rank: views[rank].since)
    return rank_error(failures, first, rows, failures[first].original())


def process_ended(
    rank: int, status: int | None, dump: str, views: Sequence[RankView], where: str
) -> RanksError:
    """Return the error for a rank whose process ended; `status` as in `exit_reason`."""
    if (mismatch := find_mismatch(views)) is not None:
        return mismatch
    states = [
        RankState(rank, "process ended", where or state.where) if state.rank == rank else state
        for state in board_states(views)
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
