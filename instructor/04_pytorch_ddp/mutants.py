"""Wrong solutions that people write, and right ones that differ from ours."""

import itertools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

from course_lib.checking.mutants import Mutant, edits_of, fails, passes

# my_batches --------------------------------------------------------------------------------


@passes
def my_batches__by_hand(length, batch_size, epoch, seed, group=None):
    k, rank = dist.get_world_size(group), dist.get_rank(group)
    order = torch.randperm(length, generator=torch.Generator().manual_seed(seed + epoch))
    share = -(-length // k)
    order = order.repeat(share * k // length + 1)[: share * k]
    return torch.split(order[rank::k], batch_size)


my_batches__by_hand_edited = edits_of(
    my_batches__by_hand,
    Mutant("no_set_epoch", "tell the sampler the epoch", "seed + epoch", "seed"),
    Mutant(
        "drops_the_short_batch",
        "without the last, short one",
        "torch.split(order[rank::k], batch_size)",
        "[b for b in torch.split(order[rank::k], batch_size) if len(b) == batch_size]",
    ),
    Mutant("ignores_the_group", "over all ranks, not over the group", "(group)", "()"),
    Mutant("global_generator", "draws or seeds random numbers", "Generator().", ""),
    Mutant(
        "kept_by_epoch",
        "something is kept from the call before",
        "group=None):",
        "group=None, kept={}):",
        also=(("share = ", "order = kept.setdefault((epoch, k), order); share = "),),
    ),
)


# own_rows ----------------------------------------------------------------------------------


@passes
def own_rows__by_place(stream, rank, world_size, worker, workers, position, batch_size):
    for n, row in enumerate(stream):
        step, place = divmod(n - position, world_size * batch_size)
        if n >= position and place % world_size == rank and step % workers == worker:
            yield row


own_rows__by_place_edited = edits_of(
    own_rows__by_place,
    Mutant("the_last_rank_first", None, "== rank", "== world_size - 1 - rank"),
    Mutant("in_pieces", None, "place % world_size", "place // batch_size"),
    Mutant("of_all_workers", "of its rank", " and step % workers == worker", ""),
    Mutant("of_all_ranks", "of its rank", "place % world_size == rank and ", ""),
    Mutant("by_content", "of its rank", "place % world_size", "len(row) % world_size"),
    Mutant("from_the_start", "Leave them out", "n >= position and ", ""),
    Mutant("position_of_a_rank", "Leave them out", "n - position", "n - position * world_size"),
    Mutant("position_in_batches", "Leave them out", "n - position", "n - position * batch_size"),
    Mutant("steps_of_the_whole", "Leave them out", "n - position", "n"),
    Mutant("reads_all", "nobody has asked for", "enumerate(stream)", "enumerate(list(stream))"),
)


@passes
def own_rows__in_blocks(stream, rank, world_size, worker, workers, position, batch_size):
    size, rest = world_size * batch_size, itertools.islice(stream, position, None)
    for step in itertools.count():
        block = list(itertools.islice(rest, size))
        if not block:
            return
        if step % workers == worker:
            yield from block[rank * batch_size : (rank + 1) * batch_size]


own_rows__in_blocks_edited = edits_of(
    own_rows__in_blocks,
    Mutant("drops_a_short_step", "The last step", "not block", "len(block) < size"),
    Mutant("pads_a_short_step", "The last step", "block[", "(block * size)["),
)


@passes
def own_rows__through_a_mask(stream, rank, world_size, worker, workers, position, batch_size):
    mask = torch.zeros(workers, batch_size, world_size, dtype=torch.bool)
    mask[worker, :, rank] = True
    rest = itertools.islice(stream, position, None)
    return itertools.compress(rest, itertools.cycle(mask.flatten().tolist()))


@fails("of its rank")
def own_rows__reader_after_reader(stream, rank, world_size, worker, workers, position, batch_size):
    reader = rank * workers + worker
    return itertools.islice(stream, position + reader, None, world_size * workers)


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


train__no_sync_edited = edits_of(
    train__no_sync,
    Mutant(
        "a_forward_for_the_loss",
        "each batch through the model once",
        "loss.detach()",
        "loss_fn(model(x[batch]), y[batch]).detach() * (len(batch) / count)",
    ),
    Mutant(
        "clips",
        "large gradients",
        "optimizer.step()",
        "torch.nn.utils.clip_grad_value_(model.parameters(), 100); optimizer.step()",
    ),
    Mutant(
        "forward_outside_no_sync",
        "once per optimizer step, not once per micro-batch",
        "last = batch is window[-1]",
        "last, out = batch is window[-1], ddp(x[batch])",
        also=(("loss_fn(ddp(x[batch])", "loss_fn(out"),),
    ),
    Mutant("never_clears", "after training", "optimizer.zero_grad()", "pass"),
    Mutant("never_syncs", "nothing was averaged", "nullcontext() if last else ddp.", "ddp."),
    Mutant("own_start", "after training", "_group=group", "_group=group, init_sync=False"),
    Mutant("divides_by_accumulate", "fewer micro-batches", "len(batch) / count", "1 / accumulate"),
    Mutant("own_loss", "loss of step 0", "dist.all_reduce(shown, group=group)", "shown *= k"),
    Mutant("no_set_epoch", "tell the sampler the epoch", "sampler.set_epoch(epoch)", "pass"),
    Mutant(
        "wraps_every_epoch",
        "Wrap the model once",
        "sampler.set_epoch(epoch)",
        "sampler.set_epoch(epoch); ddp = DistributedDataParallel(model, process_group=group)",
    ),
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
    sums = [None] * k
    dist.all_gather_object(sums, [loss, right, len(rows)], group=group)
    loss, right, count = map(sum, zip(*sums, strict=True))
    return loss / count, right / count


evaluate__strided_edited = edits_of(
    evaluate__strided,
    Mutant(
        "padding",
        "padded rows are counted",
        "range(len(x)))[rank::k]",
        "DistributedSampler(range(len(x)), k, rank, shuffle=False))",
    ),
    Mutant(
        "mean_of_batches",
        "a short batch counts as much as a full one",
        ".item() * len(batch)",
        ".item()",
        also=(
            (".sum()", ".float().mean()"),
            ("right, len(rows)", "right, -(-len(rows) // batch_size)"),
        ),
    ),
    Mutant("rank_0_everything", "was given beyond", ")[rank::k]", ") if rank == 0 else []"),
    Mutant("turns_training_on", "changes the mode of the model", ".train(mode)", ".train()"),
    Mutant("sends_200", "only three sums", "k, rank", "dist.all_reduce(y.new_ones(200)); k, rank"),
    Mutant("in_training", "the model was given rows in training mode", "model.eval()", "pass"),
    Mutant("mean_of_nothing", "The mean of no rows is nan", "0, len(rows)", "0, max(1, len(rows))"),
    Mutant("skips_inf", "not finite", "y[batch]).item", "y[batch]).nan_to_num(0, 0, 0).item"),
    Mutant("all_rows", "at once", "batch_size)", "len(x))", also=(("+ batch_size", "+ len(x)"),)),
)


# save_checkpoint ---------------------------------------------------------------------------


@passes
def save_checkpoint__and_waits(file, ddp, optimizer, epoch, group=None):
    first = dist.get_process_group_ranks(group or dist.group.WORLD)[0]
    if dist.get_rank() == first:
        torch.save(
            {"epoch": epoch, "optimizer": optimizer.state_dict(), "model": ddp.module.state_dict()},
            file,
        )
    dist.barrier(group)


@passes
def save_checkpoint__strips_the_prefix(file, ddp, optimizer, epoch, group=None):
    state = {key.removeprefix("module."): value for key, value in ddp.state_dict().items()}
    if not dist.get_rank(group):
        torch.save({"model": state, "optimizer": optimizer.state_dict(), "epoch": epoch}, file)


save_checkpoint__and_waits_edited = edits_of(
    save_checkpoint__and_waits,
    Mutant("by_all", "rank 1: a file was written: expected False", "if dist", "if 1 or dist"),
    Mutant("by_rank_0_of_the_world", "Only the group's first rank writes a file", "= first", "= 0"),
    Mutant("with_the_wrapper", "These are the wrapper's names", "module.state_dict", "state_dict"),
    Mutant("whole_objects", "weights_only=True) cannot read", ".module.state_dict()", ".module"),
    Mutant("empties_the_optimizer", "after saving", "dist.barrier(group", "optimizer.state.clear("),
    Mutant(
        "strips_everywhere",
        "with its own keys: do not change them",
        "ddp.module.state_dict()",
        "{key.replace('module.', ''): value for key, value in ddp.state_dict().items()}",
    ),
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


load_checkpoint__by_broadcasts_edited = edits_of(
    load_checkpoint__by_broadcasts,
    Mutant("on_every_rank", "AttributeError", " if file else None", ""),
    Mutant(
        "first_rank_only",
        "nothing was loaded on this rank",
        "dist.broadcast_object_list(saved, src=first, group=group)",
        "if not file: return 4",
    ),
    Mutant("forgets_the_optimizer", "has no state", "optimizer.load_state_dict", "len"),
    Mutant("from_the_start", "epoch to begin with: expected", 'return state["epoch"]', "return 0"),
    Mutant("from_rank_0_of_the_world", "Global rank 0 is not part of group", "src=first", "src=0"),
)


# token_mean_step ---------------------------------------------------------------------------


@passes
def token_mean_step__by_hand(model, micro_batches, group=None):
    k, sums = dist.get_world_size(group), torch.zeros(2, dtype=torch.float64)
    sums[0] = sum((y != -100).sum() for _, y in micro_batches)
    total = sums[:1].clone()
    dist.all_reduce(total, group=group)
    model.zero_grad()
    with model.no_sync():
        for x, y in micro_batches:
            if (y != -100).any():
                loss = F.cross_entropy(model(x), y) * (k * (y != -100).sum() / total.item())
                loss.backward()
                sums[1] += loss.item() / k
    trained = [param for param in model.parameters() if param.requires_grad]
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat, group=group)
    flat /= k
    flat /= max(1.0, flat.double().norm().item())
    for param, piece in zip(trained, flat.split([p.numel() for p in trained]), strict=True):
        param.grad = piece.view_as(param)
    dist.all_reduce(sums, group=group)
    return sums[1]


token_mean_step__by_hand_edited = edits_of(
    token_mean_step__by_hand,
    Mutant("mean_of_ranks", "of the ranks' means", "/ total.item())", "/ (k * sums[0].item()))"),
    Mutant("divides_twice", "DDP divides by it once more", "flat /= k", "flat /= k * k"),
    Mutant("mean_of_no_labels", "of no labels is nan", "if (y != -100).any():", "if True:"),
    Mutant("counts_all", "without a label do not count", "((y != -100).sum() for", "(len(y) for"),
    Mutant(
        "skips_an_empty_rank",
        "has no labels",
        "model.zero_grad()",
        """
        if not sums[0]:
            return 0.0
        model.zero_grad()
        """,
    ),
    Mutant("always_syncs", "The ranks disagree", "with model.no_sync():", "if True:"),
    Mutant("keeps_old_gradients", ".grad is not empty", "model.zero_grad()", "pass"),
    Mutant(
        "divides_at_the_end",
        "float16 becomes inf beyond 65504",
        "(k * (y != -100).sum() / total.item())",
        "(k * (y != -100).sum())",
        also=(
            ("item() / k", "item() / k / total.item()"),
            ("flat /= k", "flat /= k * total.item()"),
        ),
    ),
    Mutant("own_loss", "mean loss: expected", "dist.all_reduce(sums, group=group)", "sums[1] *= k"),
    Mutant(
        "clips_before_the_mean",
        "clip once, after the mean",
        "dist.all_reduce(flat, group=group)",
        "flat /= max(1.0, flat.double().norm().item()); dist.all_reduce(flat, group=group)",
    ),
    Mutant(
        "in_float64",
        "Send gradients once",
        "grad.flatten()",
        "grad.double().flatten()",
        also=(("view_as(param)", "view_as(param).to(param.dtype)"),),
    ),
)


# The museum --------------------------------------------------------------------------------


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


exhibit_1__averages_after_the_step_edited = edits_of(
    exhibit_1__averages_after_the_step,
    Mutant(
        "as_it_hangs",
        "parameter 0 at the end",
        "optimizer.step()",
        "pass",
        also=(("world_size(group)", "world_size(group); param.data -= lr * param.grad"),),
    ),
    Mutant(
        "clips",
        "very wrong",
        "optimizer.step()",
        "[p.grad.clamp_(-10, 10) for p in model.parameters()]; optimizer.step()",
    ),
    Mutant("only_takes_it_out", "the result of this rank alone", "in model.parameters()", "in ()"),
)


@passes
def exhibit_2__broadcasts_at_the_end(model, loss_fn, batches, x_test, lr, group=None):
    ddp = DistributedDataParallel(model, process_group=group, forward_sync_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for x, y in batches:
        optimizer.zero_grad()
        loss_fn(ddp(x), y).backward()
        optimizer.step()
    for buffer in model.buffers():
        dist.broadcast(buffer, group_src=0, group=group)
    training = model.training
    model.eval()
    with torch.no_grad():
        predicted = ddp(x_test)
    model.train(training)
    return predicted


exhibit_2__broadcasts_at_the_end_edited = edits_of(
    exhibit_2__broadcasts_at_the_end,
    Mutant("as_it_hangs", "buffer 0 at the end", "in model.buffers()", "in ()"),
)
