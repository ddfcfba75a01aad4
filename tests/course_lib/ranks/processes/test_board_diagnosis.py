"""From the board's entries follow exactly the ranks that can never go on."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from course_lib.ranks.processes.board import MAX_CHANNELS, MAX_GROUPS, Board
from course_lib.ranks.processes.board_diagnosis import DeadlockWatch, find_deadlock, stuck_ranks
from course_lib.ranks.processes.board_views import Message, MessageChannel, RankPhase, Wait

# Key of a group.
WORLD = 17
ONE = Message(1, "float32")


@pytest.fixture
def board() -> Board:
    return running(3)


def running(k: int) -> Board:
    board = Board.create(k)
    for rank in range(k):
        board.open_group(rank, WORLD, tuple(range(k)))
        board.set_state(rank, RankPhase.RUNNING)
    return board


def wait_in_message(board: Board, rank: int, peer: int, sends: bool, tag: int = 0) -> None:
    channel = MessageChannel(sends, peer, tag, WORLD)
    seq = board.start_message(rank, channel, ONE)
    board.block(rank, Wait.SEND if sends else Wait.RECV, seq=seq, channel=channel)


@st.composite
def waits(draw: st.DrawFn) -> tuple[int, list[int | None], set[int]]:
    k = draw(st.integers(2, 5))
    awaited = [
        draw(st.one_of(st.none(), st.integers(0, k - 1).filter(lambda p, r=r: p != r)))
        for r in range(k)
    ]
    ended = {r for r in range(k) if awaited[r] is None and draw(st.booleans())}
    return k, awaited, ended


@given(waits())
def test_stuck_are_those_whose_chain_never_reaches_a_running_rank(drawn):
    k, awaited, ended = drawn
    board = running(k)
    for rank, peer in enumerate(awaited):
        if peer is not None:
            wait_in_message(board, rank, peer, sends=False)
        elif rank in ended:
            board.set_state(rank, RankPhase.FINISHED)

    def reaches_running(rank: int) -> bool:
        for _ in range(k + 1):
            peer = awaited[rank]
            if peer is None:
                return rank not in ended
            rank = peer
        return False

    expected = {r for r in range(k) if awaited[r] is not None and not reaches_running(r)}
    assert set(stuck_ranks(board.views())) == expected
    board.close()


def test_the_watch_wants_to_see_it_twice(board: Board) -> None:
    watch = DeadlockWatch(patience=0.05)
    wait_in_message(board, 0, 1, sends=False)
    wait_in_message(board, 1, 0, sends=False)
    assert watch.look(board.views()) is None
    time.sleep(0.06)
    # Rank 1 did send, from another thread.
    board.start_message(1, MessageChannel(True, 0, 0, WORLD), ONE)
    assert watch.look(board.views()) is None
    wait_in_message(board, 0, 1, sends=False)
    assert watch.look(board.views()) is None
    time.sleep(0.06)
    assert watch.look(board.views()) is not None


def test_a_rank_that_is_late_is_not_said_to_have_ended(board: Board) -> None:
    slot = board.open_group(0, WORLD, (0, 1, 2))
    seq = board.enter_collective(0, slot, "all_reduce", "Cell In[1], line 2")
    board.block(0, Wait.COLLECTIVE, seq=seq, group=WORLD)
    board.set_state(1, RankPhase.FINISHED)
    report = str(find_deadlock(board.views()))
    assert "Rank 0 waits for rank 1, which ended" in report
    assert "which rank 1 never called" in report


def test_tables_that_are_full_say_so(board: Board) -> None:
    with pytest.raises(RuntimeError, match=f"more than {MAX_GROUPS} process groups"):
        for key in range(100, 100 + MAX_GROUPS):
            board.open_group(0, key, (0,))
    with pytest.raises(RuntimeError, match="different tags and peers"):
        for tag in range(MAX_CHANNELS + 1):
            board.start_message(0, MessageChannel(True, 1, tag, WORLD), ONE)
