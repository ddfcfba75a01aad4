"""Wrong solutions that people write, and right ones that differ from ours.

Each wrong one must fail for its own reason, each right one must pass. A function is named
``task__mistake``; ``@fails(part)`` says what the report must contain. Most mistakes change one
line of a right solution: ``edits_of`` gives that line and its replacement.
"""

# ruff: noqa: B006 - people make the mistake of a default that is kept from call to call

import torch
import torch.distributed as dist

from course_lib.checking.mutants import edits_of, fails, passes

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
def shard_bounds__in_numpy(length, world_size, rank):
    import numpy as np

    edges = np.cumsum(
        [0] + [length // world_size + (r < length % world_size) for r in range(rank + 1)]
    )
    return edges[rank], edges[rank + 1]


edits_of(shard_bounds__in_numpy)("""
a_slice: expected two ints (start, stop)
    return edges[rank], edges[rank + 1] → return slice(edges[rank], edges[rank + 1])
""")


@fails("A stop is not part of its shard")
def shard_bounds__inclusive_stop(length, world_size, rank):
    size, rest = divmod(length, world_size)
    start = rank * size + min(rank, rest)
    return start, start + size + (rank < rest) - 1


@fails("two ints")
def shard_bounds__a_list_of_rows(length, world_size, rank):
    return list(range(length))[rank::world_size]


@fails("shard_bounds(12, 2, rank)")
def shard_bounds__ignores_the_rank(length, world_size, rank):
    return 0, length // world_size


@fails("belong to nobody")
def shard_bounds__drops_the_rest(length, world_size, rank):
    size = length // world_size
    return rank * size, (rank + 1) * size


edits_of(shard_bounds__drops_the_rest)("""
rest_to_the_last: the shards have sizes
    (rank + 1) → length if rank == world_size - 1 else (rank + 1)
past_the_end: beyond the end
    size = length // world_size → size = (length + world_size - 1) // world_size
overlap: is held twice
    (rank + 1) * size → min(length, (rank + 1) * size + length % world_size)
""")


@fails("two ints")
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


@fails("two ints")
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


edits_of(average_gradients__all_at_once)("""
joins_again: the caller has made the process group already
    grads = [param.grad for → dist.init_process_group("gloo"); …
through_bfloat16: rounded to bfloat16 on the way
    grad /= dist.get_world_size(group) → …; grad.copy_(grad.bfloat16())
divides_what_is_under_way (simulated): before its wait()
    handle.wait()
    grad /= dist.get_world_size(group)
  → grad /= dist.get_world_size(group)
  → handle.wait()
""")
edits_of(average_gradients__flat)("""
needs_contiguous_gradients: view size is not compatible
    flatten() → view(-1)
    copy_(flat[at : at + grad.numel()].view_as(grad)) → view(-1).copy_(flat[at : at + grad.numel()])
""")


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


edits_of(average_gradients__new_tensors)("""
sum: the sum over the ranks
    grad / world_size → grad
no_communication: nothing was averaged
    dist.all_reduce(grad, group=group) → pass
    grad / world_size → grad
averages_the_parameters: changes weights, which must stay as it is
    dist.all_reduce(grad, group=group) → dist.all_reduce(param.data, group=group)
    grad / world_size → grad
half_of_the_sum: 3 ranks
    grad / world_size → grad / min(2, world_size)
into_a_copy: the sum did not arrive here
    dist.all_reduce(grad, group=group) → dist.all_reduce(grad.clone(), group=group)
does_not_wait: never waits for the handle of all_reduce
    dist.all_reduce(grad, group=group) → dist.all_reduce(grad, group=group, async_op=True)
into_a_flat_copy: and the mean went into the copy
    param.grad.clone() → param.grad.flatten()
    param.grad = grad / world_size → grad /= world_size
divides_twice: divided by the number of ranks a second time
    grad = param.grad.clone() → grad = param.grad / world_size
ignores_the_group: 4 ranks, in two groups
    dist.all_reduce(grad, group=group) → dist.all_reduce(grad)
    world_size = dist.get_world_size(group) → world_size = dist.get_world_size()
walks_the_parameters_twice: nothing was averaged
    get_world_size(group) → get_world_size(group); any(param.grad is None for param in params)
through_float32: expected
    grad = param.grad.clone() → grad = param.grad.float()
    grad / world_size → (…).to(param.dtype)
in_float32: RuntimeError
    grad = param.grad.clone() → grad = param.grad.float()
steps_as_well: changes weights, which must stay as it is
    grad / world_size → …; param.data -= 0.1 * param.grad
seeds: draws or seeds random numbers of the torch generator
    get_world_size(group) → get_world_size(group); torch.manual_seed(0)
turns_gradients_off: gradients are disabled after the call
    get_world_size(group) → get_world_size(group); torch.set_grad_enabled(False)
no_frozen_parameters: AttributeError
    if param.grad is not None: → if True:
rank_0_skips: waits in all_reduce
    all_reduce → get_rank(group) > 0 and dist.all_reduce
exit: process ended
    all_reduce → get_rank(group) > 0 and __import__('os')._exit(1); dist.all_reduce
""")


# Right sums, in ways that the task forbids.

edits_of(average_gradients__new_tensors)("""
by_all_gather: this task allows all_reduce only
    dist.all_reduce(grad, group=group)
  → copies = [torch.empty_like(grad) for _ in range(world_size)]
    grad / world_size → sum(dist.all_gather(copies, grad, group=group) or copies) / world_size
sums_twice_the_bytes: Sum every gradient only once
    grad = param.grad.clone() → grad = torch.stack([param.grad, param.grad])
    grad / world_size → grad[0] / world_size
element_by_element: One call of all_reduce sums a whole tensor
    dist.all_reduce(grad, group=group)
  → flat = grad.flatten(); [dist.all_reduce(e, group=group) for e in flat]
    grad / world_size → flat.view_as(grad) / world_size
""")


# Side effects, wrong assumptions, and nearly right solutions.

edits_of(average_gradients__new_tensors)("""
freezes: changes which of the parameters require a gradient
    grad / world_size → …; param.requires_grad_(False)
replaces_the_weights: changes the parameters, which must stay as
    grad / world_size → …; param.data = torch.zeros_like(param.data)
walks_a_list: TypeError
    get_world_size(group) → get_world_size(group); params = params[:]
world_size_of_the_world: 4 ranks, in two groups
    world_size = dist.get_world_size(group) → world_size = dist.get_world_size()
powers_of_two_only: 3 ranks
    grad / world_size → grad / (1 << (world_size - 1).bit_length())
divides_as_integers: expected
    grad / world_size → grad // world_size
three_decimals: expected
    grad / world_size → (…).round(decimals=3)
clips: expected
    grad / world_size → (…).clamp(-0.1, 0.1)
largest: expected
    dist.all_reduce(grad, group=group) → dist.all_reduce(grad, op=dist.ReduceOp.MAX, group=group)
averages_twice: divided by the number of ranks a second time
    dist.all_reduce(grad, group=group) → dist.all_reduce(grad, op=dist.ReduceOp.AVG, group=group)
small_ones_are_left_out: expected
    dist.all_reduce(grad, group=group) → grad.numel() > 4 and …
barrier: this task allows all_reduce only
    all_reduce(grad, group=group) → …; dist.barrier(group=group)
default_dtype: changes torch's default dtype
    get_world_size(group) → get_world_size(group); torch.set_default_dtype(torch.float64)
draws: random numbers of the Python generator
    get_world_size(group) → get_world_size(group); __import__('random').random()
through_files: nothing was averaged
    dist.all_reduce(grad, group=group) → torch.save(grad, f'/tmp/gradient{dist.get_rank()}.pt')
    grad / world_size → grad
""")


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


edits_of(data_parallel_step__shares)("""
plain_mean: a shard of few rows counts as much
    loss_fn(model(x), y) * len(x) / count → loss_fn(model(x), y) / dist.get_world_size(group)
sum: the sum of the shards' gradients
    loss_fn(model(x), y) * len(x) / count → loss_fn(model(x), y)
sum_over_rows: the division by B is missing
    loss_fn(model(x), y) * len(x) / count → loss_fn(model(x), y) * len(x)
divides_again: divided by the number of ranks a second time
    param -= lr * param.grad → … / dist.get_world_size(group)
climbs: the sign is wrong
    param -= lr * param.grad → param += lr * param.grad
clears_after_the_step: .grad from before the first step
    model.zero_grad() → pass
    return loss.item() → model.zero_grad(); return loss.item()
rounds_the_rate: converted to float32
    lr * param.grad → torch.tensor(lr) * param.grad
never_zeroes: zero_grad is missing
    model.zero_grad() → pass
never_zeroes_copies: zero_grad is missing
    model.zero_grad() → pass
    dist.all_reduce(param.grad, group=group)
  → g = param.grad.clone(); dist.all_reduce(g, group=group)
    param -= lr * param.grad → param -= lr * g
rows_of_the_first_step: with the B of the first step: count the rows anew
    dist.all_reduce(count, group=group) → …; count = model.__dict__.setdefault("all_rows", count)
share_of_the_first_step: with the B_k/B of the first step: count the rows anew
    * len(x) / count → * model.__dict__.setdefault("part", len(x) / count)
own_rows_only: a step with this rank's own gradient
    loss_fn(model(x), y) * len(x) / count → loss_fn(model(x), y)
    dist.all_reduce(param.grad, group=group) → pass
updates_before_averaging: average before the update
    dist.all_reduce(param.grad, group=group) → pass
    param -= lr * param.grad → …; dist.all_reduce(param.grad, group=group)
sums_a_copy: the sum did not arrive
    loss_fn(model(x), y) * len(x) / count → loss_fn(model(x), y) / dist.get_world_size(group)
    dist.all_reduce(param.grad, group=group) → dist.all_reduce(param.grad.clone(), group=group)
steps_on_a_copy: the model was not updated
    param -= lr * param.grad → param = param - lr * param.grad
momentum: parameter
    model.zero_grad()
  → [setattr(p, 'grad', 0.9 * p.grad) for p in model.parameters() if p.grad is not None]
local_loss: the loss on this rank's own rows
    loss.item() → (share * count / len(x)).item()
share_of_the_loss: this rank's share of the loss
    loss.item() → share.item()
mean_of_the_losses: the plain mean of the ranks' losses
    share.detach().clone() → share.detach() * count / len(x) / dist.get_world_size(group)
sum_of_the_losses: the sum of the ranks' losses
    loss = share.detach().clone() → loss = share.detach() * count / len(x)
returns_nothing: is None
    loss.item() → None
ignores_the_group: in two groups
    group=group → group=None
ignores_the_rate: 2 ranks, 4 rows each
    param -= lr * param.grad → param -= 0.5 * param.grad
ignores_the_loss: squared error
    loss_fn(model(x), y) → torch.nn.functional.cross_entropy(model(x), y)
in_half: expected
    loss_fn(model(x), y) * len(x) / count → (…).half().to(x.dtype)
sets_the_mode: changes the mode of the model
    model.zero_grad() → …; model.train()
changes_the_rows: changes x, which must stay as it is
    loss = share.detach().clone() → …; x.zero_()
freezes_the_model: require a gradient
    model.zero_grad() → model.requires_grad_(True).zero_grad()
    loss.item() → model.requires_grad_(False) and …
leaves_hooks: leaves hooks on the model
    model.zero_grad() → …; model.register_forward_hook(lambda *_: None)
replaces_parameters: replaces parameters
    zero_grad() → zero_grad(); model[0].bias = torch.nn.Parameter(model[0].bias.detach().clone())
seeds: draws or seeds random numbers
    model.zero_grad() → …; torch.manual_seed(0)
does_not_wait: never waits for the handle
    grad, group=group → grad, group=group, async_op=True
""")


# Right steps, in ways that the task forbids.

edits_of(data_parallel_step__shares)("""
gathers_gradients: Use all_reduce for gradients
    dist.all_reduce(param.grad, group=group)
  → copies = [torch.empty_like(param.grad) for _ in range(dist.get_world_size(group))]
    lr * param.grad → lr * sum(dist.all_gather(copies, param.grad, group=group) or copies)
sums_twice_the_bytes: expected at most
    dist.all_reduce(param.grad, group=group)
  → g = param.grad.repeat(2, *[1] * (param.dim() - 1)); dist.all_reduce(g, group=group)
    param -= lr * param.grad → param -= lr * g[: len(param)]
""")


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


edits_of(data_parallel_step__shares)("""
uses_ddp: 4 × broadcast
    count = x.new_tensor(len(x))
  → from torch.nn.parallel import DistributedDataParallel
  → parallel = DistributedDataParallel(model, process_group=group)
  → …
    (model(x), y) * len(x) / count → (parallel(x), y) * len(x) / count * dist.get_world_size(group)
    loss = share.detach().clone() → loss = share.detach() / dist.get_world_size(group)
    dist.all_reduce(param.grad, group=group) →
""")


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


edits_of(data_parallel_step__shares)("""
clips: parameter
    param -= lr * param.grad → param -= lr * param.grad.clamp(-0.05, 0.05)
weight_decay: parameter
    param -= lr * param.grad → param -= lr * (param.grad + 1e-2 * param)
biases_stay: parameter
    param -= lr * param.grad → … * (param.dim() > 1)
count_of_the_first_call: expected
    / count → / model.__dict__.setdefault('count', count)
a_list: expected the number
    loss.item() → [loss.item()]
a_text: expected the number
    loss.item() → str(…)
rounded_loss: loss returned by step
    loss.item() → round(…, 3)
""")


# State between calls, and ways around a rule -----------------------------------------------


@fails("raised KeyError")
def shard_bounds__goes_on_where_the_last_one_stopped(length, world_size, rank, kept={}):
    start = kept["stop"] if rank else 0
    kept["stop"] = start + length // world_size + (rank < length % world_size)
    return start, kept["stop"]


@fails("this call has changed the result of an earlier call")
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


@fails("pass group=group to every call")
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


edits_of(average_gradients__leaves_hooks)("""
wants_gradients_of_gradients: a tensor of the input requires a gradient
    param.register_post_accumulate_grad_hook(lambda param: None) → param.grad.requires_grad_()
""")
edits_of(data_parallel_step__shares)("""
rate_of_the_first_call: something is kept from the call before
    lr, group=None): → lr, group=None, kept={}):
    count = x.new_tensor(len(x)) → lr = kept.setdefault("lr", lr); …
loss_by_the_targets: parameter 0 after two steps
    count = x.new_tensor(len(x))
  → loss_fn = (
  →     torch.nn.functional.mse_loss if y.is_floating_point() else torch.nn.functional.cross_entropy
  → )
  → …
asks_the_loss_for_a_sum: unexpected keyword argument 'reduction'
    loss_fn(model(x), y) * len(x) → loss_fn(model(x), y, reduction='sum')
""")


# Empty shards, and hidden ways to other ranks ------------------------------------------------


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


@fails("expected two ints (start, stop)")
def shard_bounds__every_kth(length, world_size, rank):
    return slice(rank, length, world_size)


@passes
def average_gradients__functional_collective(params, group=None):
    from torch.distributed import _functional_collectives as functional

    for param in params:
        if param.grad is not None:
            total = functional.all_reduce(param.grad, "sum", group or dist.group.WORLD)
            param.grad = functional.wait_tensor(total) / dist.get_world_size(group)


@fails("tensors that were made in torch.inference_mode()")
def average_gradients__in_inference_mode(params, group=None):
    with torch.inference_mode():
        for param in params:
            if param.grad is not None:
                total = param.grad.clone()
                dist.all_reduce(total, group=group)
                param.grad = total / dist.get_world_size(group)


# In the grader each rank has a store of its own, so this waits for ever.
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


edits_of(data_parallel_step__shares)("""
updates_in_float32: parameter 0 after two steps
    param -= lr * param.grad
  → param.copy_((param.float() - lr * param.grad.float()).to(param.dtype))
in_any_order: The ranks disagree about
    model.parameters() → set(…)
""")


@passes
def data_parallel_step__averages_weights_by_rows(model, loss_fn, x, y, lr, group=None):
    rows = torch.tensor(float(len(x)), dtype=torch.float64)
    dist.all_reduce(rows, group=group)
    share = len(x) / rows.item()
    model.zero_grad()
    loss = loss_fn(model(x), y)
    loss.backward()
    for param in model.parameters():
        mine = ((param.data - lr * param.grad) * share).contiguous()
        dist.all_reduce(mine, group=group)
        param.data.copy_(mine)
    total = loss.detach().double() * share
    dist.all_reduce(total, group=group)
    return total.item()
