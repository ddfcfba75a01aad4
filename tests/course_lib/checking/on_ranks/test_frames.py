"""Frames arrive whole and in order, however the stream is cut; nonsense is refused."""

import contextlib
import socket
import struct
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from course_lib.checking.on_ranks.frames import FrameReader, recv_frame, send_frame
from course_lib.checking.on_ranks.wire import WireError


def pair() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair()
    ours.settimeout(10)
    theirs.settimeout(10)
    return ours, theirs


def test_frames_arrive_whole_and_in_order() -> None:
    frames = [(0, b""), (7, b"x"), (2**32 - 1, bytes(range(256)) * 20_000), (1, b"end")]
    ours, theirs = pair()

    def write() -> None:
        with theirs:
            for kind, payload in frames:
                send_frame(theirs, kind, payload)

    writer = threading.Thread(target=write)
    with ours:
        writer.start()
        assert [recv_frame(ours) for _ in frames] == frames
        with pytest.raises(EOFError):
            recv_frame(ours)
        writer.join()


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (struct.pack("<4sIQ", b"DDPf", 1, 5)[:10], "inside a frame's header"),
        (struct.pack("<4sIQ", b"DDPf", 1, 5) + b"abc", "after 3 of a frame's 5 bytes"),
        (struct.pack("<4sIQ", b"XXXX", 1, 1) + b"a", "do not begin like a frame"),
        (struct.pack("<4sIQ", b"DDPf", 1, 2**64 - 1) + b"a", "at most"),
    ],
)
def test_a_cut_or_false_frame_is_a_wire_error(sent: bytes, told: str) -> None:
    ours, theirs = pair()
    with ours:
        with theirs:
            theirs.sendall(sent)
        with pytest.raises(WireError, match=told):
            recv_frame(ours)


def test_the_size_of_a_frame_is_checked_before_its_payload_is_awaited() -> None:
    ours, theirs = pair()
    with ours, theirs:  # the payload never comes, and the stream stays open
        theirs.sendall(struct.pack("<4sIQ", b"DDPf", 1, 11))
        with pytest.raises(WireError, match="at most 10"):
            recv_frame(ours, max_bytes=10)


@given(
    st.lists(st.tuples(st.integers(0, 2**32 - 1), st.binary(max_size=60)), max_size=6),
    st.data(),
)
def test_a_reader_finds_the_same_frames_however_the_stream_is_cut(
    frames: list[tuple[int, bytes]], data: st.DataObject
) -> None:
    stream = b"".join(struct.pack("<4sIQ", b"DDPf", k, len(p)) + p for k, p in frames)
    reader, found = FrameReader(max_bytes=60), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        found += reader.feed(stream[:size])
        stream = stream[size:]
    assert found == frames
    assert not reader.inside_frame


def test_a_reader_knows_when_the_stream_stops_inside_a_frame() -> None:
    reader = FrameReader()
    assert not [*reader.feed(struct.pack("<4sIQ", b"DDPf", 1, 5) + b"abcd")]
    assert reader.inside_frame
    assert [*reader.feed(b"e")] == [(1, b"abcde")]
    assert not reader.inside_frame


@pytest.mark.parametrize(
    "header",
    [struct.pack("<4sIQ", b"DDPf", 1, 11), struct.pack("<4sIQ", b"DDPx", 1, 1)],
)
def test_a_reader_stays_broken_after_nonsense(header: bytes) -> None:
    reader = FrameReader(max_bytes=10)
    with pytest.raises(WireError):
        list(reader.feed(header))
    with pytest.raises(WireError):
        list(reader.feed(struct.pack("<4sIQ", b"DDPf", 1, 0)))


@given(st.lists(st.binary(max_size=40), max_size=10))
def test_random_streams_only_ever_raise_wire_error(pieces: list[bytes]) -> None:
    reader = FrameReader(max_bytes=100)
    with contextlib.suppress(WireError):
        for piece in pieces:
            list(reader.feed(piece))
