"""A linear layer over K ranks: cut by outputs (column parallel) or by inputs (row parallel).

The names come from the block matrices in Y = X A, in which A has a column for each output:

    column parallel     Y = X [A₁ A₂] = [X A₁  X A₂]           each rank has some of the outputs
    row parallel        Y = [X₁ X₂] [A₁; A₂] = X₁ A₁ + X₂ A₂   each rank has a term of all of them

and backward, with dY the gradient of Y:

    column parallel     dA_r = Xᵀ dY_r          dX = Σ_r dY_r A_rᵀ      (a sum over the ranks: f)
    row parallel        dA_r = X_rᵀ dY          dX_r = dY A_rᵀ          (the sum was in forward: g)

Take a column-parallel layer, then any function of single elements, then a row-parallel layer. They
need one all-reduce in forward and one in backward, and no rank ever holds the whole wide middle.
(`nn.Linear` keeps Aᵀ: its rows are the outputs. Column parallel cuts `weight` along dimension 0.)

**Wrong:** a bias inside the row-parallel product is added K times. Add it after the sum.

M. Shoeybi et al., "Megatron-LM", 2019, section 3.
"""

import copy
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from course_lib.collectives import Group, place_in
from course_lib.parts import Block, as_part
from course_lib.sharding import shard
from course_lib.tensor_parallel.conjugate import (
    copy_to_ranks,
    gather_from_sequence,
    reduce_from_ranks,
    scatter_to_sequence,
)


class _ParallelLinear(nn.Module):
    """A part of an `nn.Linear`, on this rank. A subclass takes its part and computes with it."""

    _take: Callable[..., None]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        group: Group = None,
        *,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.group, self.sequence_parallel = group, sequence_parallel
        self._take(nn.Linear(in_features, out_features, bias))

    @classmethod
    def from_linear(
        cls, layer: nn.Linear, group: Group = None, *, sequence_parallel: bool = False, **cut: int
    ) -> Self:
        """Return this rank's part of `layer`, which is equal on all ranks.

        With `together`, so many consecutive outputs (column parallel) or inputs (row parallel) stay
        on one rank (a head). For column parallel, `blocks` equal blocks of outputs (3 for queries,
        keys and values) are cut one by one. Both are 1 if they are not given.
        """
        with torch.device("meta"):  # draws no random numbers
            part = cls(1, 1, False, group, sequence_parallel=sequence_parallel)
        part._take(layer, **cut)
        return part


class ColumnParallelLinear(_ParallelLinear):
    """`nn.Linear(in_features, out_features)` of which this rank computes its `shard` of outputs.

    It takes X, shape (…, in_features), equal on all ranks, and returns (…, outputs of this rank),
    about out_features / K. With `sequence_parallel` it takes this rank's part of the tokens, shape
    (part, …, in_features). Then the whole sequence must have been cut by `shard`, and `forward`
    needs its length.

    Construct it with the same arguments and the same random numbers on all ranks: then its parts
    together are one `nn.Linear`. Its weights and their gradients know that they are parts: clip
    with `clip_grad_norm_` of `parts`.

    Attributes:
        weight: shape (outputs of this rank, in_features).
        bias: shape (outputs of this rank,), or None.

    """

    def _take(self, layer: nn.Linear, blocks: int = 1, together: int = 1) -> None:
        rank, world_size = place_in(self.group)

        def own_part(tensor: Tensor, name: str) -> nn.Parameter:
            units = [_in_units(block, together) for block in tensor.detach().chunk(blocks)]
            parts = [shard(block, world_size, rank).flatten(0, 1) for block in units]
            label = f"{type(self).__name__}.{name}"
            return as_part(torch.cat(parts), Block, tensor, self.group, label)

        self.weight = own_part(layer.weight, "weight")
        self.bias = None if layer.bias is None else own_part(layer.bias, "bias")

    def forward(self, x: Tensor, length: int | None = None) -> Tensor:
        """Return this rank's outputs; `length` is the number of tokens, along the sequence."""
        if not self.sequence_parallel:
            x = copy_to_ranks(x, self.group)
        elif length is None:
            raise ValueError("with sequence_parallel, forward needs length, the number of tokens")
        else:
            x = gather_from_sequence(x, length, self.group)
        return linear(x, self.weight, self.bias)


class RowParallelLinear(_ParallelLinear):
    """`nn.Linear(in_features, out_features)` of which this rank has its `shard` of inputs.

    It takes the output of a column-parallel layer, shape (…, inputs of this rank), and returns the
    sum over the ranks, (…, out_features), equal on all of them. With `sequence_parallel` it returns
    this rank's part of the tokens, along dimension 0. Then the gradient of `bias` comes from these
    tokens only, and `sum_partial_gradients` must add up the ranks' gradients.

    Attributes:
        weight: shape (out_features, inputs of this rank).
        bias: shape (out_features,), equal on all ranks, or None.

    """

    def _take(self, layer: nn.Linear, together: int = 1) -> None:
        rank, world_size = place_in(self.group)
        units = _in_units(layer.weight.detach().t(), together)
        columns = shard(units, world_size, rank).flatten(0, 1).t()
        # A copy: a view would keep the memory of the whole matrix.
        own_block = columns.clone(memory_format=torch.contiguous_format)
        label = f"{type(self).__name__}.weight"
        self.weight = as_part(own_block, Block, layer.weight, self.group, label)
        self.bias = None if layer.bias is None else copy.deepcopy(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's outputs for all tokens or for this rank's tokens."""
        partial = linear(x, self.weight)
        combine = scatter_to_sequence if self.sequence_parallel else reduce_from_ranks
        total = combine(partial, self.group)
        return total if self.bias is None else total + self.bias


def column_parallel(linear: nn.Linear, group: Group = None) -> nn.Module:
    """Return this rank's part of `linear`, cut by outputs: shape (…, in) → (…, its outputs).

    Every rank of `group` has the same `linear`, which is neither changed nor kept. Backward takes
    one all-reduce, of the gradient of x; forward takes none.
    """
    return ColumnParallelLinear.from_linear(linear, group)


def row_parallel(linear: nn.Linear, group: Group = None) -> nn.Module:
    """Return this rank's part of `linear`, cut by inputs: shape (…, its inputs) → (…, out).

    Every rank of `group` has the same `linear`, which is neither changed nor kept. Forward takes
    one all-reduce, of the output; backward takes none. The bias is whole, and is added once.
    """
    return RowParallelLinear.from_linear(linear, group)


def _in_units(tensor: Tensor, together: int) -> Tensor:
    """Return `tensor`, shape (n, …), in the shape (n / together, together, …)."""
    return tensor.reshape(len(tensor) // together, together, *tensor.shape[1:])
