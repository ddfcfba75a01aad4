"""The fabric behind a socket cannot be harmed by clients that break the rules."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.ranks.costs.network import Network
from course_lib.ranks.explain.errors import RankError, RankTimeout
from course_lib.ranks.simulated import socket_frames as frames
from course_lib.ranks.simulated.operation import Operation
from course_lib.ranks.simulated.socket_frames import Bounds, FrameError, Type, post, read_post
from course_lib.ranks.simulated.socket_server import FabricServer
from tests.helpers.socket_ranks import Serving

NETWORK = Network(1.3e-3, 7e6)


class Served:
    """A server of three ranks, in a thread, and connections to it."""

    def __init__(self, timeout: float = 20.0, **limits: Any) -> None:
        pairs = [socket.socketpair() for _ in range(3)]
        self._channels = [theirs for _, theirs in pairs]
        server = FabricServer([ours for ours, _ in pairs], NETWORK, **limits)
        self._serving = Serving(server, timeout)

    @property
    def error(self) -> BaseException | None:
        return self._serving.error

    def rank(self, rank: int) -> socket.socket:
        channel = self._channels[rank]
        channel.settimeout(20)
        channel.sendall(frames.group(0, "0", (0, 1, 2)))
        return channel

    def join(self) -> None:
        self._serving.join(30)
        assert not self._serving.is_alive()
        for channel in self._channels:
            channel.close()


def hung_up(channel: socket.socket) -> bool:
    try:
        return channel.recv(1) == b""
    except ConnectionResetError:  # what was sent last was not even read
        return True


def message(rank: int, kind: str, peer: int) -> Operation:
    x = torch.arange(4, dtype=torch.float32)
    pair = ([x], []) if kind == "send" else ([], [torch.zeros(4)])
    return Operation(rank, kind, "0", (0, 1, 2), *pair, peer=peer)


def talk(served: Served) -> None:
    """Let the good ranks 0 and 1 pass a message and end."""
    a, b = served.rank(0), served.rank(1)
    for channel, operation in ((a, message(0, "send", 1)), (b, message(1, "recv", 0))):
        channel.sendall(post(1, operation, 0))
        channel.sendall(frames.wait(Type.WAIT, 1))
    for channel, size in ((a, 0), (b, 16)):
        header = channel.recv(16, socket.MSG_WAITALL)
        kind, length = frames.read_header(header, 1000)
        number, clock, _, data = frames.read_done(channel.recv(length, socket.MSG_WAITALL))
        assert (kind, number, len(data)) == (Type.DONE, 1, size)
        assert clock == pytest.approx(16 / 7e6 + (1.3e-3 if size else 0.0), rel=1e-9)
        if size:
            assert list(struct.unpack("<4f", data)) == [0.0, 1.0, 2.0, 3.0]
        channel.sendall(frames.finish(False))
        channel.close()


def good(rank: int = 2) -> bytes:
    return post(1, message(rank, "send", 0), 0)


def patched(data: bytes, at: int, fmt: str, value: Any) -> bytes:
    body = bytearray(data)
    struct.pack_into(fmt, body, at, value)
    return bytes(body)


BAD_FRAMES = {
    "garbage": b"\x93" * 4000,
    "wrong magic": b"FAB2" + good()[4:],
    "unknown type": patched(good(), 4, "<H", 77),
    "a server's frame": frames.done(Type.DONE, 1, 0.0),
    "huge length": patched(good(), 8, "<Q", 1 << 60),
    "longer than its fields": patched(good(), 8, "<Q", len(good()) - 15) + b"x",
    "unknown kind": patched(good(), 24, "<B", 200),
    "unknown dtype": patched(good(), 26, "<B", 200),
    "unknown group": post(1, message(2, "send", 0), 9),
    "peer outside": post(1, message(2, "send", 7), 0),
    "peer itself": post(1, message(2, "send", 2), 0),
    "negative time": frames.compute(-1.0),
    "not a time": frames.compute(float("nan")),
    "eternity": frames.compute(float("inf")),
    "result too large": post(
        1, Operation(2, "recv", "0", (0, 1, 2), [], [torch.empty(1 << 20)], peer=0), 0
    ),
    "wait for nothing": frames.wait(Type.WAIT, 5),
    "twice the same number": good() + good(),
    "group of nobody": frames.group(1, "x", (0, 9)),
    "group of others": frames.group(1, "x", (0, 1)),
}


@pytest.mark.parametrize("data", BAD_FRAMES.values(), ids=BAD_FRAMES.keys())
def test_a_bad_frame_ends_its_rank_only(data: bytes) -> None:
    served = Served(bounds=Bounds(frame=1 << 20))
    bad = served.rank(2)
    bad.sendall(data)
    assert hung_up(bad)
    talk(served)
    served.join()
    assert isinstance(served.error, RankError)
    assert served.error.rank == 2
    assert "protocol" in str(served.error) or "limit for a message is 1,048,576" in str(
        served.error
    )


def test_a_rank_that_hangs_up_ends_alone() -> None:
    for data in (b"", good()[:7], good()[:40]):
        served = Served()
        bad = served.rank(2)
        bad.sendall(data)
        bad.close()
        talk(served)
        served.join()
        assert isinstance(served.error, RankError) and served.error.rank == 2
        assert "closed its connection" in str(served.error)


def test_those_who_wait_for_a_broken_rank_are_told() -> None:
    served = Served()
    waiting, other, bad = served.rank(0), served.rank(1), served.rank(2)
    waiting.sendall(post(1, message(0, "recv", 2), 0))
    waiting.sendall(frames.wait(Type.WAIT, 1))
    other.sendall(frames.finish(False))
    bad.sendall(b"nonsense" * 10)
    kind, length = frames.read_header(waiting.recv(16, socket.MSG_WAITALL), 1 << 20)
    assert kind is Type.STOP
    assert b"rank 2" in waiting.recv(length, socket.MSG_WAITALL)
    served.join()
    assert isinstance(served.error, RankError) and served.error.rank == 2


def test_half_a_frame_and_nothing_meet_the_time_limit_of_their_own_run() -> None:
    for data in (b"", good()[:9], good()[:50]):
        served = Served(timeout=1.0)
        bad, good_one = served.rank(2), served.rank(0)
        bad.sendall(data)
        good_one.sendall(frames.finish(False))
        neighbour = Served()
        neighbour.rank(2).sendall(frames.finish(False))
        talk(neighbour)
        neighbour.join()
        assert neighbour.error is None
        served.join()
        assert isinstance(served.error, RankTimeout)
        doing = [state.doing for state in served.error.states]
        assert doing == ["finished", "running", "running"]


FLOODS = {
    "groups": [frames.group(i, "g", (2,)) for i in range(1, 1000)],
    "sends": [post(i, message(2, "send", 0), 0) for i in range(1000)],
    "questions": [good(), *[frames.wait(Type.TEST, 1)] * 1000],
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS.keys())
def test_a_million_tiny_frames_hurt_nobody(flood: list[bytes]) -> None:
    served = Served(timeout=60)
    bad = served.rank(2)

    def pour() -> None:
        with contextlib.suppress(OSError):
            for _ in range(1000):
                bad.sendall(b"".join(flood))

    thread = threading.Thread(target=pour, daemon=True)
    thread.start()
    talk(served)
    thread.join(20)
    assert not thread.is_alive()
    served.join()
    assert isinstance(served.error, RankError) and served.error.rank == 2


def test_what_is_not_over_has_a_limit() -> None:
    served = Served(bounds=Bounds(held=30_000))
    bad = served.rank(2)
    try:
        for number in range(1000):
            bad.sendall(post(number, message(2, "send", 0), 0))
    except OSError:
        pass
    assert hung_up(bad)
    talk(served)
    served.join()
    assert isinstance(served.error, RankError) and "limit for a rank is 10,000" in str(served.error)


@settings(max_examples=300)
@given(data=st.data())
def test_no_bytes_make_the_reader_fail_otherwise(data: st.DataObject) -> None:
    """Reading a damaged frame gives a `FrameError` or an operation, never anything else."""
    body = bytearray(good()[16:])
    for _ in range(data.draw(st.integers(1, 8))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(body)))
    for damaged in (body, body[:cut]):
        for read in (
            lambda b: read_post(b, 2, {0: ("0", (0, 1, 2))}, 1 << 20),
            lambda b: frames.read_group(b, 3),
            frames.read_wait,
            frames.read_compute,
            frames.read_finish,
        ):
            with contextlib.suppress(FrameError):
                read(bytearray(damaged))
