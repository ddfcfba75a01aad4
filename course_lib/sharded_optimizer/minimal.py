"""ZeRO-1 in one page: all parameters are one vector, and each rank updates a chunk of it.

    >>> from course_lib.sharded_optimizer import sharded_optimizer
    >>> step = sharded_optimizer(model.parameters(), lambda own: torch.optim.AdamW(own, lr=1e-3))
    >>> for x, y in loader:                     # each rank's own shard
    ...     model.zero_grad()
    ...     loss_fn(model(x), y).backward()
    ...     step()

The n numbers of all parameters lie one after the other. Zeros are added until K divides their
count, and rank r owns chunk r of ⌈n/K⌉ numbers. With f the rule of the optimizer and s its state,

    g = chunk r of 1/K Σ_k g_k         reduce-scatter
    w, s = f(w, g, s)                  on rank r, for its chunk only
    weights = chunks 0, …, K-1         all-gather, written into the parameters

It is right for parameters of one dtype and device, and for optimizers that treat each number by
itself. `ShardedOptimizer` has no such conditions on the parameters, needs no copies, and has a
state_dict.

S. Rajbhandari et al., "ZeRO", SC 2020, section 5.1.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from course_lib.collectives import Group, place_in

MakeOptimizer = Callable[[list[Tensor]], torch.optim.Optimizer]


def sharded_optimizer(
    params: Iterable[Tensor], make_optimizer: MakeOptimizer, group: Group = None
) -> Callable[[], None]:
    """Return ``step()``: it averages gradients, updates this rank's chunk and gathers the weights.

    Args:
        params: parameters, equal on all ranks. Frozen ones are left out; a tied one, which occurs
            several times, counts once.
        make_optimizer: makes an optimizer for a list of tensors; it is called once, with this
            rank's chunk of the weights, shape (⌈n/K⌉,).
        group: the process group; None for all ranks. All of its ranks must call ``step()``.

    A gradient that is None counts as zeros, so momentum and weight decay still act.

    """
    rank, world_size = place_in(group)
    trained = [param for param in dict.fromkeys(params) if param.requires_grad]
    sizes = [param.numel() for param in trained]
    length = -(-sum(sizes) // world_size)

    def as_vector(tensors: Sequence[Tensor]) -> Tensor:
        vector = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        return pad(vector, (0, world_size * length - len(vector)))

    chunk = nn.Parameter(as_vector(trained).tensor_split(world_size)[rank].clone())
    optimizer = make_optimizer([chunk])

    @torch.no_grad()
    def step() -> None:
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        shares = (as_vector(gradients) / world_size).tensor_split(world_size)
        chunk.grad = torch.empty_like(chunk)
        dist.reduce_scatter(chunk.grad, list(shares), group=group)
        optimizer.step()
        chunks = [torch.empty_like(chunk.detach()) for _ in range(world_size)]
        dist.all_gather(chunks, chunk.detach(), group=group)
        weights = torch.split(torch.cat(chunks)[: sum(sizes)], sizes)
        for param, weight in zip(trained, weights, strict=True):
            param.copy_(weight.view_as(param))

    return step
