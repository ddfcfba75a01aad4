"""Random-k: k elements drawn by lot; their places need not be sent.

    >>> from course_lib.compression import RandomK
    >>> payload = RandomK(0.01, seed=7).encode(gradient)  # the same seed on every rank

    C(x)_i = x_i if i was drawn, else 0         ‖x‖² (1 - k/n) left out, on average

All ranks draw the same places from the same seed, so they send no index. Because all send the same
places, *their values can be summed on the way*: by one ordinary all-reduce of k numbers. The
payloads of top-k cannot be summed. If the values are scaled by n/k, they are right on average, but
have a variance:

    E C(x) = x,     E‖C(x) - x‖² = (n/k - 1) ‖x‖²

The scale enlarges the vector, so use it *without* `ErrorFeedback`; with `ErrorFeedback`, leave it
out.

In a long tensor, elements are drawn in runs of 256 neighbours: one random number draws a run, and
memory is read in whole lines. Every element is still drawn with probability k/n, as the formulas
need.

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
    CompressorInPlace,
    Payload,
    Shape,
    as_vector,
    elements,
    forget,
    section,
)

RUN = 256
"""Elements that are drawn together, in tensors of `LONG` elements or more."""
LONG = 1 << 16


class RandomK(CompressorInPlace):
    """Elements in random places, which all ranks know.

    Args:
        density: k/n, above 0 and up to 1; at least one element is sent.
        seed: the same on all ranks, or they would sum what does not belong together.
        unbiased: scale by n/k. Not together with `ErrorFeedback`.

    Attributes:
        draws: how many tensors of each key were encoded. Every draw is another one, and the same on
            ranks that have encoded equally often.

    """

    linear = True

    def __init__(self, density: float, seed: int = 0, unbiased: bool = False) -> None:
        if not 0 < density <= 1:
            raise ValueError(
                f"density, the share that is sent, must be above 0 and up to 1, not {density}"
            )
        self.density = density
        self.seed = seed
        self.unbiased = unbiased
        self.draws: Counter[Hashable] = Counter()

    def nbytes(self, shape: Shape) -> int:
        """Four bytes for each value drawn; the last run, if drawn, is filled up with zeros."""
        numel = elements(shape)
        drawn, _, run = self._counts(numel)
        return 4 * drawn * run

    def encode(self, tensor: Tensor, key: Hashable = None) -> Payload:
        """Return the values in the places of this draw."""
        x = as_vector(tensor)
        places = self._places(x.numel(), key, self.draws[key]).to(x.device)
        self.draws[key] += 1
        drawn, runs, run = self._counts(x.numel())
        whole = x[: x.numel() // run * run].view(-1, run)
        if runs == len(whole):
            values = whole[places]
        else:  # the last run is not whole; on a GPU, asking whether it was drawn would wait
            tail = F.pad(x[whole.numel() :], (0, runs * run - x.numel()))
            inside = whole[places.clamp(max=len(whole) - 1)]
            values = torch.where((places == runs - 1)[:, None], tail, inside)
        if self.unbiased and drawn:
            values = values * (runs / drawn)
        return Payload(values.reshape(-1).view(torch.uint8), tensor.shape, tensor.dtype, places)

    def decode_into(self, payload: Payload, out: Tensor, add: bool = False) -> None:
        """As `Compressor.decode_into`: zeros, and the values in the places of the payload's draw.

        To add, only these places are touched.
        """
        drawn, runs, run = self._counts(out.numel())
        values = section(payload.wire, 0, payload.nbytes, torch.float32).view(drawn, run)
        values, places = values.to(out.dtype), payload.agreed
        if not add:
            out.zero_()
        whole = out[: out.numel() // run * run].view(-1, run)
        if runs > len(whole):  # as in `encode`
            last = (places == runs - 1)[:, None]
            out[whole.numel() :] += torch.where(last, values, 0).sum(0)[: out.numel() % run]
            values, places = torch.where(last, 0, values), places.clamp(max=len(whole) - 1)
        whole.index_add_(0, places, values)

    def sum_over(
        self, tensor: Tensor, key: Hashable, all_reduce: Callable[[Tensor], object]
    ) -> tuple[Tensor, Tensor]:
        """Sum the values: those of all ranks are from the same places."""
        payload = self.encode(tensor.float(), key)
        mine = self.decode(payload)
        if payload.nbytes:
            all_reduce(payload.wire.view(torch.float32))
        return self.decode(payload), mine

    def forget(self, key: Hashable) -> None:
        """Begin to count the draws of `key` anew."""
        forget(self.draws, key)

    def _counts(self, numel: int) -> tuple[int, int, int]:
        """Return how many runs are drawn, of how many, and how many elements each has."""
        run = RUN if numel >= LONG else 1
        runs = -(-numel // run)
        return min(runs, max(1, round(self.density * runs))), runs, run

    def _places(self, numel: int, key: Hashable, draw: int) -> Tensor:
        """Return which runs are drawn, without repetition; the same on every rank."""
        drawn, runs, _ = self._counts(numel)
        # Not hash(): that of a string differs from process to process.
        digest = hashlib.sha256(f"{self.seed}/{key!r}/{draw}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        return torch.randperm(runs, generator=generator)[:drawn]
