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
)


@fails("may exchange messages only with")
def rotate__gathers_all(x, group=None):
    every = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, x, group=group)
    return every[dist.get_rank(group) - 1]
