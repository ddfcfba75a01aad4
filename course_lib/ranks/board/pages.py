"""The memory of a board: where each rank's numbers and texts stand.

A rank's part is the head, then its channels, then its groups, then two texts. Every number is one
aligned 64-bit word.
"""

from __future__ import annotations

import mmap
import os

MAX_BOARD_RANKS = 64
MAX_GROUPS = 64
"""Process groups that one rank may use in one call."""
MAX_CHANNELS = 1024
"""Different (direction, peer, tag, group) that one rank may use for messages in one call."""
RING = 64
"""How many of its latest collectives a rank shows, per group; messages, per channel."""

SIGNATURE, WHERE, TEXT = 96, 160, 256
"""Bytes of the texts: what a collective is, a line of code, what a rank does."""
ENTRY = SIGNATURE + WHERE
# Words of the head.
STATE, CHANGES, WAIT, GROUP, SEQ, CHANNEL, SINCE, PENDING, MISMATCH, GIVEN_UP = range(10)
HEAD = 10
CHANNEL_WORDS = 2 + RING  # key, messages started, what each of the latest is
GROUP_HEAD = 3  # key, members as a bit mask, entered


class Pages:
    """A file of fixed layout, mapped into the parent and into every rank."""

    def __init__(self, fd: int, world_size: int) -> None:
        if not 1 <= world_size <= MAX_BOARD_RANKS:
            raise ValueError(f"world_size must be 1 to {MAX_BOARD_RANKS}, got {world_size}")
        self.fd = fd
        self.world_size = world_size
        self._groups_at = 8 * (HEAD + MAX_CHANNELS * CHANNEL_WORDS)
        self._group_size = 8 * GROUP_HEAD + RING * ENTRY
        self._text_at = self._groups_at + MAX_GROUPS * self._group_size
        self._stride = self._text_at + TEXT + WHERE
        size = self._stride * world_size
        if os.fstat(fd).st_size < size:
            os.ftruncate(fd, size)
        self._map = mmap.mmap(fd, size)
        self._bytes = memoryview(self._map)
        self._words = self._bytes[: size // 8 * 8].cast("Q")
        # Before and after every call each rank's part is looked at: where it begins is known.
        self._heads = range(0, self._stride // 8 * world_size, self._stride // 8)
        self._texts = range(self._text_at, self._text_at + size, self._stride)
        self._found: dict[tuple[int, int], int] = {}
        self._seen: dict[int, int] = {}  # rank → how many of its channels are in `_found`

    def close(self) -> None:
        """Unmap the board and close its file descriptor; closing again does nothing."""
        if self._map.closed:
            return  # by now the descriptor's number may be another file's
        self._words.release()
        self._bytes.release()
        self._map.close()
        os.close(self.fd)

    def _group(self, rank: int, slot: int) -> int:
        return rank * self._stride + self._groups_at + slot * self._group_size

    def _find_group(self, rank: int, key: int) -> int | None:
        for slot in range(MAX_GROUPS):
            word = self._group(rank, slot) // 8
            if self._words[word] == key:
                return word
            if self._words[word] == 0:
                return None
        return None

    def _channel(self, rank: int, key: int, create: bool = False) -> int:
        """Return the first word of a channel; 0 if there is none."""
        if (known := self._found.get((rank, key))) is not None:
            return known
        slot = self._seen.get(rank, 0)
        while slot < MAX_CHANNELS:
            word = rank * self._stride // 8 + HEAD + slot * CHANNEL_WORDS
            found = self._words[word]
            if found == 0:
                if not create:
                    return 0
                self._words[word] = found = key
            self._found[rank, found] = word
            self._seen[rank] = slot = slot + 1
            if found == key:
                return word
        if not create:
            return 0
        raise RuntimeError(
            f"a rank uses more than {MAX_CHANNELS} different tags and peers in one call; use a "
            "tag again, for example the number of the step modulo 8"
        )

    def forget_places(self) -> None:
        """Look for groups and channels anew: a rank, before a call on a board that was cleared."""
        self._found.clear()
        self._seen.clear()

    def _clear_places(self, rank: int) -> None:
        first = rank * self._stride // 8 + HEAD
        for word in range(first, first + MAX_CHANNELS * CHANNEL_WORDS, CHANNEL_WORDS):
            if self._words[word] == 0:
                break
            self._words[word] = self._words[word + 1] = 0
        for slot in range(MAX_GROUPS):
            word = self._group(rank, slot) // 8
            if self._words[word] == 0:
                break
            self._words[word] = self._words[word + 2] = 0

    def _latest(self, group_at: int, entered: int) -> dict[int, tuple[str, str]]:
        shown = range(max(1, entered - RING + 1), entered + 1)
        return {seq: self._entry(group_at, seq) for seq in shown}

    def _entry(self, group_at: int, seq: int) -> tuple[str, str]:
        entry = group_at + 8 * GROUP_HEAD + (seq % RING) * ENTRY
        return self._read_text(entry, SIGNATURE), self._read_text(entry + SIGNATURE, WHERE)

    def _write_texts(self, rank: int, text: str, where: str) -> None:
        at = self._texts[rank]
        if not text and not where:  # as mostly
            self._bytes[at] = self._bytes[at + TEXT] = 0
            return
        self._write_text(at, text, TEXT)
        self._write_text(at + TEXT, where, WHERE)

    def _write_text(self, at: int, text: str, size: int) -> None:
        # The end of a path says more than its beginning.
        if not text:  # as mostly
            self._bytes[at] = 0
            return
        data = text.encode("utf-8", "replace")[-size:]
        self._bytes[at : at + size] = data.ljust(size, b"\0")

    def _read_text(self, at: int, size: int) -> str:
        if not self._bytes[at]:  # as mostly: nothing to say
            return ""
        text = bytes(self._bytes[at : at + size]).rstrip(b"\0").decode("utf-8", "replace")
        if text.isprintable():
            return text
        return "".join(c if c.isprintable() else "�" for c in text)
