"""Wrong solutions that people write, and right ones that differ from ours."""

import math

import torch

from course_lib.checking.mutants import Mutant, edits_of, fails, passes

# minibatches -------------------------------------------------------------------------------


@passes
def minibatches__sorted_random_numbers(n, batch_size, generator, drop_last=False):
    keys = torch.rand(n, generator=generator, dtype=torch.float64)
    order = keys.argsort()
    for start in range(0, n - n % batch_size if drop_last else n, batch_size):
        yield order[start : start + batch_size].sort().values


minibatches__sorted_random_numbers_edited = edits_of(
    minibatches__sorted_random_numbers,
    Mutant("with_replacement", "Draw without replacement", "keys.argsort()", "(n * keys).long()"),
    Mutant("drops_the_rest_always", "only if drop_last=True", "if drop_last", "if True"),
    Mutant("global_generator", "the same seed gives other batches", ", generator=generator", ""),
    Mutant("reseeds", "epochs in a row have the same batches", ", dtype", ".manual_seed(7), dtype"),
    Mutant(
        "by_a_sampler",
        "RandomSampler cannot be used: it is what this task asks you to write",
        "keys.argsort()",
        "torch.tensor(list(torch.utils.data.RandomSampler(keys, generator=generator)))",
    ),
    Mutant("lists", "expected a tensor of shape", ".sort().values", ".tolist()"),
)


@fails("course_lib", ("grader",))
def minibatches__imports_the_reference(n, batch_size, generator, drop_last=False):
    import importlib

    reference = importlib.import_module("course_lib.sgd").minibatches

    return reference(n, batch_size, generator, drop_last)


@fails("A shuffle by hand may prefer some")
def minibatches__swaps_with_any_row(n, batch_size, generator, drop_last=False):
    rows = torch.arange(n)
    for i in range(n):
        j = int(torch.randint(n, (), generator=generator))
        rows[[i, j]] = rows[[j, i]]
    batches = rows.split(batch_size)
    return [batch for batch in batches if len(batch) == batch_size or not drop_last]


# sgd_step ----------------------------------------------------------------------------------


@passes
def sgd_step__in_no_grad(params, lr):
    with torch.no_grad():
        for param in params:
            if param.grad is not None:
                param -= lr * param.grad


@passes
@torch.no_grad()
def sgd_step__all_at_once(params, lr):
    with_gradient = [param for param in params if param.grad is not None]
    torch._foreach_add_(with_gradient, [param.grad for param in with_gradient], alpha=-lr)


sgd_step__in_no_grad_edited = edits_of(
    sgd_step__in_no_grad,
    Mutant("climbs", "the sign is wrong", "-=", "+="),
    Mutant("in_new_memory", "in its own memory", "param -= lr *", "param.data = param.data - lr *"),
    Mutant("walks_twice", "a second loop", "in params", "in params if list(params) else ()"),
    Mutant("forgets_frozen_ones", "a frozen parameter", "if param.grad is not None:", "if True:"),
    Mutant("scales", "changes .grad", "lr * param.grad", "param.grad.mul_(lr); param.grad /= lr"),
    Mutant(
        "by_sgd", "SGD cannot", "param -= lr * param.grad", "torch.optim.SGD([param], lr).step()"
    ),
    Mutant("clips", "expected", "= lr * param.grad", "= lr * param.grad.clamp(-5, 5)"),
    Mutant("skips_inf", "an inf or a NaN", "None:", "None and param.grad.isfinite().all():"),
    Mutant(
        "into_the_copy_of_reshape",
        "what goes into a copy does not reach the tensor",
        "param -= lr * param.grad",
        "param.reshape(-1).sub_(lr * param.grad.reshape(-1))",
    ),
)


# accumulate_gradients ----------------------------------------------------------------------


@passes
def accumulate_gradients__weighted(model, loss_fn, x, y, micro_batch_size):
    model.zero_grad()
    total = 0.0
    for start in range(0, len(x), micro_batch_size):
        rows, targets = x[start : start + micro_batch_size], y[start : start + micro_batch_size]
        part = loss_fn(model(rows), targets) * (len(rows) / len(x))
        part.backward()
        total += part.item()
    return total


accumulate_gradients__weighted_edited = edits_of(
    accumulate_gradients__weighted,
    Mutant("mean_of_means", "is shorter", "(len(rows) / len(x))", "1 / len(x[::micro_batch_size])"),
    Mutant("never_clears", "added to the .grad from before the call", "model.zero_grad()", "pass"),
    Mutant("forward_on_all", "in forward pass", "model(rows)", "model(x)[start:][: len(rows)]"),
    Mutant("last_loss", "loss returned", "+= part.item()", "= part.item() * len(x) / len(rows)"),
    Mutant("sets_the_mode", "changes the mode of the model", "grad()", "grad(); model.train()"),
    Mutant(
        "one_backward_at_the_end",
        "micro-batches in memory at a time",
        "part.backward()",
        "pass",
        also=(("part.item()", "part"), ("return total", "total.backward(); return total.item()")),
    ),
    Mutant(
        "zeros_where_nothing_was",
        "a frozen layer",
        "model.zero_grad()",
        "for param in model.parameters(): param.grad = torch.zeros_like(param)",
    ),
    Mutant(
        "adds_losses_in_float32",
        None,
        "total = 0.0",
        "total = torch.zeros(())",
        also=(("part.item()", "part.detach()"),),
    ),
    Mutant(
        "sums_in_float32",
        "rounded to float32 on the way",
        "part.backward()",
        """
        part.backward()
        for param in model.parameters():
            if param.grad is not None:
                param.grad = param.grad.float().to(param.dtype)
        """,
    ),
)


# learning_rate -----------------------------------------------------------------------------


@passes
def learning_rate__by_formula(rows_seen, batch, peak, warmup_rows, total_rows):
    row = rows_seen + batch / 2
    if row < warmup_rows:
        return peak * row / warmup_rows
    if row < total_rows:
        passed = (row - warmup_rows) / (total_rows - warmup_rows)
        return peak * (1 + math.cos(math.pi * passed)) / 2
    return 0


@passes
def learning_rate__as_a_tensor(rows_seen, batch, peak, warmup_rows, total_rows):
    row = torch.tensor(rows_seen + batch / 2)
    falling = (row - warmup_rows) / max(1, total_rows - warmup_rows)
    falling = torch.cos(falling * torch.pi / 2) ** 2 * (row < total_rows)
    return peak * torch.where(row < warmup_rows, row / max(1, warmup_rows), falling)


learning_rate__by_formula_edited = edits_of(
    learning_rate__by_formula,
    Mutant("in_half_rows", None, "rows_seen + batch / 2", "(2 * rows_seen + batch) / 2"),
    Mutant(
        "in_batches",
        None,
        "row = rows_seen + batch / 2",
        "row = rows_seen / batch + 1 / 2; warmup_rows /= batch; total_rows /= batch",
    ),
    Mutant(
        "in_whole_steps",
        "Count rows and not steps",
        "row = rows_seen + batch / 2",
        "row = rows_seen // batch + 1; warmup_rows //= batch; total_rows //= batch",
    ),
    Mutant("begins_with_0", "the first step would do nothing", " + batch / 2", ""),
    Mutant("reads_the_end", "where the batch ends", "batch / 2", "batch"),
    Mutant("of_the_batch_before", "Count rows and not steps", "+ batch / 2", "- batch / 2"),
    Mutant("whole_half", "Count rows and not steps", "batch / 2", "batch // 2"),
    Mutant("peak_by_batch", "Count rows and not steps", "peak *", "peak * batch / 4 *"),
    Mutant("whole_shares", "Count rows and not steps", "row / warmup", "row // warmup"),
    Mutant("asks_too_early", "rate in step", "if row < warmup_rows", "if rows_seen < warmup_rows"),
    Mutant("cosine_of_all_rows", "only the rows after the warm-up", " - warmup_rows", ""),
    Mutant("divides_by_the_warm_up", "Division", "if row < w", "if 1 / warmup_rows and row < w"),
    Mutant("rises_again", "an epoch after the last row", "row < total", "warmup_rows < total"),
    Mutant("ends_too_late", "ends within the last batch", "if row < total", "if rows_seen < total"),
    Mutant(
        "counts_the_calls",
        "rate in step",
        "total_rows):",
        "total_rows, calls=iter(range(10**6))):",
        also=(("rows_seen +", "next(calls) * batch % total_rows +"),),
    ),
)


# gradient_variance -------------------------------------------------------------------------


@passes
def gradient_variance__draw_by_draw(model, loss_fn, x, y, batch_size, num_batches, generator):
    def gradient(rows):
        loss = loss_fn(model(x[rows]), y[rows])
        grads = torch.autograd.grad(loss, list(model.parameters()))
        return torch.cat([g.flatten() for g in grads])

    full = gradient(slice(None))
    total = 0.0
    for _ in range(num_batches):
        rows = torch.randperm(len(x), generator=generator)[:batch_size]
        total += (gradient(rows) - full).square().sum().item()
    return total / num_batches


@passes
def gradient_variance__from_single_rows(model, loss_fn, x, y, batch_size, num_batches, generator):
    params = list(model.parameters())
    rows = torch.stack(
        [
            torch.cat([g.flatten() for g in torch.autograd.grad(loss_fn(model(a), b), params)])
            for a, b in zip(x.split(1), y.split(1), strict=True)
        ]
    )
    weights = torch.rand(num_batches, len(x), generator=generator, dtype=torch.float64)
    drawn = weights.argsort(1)[:, :batch_size]
    misses = rows[drawn].mean(1) - rows.mean(0)
    return misses.square().sum(1).mean()


gradient_variance__draw_by_draw_edited = edits_of(
    gradient_variance__draw_by_draw,
    Mutant(
        "with_replacement",
        "Draw each batch without replacement",
        "randperm(len(x), generator=generator)[:batch_size]",
        "randint(len(x), (batch_size,), generator=generator)",
    ),
    Mutant("mean_over_the_numbers", "|…|² is a sum", ".sum()", ".mean()"),
    Mutant("one_batch", "is the same number in", "[:batch_size]", ".sort().values[:batch_size]"),
    Mutant("global_generator", "second time, with the same seed", "x), generator=generator", "x)"),
    Mutant(
        "through_backward",
        ".grad of parameter 0 after the call",
        "grads = torch.autograd.grad(loss, list(model.parameters()))",
        "model.zero_grad(); loss.backward(); grads = [p.grad for p in model.parameters()]",
    ),
    Mutant(
        "of_neighbours",
        "Every combination of rows must be possible",
        "randperm(len(x), generator=generator)",
        "arange(len(x)).roll(int(torch.randint(len(x), (), generator=generator)))",
    ),
    Mutant("at_most_20", "cannot have this mean", "(num_batches)", "(min(num_batches, 20))"),
    Mutant(
        "takes_the_next_batch_of_an_epoch",
        "do not take the next batch of an epoch",
        "rows = torch.randperm(len(x), generator=generator)[:batch_size]",
        """
        if len(order) < batch_size:
            order = torch.randperm(len(x), generator=generator)
        rows, order = order[:batch_size], order[batch_size:]
        """,
        also=(("total = 0.0", "total, order = 0.0, []"),),
    ),
)
