"""Equal states: all replicas start from the same numbers, and keep the same buffers.

    >>> from course_lib.ddp import broadcast_module_states, verify_same_model
    >>> verify_same_model(model)  # else an error names what differs
    >>> broadcast_module_states(model)  # every rank then holds rank 0's parameters and buffers

Averaged gradients keep replicas equal only if they *start* equal. The same seed on every rank is
not enough. If one rank draws one more random number, or only rank 0 loads a checkpoint, the ranks
train K different models with one another's gradients, and no error says so. So rank 0's parameters
*and buffers* (running statistics, position tables) are broadcast at the start. Before that, the
models must have the same parameters. If ranks broadcast or summed parameters of different shapes,
the backend would crash, hang, or mix up numbers. `verify_same_model` names the difference.

Gradients do not keep *buffers* equal, such as BatchNorm's statistics: every rank computes them from
its own batches. Before the next forward, the first rank broadcasts its buffers to all ranks.
"""

import hashlib
from collections.abc import Collection, Iterable, Sequence
from itertools import zip_longest
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.bucketing import assign_buckets
from course_lib.collectives import Group, place_in

T = TypeVar("T", bound=Tensor)

BROADCAST_MB = 250
"""MiB of one broadcast: few messages, but not a second copy of a large model in memory."""


@torch.no_grad()
def broadcast_tensors(tensors: Sequence[Tensor], source: int = 0, group: Group = None) -> None:
    """Copy the tensors of rank `source` of `group` into everyone's, in place, packed together.

    The tensors are dense, with the same shapes and dtypes on all ranks. `source` is a number inside
    the group; all members must call, and no other rank. It takes one broadcast per dtype, device
    and `BROADCAST_MB`.
    """
    buckets = assign_buckets(tensors, BROADCAST_MB, BROADCAST_MB, range(len(tensors)))
    for indices in buckets:
        # .data: autograd does not see this write. A forward may have saved a buffer for a later
        # backward. If that backward needs its numbers (BatchNorm in training does not), it gets the
        # source's, as with PyTorch's DDP.
        members = [tensors[i].data for i in indices]
        flat = torch.cat([member.flatten() for member in members])
        # As bytes, because not every backend sends every dtype (for example bool).
        dist.broadcast(flat.view(torch.uint8), group=group, group_src=source)
        pieces = torch.split(flat, [member.numel() for member in members])
        for member, piece in zip(members, pieces, strict=True):
            member.copy_(piece.view(member.shape))


def named_parameters(
    module: nn.Module, ignored: Collection[str] = ()
) -> list[tuple[str, nn.Parameter]]:
    """Return pairs of name and parameter, without parameters whose names are all in `ignored`.

    A tied parameter is one parameter, and appears once, under its first name that is not ignored.
    """
    return _each_once(module.named_parameters(remove_duplicate=False), ignored)


def named_buffers(module: nn.Module, ignored: Collection[str] = ()) -> list[tuple[str, Tensor]]:
    """Return pairs of name and buffer, in the same way as `named_parameters`."""
    return _each_once(module.named_buffers(remove_duplicate=False), ignored)


def _each_once(pairs: Iterable[tuple[str, T]], ignored: Collection[str]) -> list[tuple[str, T]]:
    names: dict[T, str] = {}
    for name, tensor in pairs:
        if name not in ignored:
            names.setdefault(tensor, name)
    return [(name, tensor) for tensor, name in names.items()]


def broadcast_module_states(
    module: nn.Module, source: int = 0, group: Group = None, ignored: Collection[str] = ()
) -> None:
    """Give all ranks the parameters and buffers of the module on rank `source` of `group`.

    It works in place, as `broadcast_tensors`. Call `verify_same_model` before, to check that the
    modules match. Parameters and buffers named in `ignored` are not changed.
    """
    states = [*named_parameters(module, ignored), *named_buffers(module, ignored)]
    broadcast_tensors([tensor for _, tensor in states if tensor.numel()], source, group)


def verify_same_model(
    module: nn.Module, group: Group = None, ignored: Collection[str] = ()
) -> None:
    """Check that the ranks have the same parameters and buffers: by name, shape, dtype and order.

    A parameter must also be frozen on all ranks or on none. Names in `ignored` are not compared.
    All ranks must call. It costs one small all-gather of a digest; only if the digests differ, the
    ranks also exchange descriptions. Raises RuntimeError on every rank, naming the first tensor
    that differs, and ValueError if this rank is not in `group`.
    """
    _, world_size = place_in(group)
    if world_size == 1:
        return
    own_description = _description(module, ignored)
    digest = hashlib.sha256(repr(own_description).encode()).digest()
    device = next((param.device for param in module.parameters()), torch.device("cpu"))
    # Seven bytes of the digest fit an int64, and are enough.
    local = torch.tensor([int.from_bytes(digest[:7], "big")], device=device)
    everyone = [torch.empty_like(local) for _ in range(world_size)]
    dist.all_gather(everyone, local, group=group)
    if len({int(value) for value in everyone}) == 1:
        return
    descriptions: list[list[str]] = [[] for _ in range(world_size)]
    dist.all_gather_object(descriptions, own_description, group=group)
    other = next(r for r in range(world_size) if descriptions[r] != descriptions[0])
    pairs = zip_longest(descriptions[0], descriptions[other], fillvalue="nothing more")
    first, second = next(pair for pair in pairs if pair[0] != pair[1])
    ranks = dist.get_process_group_ranks(group)
    raise RuntimeError(
        f"the ranks have different models: rank {ranks[0]} has {first}, where rank {ranks[other]} "
        f"has {second}. Build the same model on every rank. (DDP expects same model across all "
        "ranks.)"
    )


def _description(module: nn.Module, ignored: Collection[str]) -> list[str]:
    """Return what must be equal, in the order of the module."""
    described = []
    for name, param in named_parameters(module, ignored):
        state = "" if param.requires_grad else ", frozen"
        described.append(f"parameter '{name}' {tuple(param.shape)} {param.dtype}{state}")
    for name, buffer in named_buffers(module, ignored):
        described.append(f"buffer '{name}' {tuple(buffer.shape)} {buffer.dtype}")
    return described
