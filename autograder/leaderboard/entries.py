"""Entries of a leaderboard: the result of each submission, and their order."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from autograder.files import write_whole

TIMED, UNFINISHED, DISQUALIFIED, FAILED = "timed", "unfinished", "disqualified", "failed"
ORDER = (TIMED, UNFINISHED, DISQUALIFIED, FAILED)


@dataclass(frozen=True)
class Entry:
    """One submission on the board.

    Attributes:
        name: the student's name.
        digest: digest of everything that determines the entry; if it is the same, so is the entry.
        status: ``timed``; ``unfinished`` if it missed the target; ``disqualified`` if it did
            something that is not allowed; ``failed`` if there is nothing to time.
        note: the reason for the status, in a sentence.
        seconds: the score, in virtual seconds.
        loss: the worst loss over the draws.
        sent: bytes sent by the rank that sends most.
        gradients: number of gradients that rank 0 computed.
        computed: virtual seconds that the busiest rank computes.
        light: the least possible time for its operations and bytes (its speed of light), in
            seconds.
        ran_out: the limit in seconds that its code exceeded; 0 if it did not.
        place: its place on the board, from 1; 0 if it has none. Equal scores share a place.

    """

    name: str
    digest: str
    status: str
    note: str = ""
    seconds: float = 0.0
    loss: float = 0.0
    sent: int = 0
    gradients: int = 0
    computed: float = 0.0
    light: float = 0.0
    ran_out: float = 0.0
    place: int = 0

    @property
    def distance(self) -> float:
        """The entry's time divided by its speed of light."""
        return self.seconds / self.light if self.light else float("inf")


def ranked(entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries in the board's order, with their places."""
    order = sorted(entries, key=_key)
    timed = [entry.seconds for entry in order if entry.status == TIMED]
    return [
        replace(entry, place=1 + timed.index(entry.seconds) if entry.status == TIMED else 0)
        for entry in order
    ]


def _key(entry: Entry) -> tuple[int, float, int, str]:
    by = {TIMED: entry.seconds, UNFINISHED: entry.loss}.get(entry.status, 0.0)
    return ORDER.index(entry.status), by, entry.sent, entry.name


class Store:
    """The known entries, kept in a file from which an interrupted board continues.

    Args:
        path: the file. It contains the seed of the draws, which nobody else should read.
        seed: the seed to use for a new file.

    Attributes:
        seed: the seed of the draws on which all entries are timed.
        entries: the entries by name.

    """

    def __init__(self, path: Path, seed: str) -> None:
        self._path = path
        self.seed = seed
        self.entries: dict[str, Entry] = {}
        if path.is_file():
            try:
                told = json.loads(path.read_text(encoding="utf-8"))
                self.seed = str(told["seed"])
                self.entries = {each["name"]: Entry(**each) for each in told["entries"]}
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(
                    f"{path} cannot be read as a leaderboard ({type(error).__name__}: {error}). "
                    "To delete this file, draw a new seed and time all entries again, add --again"
                ) from None

    def known(self, name: str, digest: str, seconds: float) -> Entry | None:
        """Return the entry, unless it has changed, or ran out of time and has more time now."""
        entry = self.entries.get(name)
        if entry is None or entry.digest != digest or 0 < entry.ran_out < seconds:
            return None
        return entry

    def keep(self, entry: Entry) -> None:
        """Write the file with this entry and all others."""
        self.entries[entry.name] = entry
        told = {"seed": self.seed, "entries": [asdict(each) for each in self.entries.values()]}
        write_whole(self._path, json.dumps(told, indent=1))
