"""The tape of one rank: its computations and messages, as data that anybody can replay.

A tape is a list of lines about *buffers*, pieces of memory with a number each:

    ["o", name, args, kwargs, outs]   an operator; `outs` are its results
    ["c", number, kind, puts, gets, members, group, peer, op, tag, where]
                                      an operation of torch.distributed begins
    ["w", number]                     the rank waits for that operation
    ["k", buffer, nbytes, bytes, where]   a constant: numbers that no operator made
    ["s", generator, seed]            a generator of random numbers is seeded
    ["f", buffer, …]                  memory that has been freed

A tensor is written as ``["t", buffer, offset, size, stride, dtype]``. A view is only a different
name for the same memory, so it needs no line. Buffers 0, 1, … exist from the start: the rows, the
labels, the weights.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

MAX_LINES = 400_000
"""The most lines of one rank's tape."""
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8),
    *(torch.int16, torch.int32, torch.int64, torch.bool),
)


class TapeError(Exception):
    """A tape cannot contain what a rank did, or cannot be played; the message explains why."""


@dataclass
class Tape:
    """The work of one rank.

    Attributes:
        lines: the lines of the tape, in the form that this module's docstring describes.
        weights: the tensors that hold the trained weights at the end.
        claimed: the bytes that the rank says it has sent; -1 if it gives no such number.

    """

    lines: list[list[Any]] = field(default_factory=list)
    weights: list[list[Any]] = field(default_factory=list)
    claimed: int = -1

    def encode(self) -> Tensor:
        """Return the tape as bytes, uint8.

        Raises:
            TapeError: the tape is too long.

        """
        if len(self.lines) > MAX_LINES:
            raise TapeError(
                f"a tape can hold {MAX_LINES:,} operators and messages, got {len(self.lines):,}"
            )
        text = json.dumps([self.lines, self.weights, self.claimed], separators=(",", ":"))
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)

    @classmethod
    def decode(cls, data: Any) -> Tape:
        """Return the tape from the bytes that `encode` returned.

        Raises:
            TapeError: the data are not a tape.

        """
        try:
            assert isinstance(data, Tensor) and data.dtype == torch.uint8 and data.dim() == 1
            lines, weights, claimed = json.loads(bytes(data.numpy().data))
            assert isinstance(lines, list) and len(lines) <= MAX_LINES
            assert isinstance(weights, list) and type(claimed) is int and abs(claimed) < 2**63
        except (AssertionError, ValueError, TypeError, RecursionError):
            raise TapeError("a rank returned something that is not a tape") from None
        return cls(lines, weights, claimed)
