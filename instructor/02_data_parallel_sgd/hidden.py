"""Cases that are never handed out and never enter a sandbox."""

# ruff: noqa: B006 - a default that is kept from call to call is one of the mistakes

import torch
import torch.distributed as dist

from course_lib.checking.testing import Candidate


def in_one_message(params, group=None):
    with_gradient = [param for param in params if param.grad is not None]
    if not with_gradient:
        return
    # With several dtypes, the message has one that can hold them all.
    flat = torch.cat([param.grad.flatten() for param in with_gradient])
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
    pieces = flat.split([param.numel() for param in with_gradient])
    for param, piece in zip(with_gradient, pieces, strict=True):
        param.grad = piece.view_as(param).to(param.dtype)


def in_place(params, group=None):
    for param in params:
        if param.grad is not None:
            dist.all_reduce(param.grad, group=group)
            param.grad /= dist.get_world_size(group)


def keeps_zeros(params, group=None):
    for param in params:
        if param.grad is not None:
            mean = param.grad.clone()
            dist.all_reduce(mean, group=group)
            if param.grad.any():
                param.grad = mean / dist.get_world_size(group)


def gives_zeros_to_the_frozen(params, group=None):
    for param in params:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        dist.all_reduce(param.grad, group=group)
        param.grad /= dist.get_world_size(group)


def one_per_shape(params, group=None):
    means = {}
    for param in params:
        if param.grad is not None:
            if param.shape not in means:
                dist.all_reduce(param.grad, group=group)
                means[param.shape] = param.grad / dist.get_world_size(group)
            param.grad = means[param.shape].clone()


def adds_to_the_last_call(params, group=None, state={}):
    for i, param in enumerate(params):
        if param.grad is not None:
            dist.all_reduce(param.grad, group=group)
            param.grad /= dist.get_world_size(group)
            before = state.get(i)
            if before is not None and before.shape == param.grad.shape:
                param.grad += before
            state[i] = param.grad.clone()


def only_once(params, group=None, calls=[]):
    for param in params:
        if param.grad is not None:
            mean = param.grad.clone()
            dist.all_reduce(mean, group=group)
            if not calls:
                param.grad = mean / dist.get_world_size(group)
    calls.append(True)


K, SUM = "dist.get_world_size(group)", "dist.all_reduce(param.grad, group=group)"
TO_ONE = "dist.reduce(param.grad, group=group, group_dst=0)"
FROM_ONE = "dist.broadcast(param.grad, group=group, group_src=0)"
# Every part of the points has right solutions, here or in checks.py, or a test that refuses
# everything would get it.
CANDIDATES = [
    Candidate(in_one_message, "sends all gradients in one message", "every rank", right=True),
    Candidate(in_place, "averages in place", "every call", right=True),
    Candidate(in_place, "always divides by 2", "the mean", edits=((f"/= {K}", "/= 2"),)),
    Candidate(in_place, "divides twice", "the mean", edits=((SUM, f"param.grad /= {K}\n{SUM}"),)),
    Candidate(in_place, "changes nothing", "every rank", edits=((SUM, "return"),)),
    Candidate(in_place, "gives the mean to one rank only", "every rank", edits=((SUM, TO_ONE),)),
    Candidate(
        *(in_place, "gives all ranks the gradients of one of them", "every rank"),
        edits=((SUM, FROM_ONE), (f"param.grad /= {K}", "pass")),
    ),
    Candidate(keeps_zeros, "leaves gradients alone that are all zero", "every gradient"),
    Candidate(
        *(in_place, "cuts off large gradients", "every gradient"),
        edits=((f"param.grad /= {K}", f"param.grad /= {K}\nparam.grad.clamp_(-10, 10)"),),
    ),
    Candidate(gives_zeros_to_the_frozen, "gives frozen parameters a gradient", "every gradient"),
    Candidate(one_per_shape, "confuses gradients of the same shape", "every gradient"),
    Candidate(adds_to_the_last_call, "keeps something from the call before", "every call"),
    Candidate(only_once, "works only in its first call", "every call"),
]

# The other tasks draw their hidden cases from the class's secret seed.
HIDDEN = {"is_right": tuple(candidate.case() for candidate in CANDIDATES)}

# Modules with the answers to this assignment: they cannot be imported while it is graded.
MASKED = ("course_lib.sharding",)
