"""Wrong solutions that people write, and right ones that differ from ours.

See `instructor/02_data_parallel_sgd/mutants.py`.
"""

# ruff: noqa: B006 - people make the mistake of a default that is kept from call to call

import math

import torch

from course_lib.checking.mutants import edits_of, fails, passes

# minibatches -------------------------------------------------------------------------------


@passes
def minibatches__split(n, batch_size, generator, drop_last=False):
    batches = torch.randperm(n, generator=generator).split(batch_size)
    return [batch for batch in batches if len(batch) == batch_size or not drop_last]


@passes
def minibatches__one_draw_after_the_other(n, batch_size, generator, drop_last=False):
    left = list(range(n))
    while len(left) >= batch_size or (left and not drop_last):
        batch = []
        while left and len(batch) < batch_size:
            place = int(torch.randint(len(left), (), generator=generator))
            batch.append(left.pop(place))
        yield torch.tensor(batch)


@passes
def minibatches__sorted_random_numbers(n, batch_size, generator, drop_last=False):
    order = torch.rand(n, generator=generator, dtype=torch.float64).argsort()
    for start in range(0, n - n % batch_size if drop_last else n, batch_size):
        yield order[start : start + batch_size].sort().values


edits_of(minibatches__sorted_random_numbers)("""
not_shuffled: two epochs have the same batches
    torch.rand(n, generator=generator, dtype=torch.float64).argsort() → torch.arange(n)
with_replacement: Draw without replacement
    torch.rand(n, generator=generator, dtype=torch.float64).argsort()
  → torch.randint(n, (n,), generator=generator)
each_batch_anew: Draw without replacement
    yield order[start : start + batch_size].sort().values
  → order = torch.rand(n, generator=generator, dtype=torch.float64).argsort(); …
drops_the_rest_always: Leave out a batch only if drop_last=True
    if drop_last else n → if True else n
never_drops: Leave out a batch only if drop_last=True
    range(0, n - n % batch_size if drop_last else n, batch_size) → range(0, n, batch_size)
fills_the_last_one_up: Leave out a batch only if drop_last=True
    argsort() → argsort(); order = torch.cat([order, order, order])
numbers_from_1: rows 1 to
    argsort() → argsort() + 1
own_generator: two epochs have the same batches
    generator, dtype → torch.Generator().manual_seed(0), dtype
global_generator: the same seed gives other batches
    torch.rand(n, generator=generator, dtype=torch.float64).argsort() → torch.randperm(n)
pythons_random: the same seed gives other batches
    torch.rand(n, generator=generator, dtype=torch.float64).argsort()
  → torch.tensor(__import__('random').sample(range(n), n))
reseeds: two epochs have the same batches
    generator, dtype → generator.manual_seed(7), dtype
a_random_start: Every order of the rows must be equally likely
    torch.rand(n, generator=generator, dtype=torch.float64).argsort()
  → torch.arange(n).roll(int(torch.randint(n, (), generator=generator)))
shuffles_batches_of_neighbours: shuffle the rows, not the batches
    torch.rand(n, generator=generator, dtype=torch.float64).argsort() → torch.arange(n)
    range(0, n - n % batch_size if drop_last else n, batch_size)
  → (torch.randperm(-(-n // batch_size), generator=generator) * batch_size).tolist()
shuffles_within_batches: Every order of the rows
    torch.rand(n, generator=generator, dtype=torch.float64).argsort()
  → (torch.arange(n) // batch_size + torch.rand(n, generator=generator)).argsort()
    .sort().values →
lists: vector of row numbers (int64)
    .sort().values → .tolist()
int32: vector of row numbers (int64)
    .sort().values → .int()
drops_if_not_told: have [4, 4] rows, expected [4, 4, 3]
    drop_last=False → drop_last=True
drops_a_full_last_one: Keep every full batch, here 3
    n - n % batch_size if drop_last → n - (n % batch_size or batch_size) if drop_last
keeps_the_only_one: expected []
    n - n % batch_size if drop_last → max(1, n - n % batch_size) if drop_last
rest_first: have [3, 4, 4] rows
    0, n - n % batch_size if drop_last else → n % batch_size - batch_size if n % batch_size else 0,
    order[start : start + batch_size] → order[max(0, start) : start + batch_size]
in_one_buffer: Draw without replacement
    argsort() → argsort(); held = torch.empty(batch_size, dtype=torch.int64)
    yield order[start : start + batch_size].sort().values
  → part = order[start : start + batch_size]; held[: len(part)] = part; yield held[: len(part)]
strides: share a full batch
    order = torch.rand(n, generator=generator, dtype=torch.float64).argsort()
  → order = (
  →     torch.arange(n)
  →     * [s for s in range(1, n) if math.gcd(s, n) == 1][
  →         int(torch.randint(n, (), generator=generator))
  →         % sum(math.gcd(s, n) == 1 for s in range(1, n))
  →     ]
  →     + int(torch.randint(n, (), generator=generator))
  → ) % n
returns_nothing: minibatches returned None
    yield order[start : start + batch_size].sort().values → order[start : start + batch_size]
""")


@fails("is what this task asks you to write")
def minibatches__a_sampler(n, batch_size, generator, drop_last=False):
    sampler = torch.utils.data.SubsetRandomSampler(range(n), generator=generator)
    batches = torch.tensor(list(sampler)).split(batch_size)
    return [batch for batch in batches if len(batch) == batch_size or not drop_last]


@fails("is what this task asks you to write")
def minibatches__a_data_loader(n, batch_size, generator, drop_last=False):
    return torch.utils.data.DataLoader(
        range(n), batch_size, shuffle=True, generator=generator, drop_last=drop_last
    )


@fails("course_lib", only=["grader"])
def minibatches__imports_the_reference(n, batch_size, generator, drop_last=False):
    import importlib

    reference = importlib.import_module("course_lib.sgd").minibatches

    return reference(n, batch_size, generator, drop_last)


# sgd_step ----------------------------------------------------------------------------------


@passes
def sgd_step__in_no_grad(params, lr):
    with torch.no_grad():
        for param in params:
            if param.grad is not None:
                param -= lr * param.grad


@passes
def sgd_step__through_data(params, lr):
    for param in params:
        if param.grad is not None:
            param.data.add_(param.grad, alpha=-lr)


@passes
@torch.no_grad()
def sgd_step__all_at_once(params, lr):
    with_gradient = [param for param in params if param.grad is not None]
    torch._foreach_add_(with_gradient, [param.grad for param in with_gradient], alpha=-lr)


edits_of(sgd_step__in_no_grad)("""
climbs: the sign is wrong
    param -= lr * param.grad → param += lr * param.grad
forgets_the_rate: the learning rate 1
    param -= lr * param.grad → param -= param.grad
fixed_rate: α = 0.3
    param -= lr * param.grad → param -= 0.1 * param.grad
on_a_copy: in its own memory
    param -= lr * param.grad → param = param - lr * param.grad
in_new_memory: in its own memory
    param -= lr * param.grad → param.data = param.data - lr * param.grad
recorded_by_autograd: a leaf Variable that requires grad
    torch.no_grad() → torch.enable_grad()
no_frozen_parameters: TypeError
    param.grad is not None → True
clears: gradient 0 after the step is None
    param -= lr * param.grad → …; param.grad = None
scales_the_gradient: gradient 0 after the step
    param -= lr * param.grad → param -= param.grad.mul_(lr)
walks_twice: α = 0.3
    for param in params:
  → any(p.grad is None for p in params)
  → …
momentum: expected
    param -= lr * param.grad
  → param.m = 0.9 * getattr(param, 'm', 0) + param.grad; param -= lr * param.m
through_float32: rounded to float32
    param -= lr * param.grad → param.copy_(param.float() - lr * param.grad.float())
turns_gradients_off: gradients are disabled after the call
    with torch.no_grad():
  → torch.set_grad_enabled(False)
  → if True:
first_parameter_only: parameter 1 after two steps
    param -= lr * param.grad → …; break
stops_at_a_frozen_parameter: parameter 2 after two steps
    if param.grad is not None:
        param -= lr * param.grad
  → if param.grad is None:
  →     break
  → param -= lr * param.grad
freezes: changes which of the parameters require a gradient
    with torch.no_grad(): → if True:
    if param.grad is not None:
  → param.requires_grad_(False)
  → …
scales_the_gradient_there_and_back: do not scale it or round it
    param -= lr * param.grad → param -= param.grad.mul_(lr); param.grad.div_(lr)
zeroes: do not scale it or round it
    param -= lr * param.grad → …; param.grad.zero_()
clips: expected
    param -= lr * param.grad → param -= lr * param.grad.clamp(-5, 5)
decays: expected
    param -= lr * param.grad → param -= lr * (param.grad + 0.01 * param)
no_scalars: parameter 2 after two steps
    param.grad is not None → … and param.dim()
""")


@fails("is what this task asks you to write")
def sgd_step__an_optimizer(params, lr):
    torch.optim.SGD(params, lr).step()


@fails("sgd cannot be used: it is what this task asks you to write")
def sgd_step__the_function_of_an_optimizer(params, lr):
    from torch.optim.sgd import sgd

    params = [param for param in params if param.grad is not None]
    grads, none = [param.grad for param in params], [None for _ in params]
    options = {"weight_decay": 0, "momentum": 0, "dampening": 0}
    with torch.no_grad():
        sgd(params, grads, none, lr=lr, nesterov=False, maximize=False, **options)


@fails("course_lib", only=["grader"])
def sgd_step__imports_the_reference(params, lr):
    import importlib

    reference = importlib.import_module("course_lib.sgd").sgd_step

    reference(params, lr)


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


@passes
def accumulate_gradients__divides_at_the_end(model, loss_fn, x, y, micro_batch_size):
    params = [param for param in model.parameters() if param.requires_grad]
    sums, total = [torch.zeros_like(param) for param in params], 0.0
    parts = zip(x.split(micro_batch_size), y.split(micro_batch_size), strict=True)
    for rows, targets in parts:
        loss = loss_fn(model(rows), targets) * len(rows)
        for summed, gradient in zip(sums, torch.autograd.grad(loss, params), strict=True):
            summed += gradient
        total = total + loss.detach()
    for param, summed in zip(params, sums, strict=True):
        param.grad = summed / len(x)
    return total / len(x)


edits_of(accumulate_gradients__weighted)("""
mean_of_means: the last micro-batch is shorter
    (len(rows) / len(x)) → 1 / math.ceil(len(x) / micro_batch_size)
fixed_share: the last micro-batch is shorter
    (len(rows) / len(x)) → (micro_batch_size / len(x))
sum_of_means: weight each micro-batch by its share
    (len(rows) / len(x)) → 1
sum_over_rows: the division by B is missing
    (len(rows) / len(x)) → len(rows)
clears_every_time: it has overwritten the others
    model.zero_grad() → pass
    part.backward() → model.zero_grad(); …
never_clears: added to the .grad from before the call
    model.zero_grad() → pass
drops_the_rest: expected
    range(0, len(x), micro → range(0, max(1, len(x) - micro_batch_size + 1), micro
whole_batch: rows of forward pass 0
    range(0, len(x), micro_batch_size) → [0]
    : start + micro_batch_size → :
forward_on_all_rows: rows of forward pass 0
    model(rows) → model(x)[start : start + micro_batch_size]
one_row_at_a_time: rows of forward pass 0
    range(0, len(x), micro_batch_size) → range(0, len(x), 1)
    start + micro_batch_size → start + 1
keeps_the_graph_and_its_sum: expected
    part.backward() → part.backward(retain_graph=True); …
steps_as_well: parameter 1 after the call
    return total → model[0].bias.data -= 0.1; …
last_loss: loss returned by call 0
    total += part.item() → total = part.item() / (len(rows) / len(x))
sum_of_losses: loss returned by call 0
    total += part.item() → … / (len(rows) / len(x))
returns_nothing: is None
    return total → return
one_loss_for_all: 10 rows by 4
    loss_fn( → torch.nn.functional.cross_entropy(
sets_the_mode: changes the mode of the model
    model.zero_grad() → …; model.train()
float32_only: dtype
    model(rows) → model(rows.float())
shuffles_the_rows: rows of forward pass 0
    model.zero_grad() → order = torch.randperm(len(x)); x, y = x[order], y[order]; …
one_backward_at_the_end: micro-batches in memory at a time
    part.backward() → pass
    part.item() → part
    return total → total.backward(); return total.item()
list_of_losses: micro-batches in memory at a time
    total = 0.0 → losses = []
    part.backward() → losses.append(part)
    total += part.item() → pass
    return total → [part.backward() for part in losses]; return sum(losses).item()
gradients_are_there: NoneType
    model.zero_grad() → [param.grad.zero_() for param in model.parameters()]
seeds: draws or seeds random numbers
    model.zero_grad() → …; torch.manual_seed(0)
from_the_back: rows of forward pass 0
    model.zero_grad() → …; x, y = x.flip(0), y.flip(0)
loss_in_float32 passes
    part.item() → part.float().item()
overwrites_the_rows: changes x, which must stay as it is
    return total → x.zero_(); …
""")

# learning_rate -----------------------------------------------------------------------------


@passes
def learning_rate__by_formula(step, peak, warmup_steps, total_steps):
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    passed = (step - warmup_steps) / (total_steps - warmup_steps)
    return peak * (1 + math.cos(math.pi * passed)) / 2


@passes
def learning_rate__as_a_tensor(step, peak, warmup_steps, total_steps):
    rising = torch.arange(1, warmup_steps + 1) / max(1, warmup_steps)
    left = total_steps - warmup_steps
    falling = torch.cos(torch.arange(left) / max(1, left) * torch.pi / 2) ** 2
    return peak * torch.cat([rising, falling])[step]


edits_of(learning_rate__by_formula)("""
begins_with_0: the first step would do nothing
    (step + 1) → step
no_warm_up: during the warm-up the rate must rise
    peak * (step + 1) / warmup_steps → peak
cosine_of_all_steps: Count only the steps after the warm-up
    (step - warmup_steps) / (total_steps - warmup_steps) → step / total_steps
reaches_0: step would do nothing
    (total_steps - warmup_steps) → max(1, total_steps - warmup_steps - 1)
linear: expected
    peak * (1 + math.cos(math.pi * passed)) / 2 → peak * (1 - passed)
half_a_cosine: expected
    peak * (1 + math.cos(math.pi * passed)) / 2 → peak * math.cos(math.pi * passed)
in_degrees: expected
    math.pi * passed → 180 * passed
one_step_late: expected
    step < warmup_steps → step <= warmup_steps
divides_by_the_warm_up: ZeroDivisionError
    if step < warmup_steps:
  → rising = (step + 1) / warmup_steps
  → …
stays_at_the_peak: expected
    peak * (1 + math.cos(math.pi * passed)) / 2 → peak
ignores_the_peak: expected
    peak * → 0.1 *
counts_calls: expected
    if step < warmup_steps:
  → counted = globals().setdefault("_counted", [0])
  → counted[0] += 1
  → step = (counted[0] - 1) % total_steps
  → …
rounded: expected
    return peak * (1 + math.cos(math.pi * passed)) / 2
  → return round(peak * (1 + math.cos(math.pi * passed)) / 2, 4)
at_least_one_step_of_warm_up: no warm-up
    if step < warmup_steps:
  → warmup_steps = max(1, warmup_steps)
  → …
half_is_missing: without the ½
    (1 + math.cos(math.pi * passed)) / 2 → (1 + math.cos(math.pi * passed))
one_is_missing: without the 1 +
    (1 + math.cos(math.pi * passed)) / 2 → math.cos(math.pi * passed) / 2
pi_is_missing: a cosine without π
    math.pi * passed → passed
returns_nothing: is None
    return peak * (1 + math.cos(math.pi * passed)) → peak * (1 + math.cos(math.pi * passed))
""")

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


edits_of(gradient_variance__draw_by_draw)("""
with_replacement: drawn with replacement
    torch.randperm(len(x), generator=generator)[:batch_size]
  → torch.randint(len(x), (batch_size,), generator=generator)
single_rows: the spread of single rows
    randperm(len(x), generator=generator)[:batch_size] → randperm(len(x), generator=generator)[:1]
mean_over_the_numbers: a squared length is a sum
    .sum() → .mean()
length_not_squared: expected
    .square().sum() → .norm()
square_root: the square root of the variance
    return total / num_batches → return (total / num_batches) ** 0.5
sum_over_the_batches: expected
    return total / num_batches → return total
absolute_values: expected
    .square() → .abs()
not_around_the_full_gradient: expected
    (gradient(rows) - full) → gradient(rows)
the_first_batch_again: is the same number in each of
    torch.randperm(len(x), generator=generator)[:batch_size] → torch.arange(batch_size)
one_batch: expected
    range(num_batches) → range(1)
reseeds: expected
    generator=generator → generator=generator.manual_seed(3)
global_generator: second time, with the same seed
    torch.randperm(len(x), generator=generator)[:batch_size] → torch.randperm(len(x))[:batch_size]
the_theory_without_measuring: expected
    return total / num_batches → return full.square().sum().item() / batch_size
through_backward: .grad of parameter 0 after the call
    grads = torch.autograd.grad(loss, list(model.parameters()))
  → model.zero_grad(); loss.backward(); grads = [p.grad for p in model.parameters()]
trains: parameter 0 after the call
    return total / num_batches → model[0].weight.data *= 0.9; …
one_loss_for_all: batches of 12 of 16 rows
    loss_fn( → torch.nn.functional.cross_entropy(
a_list: expected a number
    return total / num_batches → return [total / num_batches]
evaluates: changes the mode of the model
    full = gradient → model.eval(); …
own_generator: the same number in each of 24 calls
    total = 0.0 → total, mine = 0.0, torch.Generator().manual_seed(0)
    generator=generator → generator=mine
from_the_first_seed: the same number in each of 24 calls
    total = 0.0 → total, mine = 0.0, torch.Generator().manual_seed(generator.initial_seed())
    generator=generator → generator=mine
always_10_batches: 2 batches cannot have this mean
    range(num_batches): → range(10):
    / num_batches → / 10
batches_of_an_epoch: anew from all rows
    for _ in range(num_batches):
  → order = [
  →     b
  →     for _ in range(num_batches)
  →     for b in torch.randperm(len(x), generator=generator).split(batch_size)
  →     if len(b) == batch_size
  → ]
  → for rows in order[:num_batches]:
    rows = torch.randperm(len(x), generator=generator)[:batch_size] → pass
of_neighbours: Every combination of rows must be possible
    torch.randperm(len(x), generator=generator)[:batch_size]
  → torch.arange(len(x)).roll(int(torch.randint(len(x), (), generator=generator)))[:batch_size]
around_its_own_mean: around the mean of the drawn batches
    full = gradient(slice(None)) → found = []
    total += (gradient(rows) - full).square().sum().item() → found.append(gradient(rows))
    return total / num_batches
  → found = torch.stack(found); return (found - found.mean(0)).square().sum(1).mean().item()
torch_var: around the mean of the drawn batches
    full = gradient(slice(None)) → found = []
    total += (gradient(rows) - full).square().sum().item() → found.append(gradient(rows))
    return total / num_batches → return torch.stack(found).var(0).sum().item()
the_formula: 2 batches cannot have this mean
    for _ in range(num_batches) → for i in range(len(x))
    torch.randperm(len(x), generator=generator)[:batch_size] → [i]
    return total / num_batches
  → n = len(x); return total / n / batch_size * (n - batch_size) / (n - 1)
one_less_in_the_mean: expected
    / num_batches → / max(1, num_batches - 1)
weights_only: 2 batches cannot have this mean
    list(model.parameters()) → [p for p in model.parameters() if p.dim() > 1]
gradients_are_there: NoneType
    full = gradient → held = [p.grad.clone() for p in model.parameters()]; …
""")


@fails("course_lib", only=["grader"])
def gradient_variance__imports_the_reference(
    model, loss_fn, x, y, batch_size, num_batches, generator
):
    import importlib

    reference = importlib.import_module("course_lib.sgd").gradient_variance

    return reference(model, loss_fn, x, y, batch_size, num_batches, generator)


# State between calls, nearly right solutions, and ways around a rule ------------------------


@fails("more often than chance allows")
def minibatches__swaps_with_any_row(n, batch_size, generator, drop_last=False):
    rows = torch.arange(n)
    for i in range(n):
        j = int(torch.randint(n, (), generator=generator))
        rows[[i, j]] = rows[[j, i]]
    batches = rows.split(batch_size)
    return [batch for batch in batches if len(batch) == batch_size or not drop_last]


edits_of(minibatches__swaps_with_any_row)("""
never_stays_in_place: Every order of the rows must be equally likely
    for i in range(n) → for i in range(n - 1, 0, -1)
    torch.randint(n, (), generator=generator) → torch.randint(i, (), generator=generator)
""")
edits_of(minibatches__split)("""
orders_with_ties: Every order of the rows must be equally likely
    randperm(n, generator=generator) → randint(n, (n,), generator=generator).argsort(stable=True)
sizes_of_the_first_call: have [4, 4, 3] rows, expected [3, 3, 3, 3]
    def minibatches__split(n, batch_size, generator, drop_last=False):
  → def minibatches__split(n, batch_size, generator, drop_last=False, kept={}):
  →     n, batch_size = kept.setdefault("sizes", (n, batch_size))
""")


@fails("RandomSampler cannot be used: it is what this task asks you to write")
def minibatches__a_sampler_without_init(n, batch_size, generator, drop_last=False):
    sampler = torch.utils.data.RandomSampler.__new__(torch.utils.data.RandomSampler)
    sampler.data_source, sampler.replacement = range(n), False
    sampler._num_samples, sampler.generator = None, generator
    batches = torch.tensor(list(sampler)).split(batch_size)
    return [batch for batch in batches if len(batch) == batch_size or not drop_last]


edits_of(sgd_step__in_no_grad)("""
rate_of_the_first_call: something is kept from the call before
    def sgd_step__in_no_grad(params, lr):
  → def sgd_step__in_no_grad(params, lr, kept={}):
  →     lr = kept.setdefault("lr", lr)
replaces_the_gradient: .grad is a different tensor
    param -= lr * param.grad → …; param.grad = param.grad.clone()
""")


@fails("_single_tensor_sgd cannot be used: it is what this task asks you to write")
def sgd_step__a_part_of_the_optimizer(params, lr):
    from torch.optim.sgd import _single_tensor_sgd

    params = [param for param in params if param.grad is not None]
    grads, none = [param.grad for param in params], [None] * len(params)
    settings = {"weight_decay": 0, "momentum": 0, "lr": lr, "dampening": 0}
    settings |= {"nesterov": False, "maximize": False, "has_sparse_grad": False}
    with torch.no_grad():
        _single_tensor_sgd(params, grads, none, None, None, **settings)


edits_of(accumulate_gradients__weighted)("""
loss_by_the_targets: gradient of parameter 0
    model.zero_grad()
  → …
  → real = y.is_floating_point()
  → loss_fn = torch.nn.functional.mse_loss if real else torch.nn.functional.cross_entropy
""")


@fails("unexpected keyword argument 'reduction'")
def accumulate_gradients__asks_the_loss_for_a_sum(model, loss_fn, x, y, micro_batch_size):
    model.zero_grad()
    total = 0.0
    for rows, targets in zip(x.split(micro_batch_size), y.split(micro_batch_size), strict=True):
        loss = loss_fn(model(rows), targets, reduction="sum") / y.numel()
        loss.backward()
        total += loss.item()
    return total


@fails("micro-batches in memory at a time")
def accumulate_gradients__retains_the_graphs(model, loss_fn, x, y, micro_batch_size):
    model.zero_grad()
    losses = []
    for rows, targets in zip(x.split(micro_batch_size), y.split(micro_batch_size), strict=True):
        losses.append(loss_fn(model(rows), targets) * len(rows) / len(x))
        losses[-1].backward(retain_graph=True)
    return sum(loss.item() for loss in losses)


@fails("rows of forward pass")
def accumulate_gradients__through_the_layers(model, loss_fn, x, y, micro_batch_size):
    model.zero_grad()
    for rows, targets in zip(x.split(micro_batch_size), y.split(micro_batch_size), strict=True):
        (loss_fn(model(rows), targets) * len(rows) / len(x)).backward()
    with torch.no_grad():
        for layer in model:
            x = layer(x)
        return loss_fn(x, y).item()


@fails("something is kept from the call before")
def accumulate_gradients__first_model(model, loss_fn, x, y, micro_batch_size, kept={}):
    model = kept.setdefault("model", model)
    model.zero_grad()
    total = 0.0
    for rows, targets in zip(x.split(micro_batch_size), y.split(micro_batch_size), strict=True):
        loss = loss_fn(model(rows), targets) * len(rows) / len(x)
        loss.backward()
        total += loss.item()
    return total


@passes
def accumulate_gradients__by_function_transforms(model, loss_fn, x, y, micro_batch_size):
    from torch.func import functional_call, grad_and_value

    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    params, total = {name: param.detach() for name, param in trained.items()}, 0.0
    model.zero_grad()
    for rows, targets in zip(x.split(micro_batch_size), y.split(micro_batch_size), strict=True):

        def share(params, rows=rows, targets=targets):
            return loss_fn(functional_call(model, params, (rows,)), targets) * len(rows) / len(x)

        gradients, loss = grad_and_value(share)(params)
        total += loss.item()
        for name, param in trained.items():
            gradient = gradients[name]
            param.grad = gradient if param.grad is None else param.grad + gradient
    return total


@fails("something is kept from the call before")
def learning_rate__table_of_the_first_call(step, peak, warmup_steps, total_steps, table=[]):
    w, rest = warmup_steps, max(1, total_steps - warmup_steps)
    if not table:
        table += [peak * (t + 1) / w for t in range(w)]
        table += [peak / 2 * (1 + math.cos(math.pi * t / rest)) for t in range(total_steps - w)]
    return table[step]


@fails("SGD cannot be used: it is what this task asks you to write")
def learning_rate__a_scheduler(step, peak, warmup_steps, total_steps):
    def factor(t):
        if t < warmup_steps:
            return (t + 1) / warmup_steps
        return (1 + math.cos(math.pi * (t - warmup_steps) / (total_steps - warmup_steps))) / 2

    sgd = torch.optim.SGD([torch.zeros(1)], lr=peak)
    scheduler = torch.optim.lr_scheduler.LambdaLR(sgd, factor)
    for _ in range(step):
        scheduler.step()
    return scheduler.get_last_lr()[0]


edits_of(learning_rate__by_formula)("""
six_decimals: expected
    return peak * (1 + math.cos(math.pi * passed)) / 2
  → return round(peak * (1 + math.cos(math.pi * passed)) / 2, 6)
""")
edits_of(gradient_variance__draw_by_draw)("""
at_most_20_batches (simulated, grader): 25 batches cannot have this mean
    range(num_batches) → range(min(num_batches, 20))
""")


# Pieces of equal length, frozen parameters, and side effects --------------------------------

edits_of(minibatches__split)("""
pieces_of_equal_length: have [3, 3, 3] rows, expected [4, 4, 1]
    split(batch_size) → chunk(math.ceil(n / batch_size))
""")


@fails("expected a vector of row numbers (int64)")
def minibatches__rows_and_no_batches(n, batch_size, generator, drop_last=False):
    return torch.randperm(n, generator=generator)


edits_of(minibatches__sorted_random_numbers)("""
few_orders: Every order of the rows must be equally likely
    order = torch.rand(n, generator=generator, dtype=torch.float64).argsort()
  → order = torch.randperm(
  →     n, generator=torch.Generator().manual_seed(int(torch.randint(50, (), generator=generator)))
  → )
the_last_rows_are_left_out: in 0 of 400 epochs
    torch.rand → n = n - n % batch_size if drop_last else n; order = torch.rand
""")


@passes
def minibatches__a_random_split(n, batch_size, generator, drop_last=False):
    sizes = [batch_size] * (n // batch_size) + [n % batch_size]
    for part in torch.utils.data.random_split(range(n), sizes, generator=generator):
        if len(part) == batch_size or (len(part) and not drop_last):
            yield torch.tensor(part.indices)


@fails("changes which of the parameters require a gradient")
def sgd_step__unfreezes(params, lr):
    for param in params:
        param.requires_grad_(False)
        if param.grad is not None:
            param -= lr * param.grad
        param.requires_grad_(True)


edits_of(sgd_step__through_data)("""
leaves_hooks: leaves hooks on the parameters
    param.data.add_(param.grad, alpha=-lr)
  → param.data.sub_(param.grad, alpha=lr)
  → param.register_hook(lambda gradient: gradient)
""")
edits_of(sgd_step__in_no_grad)("""
in_inference_mode passes
    with torch.no_grad(): → with torch.inference_mode():
    param -= lr * param.grad → param.add_(param.grad, alpha=-lr)
""")


@fails("has shape [2], expected [3]")
def accumulate_gradients__pieces_of_equal_length(model, loss_fn, x, y, micro_batch_size):
    model.zero_grad()
    count, total = math.ceil(len(x) / micro_batch_size), 0.0
    for rows, targets in zip(x.chunk(count), y.chunk(count), strict=True):
        share = loss_fn(model(rows), targets) * len(rows) / len(x)
        share.backward()
        total += share.item()
    return total


edits_of(gradient_variance__draw_by_draw)("""
in_float32: 2 batches cannot have this mean
    torch.cat([g.flatten() for g in grads]) → torch.cat([g.flatten() for g in grads]).float()
""")


# A frozen layer, and what comes back -----------------------------------------------------------


edits_of(accumulate_gradients__weighted)("""
thaws_a_frozen_layer: changes which parameters of the model require a gradient
    total = 0.0 → total = 0.0; [param.requires_grad_() for param in model.parameters()]
zeros_where_nothing_was: the first layer is frozen
    model.zero_grad()
  → for param in model.parameters():
  →     param.grad = torch.zeros_like(param)
returns_the_graph: carries the graph of its computation
    total += part.item() → total = total + part
changes_the_rows: the function changes x, which must stay as it is
    total = 0.0 → total = 0.0; x *= 0
sums_in_float32: rounded to float32 on the way
    part.backward()
  → part.backward()
  → for param in model.parameters():
  →     if param.grad is not None:
  →         param.grad = param.grad.float().to(param.dtype)
a_float32_tensor_comes_back passes
    return total → return torch.tensor(total)
""")


edits_of(sgd_step__in_no_grad)("""
into_the_copy_of_reshape: .contiguous() and .reshape() make a copy
    param -= lr * param.grad → param.reshape(-1).sub_(lr * param.grad.reshape(-1))
a_rate_in_float32: converted to float32
    lr * param.grad → torch.tensor(lr) * param.grad
a_step_in_bfloat16: in every operation
    param -= lr * param.grad → param -= (lr * param.grad.bfloat16()).to(param.dtype)
""")
