"""The pages of the board: mapped by everyone, closed by each once."""

import os

from course_lib.ranks.processes.board import Board


def test_closing_twice_leaves_alone_who_got_the_number_since() -> None:
    board = Board.create(2)
    board.close()
    ours = os.pipe()
    try:
        assert board.fd in ours, "the number was not given out again: nothing is tested"
        board.close()
        os.fstat(board.fd)
    finally:
        for fd in ours:
            os.close(fd)
