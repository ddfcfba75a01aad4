"""Forty mistakes that students make on four ranks, and the error that each must raise.

They are the same on every kind of ranks: `error` is the class of the exception, `words` are words
of the cause that its report must name.
"""

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from course_lib.ranks import DeadlockError, MismatchError, RankError, RankTimeout

DDP = nn.parallel.DistributedDataParallel


@dataclass(frozen=True)
class Bug:
    """One mistake."""

    fn: Callable[[], Any]
    what: str
    error: type[Exception]
    words: tuple[str, ...]


BUGS: list[Bug] = []


def bug(what, error, *words):
    """Put a program into the list."""

    def add(fn: Callable[[], Any]) -> Callable[[], Any]:
        BUGS.append(Bug(fn, what, error, words))
        return fn

    return add


def here() -> tuple[int, int, int, int]:
    rank, k = dist.get_rank(), dist.get_world_size()
    return rank, k, (rank + 1) % k, (rank - 1) % k


# Messages ------------------------------------------------------------------------------------


@bug("all send to the right before anyone receives", DeadlockError, "All of them send first")
def all_send_first() -> None:
    rank, _, right, left = here()
    dist.send(torch.full((3,), float(rank)), right)
    dist.recv(torch.empty(3), left)


@bug("all receive before anyone sends", DeadlockError, "All of them receive first")
def all_receive_first() -> None:
    rank, _, right, left = here()
    dist.recv(torch.empty(3), left)
    dist.send(torch.full((3,), float(rank)), right)


@bug("send and receive both to the left", DeadlockError, "Rank 3 did send, but to rank 2")
def wrong_neighbour() -> None:
    rank, _, _, left = here()
    request = dist.isend(torch.full((3,), float(rank)), left)
    dist.recv(torch.empty(3), left)
    request.wait()


@bug("the tags of send and receive differ", DeadlockError, "with tag 1, not 2")
def wrong_tag() -> None:
    rank, _, right, left = here()
    request = dist.isend(torch.full((3,), float(rank)), right, tag=1)
    dist.recv(torch.empty(3), left, tag=2)
    request.wait()


@bug("a receive whose sender has ended", DeadlockError, "ended without sending")
def nobody_sends() -> None:
    if dist.get_rank() == 1:
        dist.recv(torch.empty(3), 3)


@bug("a send whose receiver has ended", DeadlockError, "ended without receiving")
def nobody_receives() -> None:
    if dist.get_rank() == 1:
        dist.send(torch.ones(3), 3)


@bug("an isend that nobody receives", DeadlockError, "Rank 1 sent 1 message to rank 3")
def never_received() -> None:
    if dist.get_rank() == 1:
        dist.isend(torch.ones(3), 3)


@bug("one more send than receives", DeadlockError, "Rank 0", "rank 1")
def one_send_too_many() -> None:
    for _ in range(3 - dist.get_rank()):
        if dist.get_rank() == 0:
            dist.send(torch.ones(3), 1)
        elif dist.get_rank() == 1:
            dist.recv(torch.empty(3), 0)


@bug("the last rank sends to rank K", RankError, "Rank 3 raised ValueError", "send to rank 4")
def peer_out_of_range() -> None:
    rank, _, _, _ = here()
    if rank == 3:
        dist.send(torch.ones(3), rank + 1)


@bug("rank 0 receives from rank -1", RankError, "Rank 0 raised ValueError", "rank -1")
def negative_peer() -> None:
    if dist.get_rank() == 0:
        dist.recv(torch.empty(3), dist.get_rank() - 1)


@bug("a rank sends to itself", RankError, "Rank 2 raised ValueError", "the same as the rank")
def sends_to_itself() -> None:
    if dist.get_rank() == 2:
        dist.send(torch.ones(3), 2)


@bug("the receiver's buffer has another size", MismatchError, "sends 3 elements", "as 4 elements")
def other_message_size() -> None:
    if dist.get_rank() == 0:
        dist.send(torch.ones(3), 2)
    elif dist.get_rank() == 2:
        dist.recv(torch.empty(4), 0)


@bug("the receiver's buffer has another dtype", MismatchError, "of float32", "of int32")
def other_message_dtype() -> None:
    if dist.get_rank() == 0:
        dist.send(torch.ones(3), 2)
    elif dist.get_rank() == 2:
        dist.recv(torch.empty(3, dtype=torch.int32), 0)


@bug("a column of a matrix is sent as it is", RankError, "Rank 0 raised ValueError", "contiguous")
def not_contiguous() -> None:
    matrix = torch.arange(12.0).reshape(3, 4)
    if dist.get_rank() == 0:
        dist.send(matrix[:, 1], 1)
    elif dist.get_rank() == 1:
        dist.recv(torch.empty(3), 0)


# Collectives ---------------------------------------------------------------------------------


@bug("one rank skips an all_reduce", DeadlockError, "rank 2 never called", "#1")
def one_skips() -> None:
    if dist.get_rank() != 2:
        dist.all_reduce(torch.ones(3))


@bug("the ranks loop unequally often", DeadlockError, "ranks 1, 2, 3 never called", "#3")
def uneven_loops() -> None:
    for _ in range(3 if dist.get_rank() == 0 else 2):
        dist.all_reduce(torch.ones(3))


@bug("a barrier on rank 0 only", DeadlockError, "barrier #1", "ranks 1, 2, 3 never called")
def barrier_on_rank_0() -> None:
    if dist.get_rank() == 0:
        dist.barrier()


@bug("broadcast on one rank, all_reduce on the others", MismatchError, "broadcast", "all_reduce")
def other_collective() -> None:
    if dist.get_rank() == 2:
        dist.broadcast(torch.ones(3), src=0)
    else:
        dist.all_reduce(torch.ones(3))


@bug("two collectives in another order", MismatchError, "broadcast", "all_reduce")
def other_order() -> None:
    x, y = torch.ones(3), torch.ones(3)
    if dist.get_rank() == 1:
        dist.broadcast(y, src=0)
        dist.all_reduce(x)
    else:
        dist.all_reduce(x)
        dist.broadcast(y, src=0)


@bug("all_reduce of another shape", MismatchError, "3 elements", "4 elements")
def other_shape() -> None:
    dist.all_reduce(torch.ones(3 + (dist.get_rank() == 2)))


@bug("all_reduce of another dtype", MismatchError, "int32", "float32")
def other_dtype() -> None:
    dist.all_reduce(torch.ones(3, dtype=torch.int32 if dist.get_rank() == 2 else torch.float32))


@bug("broadcast from another root", MismatchError, "root=0", "root=1")
def other_root() -> None:
    dist.broadcast(torch.ones(3), src=int(dist.get_rank() == 2))


@bug("all_reduce with another operation", MismatchError, "max", "sum")
def other_reduction() -> None:
    op = dist.ReduceOp.MAX if dist.get_rank() == 2 else dist.ReduceOp.SUM
    dist.all_reduce(torch.ones(3), op=op)


@bug("gather without a list on the root", RankError, "Rank 0 raised ValueError", "gather_list")
def gather_without_list() -> None:
    dist.gather(torch.ones(3), None, dst=0)


@bug("scatter of too short a list", RankError, "Rank 0 raised", "4")
def short_scatter_list() -> None:
    parts = [torch.ones(2)] * 3 if dist.get_rank() == 0 else None
    dist.scatter(torch.empty(2), parts, src=0)


@bug("all_gather into too short a list", RankError, "raised", "4")
def short_gather_list() -> None:
    dist.all_gather([torch.empty(3)] * 3, torch.ones(3))


@bug("all_reduce of a number", RankError, "raised TypeError", "Tensor")
def reduces_a_number() -> None:
    dist.all_reduce(3.0)


@bug("wait() on a collective that was not async", RankError, "NoneType", "wait")
def waits_for_nothing() -> None:
    dist.all_reduce(torch.ones(3)).wait()


# Process groups ------------------------------------------------------------------------------


@bug("new_group on its members only", DeadlockError, "new_group")
def group_on_members_only() -> None:
    if dist.get_rank() < 2:
        group = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(3), group=group)


@bug("groups made in another order", MismatchError, "new_group")
def groups_in_another_order() -> None:
    rank = dist.get_rank()
    halves = ([0, 1], [2, 3]) if rank < 2 else ([2, 3], [0, 1])
    groups = [dist.new_group(half) for half in halves]
    dist.all_reduce(torch.ones(3), group=groups[0])


@bug("two groups used in another order", DeadlockError, "same order", "group 1", "group 2")
def crossed_groups() -> None:
    a, b = dist.new_group([0, 1, 2, 3]), dist.new_group([0, 1, 2, 3])
    for group in (a, b) if dist.get_rank() == 0 else (b, a):
        dist.all_reduce(torch.ones(1), group=group)


@bug("send in a group that the peer is not in", RankError, "Rank 0 raised", "not part of group")
def outside_the_group() -> None:
    group = dist.new_group([0, 1])
    if dist.get_rank() == 0:
        dist.send(torch.ones(1), 3, group=group)


# Exceptions, ends and loops ------------------------------------------------------------------


@bug("an exception on one rank", RankError, "Rank 2 raised KeyError", "lost", "waits in all_reduce")
def one_raises() -> None:
    if dist.get_rank() == 2:
        raise KeyError("lost")
    dist.all_reduce(torch.ones(3))


def raises(where: str) -> Callable[..., None]:
    def hook(*_: object) -> None:
        raise ValueError(where)

    return hook


@bug("an exception in forward, under DDP", RankError, "Rank 1 raised ValueError: in forward")
def fails_in_forward() -> None:
    layer = nn.Linear(4, 4)
    if dist.get_rank() == 1:
        layer.register_forward_hook(raises("in forward"))
    DDP(layer)(torch.ones(2, 4)).sum().backward()


@bug("an exception in backward, under DDP", RankError, "Rank 1 raised ValueError: in backward")
def fails_in_backward() -> None:
    y = DDP(nn.Linear(4, 4))(torch.ones(2, 4))
    if dist.get_rank() == 1:
        y.register_hook(raises("in backward"))
    y.sum().backward()


@bug("one rank has a batch less, under DDP", DeadlockError, "all_reduce", "rank 3", "ended")
def uneven_batches() -> None:
    model = DDP(nn.Linear(4, 4))
    for _ in range(3 - (dist.get_rank() == 3)):
        model(torch.ones(2, 4)).sum().backward()


@bug("models that differ, under DDP", RankError, "raised RuntimeError", "shape")
def models_differ() -> None:
    DDP(nn.Linear(4, 4 + (dist.get_rank() == 2)))


@bug("a parameter without gradient, under DDP", RankError, "RuntimeError", "finished reduction")
def unused_parameter() -> None:
    layer = nn.Linear(4, 4)
    layer.unused = nn.Linear(4, 4)
    model = DDP(layer)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()


@bug("recursion without an end", RankError, "Rank 0 raised RecursionError")
def endless_recursion() -> None:
    def again() -> None:
        again()

    if dist.get_rank() == 0:
        again()
    dist.barrier()


@bug("sys.exit on one rank", RankError, "Rank 3 raised SystemExit", "waits in barrier")
def exits() -> None:
    if dist.get_rank() == 3:
        sys.exit(1)
    dist.barrier()


@bug("a loop without an end", RankTimeout, "Rank 1 is computing, sleeping or looping", "barrier #1")
def endless_loop() -> None:
    while dist.get_rank() == 1:
        pass
    dist.barrier()


def uses_a_lock(lock: Any) -> None:
    with lock:
        dist.barrier()


a_lock_in_the_function = bug(
    "a lock in the function", TypeError, "the function", "cannot be sent", "lock"
)(partial(uses_a_lock, threading.Lock()))


@bug(
    "a result that cannot be sent",
    RankError,
    "raised TypeError: the result (generator) cannot be sent back",
)
def returns_a_generator() -> Any:
    return (x for x in range(3))


# The bugs of which a watched job of ``torchrun`` is not told; the page says why.
NOT_UNDER_TORCHRUN = (
    "a loop without an end",
    "a lock in the function",
    "a result that cannot be sent",
)
