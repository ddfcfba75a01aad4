"""Wrong solutions that people write, and right ones that differ from ours."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

from course_lib.checking.mutants import Mutant, edits_of, passes

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
    share = -(-length // k)
    order = order.repeat(share * k // length + 1)[: share * k]
    return torch.split(order[rank::k], batch_size)


my_batches__by_slices_edited = edits_of(
    my_batches__by_slices,
    Mutant("no_set_epoch", "tell the sampler the epoch", "sampler.set_epoch(epoch)", "pass"),
    Mutant(
        "drops_the_short_batch", "without the last, short one", "rows)", "rows) - batch_size + 1"
    ),
    Mutant("ignores_the_group", "over all ranks, not over the group", "(group)", "()"),
    Mutant(
        "data_loader",
        "draws or seeds random numbers",
        "list(sampler)",
        "[int(i) for i in torch.utils.data.DataLoader(range(length), sampler=sampler)]",
    ),
    Mutant(
        "kept_by_epoch",
        "something is kept from the call before",
        "group=None):",
        "group=None, kept={}):",
        also=(("list(sampler)", "kept.setdefault((epoch, k, rank), list(sampler))"),),
    ),
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


train__no_sync_edited = edits_of(
    train__no_sync,
    Mutant(
        "a_forward_for_the_loss",
        "forward passes beyond one for each",
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
    Mutant(
        "own_start", "parameter 0 after training", "_group=group", "_group=group, init_sync=False"
    ),
    Mutant("divides_by_accumulate", "fewer micro-batches", "len(batch) / count", "1 / accumulate"),
    Mutant("own_loss", "loss of step 0", "dist.all_reduce(shown, group=group)", "shown *= k"),
    Mutant(
        "wraps_every_epoch",
        "Wrap the model once",
        "sampler.set_epoch(epoch)",
        """
        sampler.set_epoch(epoch)
        again = [DistributedDataParallel(model, process_group=group) for _ in range(2)]
        """,
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
    sums = torch.tensor([loss, right, len(rows)], dtype=torch.float64)
    dist.all_reduce(sums, group=group)
    return sums[0].item() / sums[2].item(), sums[1].item() / sums[2].item()


@passes
def evaluate__contiguous_and_gathered(model, loss_fn, x, y, batch_size, group=None):
    k, rank = dist.get_world_size(group), dist.get_rank(group)
    modes = [module.training for module in model.modules()]
    begin, end = len(x) * rank // k, len(x) * (rank + 1) // k
    sums = [0.0, 0]
    with torch.inference_mode():
        model.eval()
        for xs, ys in zip(
            x[begin:end].split(batch_size), y[begin:end].split(batch_size), strict=True
        ):
            if len(xs):
                out = model(xs)
                sums[0] += float(loss_fn(out, ys)) * len(xs)
                sums[1] += int((out.argmax(1) == ys).sum())
    for module, mode in zip(model.modules(), modes, strict=True):
        module.training = mode
    everyone = [None] * k
    dist.all_gather_object(everyone, sums, group=group)
    return sum(s[0] for s in everyone) / len(x), sum(s[1] for s in everyone) / len(x)


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
    Mutant("rank_0_everything", "The ranks share the work", ")[rank::k]", ") if rank == 0 else []"),
    Mutant("turns_training_on", "changes the mode of the model", ".train(mode)", ".train()"),
    Mutant(
        "gathers_outputs",
        "Send only three sums",
        "=group)",
        "=group); dist.all_reduce(torch.zeros(200), group=group)",
    ),
    Mutant(
        "only_norm_off",
        "the model was given rows in training mode",
        "model.eval()",
        "[m.eval() for m in model.modules() if isinstance(m, torch.nn.BatchNorm1d)]",
    ),
    Mutant("mean_of_nothing", "The mean of no rows is nan", "0, len(rows)", "0, max(1, len(rows))"),
    Mutant(
        "skips_what_is_not_finite",
        "a row is not finite",
        "loss_fn(out, y[batch])",
        "loss_fn(out, y[batch]).nan_to_num(0, 0, 0)",
    ),
    Mutant(
        "all_rows_at_once",
        "that it was given at once",
        "batch_size)",
        "len(x))",
        also=(("at + batch_size", "at + len(x)"),),
    ),
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


save_checkpoint__and_waits_edited = edits_of(
    save_checkpoint__and_waits,
    Mutant(
        "by_all", "rank 1: a file was written: expected False, got True", "if dist", "if 1 or dist"
    ),
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
    Mutant("closes_the_file", "closes the file", "dist.barrier(group)", "file.close()"),
    Mutant(
        "first_settings_only",
        "lr of group 1 is missing",
        "optimizer.state_dict(),",
        "{k: v if k == 'state' else v[:1] for k, v in optimizer.state_dict().items()},",
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


@passes
def load_checkpoint__by_all_gather(file, model, optimizer, group=None):
    contents = [None] * dist.get_world_size(group)
    content = None if file is None else file.read()
    dist.all_gather_object(contents, content, group=group)
    import io

    state = torch.load(io.BytesIO(contents[0]), weights_only=True)
    optimizer.load_state_dict(state["optimizer"])
    model.load_state_dict(state["model"])
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
    Mutant(
        "forgets_the_optimizer", "The optimizer has no state", "optimizer.load_state_dict", "len"
    ),
    Mutant("from_the_start", "epoch to begin with: expected", 'return state["epoch"]', "return 0"),
    Mutant("from_rank_0_of_the_world", "Global rank 0 is not part of group", "src=first", "src=0"),
    Mutant(
        "file_of_the_first_call",
        "something is kept from the call before",
        "group=None):",
        "group=None, kept={}):",
        also=(("= saved[0]", "= kept.setdefault('state', saved[0])"),),
    ),
    Mutant(
        "broadcasts_parameters",
        "loaded model middle.module.scale",
        'model.load_state_dict(state["model"])',
        """
        file and model.load_state_dict(state["model"])
        [dist.broadcast(p.data, src=first, group=group) for p in model.parameters()]
        """,
    ),
)


# token_mean_step ---------------------------------------------------------------------------


@passes
def token_mean_step__with_ddp(model, micro_batches, group=None):
    k = dist.get_world_size(group)
    counts = torch.tensor([float((y >= 0).sum()) for _, y in micro_batches], dtype=torch.float64)
    sums = torch.stack([counts.sum(), torch.zeros_like(counts[0])])
    dist.all_reduce(sums[:1], group=group)
    model.zero_grad()
    for i, (x, y) in enumerate(micro_batches):
        model.require_backward_grad_sync = i == len(micro_batches) - 1
        loss = F.cross_entropy(model(x), y, reduction="sum") * (k / sums[0].item())
        loss.backward()
        sums[1] += loss.item() / k
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    dist.all_reduce(sums[1:], group=group)
    return sums[1].item()


@passes
def token_mean_step__by_hand(model, micro_batches, group=None):
    sums = torch.zeros(2, dtype=torch.float64)
    sums[0] = sum((y != -100).sum() for _, y in micro_batches)
    total = sums[:1].clone()
    dist.all_reduce(total, group=group)
    model.zero_grad()
    with model.no_sync():
        for x, y in micro_batches:
            if (y != -100).any():
                loss = F.cross_entropy(model(x), y) * ((y != -100).sum() / total.item())
                loss.backward()
                sums[1] += loss.item()
    trained = [param for param in model.parameters() if param.requires_grad]
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat, group=group)
    flat /= max(1.0, flat.double().norm().item())
    for param, piece in zip(trained, flat.split([p.numel() for p in trained]), strict=True):
        param.grad = piece.view_as(param)
    dist.all_reduce(sums, group=group)
    return sums[1]


token_mean_step__with_ddp_edited = edits_of(
    token_mean_step__with_ddp,
    Mutant(
        "mean_of_ranks", "a mean of the ranks' means", "(k / sums[0]", "(1 / counts.sum().clip(1)"
    ),
    Mutant("forgets_k", "DDP divides by it once more", "(k / sums", "(1 / sums"),
    Mutant(
        "mean_of_no_labels",
        "The mean of no labels is nan",
        '(model(x), y, reduction="sum") * (k',
        "(model(x), y) * len(y[y >= 0]) * (k",
    ),
    Mutant("counts_padding", "tokens without a label do not count", "(y >= 0).sum()", "len(y)"),
    Mutant(
        "skips_an_empty_rank",
        "has no labels",
        "model.zero_grad()",
        """
        if not counts.sum():
            return 0.0
        model.zero_grad()
        """,
    ),
    Mutant("always_syncs", "The ranks disagree", "i == len(micro_batches) - 1", "True"),
    Mutant("keeps_old_gradients", ".grad is not empty", "model.zero_grad()", "pass"),
    Mutant(
        "divides_at_the_end",
        "float16 becomes inf beyond 65504",
        " * (k / sums[0].item())",
        " * k",
        also=(
            (
                "torch.nn.utils.clip",
                "sums[1] /= sums[0]; [p.grad.div_(sums[0]) for p in model.parameters() "
                "if p.requires_grad]; torch.nn.utils.clip",
            ),
        ),
    ),
    Mutant(
        "own_loss", "mean loss: expected", "dist.all_reduce(sums[1:], group=group)", "sums[1] *= k"
    ),
)

token_mean_step__by_hand_edited = edits_of(
    token_mean_step__by_hand,
    Mutant(
        "clips_before_the_mean",
        "clip once, after the mean",
        "dist.all_reduce(flat, group=group)",
        """
        flat /= max(1.0, dist.get_world_size(group) * flat.double().norm().item())
        dist.all_reduce(flat, group=group)
        """,
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
def exhibit_1__ddp(model, loss_fn, batches, lr, group=None):
    ddp = DistributedDataParallel(model, process_group=group)
    for x, y in batches:
        ddp.zero_grad()
        loss_fn(ddp(x), y).backward()
        with torch.no_grad():
            for param in model.parameters():
                param -= lr * param.grad


exhibit_1__ddp_edited = edits_of(
    exhibit_1__ddp,
    Mutant("clips", "very wrong", "lr * param.grad", "lr * param.grad.clamp(-10, 10)"),
)


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
        "averages the parameters, and then takes a step with this rank's own gradient",
        "optimizer.step()",
        "pass",
        also=(("world_size(group)", "world_size(group); param.data -= lr * param.grad"),),
    ),
    Mutant("only_takes_it_out", "the result of this rank alone", "in model.parameters()", "in ()"),
)


@passes
def exhibit_2__touches_all(model, loss_fn, batches, lr, group=None):
    ddp = DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for x, y in batches:
        optimizer.zero_grad()
        zero = sum(0 * param.sum() for param in model.parameters())
        (loss_fn(ddp(x), y) + zero).backward()
        optimizer.step()


@passes
def exhibit_2__by_hand(model, loss_fn, batches, lr, group=None):
    for x, y in batches:
        model.zero_grad()
        loss_fn(model(x), y).backward()
        for param in model.parameters():
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            dist.all_reduce(grad, group=group)
            param.data -= lr * grad / dist.get_world_size(group)


exhibit_2__by_hand_edited = edits_of(
    exhibit_2__by_hand,
    Mutant(
        "skips_unused_ones",
        "ranks",
        "for param in model.parameters()",
        "for param in [param for param in model.parameters() if param.grad is not None]",
    ),
    Mutant(
        "divides_by_those_who_used_it",
        "parameter 0 at the end",
        "dist.all_reduce(grad, group=group)",
        """
        used = torch.tensor(float(param.grad is not None))
        dist.all_reduce(used, group=group)
        dist.all_reduce(grad, group=group)
        grad *= dist.get_world_size(group) / max(1, used.item())
        """,
    ),
)


exhibit_2__touches_all_edited = edits_of(
    exhibit_2__touches_all,
    Mutant("as_it_hangs", "Expected to have finished reduction", " + zero", ""),
    Mutant(
        "knows_the_model", "another model", "in model.parameters", "in model.experts.parameters"
    ),
)


@passes
def exhibit_3__the_default(model, loss_fn, batches, x_test, lr, group=None):
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


exhibit_3__the_default_edited = edits_of(
    exhibit_3__the_default,
    Mutant(
        "broadcasts_at_the_end",
        None,
        "process_group=group",
        "process_group=group, forward_sync_buffers=False",
        also=(
            (
                "training = model.training",
                """
                training = model.training
                for buffer in model.buffers():
                    dist.broadcast(buffer, group_src=0, group=group)
                """,
            ),
        ),
    ),
    Mutant(
        "as_it_hangs",
        "the buffers differ between the ranks",
        "=group",
        "=group, forward_sync_buffers=False",
    ),
)
