"""Checksums: check whether the replicas still hold the same bits, and which rank differs.

    >>> from course_lib.compare import compare_replicas
    >>> model = torch.nn.Linear(4, 1)
    >>> compare_replicas(model) is None  # one rank agrees with itself
    True

In data parallelism all ranks hold the same weights, averaged gradients and optimizer state, bit for
bit. So a rank that once computes a wrong number in them differs from the others. It stays
different, because nothing copies weights from one rank to another. The checksum of a tensor is the
sum of its elements, read as integers,

    c = sum_i int(x_i)   mod 2^64

A flip of bit b changes c by 2^b, so one flip is always detected. (Two flips may cancel. A sum or a
norm of the floating-point numbers would lose small changes in its rounding.) Each rank sends 8
bytes for each tensor, in one all-gather. A first one, of 8 bytes, shows whether all ranks have
tensors of the same names; if a rank lacks one, names are sent as well.

A wrong number *before* the all-reduce, in an activation or in a rank's own gradient, is averaged
into all replicas. The replicas stay equal, so no comparison of replicas can detect it. To detect
it, a part of the step must be computed twice. Megatron-LM compares hashes of the replicas' weights
(``check_param_hashes_across_dp_replicas``); torchtitan computes the first part of a step twice and
compares hashes of the gradients (``sdc_replay``).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from course_lib.compare.differences import named
from course_lib.parts import GradientElsewhere, LocalGradient

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element → the integers that have the same bits."""


@dataclass
class Disagreement:
    """Replicas that are not equal.

    Attributes:
        name: the first tensor that differs, or that a rank lacks, in the order of a step:
            gradients, state, weights.
        ranks: the ranks that differ from the majority. All ranks if no value is held by more ranks
            than any other, because then the wrong ones are unknown.

    """

    name: str
    ranks: list[int]
    world_size: int

    def __str__(self) -> str:
        if len(self.ranks) < self.world_size:
            right = self.world_size - len(self.ranks)
            return f"{self.name} differs on {named(self.ranks)} from the {right} others."
        return (
            f"{self.name} differs between {named(self.ranks)}, and no majority tells which of them "
            "is wrong."
        )


def checksum(tensor: Tensor) -> Tensor:
    """Return the sum of the elements of this rank's part, read as integers: one int64."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    local = local.detach().as_subclass(Tensor)  # a part of a whole refuses to be summed
    local = torch.view_as_real(local) if local.is_complex() else local
    return local.view(_INTEGERS[local.element_size()]).sum(dtype=torch.int64)


def compare_replicas(
    model: nn.Module, optimizer: Optimizer | None = None, group: dist.ProcessGroup | None = None
) -> Disagreement | None:
    """Return where the replicas differ, the same on all ranks; None if they are equal bit for bit.

    Call it after ``optimizer.step()``, on all ranks of `group`, every n-th step, and before writing
    a checkpoint. Buffers are not compared, because ranks may have their own. If weights are
    sharded, `group` must have the ranks that hold the same shard.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    sums = {name: checksum(tensor) for name, tensor in _replicated(model, optimizer)}
    device = next(model.parameters()).device  # Adam counts its steps on the CPU
    digest = hashlib.sha256(repr(list(sums)).encode()).digest()
    labels = _from_all(torch.tensor([int.from_bytes(digest[:7], "big")], device=device), group)
    everyone: list[dict[str, int]] = [{} for _ in labels]
    if any(label != labels[0] for label in labels):
        dist.all_gather_object(everyone, {name: int(c) for name, c in sums.items()}, group)
    else:
        received = _from_all(torch.stack([c.to(device) for c in sums.values()]), group)
        everyone = [dict(zip(sums, numbers, strict=True)) for numbers in received]
    # A name begins with gradient, state or weight: in the alphabet as in a step.
    names = dict.fromkeys(name for numbers in everyone for name in numbers)
    in_order = sorted(names, key=lambda name: name.split()[0])
    held = {name: [numbers.get(name) for numbers in everyone] for name in names}
    first = next((name for name in in_order if len(set(held[name])) > 1), None)
    if first is None:
        return None
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    sums_of_ranks = held[first]
    (right, count), (_, second_count), *_ = Counter(sums_of_ranks).most_common()
    clear = count > second_count
    suspects = [r for r, c in zip(ranks, sums_of_ranks, strict=True) if c != right or not clear]
    return Disagreement(first, suspects, len(ranks))


def _from_all(numbers: Tensor, group: dist.ProcessGroup | None) -> list[list[int]]:
    gathered = [torch.empty_like(numbers) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, numbers, group=group)
    received: list[list[int]] = torch.stack(gathered).tolist()
    return received


def _replicated(model: nn.Module, optimizer: Optimizer | None) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that all replicas share, in the order in which a step computes them."""
    params = list(model.named_parameters())
    for name, param in params:
        is_local = isinstance(param.grad, LocalGradient | GradientElsewhere)
        if param.grad is not None and not is_local:  # a rank's own gradient is no replica
            yield f"gradient of {name}", param.grad
    for name, param in params:
        state = optimizer.state.get(param, {}) if optimizer else {}
        for key, value in state.items():
            if isinstance(value, Tensor):
                yield f"state {key} of {name}", value
    for name, param in params:
        yield f"weight {name}", param


def flip_bit(tensor: Tensor, bit: int, index: int = 0) -> None:
    """Flip a bit of element `index` of the flat tensor, in place; bit 0 is the mantissa's lowest.

    In float32, bits 0 to 22 are the mantissa, 23 to 30 the exponent, and 31 is the sign.
    """
    bits = tensor.detach().view(_INTEGERS[tensor.element_size()]).view(-1)
    bits[index] ^= torch.ones_like(bits[index]) << bit
