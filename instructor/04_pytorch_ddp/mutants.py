"""Wrong solutions that people write, and right ones that differ from ours.

Each wrong one must fail for its own reason, each right one must pass. A function is named
``task__mistake``; ``@fails(part)`` says what the report must contain. Most mistakes change one
line of a right solution: ``edits_of`` gives that line and its replacement.
"""

# ruff: noqa: B006 - people make the mistake of a default that is kept from call to call

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler
from torch.utils.data.distributed import DistributedSampler

from course_lib.checking.mutants import edits_of, fails, passes

# my_batches --------------------------------------------------------------------------------


@passes
def my_batches__by_slices(length, batch_size, epoch, seed, group=None):
    k, rank = dist.get_world_size(group), dist.get_rank(group)
    sampler = DistributedSampler(range(length), num_replicas=k, rank=rank, seed=seed)
    sampler.set_epoch(epoch)
    rows = list(sampler)
    return [rows[at : at + batch_size] for at in range(0, len(rows), batch_size)]


@passes
def my_batches__by_hand(length, batch_size, epoch, seed, group=None):
    k, rank = dist.get_world_size(group), dist.get_rank(group)
    order = torch.randperm(length, generator=torch.Generator().manual_seed(seed + epoch))
    each = -(-length // k)
    order = order.repeat(each * k // length + 1)[: each * k]
    return torch.split(order[rank::k], batch_size)


edits_of(my_batches__by_slices)("""
no_set_epoch: tell the sampler the epoch
    sampler.set_epoch(epoch) → pass
not_shuffled: shuffle them
    seed=seed) → seed=seed, shuffle=False)
ignores_the_seed: an order from a different seed
    , seed=seed) → )
drops_rows: no row may be lost
    seed=seed) → seed=seed, drop_last=True)
drops_the_short_batch: got []. This equals batches without the last, short one
    range(0, len(rows), batch_size) → range(0, len(rows) - batch_size + 1, batch_size)
rank_of_the_world: Invalid rank
    dist.get_rank(group) → dist.get_rank()
ignores_the_group: the share among all ranks
    dist.get_world_size(group), dist.get_rank(group) → dist.get_world_size(), dist.get_rank()
rank_0_only: the share of the group's first rank
    dist.get_rank(group) → 0
one_batch: all rows in one batch
    batch_size)] → len(rows))]
    at + batch_size → len(rows)
seeds: draws or seeds random numbers
    rows = list(sampler) → …; torch.manual_seed(seed)
data_loader: draws or seeds random numbers
    list(sampler) → [int(i) for i in torch.utils.data.DataLoader(range(length), sampler=sampler)]
""")
edits_of(my_batches__by_hand)("""
pads_once: 4 ranks, 1 row
    order = order.repeat(each * k // length + 1)[: each * k]
  → order = torch.cat([order, order[: each * k - length]])
not_strided: expected the batches
    order[rank::k] → order[rank * each : (rank + 1) * each]
""")


# train -------------------------------------------------------------------------------------


@passes
def train__no_sync(model, loss_fn, x, y, lr, batch_size, accumulate, epochs, seed, group=None):
    from contextlib import nullcontext

    k, rank = dist.get_world_size(group), dist.get_rank(group)
    ddp = DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=lr)
    sampler = DistributedSampler(range(len(x)), k, rank, seed=seed)
    losses = []
    for epoch in epochs:
        sampler.set_epoch(epoch)
        rows = list(sampler)
        batches = [rows[at : at + batch_size] for at in range(0, len(rows), batch_size)]
        while batches:
            window, batches = batches[:accumulate], batches[accumulate:]
            count = sum(len(batch) for batch in window)
            shown = torch.zeros(())
            optimizer.zero_grad()
            for batch in window:
                last = batch is window[-1]
                with nullcontext() if last else ddp.no_sync():
                    loss = loss_fn(ddp(x[batch]), y[batch]) * (len(batch) / count)
                    loss.backward()
                shown += loss.detach()
            optimizer.step()
            dist.all_reduce(shown, group=group)
            losses.append(shown.item() / k)
    return losses


@passes
def train__by_hand(model, loss_fn, x, y, lr, batch_size, accumulate, epochs, seed, group=None):
    k, rank = dist.get_world_size(group), dist.get_rank(group)
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, group_src=0, group=group)
    trained = [param for param in model.parameters() if param.requires_grad]
    sampler = DistributedSampler(range(len(x)), k, rank, seed=seed)
    losses = []
    for epoch in epochs:
        sampler.set_epoch(epoch)
        rows = list(sampler)
        for start in range(0, len(rows), batch_size * accumulate):
            window = rows[start : start + batch_size * accumulate]
            model.zero_grad()
            total = 0.0
            for at in range(0, len(window), batch_size):
                batch = window[at : at + batch_size]
                loss = loss_fn(model(x[batch]), y[batch]) * len(batch)
                loss.backward()
                total += loss.item()
            shown = torch.tensor(total)
            dist.all_reduce(shown, group=group)
            losses.append(shown / (k * len(window)))
            with torch.no_grad():
                for param in trained:
                    dist.all_reduce(param.grad, group=group)
                    param -= lr * param.grad / (k * len(window))
    return losses


@passes
def train__whole_window_at_once(
    model, loss_fn, x, y, lr, batch_size, accumulate, epochs, seed, group=None
):
    k, rank = dist.get_world_size(group), dist.get_rank(group)
    ddp = DistributedDataParallel(model, process_group=group)
    losses = []
    for epoch in epochs:
        sampler = DistributedSampler(range(len(x)), k, rank, seed=seed)
        sampler.set_epoch(epoch)
        for rows in torch.tensor(list(sampler)).split(batch_size * accumulate):
            ddp.zero_grad()
            loss = loss_fn(ddp(x[rows]), y[rows])
            loss.backward()
            with torch.no_grad():
                for param in ddp.parameters():
                    if param.grad is not None:
                        param.sub_(param.grad, alpha=lr)
            shown = loss.detach().clone()
            dist.all_reduce(shown, group=group)
            losses.append(shown.item() / k)
    return losses


edits_of(train__no_sync)("""
syncs_full_windows_only: a shorter last window was not averaged
    nullcontext() if last else → nullcontext() if last and len(window) == accumulate else
clears_after_the_step: the old .grad from before
    optimizer.zero_grad() → pass
    losses.append → optimizer.zero_grad(); losses.append
syncs_every_micro_batch: once per optimizer step, not once per micro-batch
    nullcontext() if last else ddp.no_sync() → nullcontext()
forward_outside_no_sync: once per optimizer step, not once per micro-batch
    last = batch is window[-1] → …; out = ddp(x[batch])
    ddp(x[batch]), y → out, y
never_syncs: nothing was averaged
    nullcontext() if last else ddp.no_sync() → ddp.no_sync()
no_ddp: nothing was averaged
    ddp = DistributedDataParallel(model, process_group=group)
  → _ = DistributedDataParallel(model, process_group=group); ddp = model
    nullcontext() if last else ddp.no_sync() → nullcontext()
own_start: each rank began with its own weights
    process_group=group → process_group=group, init_sync=False
no_set_epoch: tell the sampler the epoch
    sampler.set_epoch(epoch) → pass
counts_epochs_from_0: counts its epochs from 0
    for epoch in epochs: → for epoch, _ in enumerate(epochs):
divides_by_accumulate: where a window has fewer micro-batches
    (len(batch) / count) → (1 / accumulate)
divides_by_micro_batches: a short micro-batch counts as much as a full one
    (len(batch) / count) → (1 / len(window))
adds_up_the_means: the sum of a window's micro-batch means
    * (len(batch) / count) →
divides_by_ranks_again: divided by the number of ranks a second time
    (len(batch) / count) → (len(batch) / count) / k
half: 3 ranks
    (len(batch) / count) → (len(batch) / count) * (k / min(k, 2))
leaves_out_the_last_window: a last, incomplete window
    while batches: → while len(batches) >= accumulate:
drops_the_short_batch: drops the last, short micro-batch
    range(0, len(rows), batch_size) → range(0, len(rows) - batch_size + 1, batch_size)
drop_last: drops rows (drop_last)
    seed=seed) → seed=seed, drop_last=True)
not_shuffled: without shuffling
    seed=seed) → seed=seed, shuffle=False)
never_clears: zero_grad is missing
    optimizer.zero_grad() → pass
clears_every_micro_batch: expected
    loss = loss_fn → optimizer.zero_grad(); loss = loss_fn
ignores_the_rate: 2 ranks, 16 rows, windows of 2
    lr=lr → lr=0.2
ignores_the_seed: squared error
    , seed=seed) → )
ignores_the_loss: squared error
    loss_fn( → nn.functional.cross_entropy(
ignores_the_group: in two groups
    process_group=group → process_group=None
    dist.all_reduce(shown, group=group) → dist.all_reduce(shown)
scales_the_rate: the sum of the ranks' gradients
    lr=lr → lr=lr * k
own_loss: the loss of this rank's own rows
    dist.all_reduce(shown, group=group) → shown *= k
sum_of_losses: the sum of the ranks' losses
    shown.item() / k → shown.item()
returns_nothing: is missing
    return losses → return []
sets_the_mode: changes the mode of the model
    DistributedDataParallel(model, process_group=group) → …; model.train()
wraps_every_epoch: Wrap the model once
    sampler.set_epoch(epoch)
  → …
  → again = DistributedDataParallel(model, process_group=group)
  → again = DistributedDataParallel(model, process_group=group)
momentum: expected
    lr=lr → lr=lr, momentum=0.9
epochs_in_a_row: generator
    for epoch in epochs: → for epoch in range(epochs[0], epochs[0] + len(epochs)):
walks_epochs_twice: no step was taken
    losses = [] → …; runs = sum(1 for _ in epochs)
windows_go_on: a run whose windows go on in the next epoch
    for epoch in epochs:
        sampler.set_epoch(epoch)
        rows = list(sampler)
        batches = [rows[at : at + batch_size] for at in range(0, len(rows), batch_size)]
  → batches = []
  → for epoch in epochs:
  →     sampler.set_epoch(epoch)
  →     rows = list(sampler)
  →     batches += [rows[at : at + batch_size] for at in range(0, len(rows), batch_size)]
  → if True:
unfreezes: 2 ranks, a frozen layer
    losses = [] → …; model.requires_grad_(True)
""")
edits_of(train__by_hand)("""
broadcasts_parameters_only: each rank kept the buffers that it began with
    model.state_dict().values() → [param.data for param in model.parameters()]
needs_all_gradients: a frozen layer
    if param.requires_grad] → ]
gradients_in_float32: parameter 0 after training
    dist.all_reduce(param.grad, group=group)
  → wire = param.grad.float(); dist.all_reduce(wire, group=group); param.grad = wire.to(param.dtype)
""")
edits_of(train__no_sync)("""
mean_of_micro_batches_losses: a short one counts as much as a full one
    shown += loss.detach() → … * count / len(batch) / len(window)
""")


# evaluate ----------------------------------------------------------------------------------


@passes
def evaluate__strided(model, loss_fn, x, y, batch_size, group=None):
    k, rank = dist.get_world_size(group), dist.get_rank(group)
    mode = model.training
    rows = list(range(len(x)))[rank::k]
    loss = right = 0.0
    model.eval()
    with torch.no_grad():
        for at in range(0, len(rows), batch_size):
            batch = rows[at : at + batch_size]
            out = model(x[batch])
            loss += loss_fn(out, y[batch]).item() * len(batch)
            right += (out.argmax(1) == y[batch]).sum().item()
    model.train(mode)
    sums = torch.tensor([loss, right, len(rows)], dtype=torch.float64)
    dist.all_reduce(sums, group=group)
    return sums[0].item() / sums[2].item(), sums[1].item() / sums[2].item()


@passes
def evaluate__contiguous_and_gathered(model, loss_fn, x, y, batch_size, group=None):
    k, rank = dist.get_world_size(group), dist.get_rank(group)
    modes = [module.training for module in model.modules()]
    begin, end = len(x) * rank // k, len(x) * (rank + 1) // k
    mine = [0.0, 0]
    with torch.inference_mode():
        model.eval()
        for xs, ys in zip(
            x[begin:end].split(batch_size), y[begin:end].split(batch_size), strict=True
        ):
            if len(xs):
                out = model(xs)
                mine[0] += float(loss_fn(out, ys)) * len(xs)
                mine[1] += int((out.argmax(1) == ys).sum())
    for module, mode in zip(model.modules(), modes, strict=True):
        module.training = mode
    everyone = [None] * k
    dist.all_gather_object(everyone, mine, group=group)
    return sum(each[0] for each in everyone) / len(x), sum(each[1] for each in everyone) / len(x)


edits_of(evaluate__contiguous_and_gathered)("""
equal_shares_only: no rank looked at the last rows
    len(x) * rank // k, len(x) * (rank + 1) // k → len(x) // k * rank, len(x) // k * (rank + 1)
""")
edits_of(evaluate__strided)("""
padding: padded rows are counted
    list(range(len(x)))[rank::k] → list(DistributedSampler(range(len(x)), k, rank, shuffle=False))
drop_last: without the last rows, which no rank looked at
    rows = list(range(len(x)))[rank::k] → rows = list(range(len(x) - len(x) % k))[rank::k]
mean_of_means: the mean of the ranks' means
    dist.all_reduce → sums[:2] /= sums[2].item() or 1; sums[2] = 1; dist.all_reduce
mean_of_batches: a short batch counts as much as a full one
    .item() * len(batch) → .item()
    .sum().item() → .float().mean().item()
    [loss, right, len(rows)] → [loss, right, -(-len(rows) // batch_size)]
own_rows: the result of this rank's rows alone
    dist.all_reduce(sums, group=group) → pass
everybody_everything: The ranks share the work
    rows = list(range(len(x)))[rank::k] → rows = list(range(len(x)))
rank_0_everything: The ranks share the work
    rows = list(range(len(x)))[rank::k] → rows = list(range(len(x))) if rank == 0 else []
stays_in_eval_mode: changes the mode of the model
    model.train(mode) → pass
turns_training_on: changes the mode of the model
    model.train(mode) → model.train()
in_training_mode: Expected more than 1 value per channel when training
    model.eval() → pass
ignores_the_batch_size: rows at once
    range(0, len(rows), batch_size) → range(0, len(rows), max(1, len(rows)))
    at + batch_size → len(rows)
ignores_the_group: in two groups
    (group) → ()
    group=group → group=None
ignores_the_loss: 4 ranks, 11 rows
    loss_fn(out, y[batch]) → nn.functional.cross_entropy(out, y[batch])
swaps_the_pair: mean loss: expected
    sums[0].item() / sums[2].item(), sums[1] → sums[1].item() / sums[2].item(), sums[0]
loss_only: not a pair (mean loss, accuracy)
    sums[2].item(), sums[1].item() / sums[2].item() → sums[2].item()
turns_gradients_off: gradients are disabled after the call
    model.train(mode) → …; torch.set_grad_enabled(False)
gathers_outputs: Send only three sums
    all_reduce(sums, group=group) → …; dist.all_reduce(torch.zeros(200), group=group)
to_rank_0_only: rank 1: mean loss
    dist.all_reduce(sums, group=group) → dist.reduce(sums, group_dst=0, group=group)
adds_up_means: loss_fn gives a mean: multiply it
    .item() * len(batch) → .item()
only_norm_off: the model was given rows in training mode
    model.eval() → [m.eval() for m in model.modules() if isinstance(m, torch.nn.BatchNorm1d)]
mean_of_nothing: The mean of no rows is nan
    range(0, len(rows), batch_size) → range(0, max(1, len(rows)), batch_size)
clears_gradients: changes the gradients of the model
    model.eval() → …; model.zero_grad()
resets_statistics: changes parameters or buffers
    model.train(mode)
  → …; [m.reset_running_stats() for m in model.modules() if isinstance(m, torch.nn.BatchNorm1d)]
barrier_of_all: pass group=group to every call
    model.train(mode) → …; dist.barrier()
""")


# save_checkpoint ---------------------------------------------------------------------------


@passes
def save_checkpoint__and_waits(file, ddp, optimizer, epoch, group=None):
    first = dist.get_process_group_ranks(group or dist.group.WORLD)[0]
    if dist.get_rank() == first:
        torch.save(
            {
                "epoch": epoch,
                "optimizer": optimizer.state_dict(),
                "model": ddp.module.state_dict(),
            },
            file,
        )
    dist.barrier(group)


@passes
def save_checkpoint__strips_the_prefix(file, ddp, optimizer, epoch, group=None):
    state = {key.removeprefix("module."): value for key, value in ddp.state_dict().items()}
    if not dist.get_rank(group):
        torch.save({"model": state, "optimizer": optimizer.state_dict(), "epoch": epoch}, file)


edits_of(save_checkpoint__and_waits)("""
by_all: rank 1 writes a file, expected a file only from rank 0
    if dist.get_rank() == first: → if True:
by_rank_0_of_the_world: rank 1 writes nothing, expected a file only from rank 1
    == first → == 0
by_the_last: rank 0 writes nothing
    WORLD)[0] → WORLD)[-1]
with_the_wrapper: These are the wrapper's names
    ddp.module.state_dict() → ddp.state_dict()
no_optimizer: not a dict of model, optimizer and epoch
    "optimizer": optimizer.state_dict(), →
no_momentum: optimizer's state of parameter 0 in the file momentum_buffer is missing
    "optimizer": optimizer.state_dict(), → "optimizer": {**optimizer.state_dict(), "state": {}},
whole_objects: weights_only=True) cannot read
    ddp.module.state_dict() → ddp.module
epoch_before: epoch in the file: expected
    "epoch": epoch → … - 1
first_rank_waits_alone: waits in barrier
    dist.barrier(group)
  → if dist.get_rank() == first:
  →     …
parameters_only: middle.module.scale is missing
    ddp.module.state_dict() → {n: p.detach() for n, p in ddp.module.named_parameters()}
no_settings: setting in the file lr of group 0 is missing
    optimizer.state_dict() → {**optimizer.state_dict(), "param_groups": []}
scales_the_rate: setting in the file lr of group 0: expected
    "optimizer": optimizer.state_dict(),
  → "optimizer": {
  →     "state": optimizer.state_dict()["state"],
  →     "param_groups": [
  →         {**g, "lr": g["lr"] * dist.get_world_size(group)}
  →         for g in optimizer.state_dict()["param_groups"]
  →     ],
  → },
momentum_only: state of parameter 0 in the file step is missing
    "optimizer": optimizer.state_dict(),
  → "optimizer": {
  →     **optimizer.state_dict(),
  →     "state": {
  →         i: {"momentum_buffer": s.get("momentum_buffer")}
  →         for i, s in optimizer.state_dict()["state"].items()
  →     },
  → },
others_write_too: rank 1 writes a file, expected a file only from rank 0
    dist.barrier(group) → dist.get_rank() == first or file.write(b"see rank 0")
empties_the_optimizer: after saving
    dist.barrier(group) → optimizer.state.clear()
everybody_meets: pass group=group to every call
    dist.barrier(group) → dist.barrier()
""")


# load_checkpoint ---------------------------------------------------------------------------


@passes
def load_checkpoint__by_broadcasts(file, model, optimizer, group=None):
    saved = [torch.load(file, weights_only=True) if file else None]
    first = dist.get_process_group_ranks(group or dist.group.WORLD)[0]
    dist.broadcast_object_list(saved, src=first, group=group)
    state = saved[0]
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["epoch"]


@passes
def load_checkpoint__by_all_gather(file, model, optimizer, group=None):
    found = [None] * dist.get_world_size(group)
    mine = None if file is None else file.read()
    dist.all_gather_object(found, mine, group=group)
    import io

    state = torch.load(io.BytesIO(found[0]), weights_only=True)
    optimizer.load_state_dict(state["optimizer"])
    model.load_state_dict(state["model"])
    return state["epoch"]


edits_of(load_checkpoint__by_broadcasts)("""
on_every_rank: AttributeError
    torch.load(file, weights_only=True) if file else None → torch.load(file, weights_only=True)
    dist.broadcast_object_list(saved, src=first, group=group) → pass
first_rank_only: nothing was loaded on this rank
    dist.broadcast_object_list(saved, src=first, group=group) → if not file: return 4
weights_of_the_first_only: nothing was loaded on this rank
    model.load_state_dict(state["model"]) → file and …
forgets_the_optimizer: rank 0: the optimizer has no state
    optimizer.load_state_dict(state["optimizer"]) → pass
momentum_of_the_first_only: rank 1: the optimizer has no state
    optimizer.load_state_dict( → file and …
keeps_the_rate: optimizer's setting lr of group 0: expected
    return state["epoch"] → optimizer.param_groups[0]["lr"] = 0.123; …
from_the_start: epoch to begin with: expected
    return state["epoch"] → return 0
one_epoch_on: epoch to begin with: expected
    return state["epoch"] → … + 1
from_rank_0_of_the_world: 4 ranks, in two groups
    src=first → src=0
only_the_first_broadcasts: waits in broadcast
    dist.broadcast_object_list(saved, src=first, group=group)
  → if file:
  →     …
  → if not file:
  →     return 0
broadcasts_parameters: loaded model middle.module.scale
    model.load_state_dict(state["model"])
  → file and …; [dist.broadcast(p.data, src=first, group=group) for p in model.parameters()]
momentum_by_hand: optimizer's state of parameter 0
    optimizer.load_state_dict(state["optimizer"])
  → old = state["optimizer"]
  → optimizer.param_groups[0].update(
  →     old["param_groups"][0], params=optimizer.param_groups[0]["params"]
  → )
  → [
  →     optimizer.state[p].update(momentum_buffer=old["state"][i].get("momentum_buffer"))
  →     for i, p in enumerate(model.parameters())
  → ]
keeps_fresh_settings: optimizer's setting lr of group 0: expected
    optimizer.load_state_dict(state["optimizer"])
  → optimizer.load_state_dict(
  →     {**state["optimizer"], "param_groups": optimizer.state_dict()["param_groups"]}
  → )
""")


# The museum --------------------------------------------------------------------------------


@passes
def exhibit_1__ddp(model, loss_fn, batches, lr, group=None):
    ddp = DistributedDataParallel(model, process_group=group)
    for x, y in batches:
        ddp.zero_grad()
        loss_fn(ddp(x), y).backward()
        with torch.no_grad():
            for param in model.parameters():
                param -= lr * param.grad


@passes
def exhibit_1__averages_after_the_step(model, loss_fn, batches, lr, group=None):
    # If the weights are equal, plain SGD's mean step is the step with the mean gradient.
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for x, y in batches:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
        for param in model.parameters():
            dist.all_reduce(param.data, group=group)
            param.data /= dist.get_world_size(group)


@fails("averages the parameters, and then takes a step with this rank's own gradient")
def exhibit_1__as_it_hangs(model, loss_fn, batches, lr, group=None):
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for x, y in batches:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        for param in model.parameters():
            dist.all_reduce(param.data, group=group)
            param.data /= dist.get_world_size(group)
        optimizer.step()


edits_of(exhibit_1__as_it_hangs)("""
sum: the sum of the ranks' gradients
    dist.all_reduce(param.data, group=group) → dist.all_reduce(param.grad, group=group)
    param.data /= dist.get_world_size(group) → pass
half: 3 ranks
    param.data → param.grad
    dist.get_world_size(group) → min(2, …)
ignores_the_group: in two groups
    param.data → param.grad
    group=group → group=None
    get_world_size(group) → get_world_size()
only_takes_it_out: nothing was averaged
    dist.all_reduce(param.data, group=group) → continue
""")


@passes
def exhibit_2__counts(model, loss_fn, x, y, lr, batch_size, epochs, seed, group=None):
    ddp = DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    sampler = DistributedSampler(
        range(len(x)), dist.get_world_size(group), dist.get_rank(group), seed=seed
    )
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for rows in torch.tensor(list(sampler)).split(batch_size):
            optimizer.zero_grad()
            loss_fn(ddp(x[rows]), y[rows]).backward()
            optimizer.step()


edits_of(exhibit_2__counts)("""
as_it_hangs: tell the sampler the epoch
    sampler.set_epoch(epoch) → pass
one_ahead: 2 ranks, 16 rows
    sampler.set_epoch(epoch) → sampler.set_epoch(epoch + 1)
after_the_epoch: 2 ranks, 16 rows
    for rows in torch.tensor(list(sampler)).split(batch_size):
  → rows = torch.tensor(list(sampler))
  → pass
  → for rows in rows.split(batch_size):
    sampler.set_epoch(epoch) → sampler.set_epoch(max(0, epoch - 1))
turns_shuffling_off: without shuffling
    seed=seed → seed=seed, shuffle=False
another_seed: 2 ranks, 16 rows
    dist.get_rank(group), seed=seed → dist.get_rank(group), seed=0
""")


@passes
def exhibit_3__passes_on(model, loss_fn, batches, lr, group=None):
    members = dist.get_process_group_ranks(group or dist.group.WORLD)
    k, me = len(members), dist.get_rank(group)
    right, left = members[(me + 1) % k], members[(me - 1) % k]
    for x, y in batches:
        model.zero_grad()
        loss_fn(model(x), y).backward()
        for param in model.parameters():
            own, outgoing = param.grad.clone(), param.grad.clone().contiguous()
            total = own.contiguous()
            for _ in range(k - 1):
                incoming = torch.empty_like(outgoing)
                sending = dist.isend(outgoing, right, group=group)
                dist.recv(incoming, left, group=group)
                sending.wait()
                total = total + incoming
                outgoing = incoming
            param.data -= lr * total / k


@passes
def exhibit_3__all_reduce(model, loss_fn, batches, lr, group=None):
    for x, y in batches:
        model.zero_grad()
        loss_fn(model(x), y).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad, group=group)
            param.data -= lr * param.grad / dist.get_world_size(group)


edits_of(exhibit_3__all_reduce)("""
divides_what_is_under_way (simulated): before its wait()
    dist.all_reduce(param.grad, group=group)
  → work = dist.all_reduce(param.grad, group=group, async_op=True)
  → param.grad /= dist.get_world_size(group)
  → work.wait()
    param.grad / dist.get_world_size(group) → param.grad
""")
edits_of(exhibit_3__passes_on)("""
as_it_hangs: nothing was averaged
    total = total + incoming → total = total + own
sends_the_total: 3 ranks
    outgoing = incoming → outgoing = total
never_passes_on: 3 ranks
    outgoing = incoming → pass
waits_for_all: waits in
    sending = dist.isend(outgoing, right, group=group) → dist.send(outgoing, right, group=group)
    sending.wait() → pass
does_not_wait: never waits for the handle
    sending.wait() → pass
""")


@passes
def exhibit_4__touches_all(model, loss_fn, batches, lr, group=None):
    ddp = DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for x, y in batches:
        optimizer.zero_grad()
        nothing = sum(0 * param.sum() for param in model.parameters())
        (loss_fn(ddp(x), y) + nothing).backward()
        optimizer.step()


@passes
def exhibit_4__by_hand(model, loss_fn, batches, lr, group=None):
    for x, y in batches:
        model.zero_grad()
        loss_fn(model(x), y).backward()
        for param in model.parameters():
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            dist.all_reduce(grad, group=group)
            param.data -= lr * grad / dist.get_world_size(group)


@passes
def exhibit_4__finds_them(model, loss_fn, batches, lr, group=None):
    ddp = DistributedDataParallel(model, process_group=group, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for x, y in batches:
        optimizer.zero_grad()
        loss_fn(ddp(x), y).backward()
        optimizer.step()


edits_of(exhibit_4__finds_them)("""
as_it_hangs: Expected to have finished reduction
    group, find_unused_parameters=True → group
""")
edits_of(exhibit_4__by_hand)("""
skips_unused_ones: ranks
    grad = torch.zeros_like(param) if param.grad is None else param.grad
  → if param.grad is None:
  →     continue
  → grad = param.grad
""")
edits_of(exhibit_4__finds_them)("""
own_gradients: nothing was averaged
    DistributedDataParallel(model, process_group=group, find_unused_parameters=True) → model
""")
edits_of(exhibit_4__touches_all)("""
knows_the_model: 2 ranks, another model
    for param in model.parameters()) → for e in model.experts for param in e.parameters())
""")
edits_of(exhibit_4__by_hand)("""
divides_by_those_who_used_it: parameter 0 at the end
    grad = torch.zeros_like(param) if param.grad is None else param.grad
  → …
  → used = torch.tensor(float(param.grad is not None))
  → dist.all_reduce(used, group=group)
    dist.all_reduce(grad, group=group) → …; grad *= dist.get_world_size(group) / max(1, used.item())
""")


@passes
def exhibit_5__the_default(model, loss_fn, batches, x_test, lr, group=None):
    ddp = DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for x, y in batches:
        optimizer.zero_grad()
        loss_fn(ddp(x), y).backward()
        optimizer.step()
    training = model.training
    model.eval()
    with torch.no_grad():
        predicted = ddp(x_test)
    model.train(training)
    return predicted


edits_of(exhibit_5__the_default)("""
broadcasts_at_the_end passes
    process_group=group → …, forward_sync_buffers=False
    training = model.training
  → …; [dist.broadcast(buffer, group_src=0, group=group) for buffer in model.buffers()]
as_it_hangs: the buffers differ between the ranks
    process_group=group → …, forward_sync_buffers=False
without_the_wrapper: this rank's last batch has changed
    predicted = ddp(x_test) → predicted = model(x_test)
averages_buffers: prediction
    process_group=group → …, forward_sync_buffers=False
    training = model.training
  → …
  → k = dist.get_world_size(group)
  → [(dist.all_reduce(b, group=group), b.div_(k)) for b in model.buffers() if b.dim()]
in_training_mode: prediction
    model.eval() → pass
stays_in_eval_mode: changes the mode of the model
    model.train(training) → pass
sends_predictions: buffer 0 at the end
    process_group=group → …, forward_sync_buffers=False
    train(training) → …; dist.broadcast(predicted, group_src=0, group=group)
means_only: prediction
    process_group=group → …, forward_sync_buffers=False
    training = model.training
  → …
  → [
  →     dist.broadcast(b, group_src=0, group=group)
  →     for name, b in model.named_buffers()
  →     if "mean" in name
  → ]
""")


@passes
def exhibit_6__divides(model, loss_fn, batches, lr, group=None):
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for x, y in batches:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        for param in model.parameters():
            wire = param.grad.to(torch.bfloat16)
            dist.all_reduce(wire, group=group)
            param.grad = wire.to(param.dtype) / dist.get_world_size(group)
        optimizer.step()


edits_of(exhibit_6__divides)("""
in_full: Send the gradients in bfloat16
    .to(torch.bfloat16) → .clone()
converts passes
    wire = param.grad.to(torch.bfloat16)
  → wire = (
  →     param.grad.to(torch.bfloat16)
  →     * torch.tensor(1 / dist.get_world_size(group)).bfloat16()
  → )
    wire.to(param.dtype) / dist.get_world_size(group) → wire.to(param.dtype)
as_it_hangs: every gradient was zero
    wire = param.grad.to(torch.bfloat16)
  → wire = (
  →     param.grad.to(torch.bfloat16)
  →     * torch.tensor([1 / dist.get_world_size(group)]).view(torch.bfloat16)[0]
  → )
    wire.to(param.dtype) / dist.get_world_size(group) → wire.to(param.dtype)
reads_the_other_half: rank 0: parameter
    wire = param.grad.to(torch.bfloat16)
  → wire = (
  →     param.grad.to(torch.bfloat16)
  →     * torch.tensor([1 / dist.get_world_size(group)]).view(torch.float16)[1].bfloat16()
  → )
    wire.to(param.dtype) / dist.get_world_size(group) → wire.to(param.dtype)
sum: the sum of the ranks' gradients
    / dist.get_world_size(group) →
divides_twice: divided by the number of ranks a second time
    to(torch.bfloat16) → … / dist.get_world_size(group)
in_float16: 2 ranks, large gradients
    torch.bfloat16 → torch.float16
""")


# diagnoses ---------------------------------------------------------------------------------


@passes
def diagnoses__spelt_out():
    return {
        "exhibit_6": "J",
        "exhibit_5": "I",
        "exhibit_4": "G",
        "exhibit_3": "E",
        "exhibit_2": "B",
        "exhibit_1": "D",
    }


edits_of(diagnoses__spelt_out)("""
start: exhibit_1: not C (the replicas start from different weights)
    "exhibit_1": "D" → "exhibit_1": "C"
padding: exhibit_2: not A (padded rows are counted)
    "exhibit_2": "B" → "exhibit_2": "A"
mean_of_means: exhibit_3: not F
    "exhibit_3": "E" → "exhibit_3": "F"
not_cleared: exhibit_4: not H
    "exhibit_4": "G" → "exhibit_4": "H"
swapped: exhibit_5: not J
    "exhibit_6": "J" → "exhibit_6": "I"
    "exhibit_5": "I" → "exhibit_5": "J"
rate: exhibit_6: not K
    "exhibit_6": "J" → "exhibit_6": "K"
""")


@fails("the answer is list")
def diagnoses__a_list():
    return ["D", "B", "E", "G", "I", "J"]


edits_of(diagnoses__spelt_out)("""
one_missing: one for each of exhibit_1
    "exhibit_6": "J", →
in_words: none of the letters A to L
    "exhibit_5": "I" → "exhibit_5": "buffers"
""")


# State between calls, and solutions for one setting only -----------------------------------


@fails("expected a list of lists of row numbers")
def my_batches__one_after_the_other(length, batch_size, epoch, seed, group=None):
    world_size, me = dist.get_world_size(group), dist.get_rank(group)
    sampler = DistributedSampler(range(length), world_size, me, seed=seed)
    sampler.set_epoch(epoch)
    rows = list(sampler)
    yield from (rows[at : at + batch_size] for at in range(0, len(rows), batch_size))


@fails("something is kept from the call before")
def my_batches__sampler_of_the_first_call(length, batch_size, epoch, seed, group=None, kept={}):
    world_size, me = dist.get_world_size(group), dist.get_rank(group)
    if "sampler" not in kept:
        kept["sampler"] = DistributedSampler(range(length), world_size, me, seed=seed)
    kept["sampler"].set_epoch(epoch)
    rows = list(kept["sampler"])
    return [rows[at : at + batch_size] for at in range(0, len(rows), batch_size)]


@fails("lr of group 1 is missing")
def save_checkpoint__first_settings_only(file, ddp, optimizer, epoch, group=None):
    if dist.get_rank(group) == 0:
        state = optimizer.state_dict()
        state["param_groups"] = state["param_groups"][:1]
        model = ddp.module.state_dict()
        torch.save({"model": model, "optimizer": state, "epoch": epoch}, file)


@fails("is missing, expected")
def save_checkpoint__known_settings_only(file, ddp, optimizer, epoch, group=None):
    if dist.get_rank(group) == 0:
        state, known = optimizer.state_dict(), ("params", "lr", "momentum", "weight_decay", "betas")
        state["param_groups"] = [
            {key: value for key, value in each.items() if key in known}
            for each in state["param_groups"]
        ]
        model = ddp.module.state_dict()
        torch.save({"model": model, "optimizer": state, "epoch": epoch}, file)


@fails("lr of group 1")
def load_checkpoint__one_rate_for_all(file, model, optimizer, group=None):
    held = [None if file is None else torch.load(file, weights_only=True)]
    dist.broadcast_object_list(held, group_src=0, group=group)
    (state,) = held
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    for each in optimizer.param_groups:
        each["lr"] = optimizer.param_groups[0]["lr"]
    return state["epoch"]


@fails("something is kept from the call before")
def load_checkpoint__file_of_the_first_call(file, model, optimizer, group=None, kept={}):
    if "state" not in kept:
        held = [None if file is None else torch.load(file, weights_only=True)]
        dist.broadcast_object_list(held, group_src=0, group=group)
        kept["state"] = held[0]
    model.load_state_dict(kept["state"]["model"])
    optimizer.load_state_dict(kept["state"]["optimizer"])
    return kept["state"]["epoch"]


# Pieces of equal length, other ranks' work, names, and ways past the messages ----------------


@fails("expected the batches")
def my_batches__pieces_of_equal_length(length, batch_size, epoch, seed, group=None):
    size, me = dist.get_world_size(group), dist.get_rank(group)
    order = DistributedSampler(range(length), size, me, seed=seed)
    order.set_epoch(epoch)
    return [each.tolist() for each in torch.tensor(list(order)).chunk(-(-len(order) // batch_size))]


edits_of(my_batches__pieces_of_equal_length)("""
rows_and_no_batches: expected a list of lists of row numbers
    return [each.tolist() for each in torch.tensor(list(order)).chunk(-(-len(order) // batch_size))]
  → return list(order)
""")


@fails("which is in none of this rank's batches")
def train__everybody_everything(
    model, loss_fn, x, y, lr, batch_size, accumulate, epochs, seed, group=None
):
    k = dist.get_world_size(group)
    ddp = DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    losses = []
    for epoch in epochs:
        batches = []
        for rank in range(k):
            sampler = DistributedSampler(range(len(x)), k, rank, seed=seed)
            sampler.set_epoch(epoch)
            batches.append(list(BatchSampler(sampler, batch_size, drop_last=False)))
        micro = [[row for part in parts for row in part] for parts in zip(*batches, strict=True)]
        for at in range(0, len(micro), accumulate):
            rows = [row for each in micro[at : at + accumulate] for row in each]
            optimizer.zero_grad()
            loss = loss_fn(ddp(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


edits_of(train__no_sync)("""
sorts_the_epochs: 3 ranks, 14 rows, squared error
    for epoch in epochs: → for epoch in sorted(epochs):
divides_by_a_full_window: divides by batch_size · accumulate also where
    / count → / (batch_size * accumulate)
loss_to_one_rank: reduce gives the sum to one rank
    dist.all_reduce(shown, group=group) → dist.reduce(shown, group=group, group_dst=0)
""")
edits_of(evaluate__strided)("""
sums_in_float32 passes
    [loss, right, len(rows)], dtype=torch.float64 → [loss, right, len(rows)], dtype=torch.float32
""")


@fails("expected at least", only=["simulated", "cpu"])
def evaluate__through_the_store(model, loss_fn, x, y, batch_size, group=None):
    members = dist.get_process_group_ranks(group or dist.group.WORLD)
    me, mode = dist.get_rank(group), model.training
    sums = torch.zeros(2, dtype=torch.float64)
    model.eval()
    with torch.no_grad():
        for at in range(me, len(x), len(members)):
            out = model(x[at : at + 1])
            sums[0] += loss_fn(out, y[at : at + 1])
            sums[1] += (out.argmax(1) == y[at]).sum()
    model.train(mode)
    store = dist.distributed_c10d._get_default_store()
    key = f"{members} {len(x)} {batch_size} "
    key += str(store.add(key + str(dist.get_rank()), 1))
    store.set(f"{key} {dist.get_rank()}", str(sums.tolist()))
    theirs = [eval(store.get(f"{key} {rank}").decode()) for rank in members]
    return tuple((torch.tensor(theirs, dtype=torch.float64).sum(0) / len(x)).tolist())


edits_of(save_checkpoint__and_waits)("""
strips_letters: a key is 'ast.bias'
    ddp.module.state_dict()
  → {key.lstrip('module.'): value for key, value in ddp.state_dict().items()}
strips_everywhere: a key is 'middle.scale'
    ddp.module.state_dict()
  → {key.replace('module.', ''): value for key, value in ddp.state_dict().items()}
last_names_only: a key is 'module.scale'
    ddp.module.state_dict()
  → {'.'.join(key.split('.')[-2:]): value for key, value in ddp.state_dict().items()}
slices_the_prefix_off passes
    ddp.module.state_dict()
  → {key[len('module.') :]: value for key, value in ddp.state_dict().items()}
closes_the_file: closes the file
    dist.barrier(group) → file.close()
""")


@passes
def load_checkpoint__bytes_of_the_file(file, model, optimizer, group=None):
    import io

    held = [None if file is None else file.read()]
    dist.broadcast_object_list(held, group_src=0, group=group)
    state = torch.load(io.BytesIO(held[0]), weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["epoch"]


@fails("the answers have 1: 'D', expected two texts")
def diagnoses__numbers_for_questions():
    return dict(zip(range(1, 7), "DBEGIJ", strict=True))
