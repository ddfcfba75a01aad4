"""The problem: one small transformer, the bytes of Python's documentation, a network and a core.

Every rank draws the same batches, and takes its part of each. Every tenth row is held out: learning
rates are chosen there, and the steps to a target are counted there.

The network is 1 Gb/s Ethernet, and a rank computes 10 GFLOP/s, as one slow core does. On four ranks
a step computes for 3 ms, and a ring needs at least 2.1 ms for its gradients. So neither can be
forgotten. For 29 small tensors, 29 latencies matter as well.
"""

from collections.abc import Iterator
from functools import cache
from itertools import count

import torch
from torch import Tensor, nn

from course_lib.mesh import Shape, next_word_loss, transformer
from course_lib.ranks import Device
from course_lib.ranks.costs import presets
from course_lib.train.datasets import documentation_text

SHAPE = Shape(words=256, length=32, width=32, heads=4, hidden=128, layers=2)
"""42,880 weights in 29 tensors, 171.5 kB of gradients; the words are the bytes of a text."""
ROWS = 16
"""Texts in a global batch, of `SHAPE.length` bytes each."""
WORLD_SIZE = 4
NETWORK = presets.ETHERNET_1
DEVICE = Device(flops=10e9, memory_bandwidth=20e9)
_HELD_OUT = 512


@cache
def texts() -> tuple[Tensor, Tensor]:
    """Return the rows to train on and the held-out rows: 32 bytes to read, and the next of each."""
    text = documentation_text()
    length = SHAPE.length + 1
    rows = text[: len(text) // length * length].view(-1, length).long()
    held_out = torch.arange(len(rows)) % 10 == 0
    return rows[~held_out], rows[held_out]


def batches(seed: int = 0) -> Iterator[Tensor]:
    """Yield global batches without end, (ROWS, length + 1); every epoch has an order of its own."""
    rows, _ = texts()
    for epoch in count(1000 * seed):
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(epoch))
        for batch in order[: len(rows) // ROWS * ROWS].view(-1, ROWS):
            yield rows[batch]


def new_model(seed: int = 0) -> nn.Sequential:
    """Return the model before the first step; it is the same on all ranks."""
    torch.manual_seed(seed)
    return transformer(SHAPE)


@torch.no_grad()
def held_out_loss(model: nn.Module) -> float:
    """Return the mean loss over some held-out rows, in nats per byte."""
    rows = texts()[1][:_HELD_OUT]
    return next_word_loss(model(rows[:, :-1]), rows[:, 1:]).item()
