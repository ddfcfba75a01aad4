"""Wrong solutions that people write, and right ones that differ from ours.

Each wrong one must fail for its own reason, each right one must pass. A function is named
``task__mistake``; ``@fails(part)`` says what the report must contain.
"""

import torch
import torch.distributed as dist

from course_lib.checking.mutants import fails, passes

# shard_bounds ------------------------------------------------------------------------------


@passes
def shard_bounds__by_rounding_up(length, world_size, rank):
    done, start = 0, 0
    for r in range(rank + 1):
        start = done
        left = world_size - r
        done += (length - done + left - 1) // left
    return start, done


@fails("belong to nobody")
def shard_bounds__drops_the_rest(length, world_size, rank):
    size = length // world_size
    return rank * size, (rank + 1) * size


@fails("the shards have sizes")
def shard_bounds__rest_to_the_last(length, world_size, rank):
    size = length // world_size
    return rank * size, length if rank == world_size - 1 else (rank + 1) * size


@fails("beyond the end")
def shard_bounds__past_the_end(length, world_size, rank):
    size = (length + world_size - 1) // world_size
    return rank * size, (rank + 1) * size


@fails("is held twice")
def shard_bounds__overlap(length, world_size, rank):
    size = length // world_size
    return rank * size, min(length, (rank + 1) * size + length % world_size)


@fails("two whole numbers")
def shard_bounds__fractions(length, world_size, rank):
    return rank * length / world_size, (rank + 1) * length / world_size


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


@passes
def average_gradients__by_all_gather(params, group=None):
    for param in params:
        if param.grad is not None:
            copies = [torch.empty_like(param.grad) for _ in range(dist.get_world_size(group))]
            dist.all_gather(copies, param.grad, group=group)
            param.grad = torch.stack(copies).mean(0)


@fails("the sum over the ranks")
def average_gradients__sum(params, group=None):
    for param in params:
        if param.grad is not None:
            dist.all_reduce(param.grad, group=group)


@fails("nothing was averaged")
def average_gradients__no_communication(params, group=None):
    for param in params:
        if param.grad is not None:
            param.grad /= 1


@fails("nothing was averaged")
def average_gradients__averages_the_parameters(params, group=None):
    for param in params:
        if param.grad is not None:
            dist.all_reduce(param.data, group=group)
            param.data /= dist.get_world_size(group)


@fails("3 ranks")
def average_gradients__half_of_the_sum(params, group=None):
    for param in params:
        if param.grad is not None:
            dist.all_reduce(param.grad, group=group)
            if dist.get_world_size(group) > 1:
                param.grad /= 2


@fails("expected")
def average_gradients__into_a_copy(params, group=None):
    for param in params:
        if param.grad is not None:
            dist.all_reduce(param.grad.clone(), group=group, async_op=True).wait()
            param.grad /= dist.get_world_size(group)


@fails("AttributeError")
def average_gradients__no_frozen_parameters(params, group=None):
    for param in params:
        dist.all_reduce(param.grad.data, group=group)
        param.grad /= dist.get_world_size(group)


@fails("waits in recv")
def average_gradients__deadlock(params, group=None):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    for param in params:
        if param.grad is not None and world_size > 1:
            received = torch.empty_like(param.grad)
            dist.recv(received, src=(rank - 1) % world_size, group=group)
            dist.send(param.grad, dst=(rank + 1) % world_size, group=group)
            param.grad = (param.grad + received) / world_size


@fails("waits in all_reduce")
def average_gradients__rank_0_skips(params, group=None):
    for param in params:
        if param.grad is not None and dist.get_rank(group) > 0:
            dist.all_reduce(param.grad, group=group)
            param.grad /= dist.get_world_size(group)


@fails("process ended")
def average_gradients__exit(params, group=None):
    import os

    if dist.get_rank(group) == dist.get_world_size(group) - 1:
        os._exit(1)
    for param in params:
        dist.all_reduce(param.grad, group=group)
        param.grad /= dist.get_world_size(group)


# data_parallel_step ------------------------------------------------------------------------


@passes
def data_parallel_step__sums_then_divides(model, loss_fn, x, y, lr, group=None):
    model.zero_grad()
    loss = loss_fn(model(x), y) * len(x)
    loss.backward()
    totals = torch.tensor([loss.item(), float(len(x))])
    dist.all_reduce(totals, group=group)
    with torch.no_grad():
        for param in model.parameters():
            dist.all_reduce(param.grad, group=group)
            param -= lr * param.grad / totals[1]
    return (totals[0] / totals[1]).item()


@fails("a shard of few rows counts as much")
def data_parallel_step__plain_mean(model, loss_fn, x, y, lr, group=None):
    world_size = dist.get_world_size(group)
    model.zero_grad()
    loss = loss_fn(model(x), y)
    loss.backward()
    with torch.no_grad():
        dist.all_reduce(loss, group=group)
        for param in model.parameters():
            dist.all_reduce(param.grad, group=group)
            param -= lr * param.grad / world_size
    return loss.item() / world_size


@fails("the sum of the shards' gradients")
def data_parallel_step__sum(model, loss_fn, x, y, lr, group=None):
    model.zero_grad()
    loss = loss_fn(model(x), y)
    loss.backward()
    with torch.no_grad():
        for param in model.parameters():
            dist.all_reduce(param.grad, group=group)
            param -= lr * param.grad
    return loss.item()


@fails("expected")
def data_parallel_step__never_zeroes(model, loss_fn, x, y, lr, group=None):
    count = torch.tensor(float(len(x)))
    dist.all_reduce(count, group=group)
    loss = loss_fn(model(x), y) * len(x) / count
    loss.backward()
    with torch.no_grad():
        for param in model.parameters():
            gradient = param.grad.clone()
            dist.all_reduce(gradient, group=group)
            param -= lr * gradient
        dist.all_reduce(loss, group=group)
    return loss.item()


@fails("differ")
def data_parallel_step__own_rows_only(model, loss_fn, x, y, lr, group=None):
    model.zero_grad()
    loss = loss_fn(model(x), y)
    loss.backward()
    with torch.no_grad():
        for param in model.parameters():
            param -= lr * param.grad
    return loss.item()


@fails("loss returned by step 0")
def data_parallel_step__local_loss(model, loss_fn, x, y, lr, group=None):
    count = torch.tensor(float(len(x)))
    dist.all_reduce(count, group=group)
    model.zero_grad()
    loss = loss_fn(model(x), y)
    (loss * len(x) / count).backward()
    with torch.no_grad():
        for param in model.parameters():
            dist.all_reduce(param.grad, group=group)
            param -= lr * param.grad
    return loss.item()
