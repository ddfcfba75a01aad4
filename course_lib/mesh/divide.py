"""Divide the model along each axis: one line per axis.

    model = transformer(shape)                                            one process
    divide_tensors(model, mesh["tensor"])                                 every matrix in T parts
    divide_experts(model, mesh["expert"])                                 E/X experts on each rank
    model = Pipeline(split_layers(model, P), …, group=mesh["pipeline"])   L/P layers on each rank
    …backward…
    average_gradients(model, mesh)                                        D batches at a time

Each line works alone and together with the others, because each axis keeps one rule:

- *tensor*: the inputs and outputs of a block are equal on the ranks of its group;
- *expert*: a rank sends its tokens away inside a block, and has them back at the block's end;
- *pipeline*: a layer takes one tensor and returns one, on any rank;
- *data*: the other axes use the batch of one rank, and never that of a different one.

So D·X ranks hold a weight, and D ranks hold the weight of an expert. These ranks average its
gradient. The gradient of an expert is already the mean over the batches of the X ranks that sent
tokens to it. With T·P·X·D ranks, a rank holds about

    Ψ / (T P)  of the dense weights          Ψ_experts / (T P X)  of the experts'

M. Shoeybi et al., "Megatron-LM", 2019; D. Narayanan et al., SC 2021; D. Lepikhin et al., "GShard",
ICLR 2021.
"""

import torch
import torch.distributed as dist
from torch import nn

from course_lib.collectives import place_in
from course_lib.expert_parallel import ExpertParallel
from course_lib.gradient_sync import sync_flat
from course_lib.mesh.axes import Mesh
from course_lib.mesh.transformer import MLP, Attention, Block, Experts
from course_lib.sharding import shard
from course_lib.tensor_parallel import ColumnParallelLinear, RowParallelLinear


def divide_tensors(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Cut every attention by heads and every MLP by hidden units, in place; keep this rank's part.

    The MLPs of experts are cut too. `model` must be equal on all ranks of `group`. Embedding,
    norms, router and readout stay whole, and equal.
    """
    rank, world_size = place_in(group)
    for module in model.modules():
        if isinstance(module, Attention):
            size = module.size  # a head stays on one rank
            module.enter = ColumnParallelLinear.from_linear(
                module.enter, group, blocks=3, together=size
            )
            module.leave = RowParallelLinear.from_linear(module.leave, group, together=size)
            module.heads = len(shard(range(module.heads), world_size, rank))
        elif isinstance(module, MLP):
            module.enter = ColumnParallelLinear.from_linear(module.enter, group)
            module.leave = RowParallelLinear.from_linear(module.leave, group)


def divide_experts(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Keep only this rank's experts, in place; tokens are then sent to their experts."""
    for block in (module for module in model.modules() if isinstance(module, Block)):
        layer = block.feed_forward
        if isinstance(layer, Experts):
            block.feed_forward = ExpertParallel(
                layer.router, list(layer.experts), top_k=layer.top_k, group=group
            )


def average_gradients(model: nn.Module, mesh: Mesh) -> None:
    """Average all gradients over all batches of the mesh. Call it after the last backward or each.

    It takes two all-reduces: one of the experts' gradients along data, and one of all other
    gradients along data×expert.
    """
    experts = [
        param
        for module in model.modules()
        if isinstance(module, ExpertParallel)
        for param in module.experts.parameters()
    ]
    expert_params = set(experts)
    sync_flat(
        [param for param in model.parameters() if param not in expert_params], mesh["data×expert"]
    )
    sync_flat(experts, mesh["data"])


def batch_of(batch: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Return this rank's part, shape (B / (D X), …), of a batch of shape (B, …).

    Ranks that differ along data or expert have different rows. Ranks that differ along pipeline or
    tensor have the same rows. Raises ValueError if D X does not divide B, because the mean of the
    ranks' means would then not be the mean of the batch.
    """
    parts = mesh.sizes["data"] * mesh.sizes["expert"]
    if len(batch) % parts:
        raise ValueError(
            f"a batch of {len(batch)} rows cannot be divided into {parts} equal parts: use a "
            f"multiple of {parts}"
        )
    position = mesh.coordinates["data"] * mesh.sizes["expert"] + mesh.coordinates["expert"]
    return batch.chunk(parts)[position]
