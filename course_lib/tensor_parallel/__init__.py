"""Tensor parallelism: a matrix is divided over several ranks, and each multiplies its block.

    >>> from course_lib.tensor_parallel import ParallelMLP
    >>> _ = torch.manual_seed(0)  # the same on all ranks: each keeps its part of one model
    >>> mlp = ParallelMLP(8, 32)
    >>> result = mlp(torch.ones(2, 5, 8)).detach()  # equal on all ranks

Read in this order:

- `conjugate`: collectives that autograd can differentiate, in pairs
- `linear`: Y = X Aᵀ, with A cut into rows of outputs or columns of inputs
- `blocks`: MLP and attention with one collective in forward and one in backward

M. Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
Parallelism", 2019; V. Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models", MLSys 2023 (along the sequence).
"""

from course_lib.tensor_parallel.blocks import ParallelAttention, ParallelMLP
from course_lib.tensor_parallel.conjugate import (
    copy_to_ranks,
    gather_from_sequence,
    reduce_from_ranks,
    scatter_to_sequence,
    sum_partial_gradients,
)
from course_lib.tensor_parallel.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    column_parallel,
    row_parallel,
)
