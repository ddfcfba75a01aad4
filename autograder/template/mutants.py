"""Wrong solutions that people write, and right ones that differ from ours."""

import torch
import torch.distributed as dist

from course_lib.checking.mutants import VIRTUAL, Mutant, edits_of, fails, passes


@passes
def rotate__both_begun_then_waited_for(x, group=None):
    k, me = dist.get_world_size(group), dist.get_rank(group)
    if k == 1:
        return x.clone()
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    handles = [
        dist.isend(x.contiguous(), group=group, group_dst=(me + 1) % k),
        dist.irecv(received, group=group, group_src=(me - 1) % k),
    ]
    for handle in handles:
        handle.wait()
    return received


rotate__both_begun_then_waited_for_edited = edits_of(
    rotate__both_begun_then_waited_for,
    Mutant(
        "wrong_direction",
        "the direction is wrong",
        """
        dist.isend(x.contiguous(), group=group, group_dst=(me + 1) % k),
        dist.irecv(received, group=group, group_src=(me - 1) % k),
        """,
        """
        dist.isend(x.contiguous(), group=group, group_dst=(me - 1) % k),
        dist.irecv(received, group=group, group_src=(me + 1) % k),
        """,
    ),
    Mutant("ignores_the_group", "pass group=group to every call", "k, me", "group = None; k, me"),
    Mutant("does_not_wait", "never waits for the handle", "handle.wait()", "pass", VIRTUAL),
    Mutant("one_alone_returns_its_input", "shares memory with x", "return x.clone()", "return x"),
    Mutant("through_float32", "dtype", "k, me =", "x = x.float(); k, me ="),
    Mutant(
        *("drops_what_is_not_finite", "has an inf or a NaN"),
        *("return received", "return received.nan_to_num()"),
    ),
    Mutant(
        "imports_the_reference",
        "course_lib.collectives",
        "k, me =",
        "__import__('importlib').import_module('course_lib.collectives'); k, me =",
        ("grader",),
    ),
)


@fails("expected at most", VIRTUAL)
def rotate__one_after_the_other(x, group=None):
    k, me = dist.get_world_size(group), dist.get_rank(group)
    x = x.contiguous()
    received = x.clone()
    for rank in range(k if k > 1 else 0):
        if rank == me:
            dist.send(x, group=group, group_dst=(me + 1) % k)
        if rank == (me - 1) % k:
            dist.recv(received, group=group, group_src=rank)
    return received


@fails("this task allows")
def rotate__gathers_all(x, group=None):
    every = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, x, group=group)
    return every[dist.get_rank(group) - 1]
