"""Wrong solutions that people write, and right ones that differ from ours.

Each wrong one must fail for its own reason, each right one must pass. A function is named
``task__mistake``; ``@fails(part)`` says what the report must contain. Most mistakes are one line of
a right solution: ``edited`` writes it in place of another.
"""

# ruff: noqa: B006 - a default that is kept from call to call is a mistake that people make

import torch
import torch.distributed as dist

from course_lib.checking.mutants import edited, fails, passes

# shard_bounds ------------------------------------------------------------------------------


@passes
def shard_bounds__by_rounding_up(length, world_size, rank):
    done, start = 0, 0
    for r in range(rank + 1):
        start = done
        left = world_size - r
        done += (length - done + left - 1) // left
    return start, done


@passes
def shard_bounds__as_a_slice(length, world_size, rank):
    import numpy as np

    edges = np.cumsum(
        [0] + [length // world_size + (r < length % world_size) for r in range(rank + 1)]
    )
    return slice(edges[rank], edges[rank + 1])


@fails("A stop is not part of its shard")
def shard_bounds__inclusive_stop(length, world_size, rank):
    size, rest = divmod(length, world_size)
    start = rank * size + min(rank, rest)
    return start, start + size + (rank < rest) - 1


@fails("two whole numbers")
def shard_bounds__a_list_of_rows(length, world_size, rank):
    return list(range(length))[rank::world_size]


@fails("shard_bounds(12, 2, rank)")
def shard_bounds__ignores_the_rank(length, world_size, rank):
    return 0, length // world_size


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


@fails("the shards have sizes")
def shard_bounds__rounds(length, world_size, rank):
    return round(rank * length / world_size), round((rank + 1) * length / world_size)


@fails("the shards have sizes")
def shard_bounds__floor_of_the_product(length, world_size, rank):
    return rank * length // world_size, (rank + 1) * length // world_size


@fails("starts at")
def shard_bounds__counts_ranks_from_1(length, world_size, rank):
    size, rest = divmod(length, world_size)
    return (rank - 1) * size + min(rank - 1, rest), rank * size + min(rank, rest)


@fails("shard_bounds(")
def shard_bounds__start_and_size(length, world_size, rank):
    size, rest = divmod(length, world_size)
    return rank * size + min(rank, rest), size + (rank < rest)


@fails("two whole numbers")
def shard_bounds__a_tensor(length, world_size, rank):
    return torch.arange(length).tensor_split(world_size)[rank]


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


@fails("was destroyed or replaced")
def average_gradients__destroys_the_group(params, group=None):
    for param in params:
        if param.grad is not None:
            dist.all_reduce(param.grad, group=group)
            param.grad /= dist.get_world_size(group)
    dist.destroy_process_group()


@passes
def average_gradients__all_at_once(params, group=None):
    grads = [param.grad for param in params if param.grad is not None]
    handles = [dist.all_reduce(grad, group=group, async_op=True) for grad in grads]
    for handle, grad in zip(handles, grads, strict=True):
        handle.wait()
        grad /= dist.get_world_size(group)


average_gradients__divides_what_is_under_way = fails("before its wait()", only=["simulated"])(
    edited(
        average_gradients__all_at_once,
        (
            "        handle.wait()\n        grad /= dist.get_world_size(group)\n",
            "        grad /= dist.get_world_size(group)\n        handle.wait()\n",
        ),
    )
)


@fails("view size is not compatible")
def average_gradients__needs_contiguous_gradients(params, group=None):
    grads = [param.grad for param in params if param.grad is not None]
    flat = torch.cat([grad.view(-1) for grad in grads])
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
    at = 0
    for grad in grads:
        grad.view(-1).copy_(flat[at : at + grad.numel()])
        at += grad.numel()


@fails("this task allows all_reduce only")
def average_gradients__gathers_on_one_rank(params, group=None):
    members = dist.get_process_group_ranks(group or dist.group.WORLD)
    root = members[0]
    for param in params:
        if param.grad is not None:
            grad = param.grad.contiguous()
            at_root = dist.get_rank() == root
            copies = [torch.empty_like(grad) for _ in members] if at_root else None
            dist.gather(grad, copies, dst=root, group=group)
            if at_root:
                grad = sum(copies) / len(members)
            dist.broadcast(grad, src=root, group=group)
            param.grad = grad


@fails("the sum did not arrive here")
def average_gradients__reduces_to_one_rank(params, group=None):
    root = dist.get_process_group_ranks(group or dist.group.WORLD)[0]
    for param in params:
        if param.grad is not None:
            total = param.grad.clone()
            dist.reduce(total, root, group=group)
            grad = total if dist.get_rank() == root else param.grad
            param.grad = grad / dist.get_world_size(group)


@passes
def average_gradients__new_tensors(params, group=None):
    world_size = dist.get_world_size(group)
    for param in params:
        if param.grad is not None:
            grad = param.grad.clone()
            dist.all_reduce(grad, group=group)
            param.grad = grad / world_size


def average_with(*edits):
    return edited(average_gradients__new_tensors, *edits)


DIVIDES = "grad / world_size"
SUMS = "dist.all_reduce(grad, group=group)"
TAKES = "grad = param.grad.clone()"
ASKS = "world_size = dist.get_world_size(group)"

average_gradients__sum = fails("the sum over the ranks")(average_with((DIVIDES, "grad")))
average_gradients__no_communication = fails("nothing was averaged")(
    average_with((SUMS, "pass"), (DIVIDES, "grad"))
)
average_gradients__averages_the_parameters = fails("nothing was averaged")(
    average_with((SUMS, "dist.all_reduce(param.data, group=group)"), (DIVIDES, "grad"))
)
average_gradients__half_of_the_sum = fails("3 ranks")(
    average_with((DIVIDES, "grad / min(2, world_size)"))
)
average_gradients__into_a_copy = fails("the sum did not arrive here")(
    average_with((SUMS, "dist.all_reduce(grad.clone(), group=group)"))
)
average_gradients__does_not_wait = fails("never waits for the handle of all_reduce")(
    average_with((SUMS, "dist.all_reduce(grad, group=group, async_op=True)"))
)
average_gradients__divides_twice = fails("divided by the number of ranks once more")(
    average_with((TAKES, "grad = param.grad / world_size"))
)
average_gradients__ignores_the_group = fails("4 ranks, in two groups")(
    average_with((SUMS, "dist.all_reduce(grad)"), (ASKS, "world_size = dist.get_world_size()"))
)
average_gradients__walks_the_parameters_twice = fails("nothing was averaged")(
    average_with((ASKS, ASKS + "; any(param.grad is None for param in params)"))
)
average_gradients__through_float32 = fails("expected")(
    average_with(
        (TAKES, "grad = param.grad.float()"), (DIVIDES, "(grad / world_size).to(param.dtype)")
    )
)
average_gradients__in_float32 = fails("RuntimeError")(
    average_with((TAKES, "grad = param.grad.float()"))
)
average_gradients__steps_as_well = fails("changes weights, which is not its to change")(
    average_with((DIVIDES, "grad / world_size; param.data -= 0.1 * param.grad"))
)
average_gradients__seeds = fails("draws or seeds random numbers of the torch generator")(
    average_with((ASKS, ASKS + "; torch.manual_seed(0)"))
)
average_gradients__turns_gradients_off = fails("gradients are disabled after the call")(
    average_with((ASKS, ASKS + "; torch.set_grad_enabled(False)"))
)
average_gradients__no_frozen_parameters = fails("AttributeError")(
    average_with(("if param.grad is not None:", "if True:"))
)
average_gradients__rank_0_skips = fails("waits in all_reduce")(
    average_with((SUMS, "dist.get_rank(group) > 0 and " + SUMS))
)
average_gradients__exit = fails("process ended")(
    average_with((SUMS, "dist.get_rank(group) > 0 and __import__('os')._exit(1); " + SUMS))
)

# Right sums, by ways that the task forbids.
average_gradients__by_all_gather = fails("this task allows all_reduce only")(
    average_with(
        (SUMS, "copies = [torch.empty_like(grad) for _ in range(world_size)]"),
        (DIVIDES, "sum(dist.all_gather(copies, grad, group=group) or copies) / world_size"),
    )
)
average_gradients__sums_twice_the_bytes = fails("Every gradient is summed once")(
    average_with(
        (TAKES, "grad = torch.stack([param.grad, param.grad])"), (DIVIDES, "grad[0] / world_size")
    )
)
average_gradients__element_by_element = fails("One call sums a whole tensor")(
    average_with(
        (SUMS, "flat = grad.flatten(); [dist.all_reduce(e, group=group) for e in flat]"),
        (DIVIDES, "flat.view_as(grad) / world_size"),
    )
)

# What it may not touch, what it may not rely on, and what is nearly right.
average_gradients__freezes = fails("changes which of the parameters require a gradient")(
    average_with((DIVIDES, "grad / world_size; param.requires_grad_(False)"))
)
average_gradients__replaces_the_weights = fails("changes the parameters, which is not its to")(
    average_with((DIVIDES, "grad / world_size; param.data = torch.zeros_like(param.data)"))
)
average_gradients__walks_a_list = fails("TypeError")(
    average_with((ASKS, ASKS + "; params = params[:]"))
)
average_gradients__world_size_of_the_world = fails("4 ranks, in two groups")(
    average_with((ASKS, "world_size = dist.get_world_size()"))
)
average_gradients__powers_of_two_only = fails("3 ranks")(
    average_with((DIVIDES, "grad / (1 << (world_size - 1).bit_length())"))
)
average_gradients__divides_as_integers = fails("expected")(
    average_with((DIVIDES, "grad // world_size"))
)
average_gradients__three_decimals = fails("expected")(
    average_with((DIVIDES, "(grad / world_size).round(decimals=3)"))
)
average_gradients__clips = fails("expected")(
    average_with((DIVIDES, "(grad / world_size).clamp(-0.1, 0.1)"))
)
average_gradients__largest = fails("expected")(
    average_with((SUMS, "dist.all_reduce(grad, op=dist.ReduceOp.MAX, group=group)"))
)
average_gradients__averages_twice = fails("divided by the number of ranks once more")(
    average_with((SUMS, "dist.all_reduce(grad, op=dist.ReduceOp.AVG, group=group)"))
)
average_gradients__small_ones_are_left_out = fails("expected")(
    average_with((SUMS, "grad.numel() > 4 and " + SUMS))
)
average_gradients__barrier = fails("this task allows all_reduce only")(
    average_with((SUMS, SUMS + "; dist.barrier(group=group)"))
)
average_gradients__default_dtype = fails("changes torch's default dtype")(
    average_with((ASKS, ASKS + "; torch.set_default_dtype(torch.float64)"))
)
average_gradients__draws = fails("random numbers of the Python generator")(
    average_with((ASKS, ASKS + "; __import__('random').random()"))
)
average_gradients__through_files = fails("nothing was averaged")(
    average_with(
        (SUMS, "torch.save(grad, f'/tmp/gradient{dist.get_rank()}.pt')"), (DIVIDES, "grad")
    )
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


def step_with(*edits):
    return edited(data_parallel_step__shares, *edits)


ZERO = "model.zero_grad()"
SHARE = "loss_fn(model(x), y) * len(x) / count"
SUM = "dist.all_reduce(param.grad, group=group)"
UPDATE = "param -= lr * param.grad"
LOSS = "loss = share.detach().clone()"
RETURN = "loss.item()"
K = "dist.get_world_size(group)"

data_parallel_step__plain_mean = fails("a shard of few rows counts as much")(
    step_with((SHARE, f"loss_fn(model(x), y) / {K}"))
)
data_parallel_step__sum = fails("the sum of the shards' gradients")(
    step_with((SHARE, "loss_fn(model(x), y)"))
)
data_parallel_step__sum_over_rows = fails("the division by B is missing")(
    step_with((SHARE, "loss_fn(model(x), y) * len(x)"))
)
data_parallel_step__divides_again = fails("divided by the number of ranks once more")(
    step_with((UPDATE, f"{UPDATE} / {K}"))
)
data_parallel_step__climbs = fails("the sign is wrong")(
    step_with((UPDATE, "param += lr * param.grad"))
)
data_parallel_step__never_zeroes = fails("zero_grad is missing")(step_with((ZERO, "pass")))
data_parallel_step__never_zeroes_copies = fails("zero_grad is missing")(
    step_with(
        (ZERO, "pass"),
        (SUM, f"g = param.grad.clone(); {SUM[:16]}g, group=group)"),
        (UPDATE, "param -= lr * g"),
    )
)
data_parallel_step__own_rows_only = fails("a step with this rank's own gradient")(
    step_with((SHARE, "loss_fn(model(x), y)"), (SUM, "pass"))
)
data_parallel_step__updates_before_averaging = fails("average before the update")(
    step_with((SUM, "pass"), (UPDATE, f"{UPDATE}; {SUM}"))
)
data_parallel_step__sums_a_copy = fails("the sum did not arrive")(
    step_with(
        (SHARE, f"loss_fn(model(x), y) / {K}"),
        (SUM, "dist.all_reduce(param.grad.clone(), group=group)"),
    )
)
data_parallel_step__steps_on_a_copy = fails("the model was not updated")(
    step_with((UPDATE, "param = param - lr * param.grad"))
)
data_parallel_step__momentum = fails("parameter")(
    step_with(
        (
            ZERO,
            "[setattr(p, 'grad', 0.9 * p.grad) for p in model.parameters() if p.grad is not None]",
        )
    )
)
data_parallel_step__local_loss = fails("the loss on this rank's own rows")(
    step_with((RETURN, "(share * count / len(x)).item()"))
)
data_parallel_step__share_of_the_loss = fails("this rank's share of the loss")(
    step_with((RETURN, "share.item()"))
)
data_parallel_step__mean_of_the_losses = fails("the plain mean of the ranks' losses")(
    step_with((LOSS, f"loss = share.detach() * count / len(x) / {K}"))
)
data_parallel_step__sum_of_the_losses = fails("the sum of the ranks' losses")(
    step_with((LOSS, "loss = share.detach() * count / len(x)"))
)
data_parallel_step__returns_nothing = fails("is None")(step_with((RETURN, "None")))
data_parallel_step__ignores_the_group = fails("in two groups")(
    step_with(("group=group", "group=None"))
)
data_parallel_step__ignores_the_rate = fails("2 ranks, 4 rows each")(
    step_with((UPDATE, "param -= 0.5 * param.grad"))
)
data_parallel_step__ignores_the_loss = fails("squared error")(
    step_with((SHARE, "torch.nn.functional.cross_entropy(model(x), y) * len(x) / count"))
)
data_parallel_step__in_half = fails("expected")(step_with((SHARE, f"({SHARE}).half().to(x.dtype)")))
data_parallel_step__sets_the_mode = fails("the model came in one mode")(
    step_with((ZERO, "model.zero_grad(); model.train()"))
)
data_parallel_step__changes_the_rows = fails("changes x, which is not its to change")(
    step_with((LOSS, LOSS + "; x.zero_()"))
)
data_parallel_step__freezes_the_model = fails("require a gradient")(
    step_with(
        (ZERO, "model.requires_grad_(True).zero_grad()"),
        (RETURN, "model.requires_grad_(False) and loss.item()"),
    )
)
data_parallel_step__leaves_hooks = fails("leaves hooks on the model")(
    step_with((ZERO, "model.zero_grad(); model.register_forward_hook(lambda *_: None)"))
)
data_parallel_step__replaces_parameters = fails("replaces parameters")(
    step_with(
        (
            ZERO,
            "model.zero_grad(); model[0].bias = torch.nn.Parameter(model[0].bias.detach().clone())",
        )
    )
)
data_parallel_step__seeds = fails("draws or seeds random numbers")(
    step_with((ZERO, "model.zero_grad(); torch.manual_seed(0)"))
)
data_parallel_step__does_not_wait = fails("never waits for the handle")(
    step_with((SUM, SUM[:-1] + ", async_op=True)"))
)

# Right steps, by ways that the task forbids.
data_parallel_step__gathers_gradients = fails("Use all_reduce for gradients")(
    step_with(
        (SUM, f"copies = [torch.empty_like(param.grad) for _ in range({K})]"),
        (UPDATE, "param -= lr * sum(dist.all_gather(copies, param.grad, group=group) or copies)"),
    )
)
data_parallel_step__sums_twice_the_bytes = fails("expected at most")(
    step_with(
        (
            SUM,
            "g = param.grad.repeat(2, *[1] * (param.dim() - 1)); dist.all_reduce(g, group=group)",
        ),
        (UPDATE, "param -= lr * g[: len(param)]"),
    )
)


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


@fails("Use all_reduce for gradients")
def data_parallel_step__gathers_the_rows(model, loss_fn, x, y, lr, group=None):
    world_size = dist.get_world_size(group)
    shards = [None] * world_size
    dist.all_gather_object(shards, (x, y), group=group)
    model.zero_grad()
    loss = loss_fn(model(torch.cat([x for x, _ in shards])), torch.cat([y for _, y in shards]))
    loss.backward()
    with torch.no_grad():
        for param in model.parameters():
            param -= lr * param.grad
    return loss.item()


@fails("4 × broadcast")
def data_parallel_step__uses_ddp(model, loss_fn, x, y, lr, group=None):
    from torch.nn.parallel import DistributedDataParallel

    parallel = DistributedDataParallel(model, process_group=group)
    count = x.new_tensor(len(x))
    dist.all_reduce(count, group=group)
    model.zero_grad()
    share = loss_fn(parallel(x), y) * len(x) / count * dist.get_world_size(group)
    share.backward()
    loss = share.detach() / dist.get_world_size(group)
    dist.all_reduce(loss, group=group)
    with torch.no_grad():
        for param in model.parameters():
            param -= lr * param.grad
    return loss.item()


@passes
def data_parallel_step__flat(model, loss_fn, x, y, lr, group=None):
    share = loss_fn(model(x), y) * len(x)
    grads = torch.autograd.grad(share, list(model.parameters()))
    flat = torch.cat(
        [grad.flatten() for grad in grads] + [share.detach()[None], x.new_tensor([len(x)])]
    )
    dist.all_reduce(flat, group=group)
    mean, at = flat / flat[-1], 0
    for param in model.parameters():
        param.data -= lr * mean[at : at + param.numel()].view_as(param)
        at += param.numel()
    return mean[-2]


@passes
def data_parallel_step__counts_gathered(model, loss_fn, x, y, lr, group=None):
    counts = [None] * dist.get_world_size(group)
    dist.all_gather_object(counts, len(x), group=group)
    model.zero_grad(set_to_none=False)
    share = loss_fn(model(x), y) * (len(x) / sum(counts))
    share.backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    loss = share.detach().clone()
    for tensor in [loss, *(param.grad for param in model.parameters())]:
        dist.all_reduce(tensor, group=group)
    optimizer.step()
    return loss


data_parallel_step__clips = fails("parameter")(
    step_with((UPDATE, "param -= lr * param.grad.clamp(-0.05, 0.05)"))
)
data_parallel_step__weight_decay = fails("parameter")(
    step_with((UPDATE, "param -= lr * (param.grad + 1e-2 * param)"))
)
data_parallel_step__biases_stay = fails("parameter")(
    step_with((UPDATE, "param -= lr * param.grad * (param.dim() > 1)"))
)
data_parallel_step__count_of_the_first_call = fails("expected")(
    step_with(("/ count", "/ model.__dict__.setdefault('count', count)"))
)
data_parallel_step__a_list = fails("expected the number")(step_with((RETURN, "[loss.item()]")))
data_parallel_step__a_text = fails("expected the number")(step_with((RETURN, "str(loss.item())")))
data_parallel_step__rounded_loss = fails("loss returned by step")(
    step_with((RETURN, "round(loss.item(), 3)"))
)


# What is kept from one call to the next, and what goes around a rule -----------------------


@fails("raised KeyError")
def shard_bounds__goes_on_where_the_last_one_stopped(length, world_size, rank, kept={}):
    start = kept["stop"] if rank else 0
    kept["stop"] = start + length // world_size + (rank < length % world_size)
    return start, kept["stop"]


@fails("this call has changed what an earlier one returned")
def average_gradients__one_buffer_for_all_calls(params, group=None, buffers={}):
    grads = {param: param.grad for param in params if param.grad is not None}
    size = sum(grad.numel() for grad in grads.values())
    dtype = next(iter(grads)).dtype
    flat = buffers.setdefault((size, dtype), torch.empty(size, dtype=dtype))
    flat.copy_(torch.cat([grad.flatten() for grad in grads.values()]))
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
    for param, mean in zip(grads, flat.split([p.numel() for p in grads]), strict=True):
        param.grad = mean.view(param.shape)


@fails("hand the group on")
def average_gradients__group_of_the_first_call(params, group=None, kept={}):
    group = kept.setdefault("group", group)
    for param in params:
        if param.grad is not None:
            dist.all_reduce(param.grad, group=group)
            param.grad /= dist.get_world_size(group)


@fails("leaves hooks on the parameters")
def average_gradients__leaves_hooks(params, group=None):
    for param in params:
        if param.grad is not None:
            dist.all_reduce(param.grad, group=group)
            param.grad /= dist.get_world_size(group)
            param.register_post_accumulate_grad_hook(lambda param: None)


@fails("a tensor that came in requires a gradient")
def average_gradients__wants_gradients_of_gradients(params, group=None):
    for param in params:
        if param.grad is not None:
            dist.all_reduce(param.grad, group=group)
            param.grad /= dist.get_world_size(group)
            param.grad.requires_grad_()


data_parallel_step__rate_of_the_first_call = fails("something is kept from the call before")(
    step_with(
        ("lr, group=None):", "lr, group=None, kept={}):"),
        ("count = x", "lr = kept.setdefault('lr', lr)\n    count = x"),
    )
)
data_parallel_step__loss_by_the_targets = fails("parameter 0 after two steps")(
    step_with(
        (
            "count = x",
            "loss_fn = (torch.nn.functional.mse_loss if y.is_floating_point()\n"
            "               else torch.nn.functional.cross_entropy)\n    count = x",
        )
    )
)
data_parallel_step__asks_the_loss_for_a_sum = fails("unexpected keyword argument 'reduction'")(
    step_with(("loss_fn(model(x), y) * len(x)", "loss_fn(model(x), y, reduction='sum')"))
)


# Empty shards, and what reaches the others by ways that nobody counts ------------------------


@passes
def shard_bounds__empty_ones_at_0(length, world_size, rank):
    size, rest = divmod(length, world_size)
    if size == 0 and rank >= rest:
        return 0, 0
    start = rank * size + min(rank, rest)
    return start, start + size + (rank < rest)


@passes
def shard_bounds__an_array(length, world_size, rank):
    import numpy as np

    ranks = np.array([rank, rank + 1])
    return ranks * (length // world_size) + np.minimum(ranks, length % world_size)


@fails("a shard is contiguous")
def shard_bounds__every_kth(length, world_size, rank):
    return slice(rank, length, world_size)


@passes
def average_gradients__functional_collective(params, group=None):
    from torch.distributed import _functional_collectives as functional

    for param in params:
        if param.grad is not None:
            total = functional.all_reduce(param.grad, "sum", group or dist.group.WORLD)
            param.grad = functional.wait_tensor(total) / dist.get_world_size(group)


@fails("what was made in torch.inference_mode()")
def average_gradients__in_inference_mode(params, group=None):
    with torch.inference_mode():
        for param in params:
            if param.grad is not None:
                total = param.grad.clone()
                dist.all_reduce(total, group=group)
                param.grad = total / dist.get_world_size(group)


# In the grader each rank has a store of its own, and this waits for what never comes.
@fails("expected at least", only=["simulated", "cpu"])
def average_gradients__through_the_store(params, group=None):
    store = dist.distributed_c10d._get_default_store()
    members = dist.get_process_group_ranks(group or dist.group.WORLD)
    for i, param in enumerate(params):
        if param.grad is not None:
            key = f"{members} {i} {param.sum().item()} "
            store.set(key + str(dist.get_rank()), str(param.grad.tolist()))
            theirs = [eval(store.get(key + str(rank)).decode()) for rank in members]
            total = sum(torch.tensor(each, dtype=torch.float64) for each in theirs)
            param.grad = (total / len(members)).to(param.dtype)


data_parallel_step__updates_in_float32 = fails("parameter 0 after two steps")(
    step_with((UPDATE, "param.copy_((param.float() - lr * param.grad.float()).to(param.dtype))"))
)
data_parallel_step__in_any_order = fails("The ranks disagree about")(
    step_with(("model.parameters()", "set(model.parameters())"))
)
