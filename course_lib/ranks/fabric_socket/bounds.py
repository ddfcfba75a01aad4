"""How much a fabric carries for ranks in other processes, before it says that it is too much."""

from __future__ import annotations

from dataclasses import dataclass


class OverBoundError(Exception):
    """A rank wants more than a fabric carries; the message says of what, and how much there is."""


@dataclass(frozen=True)
class Bounds:
    """Of one run: but for `frame` and `text`, of all its ranks together, each with an equal share.

    Attributes:
        frame: bytes of a frame.
        held: bytes of operations that are not over, and of frames that have not wholly come or
            gone.
        open: operations whose end the rank that has posted them has not seen.
        operations: in all.
        frames: that the ranks send.
        groups: that the ranks introduce, each rank its own.
        text: characters of a group's name and of a line of code: the end of a longer one is kept.

    """

    frame: int = 1 << 28
    held: int = 1 << 34
    open: int = 160_000
    operations: int = 100_000_000
    frames: int = 200_000_000
    groups: int = 16_384
    text: int = 4096

    def shared_by(self, world_size: int) -> Bounds:
        """Return what each of so many ranks may have."""
        shares = {name: max(1, getattr(self, name) // world_size) for name in _SENTENCES}
        return Bounds(frame=self.frame, text=self.text, **shares)

    def expect(self, what: str, number: int) -> None:
        """Raise `OverBoundError` if `number` of `what` is more than there may be."""
        most: int = getattr(self, what)
        if number > most:
            raise OverBoundError(
                f"{_SENTENCES[what].format(number)}; here a rank may have {most:,}"
            )


LOOSE = Bounds()
"""For ranks that are run for their own user."""

_SENTENCES = {
    "held": "with its next message it has {:,} bytes under way at once",
    "open": "with its next operation it has {:,} that it has not waited for",
    "operations": "with its next operation it has started {:,}",
    "frames": "with its next question it has asked the network {:,} things",
    "groups": "with its next process group it has {:,}",
}
