"""Point to point: messages between two ranks, from which every collective is built.

    >>> from course_lib.collectives import exchange
    >>> exchange(outgoing, right, incoming, left)  # both at the same time

`torch.distributed` offers `send` and `recv`, which wait, and `isend` and `irecv`, which return a
handle to wait for. Every algorithm must handle the following four difficulties. They are handled
here, so that the algorithms (`rooted`, `ring`, `all_reduce`) do not have to mention them:

- **A send waits for its receive.** On GPUs it always does. With gloo it waits only for large
  messages, so a program can pass its tests and hang in production. When all ranks of a ring first
  `send` and then `recv`, they wait for one another for ever. `exchange` does both at once.
- **Ranks have two numbers.** In a process group of the ranks (4, 5, 7), rank 5 is also number 1 of
  3. Algorithms use the number inside the group. Roots are given as global ranks, as in PyTorch.
- **Tensors are not always contiguous.** A transposed matrix cannot be sent or cut into chunks as it
  is in memory. `flat_in_place` provides a vector and copies the result back.
- **Wait for a handle only once.** With gloo, a second `wait` of a send never returns.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None
"""A process group; None stands for all ranks."""


def place_in(group: Group) -> tuple[int, int]:
    """Return `(rank, world_size)`: this rank's number in `group`, and how many members it has.

    Raises ValueError if this rank is not a member, and if there is no process group at all.
    """
    if not dist.is_initialized():
        raise ValueError(
            "there is no process group: run this on ranks (Ranks(4).run(fn), or torchrun), "
            "or call torch.distributed.init_process_group(…) first"
        )
    if group is None:
        return dist.get_rank(), dist.get_world_size()
    if not isinstance(group, dist.ProcessGroup):  # new_group gives a number to the others
        raise ValueError(
            f"rank {dist.get_rank()} is not a member of this group: call this function only on "
            "the group's members"
        )
    return group.rank(), group.size()


def root_in(group: Group, root: int) -> int:
    """Return the number in `group` of the global rank `root`.

    Raises ValueError if `root` is not a member.
    """
    members = dist.get_process_group_ranks(group)
    if root not in members:
        raise ValueError(
            f"the root, rank {root}, is not a member of this group, which has the ranks {members}"
        )
    return members.index(root)


@contextmanager
def flat_in_place(tensor: Tensor) -> Iterator[Tensor]:
    """Provide `tensor`, of any shape and strides, as a vector of shape (numel,) to write to.

    If the tensor is contiguous, the vector is a view and costs nothing. If it is not, the vector is
    a copy, which is written back at the end. Autograd does not record these writes.

    Raises TypeError if the tensor is sparse, ValueError if elements share memory (`expand`).
    """
    if tensor.is_sparse:
        raise TypeError("sparse tensors cannot be cut into chunks: send tensor.to_dense()")
    tensor = tensor.detach()
    as_it_lies = not (tensor.is_conj() or tensor.is_neg())  # else conj or neg is not applied yet
    if tensor.is_contiguous() and as_it_lies:
        yield tensor.view(-1)
        return
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    if any(stride == 0 and size > 1 for stride, size in dims):
        raise ValueError(
            "an expanded tensor keeps one number for many elements: send tensor.clone()"
        )
    # flatten() would return a strided vector as it is.
    flat = tensor.resolve_conj().resolve_neg().contiguous().view(-1)
    yield flat
    tensor.copy_(flat.view(tensor.shape))


def exchange(outgoing: Tensor, to: int, incoming: Tensor, source: int, group: Group = None) -> None:
    """Send `outgoing` to rank `to` and receive `incoming` from rank `source`, at the same time.

    Both are contiguous, of any shape. `incoming` is overwritten, and has the length and dtype of
    the tensor that `source` sends. Ranks are numbered inside `group`. If sending and receiving do
    not slow each other down, this takes α + n/β seconds, with latency α (s), bandwidth β (bytes/s)
    and n the bytes of the larger message. One after the other, they would take twice as long.

    Raises ValueError if this rank is not in `group`.
    """
    for work in dist.batch_isend_irecv(pair_of(outgoing, to, incoming, source, group)):
        work.wait()


def pair_of(
    outgoing: Tensor, to: int, incoming: Tensor, source: int, group: Group = None
) -> list[dist.P2POp]:
    """Return the two operations of an `exchange`, for `dist.batch_isend_irecv`."""
    receive = dist.P2POp(dist.irecv, incoming, group=group, group_peer=source)
    send = dist.P2POp(dist.isend, outgoing, group=group, group_peer=to)
    # NCCL launches the pair together. If a backend runs them one by one and in order, the ranks
    # must not all begin with a send: so only ranks that send to a higher rank send first.
    return [send, receive] if place_in(group)[0] < to else [receive, send]


def rotate(tensor: Tensor, group: Group = None) -> Tensor:
    """Return the left neighbour's tensor: rank r gets that of rank r - 1, and rank 0 the last one.

    All ranks of `group` have a tensor of one shape and dtype, with any strides. The result is
    contiguous and in new memory. This takes α + n/β seconds: one step of a ring.
    """
    rank, world_size = place_in(group)
    outgoing = tensor.detach().contiguous()
    if world_size == 1:
        return outgoing.clone()
    incoming = torch.empty_like(outgoing)
    exchange(outgoing, (rank + 1) % world_size, incoming, (rank - 1) % world_size, group)
    return incoming


def start_send(tensor: Tensor, to: int, group: Group = None) -> dist.Work:
    """Begin to send `tensor` to rank `to` of `group`; do not change it before `.wait()`.

    The tensor is contiguous, of any shape. Only members may call: see `place_in`.
    """
    return _started(dist.isend(tensor, group=group, group_dst=to))


def start_recv(tensor: Tensor, source: int, group: Group = None) -> dist.Work:
    """Begin to receive `tensor` from rank `source` of `group`; it is filled after `.wait()`.

    The tensor is contiguous, with the length and dtype of the sent one. Only members may call.
    """
    return _started(dist.irecv(tensor, group=group, group_src=source))


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "isend or irecv returned no handle: this rank is not in the group"
    return work
