"""The two halves of a transformer layer over K ranks: MLP and attention.

    MLP         x  → f → column parallel → gelu → row parallel → g →  y
    attention   x  → f → heads of this rank: q, k, v → softmax → row parallel → g →  y

Each half needs one all-reduce in forward (g) and one in backward (f). So a layer needs 4, each of
an activation of tokens × width numbers. The computation needs their results, so it cannot hide
them. This is why tensor parallelism stays inside a node.

The heads of attention are independent. So the columns of the projections are cut in such a way that
whole heads stay together, and no rank needs the heads of a different rank.

Along the sequence (`sequence_parallel`) x and y are this rank's tokens, and f and g become an
all-gather and a reduce-scatter. They send the same bytes, but a rank holds only 1/K of the
activations between blocks.

M. Shoeybi et al., "Megatron-LM", 2019; V. Korthikanti et al., MLSys 2023.
"""

from typing import cast

from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from course_lib.collectives import Group, place_in
from course_lib.sharding import shard
from course_lib.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear


class ParallelMLP(nn.Module):
    """gelu(x A) B, with `hidden` units in the middle, about hidden / K of them on each rank.

    It takes and returns the shape (…, width), equal on all ranks. With `sequence_parallel` it takes
    and returns this rank's tokens, shape (part, …, width). Construct it with the same arguments and
    the same random numbers on all ranks.
    """

    def __init__(
        self, width: int, hidden: int, group: Group = None, *, sequence_parallel: bool = False
    ) -> None:
        super().__init__()
        options = {"sequence_parallel": sequence_parallel}
        self.enter = ColumnParallelLinear(width, hidden, True, group, **options)
        self.leave = RowParallelLinear(hidden, width, True, group, **options)

    def forward(self, x: Tensor, length: int | None = None) -> Tensor:
        """Return the block's outputs; `length` is the number of tokens, along the sequence."""
        return cast(Tensor, self.leave(gelu(self.enter(x, length))))


class ParallelAttention(nn.Module):
    """Self-attention with `heads` heads, of which this rank computes its `shard`.

    It takes and returns the shape (tokens, batch, width), with the sequence first, so that it can
    be cut. With `sequence_parallel` these are this rank's tokens. Every token sees all tokens.
    Construct it with the same arguments and the same random numbers on all ranks. If there are
    fewer heads than ranks, some ranks have nothing to do.

    Raises ValueError if `heads` does not divide `width`.
    """

    def __init__(
        self, width: int, heads: int, group: Group = None, *, sequence_parallel: bool = False
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"heads={heads} does not divide width={width}")
        rank, world_size = place_in(group)
        self.heads = len(shard(range(heads), world_size, rank))
        self.size = width // heads
        options = {"sequence_parallel": sequence_parallel}
        qkv, out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        # Queries, keys and values are each cut between heads.
        self.enter = ColumnParallelLinear.from_linear(
            qkv, group, blocks=3, together=self.size, **options
        )
        self.leave = RowParallelLinear.from_linear(out, group, together=self.size, **options)

    def forward(self, x: Tensor, length: int | None = None) -> Tensor:
        """Return the block's outputs; `length` is the number of tokens, along the sequence."""
        projected = self.enter(x, length)
        tokens, batch, _ = projected.shape
        # (tokens, batch, 3 · heads · size) → three of (batch, heads, tokens, size)
        apart = projected.view(tokens, batch, 3, self.heads, self.size).permute(2, 1, 3, 0, 4)
        queries, keys, values = apart.unbind()
        attended = scaled_dot_product_attention(queries, keys, values)
        return cast(Tensor, self.leave(attended.permute(2, 0, 1, 3).flatten(2)))
