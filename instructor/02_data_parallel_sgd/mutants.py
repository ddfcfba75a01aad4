"""Wrong solutions that people write, and right ones that differ from ours."""

# ruff: noqa: B006 - people make the mistake of a default that is kept from call to call

import torch
import torch.distributed as dist

from course_lib.checking.mutants import Mutant, edits_of, fails, passes

# shard_bounds ------------------------------------------------------------------------------


@passes
def shard_bounds__empty_ones_at_0(length, world_size, rank):
    size, leftover = divmod(length, world_size)
    if size == 0 and rank >= leftover:
        return 0, 0
    start = rank * size + min(rank, leftover)
    return start, start + size + (rank < leftover)


shard_bounds__empty_ones_at_0_edited = edits_of(
    shard_bounds__empty_ones_at_0,
    Mutant("numbers_of_numpy", None, "return start,", "return __import__('numpy').int64(start),"),
    Mutant("inclusive_stop", "A stop is not part of its shard", "< leftover)", "< leftover) - 1"),
    Mutant("drops_rest", "to nobody", "divmod(length, world_size)", "length // world_size, 0"),
    Mutant(
        "rest_to_the_last",
        "the first ranks take the extra elements",
        "return start, start + size + (rank < leftover)",
        "return rank * size, length if rank == world_size - 1 else (rank + 1) * size",
    ),
    Mutant("ignores_the_rank", "got '(0,", "start = ", "start = 0 * "),
    Mutant("rounds_up", "empty shard", "divmod(length, world_size)", "-(-length // world_size), 0"),
    Mutant("a_tensor", "two ints", "return start,", "return torch.tensor(start),"),
)


@fails("raised KeyError")
def shard_bounds__goes_on_where_the_last_one_stopped(length, world_size, rank, state={}):
    start = state["stop"] if rank else 0
    state["stop"] = start + length // world_size + (rank < length % world_size)
    return start, state["stop"]


# average_gradients -------------------------------------------------------------------------


@passes
def average_gradients__flat(params, group=None):
    grads = [param.grad for param in params if param.grad is not None]
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
    at = 0
    for grad in grads:
        grad.copy_(flat[at : at + grad.numel()].view_as(grad))
        at += grad.numel()


@fails("waits in recv")
def average_gradients__deadlock(params, group=None):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    for param in params:
        if param.grad is not None and world_size > 1:
            received = torch.empty_like(param.grad, memory_format=torch.contiguous_format)
            dist.recv(received, src=(rank - 1) % world_size, group=group)
            dist.send(param.grad.contiguous(), dst=(rank + 1) % world_size, group=group)
            param.grad = (param.grad + received) / world_size


@passes
def average_gradients__new_tensors(params, group=None):
    world_size = dist.get_world_size(group)
    for param in params:
        if param.grad is not None:
            grad = param.grad.clone()
            dist.all_reduce(grad, group=group)
            param.grad = grad / world_size


average_gradients__new_tensors_edited = edits_of(
    average_gradients__new_tensors,
    Mutant("sum", "the sum over the ranks", "grad / world_size", "grad"),
    Mutant(
        "into_a_flat_copy",
        "what goes into a copy does not reach the tensor",
        "clone()",
        "flatten()",
        also=(("param.grad = grad / world_size", "grad /= world_size"),),
    ),
    Mutant("divides_twice", "by the number of ranks a second time", "clone()", "div(world_size)"),
    Mutant("whole_world", "over all ranks", "=group", "=None", also=(("size(group)", "size()"),)),
    Mutant(
        "exit",
        "process ended",
        "all_reduce",
        "get_rank(group) > 0 and __import__('os')._exit(1); dist.all_reduce",
        ("cpu", "grader"),
    ),
    Mutant(
        "group_of_the_first_call",
        "something is kept from the call before",
        "group=None):",
        "group=None, kept={}):",
        also=(("group=group", "group=kept.setdefault('group', group)"),),
    ),
    Mutant("leaves_zeros", "only zeros on rank 0", "None:", "None and param.grad.any():"),
)


# data_parallel_step ------------------------------------------------------------------------


@passes
def data_parallel_step__shares(model, loss_fn, x, y, lr, group=None):
    count = x.new_tensor(len(x))
    dist.all_reduce(count, group=group)
    model.zero_grad()
    share = loss_fn(model(x), y) * len(x) / count
    share.backward()
    loss = share.detach().clone()
    dist.all_reduce(loss, group=group)
    with torch.no_grad():
        for param in model.parameters():
            dist.all_reduce(param.grad, group=group)
            param -= lr * param.grad
    return loss.item()


data_parallel_step__shares_edited = edits_of(
    data_parallel_step__shares,
    Mutant(
        "a_forward_for_the_loss",
        "buffer 0 after both steps",
        "share.detach().clone()",
        "(loss_fn(model(x), y) * len(x) / count).detach()",
    ),
    Mutant("clips", "large errors", "* param.grad", "* param.grad.clamp(-100, 100)"),
    Mutant("plain_mean", "a shard of few rows", "* len(x) / count", "/ dist.get_world_size(group)"),
    Mutant(
        "clears_after_the_step",
        ".grad is not empty",
        "model.zero_grad()",
        "pass",
        also=(("return loss.item()", "model.zero_grad(); return loss.item()"),),
    ),
    Mutant("never_zeroes", "an older gradient in it", "model.zero_grad()", "pass"),
    Mutant(
        "rows_of_the_first_step",
        "loss returned by step 1",
        "count, group=group)",
        'count, group=group); count = model.__dict__.setdefault("all_rows", count)',
    ),
    Mutant("local_loss", "the result of this rank alone", "loss.", "(share * count / len(x))."),
    Mutant(
        "uses_ddp",
        "4 × broadcast",
        "count = x.new_tensor(len(x))",
        """
        parallel = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
        count = x.new_tensor(len(x))
        """,
        also=(
            ("(model(x), y)", "(parallel(x), y) * dist.get_world_size(group)"),
            ("share.detach().clone()", "share.detach() / dist.get_world_size(group)"),
            ("dist.all_reduce(param.grad, group=group)", ""),
        ),
    ),
    Mutant("in_any_order", "The ranks disagree", "model.parameters()", "set(model.parameters())"),
)


# In the grader and on simulated ranks each rank has a store of its own, where others set nothing.


@fails("expected at least", ["cpu"])
def average_gradients__through_the_store(params, group=None):
    store = dist.distributed_c10d._get_default_store()
    members = dist.get_process_group_ranks(group or dist.group.WORLD)
    for i, param in enumerate(params):
        if param.grad is not None:
            key = f"{members} {i} {param.sum().item()} "
            store.set(key + str(dist.get_rank()), str(param.grad.tolist()))
            gradients = [eval(store.get(key + str(rank)).decode()) for rank in members]
            total = sum(torch.tensor(gradient, dtype=torch.float64) for gradient in gradients)
            param.grad = (total / len(members)).to(param.dtype)


@passes
def data_parallel_step__averages_weights_by_rows(model, loss_fn, x, y, lr, group=None):
    rows = torch.tensor(float(len(x)), dtype=torch.float64)
    dist.all_reduce(rows, group=group)
    share = len(x) / rows.item()
    model.zero_grad()
    loss = loss_fn(model(x), y)
    loss.backward()
    for param in model.parameters():
        moved = ((param.data - lr * param.grad) * share).contiguous()
        dist.all_reduce(moved, group=group)
        param.data.copy_(moved)
    total = loss.detach().double() * share
    dist.all_reduce(total, group=group)
    return total.item()


# is_right ----------------------------------------------------------------------------------


@passes
def is_right__two_calls_each(average):
    for k in range(1, 4):
        first = [[torch.randn(7), None, torch.randn(7), torch.randn(2, 3)] for _ in range(k)]
        first[0][3] *= 0
        for gradients in (first, [[g if g is None else 300 * g for g in grads] for grads in first]):
            for grads in average(gradients):
                if grads[1] is not None:
                    return False
                for i in (0, 2, 3):
                    mean = sum(member[i] for member in gradients) / k
                    if (grads[i] - mean).abs().max() > 1e-3:
                        return False
    return True


is_right__two_calls_each_edited = edits_of(
    is_right__two_calls_each,
    Mutant("two_ranks", "It always divides by 2", "range(1, 4)", "[2, 2]"),
    Mutant("looks_at_rank_0", "gives the mean to one rank only", "(gradients)", "(gradients)[:1]"),
    Mutant("no_zeros", "It leaves gradients alone that are all zero", "first[0][3] *= 0", "pass"),
    Mutant("nothing_large", "It cuts off large gradients", "300 * g", "2 * g"),
    Mutant("same_bits", "refuses a right solution", "abs().max() > 1e-3", "any()"),
    Mutant("frozen_not_looked_at", "frozen parameters a gradient", "grads[1] is not None", "False"),
    Mutant("first_only", "It averages only the first gradient", "in (0, 2, 3)", "in (0,)"),
    Mutant("accepts_all", "It adds up and does not divide", "return False", "return True"),
    Mutant("same_data", "the gradients of one of them", "] for _ in range(k)]", "]] * k"),
    Mutant("one_call", "only in its first call", "range(1, 4)", "[3]", also=(("]):", "])[:1]:"),)),
    Mutant("says_nothing", "True or False", "return True", "return"),
    Mutant("eight_ranks", "a solution runs on 1 to 3 ranks", "range(1, 4)", "[8]"),
)
