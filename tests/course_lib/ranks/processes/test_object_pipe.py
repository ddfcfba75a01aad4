"""The pipe to a rank by itself: what arrives is what was sent, whatever its size."""

import socket
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import pytest
import torch

from course_lib.ranks.processes.object_pipe import ObjectPipe, pack, plain

LIMIT = 1 << 13  # where messages begin to travel in files


@pytest.fixture
def pipes() -> Iterator[tuple[ObjectPipe, ObjectPipe]]:
    ends = [ObjectPipe(sock, private=True) for sock in socket.socketpair()]
    yield ends[0], ends[1]
    for end in ends:
        end.close()


def sent(pipes: tuple[ObjectPipe, ObjectPipe], value: Any) -> Any:
    """Return what arrives, between two other messages."""
    pipes[0].send(plain(b"before"), pack(value), plain(b"after"))
    before, found, after = (pipes[1].receive()() for _ in range(3))
    assert (bytes(before), bytes(after)) == (b"before", b"after")
    return found


@pytest.mark.parametrize("length", [0, 1, *range(LIMIT - 40, LIMIT + 40), 3 * LIMIT])
def test_text_and_lists_of_any_length_arrive(
    pipes: tuple[ObjectPipe, ObjectPipe], length: int
) -> None:
    assert sent(pipes, "x" * length) == "x" * length
    assert sent(pipes, ["x" * length]) == ["x" * length]


@pytest.mark.parametrize("length", [0, 1, LIMIT // 4 - 60, LIMIT // 4, LIMIT])
def test_tensors_of_any_length_arrive(pipes: tuple[ObjectPipe, ObjectPipe], length: int) -> None:
    value = {"a": torch.arange(length), "b": [torch.rand(length, 2), length]}
    found = sent(pipes, value)
    assert torch.equal(found["a"], value["a"])
    assert torch.equal(found["b"][0], value["b"][0])
    assert found["b"][1] == length


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


@pytest.mark.parametrize("value", [lambda: 0, scaled(2), with_a_class(), torch.relu, len])
def test_functions_are_pickled_as_cloudpickle_does(value: Any) -> None:
    """What is not looked up for its own helpers changes no byte."""
    packed = pack(value)
    assert packed.parts == 1
    assert packed.inline == cloudpickle.dumps(value, protocol=5)
