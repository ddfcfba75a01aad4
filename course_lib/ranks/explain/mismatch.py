"""Explain operations that do not fit together, for all kinds of ranks.

These are: ranks that disagree about a collective, a send and a receive that differ, and
communication that is unfinished when ranks have ended. `waiting` explains who waits for whom.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from course_lib.ranks.explain.errors import DeadlockError, MismatchError, RankState
from course_lib.ranks.explain.waiting import Skipped, Unmatched, first_few
from course_lib.ranks.explain.words import counted, names_inside

Splits = tuple[dict[int, int], dict[int, int]]
"""Of a rank in an all-to-all: the elements that it sends to each rank, and expects from each."""


def unfinished(
    unmatched: Sequence[Unmatched],
    skipped: Sequence[Skipped],
    states: Sequence[RankState],
    over: bool,
) -> DeadlockError | None:
    """Return the error for communication that can never complete, or ``None`` if there is none.

    Args:
        unmatched: messages whose other side has ended; all unmatched messages if the call is over.
        skipped: collectives that an ended rank did not enter.
        states: what every rank does, in rank order.
        over: whether every rank has ended.

    """
    if not unmatched and not skipped:
        return None
    lines = []
    for gap in skipped:
        text = f"Rank {gap.rank} called {counted(gap.count, gap.noun)} fewer than "
        text += f"{names_inside(gap.others)}. The first one that rank {gap.rank} skipped is "
        text += f"#{gap.first}"
        lines.append(text + (f", {gap.signature} ({gap.where})." if gap.signature else "."))
    for left in unmatched:
        messages = counted(left.count, "message") + (f" with tag {left.tag}" if left.tag else "")
        other = "any rank" if left.peer is None else f"rank {left.peer}"
        at = f" ({left.where})" if left.where else ""
        did = f"sent {messages} to {other}: never received"
        if not left.sends:
            did = f"waits for {messages} from {other}: never sent"
        lines.append(f"Rank {left.rank} {did}{at}.")
    summary = (
        "Every rank ended, but some communication is not finished."
        if over
        else "A rank ended while other ranks still need it."
    )
    return DeadlockError(summary, states, "\n".join(first_few(lines)))


def collective_mismatch(
    seq: int,
    entered: Mapping[int, tuple[str, str]],
    members: Collection[int],
    states: Sequence[RankState],
    noun: str = "collective",
    splits: str = "",
) -> MismatchError:
    """Return the error for ranks that disagree about collective `seq` of a group.

    `entered`: rank → (signature, line), for the ranks that have entered it. `splits`: in words, how
    ranks disagree about the splits of an all-to-all.
    """
    rows = []
    for state in states:
        if state.rank in entered:
            rows.append(RankState(state.rank, *entered[state.rank]))
        else:
            absent = RankState(state.rank, f"has not called this {noun}")
            rows.append(absent if state.rank in members else state)
    if splits:
        return MismatchError(f"{splits}.", rows, SPLITS)
    if noun == "new_group":
        return MismatchError(
            f"The ranks disagree about new_group #{seq}.",
            rows,
            "Every rank must call dist.new_group for every group, in the same order. This also "
            "holds for groups that the rank is not in.",
        )
    return MismatchError(
        f"The ranks disagree about collective #{seq} of their group.",
        rows,
        "All ranks of a group must call the same collectives in the same order, with the same"
        " number of elements, dtype and root.",
    )


SPLITS = (
    "Rank j must expect from rank i what rank i sends to rank j: the input splits of rank i, at j, "
    "equal the output splits of rank j, at i."
)
"""What to know if ranks disagree about the splits of an all-to-all."""


def differing_splits(splits: Mapping[int, Splits]) -> str:
    """Return in words where two of the ranks that entered an all-to-all disagree, or nothing."""
    for sender, (puts, _) in splits.items():
        for receiver, (_, gets) in splits.items():
            sent, expected = puts[receiver], gets[sender]
            if sent != expected:
                return (
                    f"In all_to_all, rank {sender} sends {counted(sent, 'element')} to rank "
                    f"{receiver}, but rank {receiver} expects {expected}"
                )
    return ""


PIECES = (
    "A send and its receive must have the same number of elements and the same dtype: in each "
    "step, a rank must send the piece that its receiver expects in that step."
)
"""What to know if a send and its receive differ."""


def differing(sender: int, sent: tuple[int, str], receiver: int, received: tuple[int, str]) -> str:
    """Return in words how a send and its receive differ; each is (elements, dtype)."""
    return (
        f"Rank {sender} sends {counted(sent[0], 'element')} of {sent[1]}, but rank {receiver} "
        f"receives them as {counted(received[0], 'element')} of {received[1]}"
    )
