"""Random-k: k randomly drawn elements, whose positions do not have to be sent.

    >>> from course_lib.compression import RandomK
    >>> payload = RandomK(0.01, seed=7).encode(gradient)  # the same seed on every rank

    C(x)_i = x_i if i was drawn, else 0         ‖x‖² (1 - k/n) left out, on average

All ranks draw the same positions from the same seed, so they send no indices. Because all ranks
send the same positions, *one ordinary all-reduce of k numbers can sum their values*. The payloads
of top-k cannot be summed. If the values are scaled by n/k, they are right on average, but have a
variance:

    E C(x) = x,     E‖C(x) - x‖² = (n/k - 1) ‖x‖²

The scale enlarges the vector, so use it *without* `ErrorFeedback`; with `ErrorFeedback`, leave it
out.

In a long tensor, elements are drawn in runs of 256 neighbours: one random number draws a run, and
memory is read in whole cache lines. Every element is still drawn with probability k/n, as the
formulas need.

S. U. Stich et al., "Sparsified SGD with Memory", NeurIPS 2018; J. Konečný et al., "Federated
Learning: Strategies for Improving Communication Efficiency", 2016.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Hashable

import torch
from torch import Tensor
from torch.nn import functional as F

from course_lib.compression.payload import (
    Compressor,
    Payload,
    Shape,
    as_vector,
    elements,
    section,
    verify_density,
)

RUN = 256
"""Elements that are drawn together, in tensors of `LONG` elements or more."""
LONG = 1 << 16


class RandomK(Compressor):
    """Elements at random positions, which all ranks know.

    Args:
        density: k/n, above 0 and up to 1; at least one element is sent.
        seed: the same on all ranks, or they would sum elements of different positions.
        unbiased: scale by n/k. Do not use it together with `ErrorFeedback`.

    Attributes:
        draws: how many tensors of each key were encoded. Every draw differs from the last one. It
            is the same on all ranks that have encoded equally often.

    """

    linear = True
    memory = ("draws",)

    def __init__(self, density: float, seed: int = 0, unbiased: bool = False) -> None:
        verify_density(density)
        self.density = density
        self.seed = seed
        self.unbiased = unbiased
        self.draws: Counter[Hashable] = Counter()

    def nbytes(self, shape: Shape) -> int:
        """Return four bytes for each drawn value; the last run, if drawn, is padded with zeros."""
        numel = elements(shape)
        drawn, _, run = self._counts(numel)
        return 4 * drawn * run

    def encode(self, tensor: Tensor, key: Hashable = None) -> Payload:
        """Return the values at the positions of this draw."""
        x = as_vector(tensor)
        places = self._places(x.numel(), key, self.draws[key]).to(x.device)
        self.draws[key] += 1
        drawn, runs, run = self._counts(x.numel())
        full_runs = x[: x.numel() // run * run].view(-1, run)
        if runs == len(full_runs):
            values = full_runs[places]
        else:  # the last run is not whole; on a GPU, checking whether it was drawn would wait
            tail = F.pad(x[full_runs.numel() :], (0, runs * run - x.numel()))
            inside = full_runs[places.clamp(max=len(full_runs) - 1)]
            values = torch.where((places == runs - 1)[:, None], tail, inside)
        if self.unbiased and drawn:
            values = values * (runs / drawn)
        return Payload(values.reshape(-1).view(torch.uint8), tensor.shape, tensor.dtype, places)

    def decode_into(self, payload: Payload, out: Tensor, add: bool = False) -> None:
        """As `Compressor.decode_into`: zeros, except for the values at the payload's positions.

        With `add`, only these positions are changed.
        """
        drawn, runs, run = self._counts(out.numel())
        values = section(payload.wire, 0, payload.nbytes, torch.float32).view(drawn, run)
        values, places = values.to(out.dtype), payload.agreed
        if not add:
            out.zero_()
        full_runs = out[: out.numel() // run * run].view(-1, run)
        if runs > len(full_runs):  # as in `encode`
            last = (places == runs - 1)[:, None]
            out[full_runs.numel() :] += torch.where(last, values, 0).sum(0)[: out.numel() % run]
            values, places = torch.where(last, 0, values), places.clamp(max=len(full_runs) - 1)
        full_runs.index_add_(0, places, values)

    def sum_over(
        self, tensor: Tensor, key: Hashable, all_reduce: Callable[[Tensor], object]
    ) -> tuple[Tensor, Tensor]:
        """Sum the values, which all ranks take from the same positions."""
        payload = self.encode(tensor.float(), key)
        own_part = self.decode(payload)
        if payload.nbytes:
            all_reduce(payload.wire.view(torch.float32))
        return self.decode(payload), own_part

    def _counts(self, numel: int) -> tuple[int, int, int]:
        """Return the number of drawn runs, the number of all runs, and the elements per run."""
        run = RUN if numel >= LONG else 1
        runs = -(-numel // run)
        return min(runs, max(1, round(self.density * runs))), runs, run

    def _places(self, numel: int, key: Hashable, draw: int) -> Tensor:
        """Return which runs are drawn, without repetition; the same on every rank."""
        drawn, runs, _ = self._counts(numel)
        # Not hash(): the hash of a string differs from process to process.
        digest = hashlib.sha256(f"{self.seed}/{key!r}/{draw}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        return torch.randperm(runs, generator=generator)[:drawn]
