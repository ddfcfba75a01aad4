"""Winnowing: keep few hashes of a text, such that texts with a common passage share a hash.

Schleimer, Wilkerson, Aiken, "Winnowing: local algorithms for document fingerprinting", SIGMOD
2003. Every K symbols in a row have a hash. In every window of W hashes the smallest is kept. Each
common passage of at least K + W - 1 symbols leaves a common hash. One of fewer than K leaves none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise

from autograder.similarity.normalise import Symbol

K = 12
"""Symbols in a row: about two short lines."""
W = 4
"""Hashes in a window: a common passage of K + W - 1 symbols is always found."""


def passages(symbols: Sequence[Symbol], k: int = K) -> list[tuple[int, int, int]]:
    """Return (hash, first line, last line) of every `k` symbols in a row.

    Fewer symbols than `k` have one hash of all of them, so that short functions count too.
    """
    if not symbols:
        return []
    texts = [symbol.text for symbol in symbols]
    found = []
    for start in range(max(1, len(symbols) - k + 1)):
        part = symbols[start : start + k]
        lines = [symbol.line for symbol in part]
        found.append((_hash(texts[start : start + k]), min(lines), max(lines)))
    return found


def winnow(hashes: Sequence[int], w: int = W) -> set[int]:
    """Return the positions of the hashes to keep: in each window the last smallest one."""
    if len(hashes) <= w:
        return {max(range(len(hashes)), key=lambda i: (-hashes[i], i))} if hashes else set()
    return {
        max(range(start, start + w), key=lambda i: (-hashes[i], i))
        for start in range(len(hashes) - w + 1)
    }


def _hash(texts: Sequence[str]) -> int:
    data = "\0".join(texts).encode("utf-8", "replace")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


def joined(lines: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return sorted ranges of lines, with touching ranges joined into one."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(lines):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    assert all(a[1] < b[0] for a, b in pairwise(found))
    return found
