"""The pipe to a rank by itself: what arrives is what was sent, whatever its size."""

import os
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from course_lib.ranks.memory import pack
from course_lib.ranks.processes.object_pipe import ObjectPipe

LIMIT = 1 << 13  # where messages begin to travel in files


@pytest.fixture
def pipes() -> Iterator[tuple[ObjectPipe, ObjectPipe]]:
    ends = [ObjectPipe(sock, private=True) for sock in socket.socketpair()]
    yield ends[0], ends[1]
    for end in ends:
        end.close()


def sent(pipes: tuple[ObjectPipe, ObjectPipe], value: Any) -> Any:
    """Return what arrives, between two other objects and two other messages."""
    pipes[0].send(pack("before"))
    pipes[0].send(pack(b"a head"), pack(value), pack(b"a tail"))
    pipes[0].send(pack("after"))
    messages = [[read() for read in pipes[1].receive()] for _ in range(3)]
    (before,), (head, found, tail), (after,) = messages
    assert (before, head, tail, after) == ("before", b"a head", b"a tail", "after")
    return found


@pytest.mark.parametrize("length", [0, 1, *range(LIMIT - 40, LIMIT + 40), 3 * LIMIT])
def test_text_and_lists_of_any_length_arrive(
    pipes: tuple[ObjectPipe, ObjectPipe], length: int
) -> None:
    assert sent(pipes, "x" * length) == "x" * length
    assert sent(pipes, ["x" * length]) == ["x" * length]


FACTOR = 3


def scaled(factor: int) -> Callable[[int], int]:
    """Return a function with a closure, a default, and a global name."""

    def scale(x: int, offset: int = 1) -> int:
        return factor * FACTOR * x + offset

    return scale


def with_a_class() -> type:
    class Counter:
        steps = 0

        def step(self) -> int:
            self.steps += 1
            return self.steps

    return Counter


def test_small_tensors_that_arrive_can_be_written_to(
    pipes: tuple[ObjectPipe, ObjectPipe],
) -> None:
    found = sent(pipes, torch.zeros(3))
    assert torch.equal(found.add_(1), torch.ones(3))


@pytest.mark.parametrize("function", [lambda: 0, scaled(2), with_a_class().__dict__["step"]])
def test_code_arrives_as_it_was(
    pipes: tuple[ObjectPipe, ObjectPipe], function: Callable[..., Any]
) -> None:
    code, found = function.__code__, sent(pipes, function).__code__
    assert found == code
    assert (found.co_filename, found.co_qualname) == (code.co_filename, code.co_qualname)
    assert list(found.co_positions()) == list(code.co_positions())
    assert found.co_exceptiontable == code.co_exceptiontable


def test_several_large_objects_of_one_message_arrive_in_order(
    pipes: tuple[ObjectPipe, ObjectPipe],
) -> None:
    values = [letter * 3 * LIMIT for letter in "abcd"]
    before = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    packed = [pack(value) for value in values]
    pipes[0].send(*packed, pack(None))
    assert [read() for read in pipes[1].receive()] == [*values, None]
    for each in packed:
        each.close()
    if sys.platform == "linux":
        assert len(os.listdir("/proc/self/fd")) == before


def test_the_end_of_the_other_side_is_told(pipes: tuple[ObjectPipe, ObjectPipe]) -> None:
    pipes[0].close()
    with pytest.raises(EOFError):
        pipes[1].receive()
