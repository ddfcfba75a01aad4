"""Wrong solutions that people write, and right ones that differ from ours.

Each wrong one must fail for its own reason, each right one must pass. A function is named
``task__mistake``; ``@fails(part)`` says what the report must contain. Most mistakes are one line of
a right solution: ``edited`` writes it in place of another.
"""

# ruff: noqa: B006 - a default that is kept from call to call is a mistake that people make

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler
from torch.utils.data.distributed import DistributedSampler

from course_lib.checking.mutants import edited, fails, passes

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


def batches_with(*edits):
    return edited(my_batches__by_slices, *edits)


my_batches__no_set_epoch = fails("tell the sampler which epoch it is")(
    batches_with(("sampler.set_epoch(epoch)", "pass"))
)
my_batches__not_shuffled = fails("shuffle them")(
    batches_with(("seed=seed)", "seed=seed, shuffle=False)"))
)
my_batches__ignores_the_seed = fails("an order from another seed")(
    batches_with((", seed=seed)", ")"))
)
my_batches__drops_rows = fails("no row may be lost")(
    batches_with(("seed=seed)", "seed=seed, drop_last=True)"))
)
my_batches__drops_the_short_batch = fails("without the last, short one")(
    batches_with(
        ("range(0, len(rows), batch_size)", "range(0, len(rows) - batch_size + 1, batch_size)")
    )
)
my_batches__rank_of_the_world = fails("Invalid rank")(
    batches_with(("dist.get_rank(group)", "dist.get_rank()"))
)
my_batches__ignores_the_group = fails("the share among all ranks")(
    batches_with(
        ("dist.get_rank(group)", "dist.get_rank()"),
        ("dist.get_world_size(group)", "dist.get_world_size()"),
    )
)
my_batches__rank_0_only = fails("the share of the group's first rank")(
    batches_with(("dist.get_rank(group)", "0"))
)
my_batches__one_batch = fails("all rows in one batch")(
    batches_with(("batch_size)]", "len(rows))]"), ("at + batch_size", "len(rows)"))
)
my_batches__seeds = fails("draws or seeds random numbers")(
    batches_with(("rows = list(sampler)", "rows = list(sampler); torch.manual_seed(seed)"))
)
my_batches__data_loader = fails("draws or seeds random numbers")(
    batches_with(
        (
            "rows = list(sampler)",
            "rows = [int(i) for i in torch.utils.data.DataLoader(range(length), sampler=sampler)]",
        )
    )
)

my_batches__pads_once = fails("4 ranks, 1 row")(
    edited(
        my_batches__by_hand,
        (
            "order = order.repeat(each * k // length + 1)[: each * k]",
            "order = torch.cat([order, order[: each * k - length]])",
        ),
    )
)
my_batches__not_strided = fails("expected the batches")(
    edited(my_batches__by_hand, ("order[rank::k]", "order[rank * each : (rank + 1) * each]"))
)


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
            for batch in window:
                last = batch is window[-1]
                with nullcontext() if last else ddp.no_sync():
                    loss = loss_fn(ddp(x[batch]), y[batch]) * (len(batch) / count)
                    loss.backward()
                shown += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
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


def train_with(*edits):
    return edited(train__no_sync, *edits)


CONTEXT = "nullcontext() if last else ddp.no_sync()"
LOSS = "loss = loss_fn(ddp(x[batch]), y[batch]) * (len(batch) / count)"
ZERO = "optimizer.zero_grad()"
STEP = "optimizer.step()"
WRAP = "ddp = DistributedDataParallel(model, process_group=group)"
ALONE = "import contextlib; ddp = model; ddp.no_sync = nullcontext"
SHOWN = "dist.all_reduce(shown, group=group)"
CUT = "window, batches = batches[:accumulate], batches[accumulate:]"

train__syncs_every_micro_batch = fails("once per optimizer step, not once per micro-batch")(
    train_with((CONTEXT, "nullcontext()"))
)
train__forward_outside_no_sync = fails("once per optimizer step, not once per micro-batch")(
    train_with(
        (f"with {CONTEXT}:", "out = ddp(x[batch])\n                with " + CONTEXT + ":"),
        ("ddp(x[batch]), y", "out, y"),
    )
)
train__never_syncs = fails("nothing was averaged")(train_with((CONTEXT, "ddp.no_sync()")))
train__no_ddp = fails("nothing was averaged")(
    train_with((WRAP, WRAP.replace("ddp", "_", 1) + "; ddp = model"), (CONTEXT, "nullcontext()"))
)
train__own_start = fails("each rank began with weights of its own")(
    train_with((WRAP, WRAP[:-1] + ", init_sync=False)"))
)
train__no_set_epoch = fails("tell the sampler (set_epoch)")(
    train_with(("sampler.set_epoch(epoch)", "pass"))
)
train__counts_epochs_from_0 = fails("counts its epochs from 0")(
    train_with(("for epoch in epochs:", "for epoch, _ in enumerate(epochs):"))
)
train__divides_by_accumulate = fails("where a window has fewer micro-batches")(
    train_with(("(len(batch) / count)", "(1 / accumulate)"))
)
train__divides_by_micro_batches = fails("a short micro-batch counts as much as a full one")(
    train_with(("(len(batch) / count)", "(1 / len(window))"))
)
train__adds_up_the_means = fails("adds up the means of a window's micro-batches")(
    train_with((" * (len(batch) / count)", ""))
)
train__divides_by_ranks_again = fails("divided by the number of ranks once more")(
    train_with((LOSS, LOSS + " / k"))
)
train__half = fails("3 ranks")(train_with((LOSS, LOSS + " * (k / min(k, 2))")))
train__leaves_out_the_last_window = fails("a last, incomplete window")(
    train_with(("while batches:", "while len(batches) >= accumulate:"))
)
train__drops_the_short_batch = fails("drops the last, short micro-batch")(
    train_with(
        ("range(0, len(rows), batch_size)", "range(0, len(rows) - batch_size + 1, batch_size)")
    )
)
train__drop_last = fails("drops rows (drop_last)")(
    train_with(("seed=seed)", "seed=seed, drop_last=True)"))
)
train__not_shuffled = fails("without shuffling")(
    train_with(("seed=seed)", "seed=seed, shuffle=False)"))
)
train__never_clears = fails("zero_grad is missing")(train_with((ZERO, "pass")))
train__clears_every_micro_batch = fails("expected")(train_with((LOSS, ZERO + "; " + LOSS)))
train__ignores_the_rate = fails("2 ranks, 16 rows, windows of 2")(train_with(("lr=lr", "lr=0.2")))
train__ignores_the_seed = fails("squared error")(train_with((", seed=seed)", ")")))
train__ignores_the_loss = fails("squared error")(
    train_with(("loss_fn(", "nn.functional.cross_entropy("))
)
train__ignores_the_group = fails("in two groups")(
    train_with(("process_group=group", "process_group=None"), (SHOWN, "dist.all_reduce(shown)"))
)
train__scales_the_rate = fails("the sum of the ranks' gradients")(
    train_with(("lr=lr", "lr=lr * k"))
)
train__own_loss = fails("the loss of this rank's own rows")(train_with((SHOWN, "shown *= k")))
train__sum_of_losses = fails("the sum of the ranks' losses")(
    train_with(("shown.item() / k", "shown.item()"))
)
train__returns_nothing = fails("is missing")(train_with(("return losses", "return []")))
train__sets_the_mode = fails("the model came in one mode")(
    train_with((WRAP, WRAP + "; model.train()"))
)
train__wraps_every_epoch = fails("Wrap the model once")(
    train_with(
        (
            "sampler.set_epoch(epoch)",
            f"sampler.set_epoch(epoch); again = {WRAP[6:]}; again = {WRAP[6:]}",
        ),
    )
)
train__momentum = fails("expected")(train_with(("lr=lr", "lr=lr, momentum=0.9")))

train__epochs_in_a_row = fails("generator")(
    train_with(("for epoch in epochs:", "for epoch in range(epochs[0], epochs[0] + len(epochs)):"))
)
train__walks_epochs_twice = fails("no step was taken")(
    train_with(("losses = []", "losses = []; runs = sum(1 for _ in epochs)"))
)
train__windows_go_on = fails("a run whose windows go on in the next epoch")(
    edited(
        train__no_sync,
        ("    for epoch in epochs:\n", "    batches = []\n    for epoch in epochs:\n"),
        ("        batches = [rows", "        batches += [rows"),
        ("        while batches:", "    if True:\n        while batches:"),
    )
)
train__unfreezes = fails("2 ranks, a frozen layer")(
    train_with(("losses = []", "losses = []; model.requires_grad_(True)"))
)
train__broadcasts_parameters_only = fails("each rank kept the buffers that it began with")(
    edited(
        train__by_hand,
        ("model.state_dict().values()", "[param.data for param in model.parameters()]"),
    )
)
train__needs_all_gradients = fails("a frozen layer")(
    edited(train__by_hand, ("if param.requires_grad]", "]"))
)
train__gradients_in_float32 = fails("parameter 0 after training")(
    edited(
        train__by_hand,
        (
            "dist.all_reduce(param.grad, group=group)",
            "wire = param.grad.float(); dist.all_reduce(wire, group=group); "
            "param.grad = wire.to(param.dtype)",
        ),
    )
)
train__mean_of_micro_batches_losses = fails("a short one counted like a full one")(
    train_with(
        ("shown += loss.detach()", "shown += loss.detach() * count / len(batch) / len(window)")
    )
)


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


def evaluate_with(*edits):
    return edited(evaluate__strided, *edits)


ROWS = "rows = list(range(len(x)))[rank::k]"
REDUCE = "dist.all_reduce(sums, group=group)"

evaluate__padding = fails("padded rows are counted")(
    evaluate_with((ROWS, "rows = list(DistributedSampler(range(len(x)), k, rank, shuffle=False))"))
)
evaluate__drop_last = fails("without the last rows, which no rank looked at")(
    evaluate_with((ROWS, "rows = list(range(len(x) - len(x) % k))[rank::k]"))
)
evaluate__mean_of_means = fails("the mean of the ranks' means")(
    evaluate_with(
        (
            REDUCE,
            "sums[:2] /= sums[2].item() or 1; sums[2] = 1; " + REDUCE,
        )
    )
)
evaluate__mean_of_batches = fails("a short batch counts as much as a full one")(
    evaluate_with(
        (".item() * len(batch)", ".item()"),
        (".sum().item()", ".float().mean().item()"),
        ("len(rows)]", "-(-len(rows) // batch_size)]"),
    )
)
evaluate__own_rows = fails("the result of this rank's rows alone")(evaluate_with((REDUCE, "pass")))
evaluate__everybody_everything = fails("The ranks share the work")(
    evaluate_with((ROWS, "rows = list(range(len(x)))"))
)
evaluate__rank_0_everything = fails("The ranks share the work")(
    evaluate_with((ROWS, "rows = list(range(len(x))) if rank == 0 else []"))
)
evaluate__stays_in_eval_mode = fails("the model came in one mode")(
    evaluate_with(("model.train(mode)", "pass"))
)
evaluate__turns_training_on = fails("the model came in one mode")(
    evaluate_with(("model.train(mode)", "model.train()"))
)
evaluate__in_training_mode = fails("rank 0: the model was given rows in training mode")(
    evaluate_with(("model.eval()", "pass"))
)
evaluate__ignores_the_batch_size = fails("rows at once")(
    evaluate_with(
        ("range(0, len(rows), batch_size)", "range(0, len(rows), max(1, len(rows)))"),
        ("at + batch_size", "len(rows)"),
    )
)
evaluate__ignores_the_group = fails("in two groups")(
    evaluate_with(("(group)", "()"), ("group=group", "group=None"))
)
evaluate__ignores_the_loss = fails("4 ranks, 11 rows")(
    evaluate_with(("loss_fn(out", "nn.functional.cross_entropy(out"))
)
evaluate__swaps_the_pair = fails("mean loss: expected")(
    evaluate_with(
        (
            "return sums[0].item() / sums[2].item(), sums[1]",
            "return sums[1].item() / sums[2].item(), sums[0]",
        )
    )
)
evaluate__loss_only = fails("not a pair (mean loss, accuracy)")(
    evaluate_with((", sums[1].item() / sums[2].item()", ""))
)
evaluate__turns_gradients_off = fails("gradients are disabled after the call")(
    evaluate_with(("model.train(mode)", "model.train(mode); torch.set_grad_enabled(False)"))
)
evaluate__gathers_outputs = fails("Three sums are all that the others need")(
    evaluate_with((REDUCE, REDUCE + "; dist.all_reduce(torch.zeros(200), group=group)"))
)
evaluate__to_rank_0_only = fails("rank 1: mean loss")(
    evaluate_with(
        (REDUCE, "dist.reduce(sums, group_dst=0, group=group)"),
    )
)

evaluate__adds_up_means = fails("loss_fn gives a mean, multiply it")(
    evaluate_with((".item() * len(batch)", ".item()"))
)
evaluate__only_norm_off = fails("the model was given rows in training mode")(
    evaluate_with(
        (
            "model.eval()",
            "[m.eval() for m in model.modules() if isinstance(m, torch.nn.BatchNorm1d)]",
        )
    )
)
evaluate__mean_of_nothing = fails("The mean of no rows is nan")(
    evaluate_with(("range(0, len(rows), batch_size)", "range(0, max(1, len(rows)), batch_size)"))
)
evaluate__clears_gradients = fails("changes the gradients of the model")(
    evaluate_with(("model.eval()", "model.eval(); model.zero_grad()"))
)
evaluate__resets_statistics = fails("changes parameters or buffers")(
    evaluate_with(
        (
            "model.train(mode)",
            "model.train(mode); [m.reset_running_stats() for m in model.modules() "
            "if isinstance(m, torch.nn.BatchNorm1d)]",
        )
    )
)
evaluate__barrier_of_all = fails("pass group=group to every call")(
    evaluate_with(("model.train(mode)", "model.train(mode); dist.barrier()"))
)


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


def save_with(*edits):
    return edited(save_checkpoint__and_waits, *edits)


save_checkpoint__by_all = fails("rank 1 writes, expected a file from rank 0")(
    save_with(("if dist.get_rank() == first:", "if True:"))
)
save_checkpoint__by_rank_0_of_the_world = fails(
    "rank 1 writes nothing, expected a file from rank 1"
)(save_with(("== first", "== 0")))
save_checkpoint__by_the_last = fails("rank 0 writes nothing")(
    save_with(("WORLD)[0]", "WORLD)[-1]"))
)
save_checkpoint__with_the_wrapper = fails("These are the wrapper's names")(
    save_with(("ddp.module.state_dict()", "ddp.state_dict()"))
)
save_checkpoint__no_optimizer = fails("not a dict of model, optimizer and epoch")(
    save_with(('"optimizer": optimizer.state_dict(),', ""))
)
save_checkpoint__no_momentum = fails(
    "optimizer's state of parameter 0 in the file momentum_buffer is missing"
)(
    save_with(
        (
            '"optimizer": optimizer.state_dict(),',
            '"optimizer": {**optimizer.state_dict(), "state": {}},',
        )
    )
)
save_checkpoint__whole_objects = fails("Weights only load failed")(
    save_with(("ddp.module.state_dict()", "ddp.module"))
)
save_checkpoint__epoch_before = fails("epoch in the file: expected")(
    save_with(('"epoch": epoch', '"epoch": epoch - 1'))
)
save_checkpoint__first_rank_waits_alone = fails("waits in barrier")(
    save_with(
        ("    dist.barrier(group)", "    if dist.get_rank() == first:\n        dist.barrier(group)")
    )
)

save_checkpoint__parameters_only = fails("middle.module.scale is missing")(
    save_with(
        ("ddp.module.state_dict()", "{n: p.detach() for n, p in ddp.module.named_parameters()}")
    )
)
save_checkpoint__no_settings = fails("setting in the file lr of group 0 is missing")(
    save_with(
        (
            '"optimizer": optimizer.state_dict(),',
            '"optimizer": {**optimizer.state_dict(), "param_groups": []},',
        )
    )
)
save_checkpoint__scales_the_rate = fails("setting in the file lr of group 0: expected")(
    save_with(
        (
            '"optimizer": optimizer.state_dict(),',
            '"optimizer": {"state": optimizer.state_dict()["state"], "param_groups": '
            '[{**g, "lr": g["lr"] * dist.get_world_size(group)} for g in optimizer.param_groups]},',
        ),
        (
            "for g in optimizer.param_groups",
            'for g in optimizer.state_dict()["param_groups"]',
        ),
    )
)
save_checkpoint__momentum_only = fails("state of parameter 0 in the file step is missing")(
    save_with(
        (
            '"optimizer": optimizer.state_dict(),',
            '"optimizer": {**optimizer.state_dict(), "state": {i: '
            '{"momentum_buffer": s.get("momentum_buffer")} '
            'for i, s in optimizer.state_dict()["state"].items()}},',
        )
    )
)
save_checkpoint__others_write_too = fails("rank 1 writes, expected a file from rank 0")(
    save_with(
        ("    dist.barrier(group)", '    dist.get_rank() == first or file.write(b"see rank 0")')
    )
)
save_checkpoint__empties_the_optimizer = fails("after saving")(
    save_with(("    dist.barrier(group)", "    optimizer.state.clear()"))
)
save_checkpoint__everybody_meets = fails("pass group=group to every call")(
    save_with(("dist.barrier(group)", "dist.barrier()"))
)


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


def load_with(*edits):
    return edited(load_checkpoint__by_broadcasts, *edits)


SHARE = "dist.broadcast_object_list(saved, src=first, group=group)"

load_checkpoint__on_every_rank = fails("AttributeError")(
    load_with(
        (
            "torch.load(file, weights_only=True) if file else None",
            "torch.load(file, weights_only=True)",
        ),
        (SHARE, "pass"),
    )
)
load_checkpoint__first_rank_only = fails("it was not loaded here")(
    load_with((SHARE, "if not file: return 4"))
)
load_checkpoint__weights_of_the_first_only = fails("it was not loaded here")(
    load_with(
        ('model.load_state_dict(state["model"])', 'file and model.load_state_dict(state["model"])')
    )
)
load_checkpoint__forgets_the_optimizer = fails("rank 0: the optimizer has no state")(
    load_with(('optimizer.load_state_dict(state["optimizer"])', "pass"))
)
load_checkpoint__momentum_of_the_first_only = fails("rank 1: the optimizer has no state")(
    load_with(("optimizer.load_state_dict(", "file and optimizer.load_state_dict("))
)
load_checkpoint__keeps_the_rate = fails("optimizer's setting lr of group 0: expected")(
    load_with(
        ('return state["epoch"]', 'optimizer.param_groups[0]["lr"] = 0.123; return state["epoch"]')
    )
)
load_checkpoint__from_the_start = fails("epoch to begin with: expected")(
    load_with(('return state["epoch"]', "return 0"))
)
load_checkpoint__one_epoch_on = fails("epoch to begin with: expected")(
    load_with(('return state["epoch"]', 'return state["epoch"] + 1'))
)
load_checkpoint__from_rank_0_of_the_world = fails("4 ranks, in two groups")(
    load_with(("src=first", "src=0"))
)
load_checkpoint__only_the_first_broadcasts = fails("waits in broadcast")(
    load_with(
        (SHARE, f"if file: {SHARE}"),
        ("state = saved[0]", "if not file: return 0\n    state = saved[0]"),
    )
)

load_checkpoint__broadcasts_parameters = fails("loaded model middle.module.scale")(
    load_with(
        (
            'model.load_state_dict(state["model"])',
            'file and model.load_state_dict(state["model"]); '
            "[dist.broadcast(p.data, src=first, group=group) for p in model.parameters()]",
        )
    )
)
load_checkpoint__momentum_by_hand = fails("optimizer's state of parameter 0")(
    load_with(
        (
            'optimizer.load_state_dict(state["optimizer"])',
            'old = state["optimizer"]; optimizer.param_groups[0].update(old["param_groups"][0], '
            'params=optimizer.param_groups[0]["params"]); '
            '[optimizer.state[p].update(momentum_buffer=old["state"][i].get("momentum_buffer")) '
            "for i, p in enumerate(model.parameters())]",
        )
    )
)
load_checkpoint__keeps_fresh_settings = fails("optimizer's setting lr of group 0: expected")(
    load_with(
        (
            'optimizer.load_state_dict(state["optimizer"])',
            'optimizer.load_state_dict({**state["optimizer"], '
            '"param_groups": optimizer.state_dict()["param_groups"]})',
        )
    )
)


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
    # Of equal weights, plain SGD's mean step is the step with the mean gradient.
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for x, y in batches:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
        for param in model.parameters():
            dist.all_reduce(param.data, group=group)
            param.data /= dist.get_world_size(group)


@fails("averages parameters, and then takes a step of its own")
def exhibit_1__as_it_hangs(model, loss_fn, batches, lr, group=None):
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for x, y in batches:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        for param in model.parameters():
            dist.all_reduce(param.data, group=group)
            param.data /= dist.get_world_size(group)
        optimizer.step()


exhibit_1__sum = fails("the sum of the ranks' gradients")(
    edited(
        exhibit_1__as_it_hangs,
        ("dist.all_reduce(param.data", "dist.all_reduce(param.grad"),
        ("param.data /= dist.get_world_size(group)", "pass"),
    )
)
exhibit_1__half = fails("3 ranks")(
    edited(
        exhibit_1__as_it_hangs,
        ("param.data", "param.grad"),
        ("dist.get_world_size(group)", "min(2, dist.get_world_size(group))"),
    )
)
exhibit_1__ignores_the_group = fails("in two groups")(
    edited(
        exhibit_1__as_it_hangs,
        *(("param.data", "param.grad"), ("group=group", "group=None")),
        ("get_world_size(group)", "get_world_size()"),
    )
)
exhibit_1__only_takes_it_out = fails("nothing was averaged")(
    edited(exhibit_1__as_it_hangs, ("dist.all_reduce(param.data, group=group)", "continue"))
)


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


def exhibit_2_with(*edits):
    return edited(exhibit_2__counts, *edits)


TELL = "sampler.set_epoch(epoch)"
exhibit_2__as_it_hangs = fails("tell the sampler (set_epoch)")(exhibit_2_with((TELL, "pass")))
exhibit_2__one_ahead = fails("2 ranks, 16 rows")(
    exhibit_2_with((TELL, "sampler.set_epoch(epoch + 1)"))
)
exhibit_2__after_the_epoch = fails("2 ranks, 16 rows")(
    exhibit_2_with(
        (
            "for rows in torch.tensor(list(sampler))",
            "rows = torch.tensor(list(sampler)); pass\n        for rows in rows",
        ),
        (TELL, "sampler.set_epoch(max(0, epoch - 1))"),
    )
)
exhibit_2__turns_shuffling_off = fails("without shuffling")(
    exhibit_2_with(("seed=seed", "seed=seed, shuffle=False"))
)
exhibit_2__another_seed = fails("2 ranks, 16 rows")(exhibit_2_with((", seed=seed", ", seed=0")))


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


exhibit_3__divides_what_is_under_way = fails("before its wait()", only=["simulated"])(
    edited(
        exhibit_3__all_reduce,
        (
            "            dist.all_reduce(param.grad, group=group)\n",
            "            work = dist.all_reduce(param.grad, group=group, async_op=True)\n"
            "            param.grad /= dist.get_world_size(group)\n"
            "            work.wait()\n",
        ),
        ("param.grad / dist.get_world_size(group)", "param.grad"),
    )
)


def exhibit_3_with(*edits):
    return edited(exhibit_3__passes_on, *edits)


ADDS = "total = total + incoming"
exhibit_3__as_it_hangs = fails("nothing was averaged")(
    exhibit_3_with((ADDS, "total = total + own"))
)
exhibit_3__sends_the_total = fails("3 ranks")(
    exhibit_3_with(("outgoing = incoming", "outgoing = total"))
)
exhibit_3__never_passes_on = fails("3 ranks")(exhibit_3_with(("outgoing = incoming", "pass")))
exhibit_3__waits_for_all = fails("waits in")(
    exhibit_3_with(
        (
            "sending = dist.isend(outgoing, right, group=group)",
            "dist.send(outgoing, right, group=group)",
        ),
        ("sending.wait()", "pass"),
    )
)
exhibit_3__does_not_wait = fails("never waits for the handle")(
    exhibit_3_with(("sending.wait()", "pass"))
)


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


def exhibit_4_with(*edits):
    return edited(exhibit_4__finds_them, *edits)


exhibit_4__as_it_hangs = fails("Expected to have finished reduction")(
    exhibit_4_with((", find_unused_parameters=True", ""))
)
exhibit_4__skips_unused_ones = fails("ranks")(
    edited(
        exhibit_4__by_hand,
        (
            "grad = torch.zeros_like(param) if param.grad is None else param.grad",
            "if param.grad is None: continue\n            grad = param.grad",
        ),
    )
)
exhibit_4__own_gradients = fails("nothing was averaged")(
    exhibit_4_with(
        (
            "DistributedDataParallel(model, process_group=group, find_unused_parameters=True)",
            "model",
        )
    )
)

exhibit_4__knows_the_model = fails("2 ranks, another model")(
    edited(
        exhibit_4__touches_all,
        ("for param in model.parameters())", "for e in model.experts for param in e.parameters())"),
    )
)
exhibit_4__divides_by_those_who_used_it = fails("parameter 0 at the end")(
    edited(
        exhibit_4__by_hand,
        (
            "dist.all_reduce(grad, group=group)",
            "used = torch.tensor(float(param.grad is not None)); "
            "dist.all_reduce(used, group=group); dist.all_reduce(grad, group=group); "
            "grad *= dist.get_world_size(group) / max(1, used.item())",
        ),
    )
)


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


def exhibit_5_with(*edits):
    return edited(exhibit_5__the_default, *edits)


OFF = ("process_group=group", "process_group=group, forward_sync_buffers=False")
exhibit_5__broadcasts_at_the_end = passes(
    exhibit_5_with(
        OFF,
        (
            "training = model.training",
            "training = model.training; "
            "[dist.broadcast(buffer, group_src=0, group=group) for buffer in model.buffers()]",
        ),
    )
)
exhibit_5__as_it_hangs = fails("the buffers came apart")(exhibit_5_with(OFF))
exhibit_5__without_the_wrapper = fails("this rank's last batch has changed")(
    exhibit_5_with(("predicted = ddp(x_test)", "predicted = model(x_test)"))
)
exhibit_5__averages_buffers = fails("prediction")(
    exhibit_5_with(
        OFF,
        (
            "training = model.training",
            "training = model.training; k = dist.get_world_size(group); "
            "[(dist.all_reduce(b, group=group), b.div_(k)) for b in model.buffers() if b.dim()]",
        ),
    )
)
exhibit_5__in_training_mode = fails("prediction")(exhibit_5_with(("model.eval()", "pass")))
exhibit_5__stays_in_eval_mode = fails("the model came in one mode")(
    exhibit_5_with(("model.train(training)", "pass"))
)

exhibit_5__sends_predictions = fails("buffer 0 at the end")(
    exhibit_5_with(
        OFF,
        (
            "model.train(training)",
            "model.train(training); dist.broadcast(predicted, group_src=0, group=group)",
        ),
    )
)
exhibit_5__means_only = fails("prediction")(
    exhibit_5_with(
        OFF,
        (
            "training = model.training",
            "training = model.training; [dist.broadcast(b, group_src=0, group=group) "
            'for name, b in model.named_buffers() if "mean" in name]',
        ),
    )
)


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


exhibit_6__in_full = passes(edited(exhibit_6__divides, (".to(torch.bfloat16)", ".clone()")))
exhibit_6__converts = passes(
    edited(
        exhibit_6__divides,
        (
            "to(torch.bfloat16)",
            "to(torch.bfloat16) * torch.tensor(1 / dist.get_world_size(group)).bfloat16()",
        ),
        (" / dist.get_world_size(group)\n", "\n"),
    )
)
READ_WRONG = "torch.tensor([1 / dist.get_world_size(group)]).view(torch.bfloat16)[0]"
exhibit_6__as_it_hangs = fails("every gradient was zero")(
    edited(
        exhibit_6__divides,
        ("to(torch.bfloat16)", f"to(torch.bfloat16) * {READ_WRONG}"),
        (" / dist.get_world_size(group)\n", "\n"),
    )
)
exhibit_6__reads_the_other_half = fails("rank 0: parameter")(
    edited(
        exhibit_6__divides,
        (
            "to(torch.bfloat16)",
            f"to(torch.bfloat16) * {READ_WRONG.replace('bfloat16)[0]', 'float16)[1].bfloat16()')}",
        ),
        (" / dist.get_world_size(group)\n", "\n"),
    )
)
exhibit_6__sum = fails("the sum of the ranks' gradients")(
    edited(exhibit_6__divides, (" / dist.get_world_size(group)\n", "\n"))
)
exhibit_6__divides_twice = fails("divided by the number of ranks once more")(
    edited(
        exhibit_6__divides,
        ("to(torch.bfloat16)", "to(torch.bfloat16) / dist.get_world_size(group)"),
    )
)

exhibit_6__in_float16 = fails("2 ranks, large gradients")(
    edited(exhibit_6__divides, ("torch.bfloat16", "torch.float16"))
)


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


def diagnoses_with(*edits):
    return edited(diagnoses__spelt_out, *edits)


diagnoses__start = fails("exhibit_1: not C (the replicas start from different weights)")(
    diagnoses_with(('"D"', '"C"'))
)
diagnoses__padding = fails("exhibit_2: not A (padded rows are counted)")(
    diagnoses_with(('"B"', '"A"'))
)
diagnoses__mean_of_means = fails("exhibit_3: not F")(diagnoses_with(('"E"', '"F"')))
diagnoses__not_cleared = fails("exhibit_4: not H")(diagnoses_with(('"G"', '"H"')))
diagnoses__swapped = fails("exhibit_5: not J")(
    diagnoses_with(('"I"', '"?"'), ('"J"', '"I"'), ('"?"', '"J"'))
)
diagnoses__rate = fails("exhibit_6: not K")(diagnoses_with(('"J"', '"K"')))


@fails("the answer is list")
def diagnoses__a_list():
    return ["D", "B", "E", "G", "I", "J"]


diagnoses__one_missing = fails("one for each of exhibit_1")(
    diagnoses_with(('"exhibit_6": "J",', ""))
)
diagnoses__in_words = fails("none of the letters A to L")(diagnoses_with(('"I"', '"buffers"')))


# What is kept from one call to the next, and what holds for one setting only ---------------


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


@fails("expected a list of lists of row numbers")
def my_batches__rows_and_no_batches(length, batch_size, epoch, seed, group=None):
    size, me = dist.get_world_size(group), dist.get_rank(group)
    order = DistributedSampler(range(length), size, me, seed=seed)
    order.set_epoch(epoch)
    return list(order)


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


train__sorts_the_epochs = fails("3 ranks, 14 rows, squared error")(
    train_with(("for epoch in epochs:", "for epoch in sorted(epochs):"))
)
train__divides_by_a_full_window = fails("divides by batch_size · accumulate also where")(
    train_with(("/ count", "/ (batch_size * accumulate)"))
)
train__loss_to_one_rank = fails("reduce gives the sum to one rank")(
    train_with((SHOWN, "dist.reduce(shown, group=group, group_dst=0)"))
)

evaluate__sums_in_float32 = passes(
    evaluate_with((", dtype=torch.float64", ", dtype=torch.float32"))
)


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


def saves_under(names):
    state = f"{{{names}: value for key, value in ddp.state_dict().items()}}"
    return save_with(("ddp.module.state_dict()", state))


save_checkpoint__strips_letters = fails("a key is 'ast.bias'")(saves_under("key.lstrip('module.')"))
save_checkpoint__strips_everywhere = fails("a key is 'middle.scale'")(
    saves_under("key.replace('module.', '')")
)
save_checkpoint__last_names_only = fails("a key is 'module.scale'")(
    saves_under("'.'.join(key.split('.')[-2:])")
)
save_checkpoint__slices_the_prefix_off = passes(saves_under("key[len('module.') :]"))
save_checkpoint__closes_the_file = fails("closes the file")(
    save_with(("    dist.barrier(group)", "    file.close()"))
)


@passes
def load_checkpoint__bytes_of_the_file(file, model, optimizer, group=None):
    import io

    held = [None if file is None else file.read()]
    dist.broadcast_object_list(held, group_src=0, group=group)
    state = torch.load(io.BytesIO(held[0]), weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["epoch"]


@fails("the answers have 1: 'D', expected texts")
def diagnoses__numbers_for_questions():
    return dict(zip(range(1, 7), "DBEGIJ", strict=True))
