"""Measure how similar the solutions of a class are by shared fingerprints; rare ones weigh more.

First, the content of the released notebook is removed from every solution. A passage that half of
the class wrote proves little, because there are not many ways to write a short function. So a
fingerprint in d of n solutions weighs log(n/d), like a word in a search engine (inverse document
frequency). The similarity of two solutions is the weight that they share:
2 w(A ∩ B) / (w(A) + w(B) + c). The constant c is the weight of two fingerprints that only these two
solutions have. So solutions that share only passages that everybody wrote are not similar.

Fingerprints are found by winnowing. It keeps few hashes of a text, such that texts with a common
passage share a hash. Every K symbols in a row have a hash, and the smallest hash in every window of
W hashes is kept. Each common passage of at least K + W - 1 symbols leaves a common hash. A passage
of fewer than K symbols leaves none. See Schleimer, Wilkerson, Aiken, "Winnowing: local algorithms
for document fingerprinting", SIGMOD 2003.

Two maintained tools also use winnowing offline. copydetect (Python) weighs all passages alike. So
in an assignment of short functions, common ways to write them count as much as rare ones. Dolos
needs Node. Neither tool reads notebooks cell by cell, so the course has this module.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from autograder.similarity.normalise import Symbol, normalise

_FEW = 4
"""Smallest number of fingerprints; a solution with fewer fingerprints is too short to compare."""


@dataclass
class Solution:
    """One student's code: cells by their names, and the positions of each kept fingerprint."""

    student: str
    cells: Mapping[str, str]
    prints: dict[int, list[tuple[str, int, int]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Pair:
    """Two solutions that share something.

    Attributes:
        alike: 2 w(A ∩ B) / (w(A) + w(B) + c), from 0 to 1.
        shared: number of shared fingerprints.
        rare: number of shared fingerprints that nobody else has.
        left, right: cell → ranges of lines that are shared.

    """

    first: str
    second: str
    alike: float
    shared: int
    rare: int
    left: Mapping[str, Sequence[tuple[int, int]]]
    right: Mapping[str, Sequence[tuple[int, int]]]


@dataclass
class Comparison:
    """The pairs, the most alike first, and the median of this class."""

    pairs: list[Pair]
    compared: int
    median: float
    too_short: list[str]


def read_solution(student: str, cells: Mapping[str, str], released: set[int]) -> Solution:
    """Return a solution with its fingerprints, without those of the released notebook."""
    solution = Solution(student, cells)
    for name, source in cells.items():
        for statement in normalise(source):
            own = [found for found in passages(statement) if found[0] not in released]
            for position in winnow([found[0] for found in own]):
                hashed, first, last = own[position]
                solution.prints.setdefault(hashed, []).append((name, first, last))
    return solution


def hashes_of(cells: Sequence[str]) -> set[int]:
    """Return every hash of the released cells, kept by winnowing or not."""
    return {found[0] for source in cells for part in normalise(source) for found in passages(part)}


def compare(
    solutions: Sequence[Solution],
    *,
    top: int = 30,
    at_least: float = 0.5,
    progress: Callable[[str], None] = lambda told: None,
) -> Comparison:
    """Return the pairs that are most alike.

    Args:
        solutions: the solutions of the class.
        top: largest number of pairs.
        at_least: leave out pairs that are less alike.
        progress: called with lines of progress.

    """
    short = [each.student for each in solutions if len(each.prints) < _FEW]
    long = [each for each in solutions if len(each.prints) >= _FEW]
    if len(long) < 2:
        return Comparison([], len(long), 0.0, short)
    columns = {hashed: i for i, hashed in enumerate(sorted({h for s in long for h in s.prints}))}
    has = np.zeros((len(long), len(columns)), dtype=np.float32)
    for row, each in enumerate(long):
        has[row, [columns[hashed] for hashed in each.prints]] = 1
    count = has.sum(0)
    # With only two solutions, every shared fingerprint is in both, so all weigh the same.
    weight = np.log((len(long) + 1) / count) if len(long) > 2 else np.ones(len(columns))
    constant = 2 * np.log((len(long) + 1) / 2) if len(long) > 2 else 2.0
    progress(f"comparing {len(long) * (len(long) - 1) // 2} pairs …")
    weighted = has * weight
    total = weighted.sum(1)
    alike = 2 * (weighted @ has.T) / (total[:, None] + total[None, :] + constant)
    rows, others = np.triu_indices(len(long), 1)
    values = alike[rows, others]
    best = np.argsort(-values, kind="stable")[:top]
    pairs = [
        _pair(long[rows[i]], long[others[i]], float(values[i]), columns, count)
        for i in best
        if values[i] >= at_least
    ]
    return Comparison(pairs, len(long), float(np.median(values)), short)


def _pair(
    first: Solution,
    second: Solution,
    alike: float,
    columns: Mapping[int, int],
    count: np.ndarray[tuple[int, ...], np.dtype[np.float32]],
) -> Pair:
    shared = first.prints.keys() & second.prints.keys()
    rare = sum(count[columns[hashed]] == 2 for hashed in shared)
    return Pair(
        *(first.student, second.student, min(1.0, alike), len(shared), int(rare)),
        *(_lines(solution, shared) for solution in (first, second)),
    )


def _lines(solution: Solution, shared: set[int]) -> dict[str, list[tuple[int, int]]]:
    found: dict[str, list[tuple[int, int]]] = {}
    for hashed in shared:
        for name, first, last in solution.prints[hashed]:
            found.setdefault(name, []).append((first, last))
    return {name: joined(lines) for name, lines in found.items()}


K = 12
"""Number of symbols in a row that have a hash: about two short lines."""
W = 4
"""Number of hashes in a window. A common passage of K + W - 1 symbols is always found."""


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
    """Return the positions of the hashes to keep: in each window, the last of the smallest."""
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
