"""Wrong solutions that people write, and right ones that differ from ours.

See `instructor/02_data_parallel_sgd/mutants.py`.
"""

# ruff: noqa: B006 - a default that is kept from call to call is a mistake that people make

import math

import torch

from course_lib.checking.mutants import edited, fails, passes

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


def batches_with(*edits):
    return edited(minibatches__sorted_random_numbers, *edits)


ORDER = "torch.rand(n, generator=generator, dtype=torch.float64).argsort()"
STARTS = "range(0, n - n % batch_size if drop_last else n, batch_size)"
YIELDS = "yield order[start : start + batch_size].sort().values"

minibatches__not_shuffled = fails("two epochs have the same batches")(
    batches_with((ORDER, "torch.arange(n)"))
)
minibatches__with_replacement = fails("Without replacement")(
    batches_with((ORDER, "torch.randint(n, (n,), generator=generator)"))
)
minibatches__each_batch_anew = fails("Without replacement")(
    batches_with((YIELDS, f"order = {ORDER}; {YIELDS}"))
)
minibatches__drops_the_rest_always = fails("Only a last batch that is shorter")(
    batches_with(("if drop_last else n", "if True else n"))
)
minibatches__never_drops = fails("Only a last batch that is shorter")(
    batches_with((STARTS, "range(0, n, batch_size)"))
)
minibatches__fills_the_last_one_up = fails("Only a last batch that is shorter")(
    batches_with((ORDER, ORDER + "; order = torch.cat([order, order, order])"))
)
minibatches__numbers_from_1 = fails("rows 1 to")(batches_with((ORDER, ORDER + " + 1")))
minibatches__own_generator = fails("two epochs have the same batches")(
    batches_with((ORDER, ORDER.replace("=generator", "=torch.Generator().manual_seed(0)")))
)
minibatches__global_generator = fails("the same seed gives other batches")(
    batches_with((ORDER, "torch.randperm(n)"))
)
minibatches__pythons_random = fails("the same seed gives other batches")(
    batches_with((ORDER, "torch.tensor(__import__('random').sample(range(n), n))"))
)
minibatches__reseeds = fails("two epochs have the same batches")(
    batches_with((ORDER, ORDER.replace("=generator", "=generator.manual_seed(7)")))
)
minibatches__a_random_start = fails("Every order of the rows must be equally likely")(
    batches_with((ORDER, "torch.arange(n).roll(int(torch.randint(n, (), generator=generator)))"))
)
minibatches__shuffles_batches_of_neighbours = fails("Every order of the rows")(
    batches_with(
        (ORDER, "torch.arange(n)"),
        (
            STARTS,
            "(torch.randperm(-(-n // batch_size), generator=generator) * batch_size).tolist()",
        ),
    )
)
minibatches__shuffles_within_batches = fails("Every order of the rows")(
    batches_with(
        (
            ORDER,
            "(torch.arange(n) // batch_size + torch.rand(n, generator=generator)).argsort()",
        ),
        (".sort().values", ""),
    )
)
minibatches__lists = fails("vector of row numbers (int64)")(
    batches_with((".sort().values", ".tolist()"))
)
minibatches__int32 = fails("vector of row numbers (int64)")(
    batches_with((".sort().values", ".int()"))
)
minibatches__drops_if_not_told = fails("have [4, 4] rows, expected [4, 4, 3]")(
    batches_with(("drop_last=False", "drop_last=True"))
)
minibatches__drops_a_full_last_one = fails("have [4, 4] rows, expected [4, 4, 4]")(
    batches_with(
        ("n - n % batch_size if drop_last", "n - (n % batch_size or batch_size) if drop_last")
    )
)
minibatches__keeps_the_only_one = fails("expected []")(
    batches_with(("n - n % batch_size if drop_last", "max(1, n - n % batch_size) if drop_last"))
)
minibatches__rest_first = fails("have [3, 4, 4] rows")(
    batches_with(
        (STARTS, "range(n % batch_size - batch_size if n % batch_size else 0, n, batch_size)"),
        ("order[start :", "order[max(0, start) :"),
    )
)
minibatches__in_one_buffer = fails("Without replacement")(
    batches_with(
        (ORDER, ORDER + "; held = torch.empty(batch_size, dtype=torch.int64)"),
        (
            YIELDS,
            "part = order[start : start + batch_size]; held[: len(part)] = part; "
            "yield held[: len(part)]",
        ),
    )
)
minibatches__strides = fails("share a full batch")(
    batches_with(
        (
            ORDER,
            "(torch.arange(n) * [s for s in range(1, n) if math.gcd(s, n) == 1][int(torch.randint("
            "n, (), generator=generator)) % sum(math.gcd(s, n) == 1 for s in range(1, n))] + "
            "int(torch.randint(n, (), generator=generator))) % n",
        )
    )
)
minibatches__returns_nothing = fails("minibatches returned None")(
    batches_with((YIELDS, "order[start : start + batch_size]"))
)


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


def step_with(*edits):
    return edited(sgd_step__in_no_grad, *edits)


UPDATE = "param -= lr * param.grad"

sgd_step__climbs = fails("the sign is wrong")(step_with((UPDATE, "param += lr * param.grad")))
sgd_step__forgets_the_rate = fails("the learning rate 1")(
    step_with((UPDATE, "param -= param.grad"))
)
sgd_step__fixed_rate = fails("α = 0.5")(step_with((UPDATE, "param -= 0.1 * param.grad")))
sgd_step__on_a_copy = fails("update its own memory")(
    step_with((UPDATE, "param = param - lr * param.grad"))
)
sgd_step__in_new_memory = fails("update its own memory")(
    step_with((UPDATE, "param.data = param.data - lr * param.grad"))
)
sgd_step__recorded_by_autograd = fails("a leaf Variable that requires grad")(
    step_with(("torch.no_grad()", "torch.enable_grad()"))
)
sgd_step__no_frozen_parameters = fails("TypeError")(step_with(("param.grad is not None", "True")))
sgd_step__clears = fails("gradient 0 after the step is None")(
    step_with((UPDATE, UPDATE + "; param.grad = None"))
)
sgd_step__scales_the_gradient = fails("gradient 0 after the step")(
    step_with((UPDATE, "param -= param.grad.mul_(lr)"))
)
sgd_step__walks_twice = fails("α = 0.5")(
    step_with(
        (
            "for param in params:",
            "any(p.grad is None for p in params)\n        for param in params:",
        )
    )
)
sgd_step__momentum = fails("expected")(
    step_with(
        (
            UPDATE,
            "param.m = 0.9 * getattr(param, 'm', 0) + param.grad; param -= lr * param.m",
        )
    )
)
sgd_step__through_float32 = fails("rounded to float32")(
    step_with((UPDATE, "param.copy_(param.float() - lr * param.grad.float())"))
)
sgd_step__turns_gradients_off = fails("gradients are disabled after the call")(
    step_with(("with torch.no_grad():", "torch.set_grad_enabled(False)\n    if True:"))
)
sgd_step__first_parameter_only = fails("parameter 1 after two steps")(
    step_with((UPDATE, UPDATE + "; break"))
)
sgd_step__stops_at_a_frozen_parameter = fails("parameter 2 after two steps")(
    step_with(
        ("if param.grad is not None:", "if param.grad is None:\n                break"),
        (f"    {UPDATE}", UPDATE),
    )
)
sgd_step__freezes = fails("changes which of the parameters require a gradient")(
    step_with(
        ("with torch.no_grad():", "if True:"),
        ("if param.grad", "param.requires_grad_(False)\n            if param.grad"),
    )
)
sgd_step__scales_the_gradient_there_and_back = fails("to the last bit")(
    step_with((UPDATE, "param -= param.grad.mul_(lr); param.grad.div_(lr)"))
)
sgd_step__zeroes = fails("Gradients stay as they are")(
    step_with((UPDATE, UPDATE + "; param.grad.zero_()"))
)
sgd_step__clips = fails("expected")(
    step_with((UPDATE, UPDATE.replace("param.grad", "param.grad.clamp(-5, 5)")))
)
sgd_step__decays = fails("expected")(
    step_with((UPDATE, UPDATE.replace("param.grad", "(param.grad + 0.01 * param)")))
)
sgd_step__no_scalars = fails("parameter 2 after two steps")(
    step_with(("param.grad is not None", "param.grad is not None and param.dim()"))
)


@fails("is what this task asks you to write")
def sgd_step__an_optimizer(params, lr):
    torch.optim.SGD(params, lr).step()


@fails("sgd is what this task asks you to write")
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
    params = list(model.parameters())
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


def accumulate_with(*edits):
    return edited(accumulate_gradients__weighted, *edits)


SHARE = "(len(rows) / len(x))"
CLEARS = "model.zero_grad()"
COUNT = "math.ceil(len(x) / micro_batch_size)"

accumulate_gradients__mean_of_means = fails("the last one has fewer rows")(
    accumulate_with((SHARE, f"1 / {COUNT}"))
)
accumulate_gradients__fixed_share = fails("the last one has fewer rows")(
    accumulate_with((SHARE, "(micro_batch_size / len(x))"))
)
accumulate_gradients__sum_of_means = fails("weigh each with its share")(
    accumulate_with((SHARE, "1"))
)
accumulate_gradients__sum_over_rows = fails("the division by B is missing")(
    accumulate_with((SHARE, "len(rows)"))
)
accumulate_gradients__clears_every_time = fails("it has wiped out the others")(
    accumulate_with((CLEARS, "pass"), ("part.backward()", "model.zero_grad(); part.backward()"))
)
accumulate_gradients__never_clears = fails("added to what was there before")(
    accumulate_with((CLEARS, "pass"))
)
accumulate_gradients__drops_the_rest = fails("expected")(
    accumulate_with(
        ("range(0, len(x), micro", "range(0, max(1, len(x) - micro_batch_size + 1), micro")
    )
)
accumulate_gradients__whole_batch = fails("rows of forward pass 0")(
    accumulate_with(
        ("range(0, len(x), micro_batch_size)", "[0]"), (": start + micro_batch_size", ":")
    )
)
accumulate_gradients__forward_on_all_rows = fails("rows of forward pass 0")(
    accumulate_with(("model(rows)", "model(x)[start : start + micro_batch_size]"))
)
accumulate_gradients__one_row_at_a_time = fails("rows of forward pass 0")(
    accumulate_with(
        ("len(x), micro_batch_size)", "len(x), 1)"), ("start + micro_batch_size", "start + 1")
    )
)
accumulate_gradients__keeps_the_graph_and_its_sum = fails("expected")(
    accumulate_with(("part.backward()", "part.backward(retain_graph=True); part.backward()"))
)
accumulate_gradients__steps_as_well = fails("parameter 1 after the call")(
    accumulate_with(("return total", "model[0].bias.data -= 0.1; return total"))
)
accumulate_gradients__last_loss = fails("loss returned by call 0")(
    accumulate_with(("total += part.item()", "total = part.item() / (len(rows) / len(x))"))
)
accumulate_gradients__sum_of_losses = fails("loss returned by call 0")(
    accumulate_with(("total += part.item()", "total += part.item() / (len(rows) / len(x))"))
)
accumulate_gradients__returns_nothing = fails("is None")(
    accumulate_with(("return total", "return"))
)
accumulate_gradients__one_loss_for_all = fails("10 rows by 4")(
    accumulate_with(("loss_fn(", "torch.nn.functional.cross_entropy("))
)
accumulate_gradients__sets_the_mode = fails("the model came in one mode")(
    accumulate_with((CLEARS, CLEARS + "; model.train()"))
)
accumulate_gradients__float32_only = fails("dtype")(
    accumulate_with(("model(rows)", "model(rows.float())"))
)
accumulate_gradients__shuffles_the_rows = fails("rows of forward pass 0")(
    accumulate_with(
        (CLEARS, "order = torch.randperm(len(x)); x, y = x[order], y[order]; model.zero_grad()")
    )
)
accumulate_gradients__one_backward_at_the_end = fails("micro-batches in memory at a time")(
    accumulate_with(
        ("part.backward()", "pass"),
        ("part.item()", "part"),
        ("return total", "total.backward(); return total.item()"),
    )
)
accumulate_gradients__list_of_losses = fails("micro-batches in memory at a time")(
    accumulate_with(
        ("total = 0.0", "losses = []"),
        ("part.backward()", "losses.append(part)"),
        ("total += part.item()", "pass"),
        ("return total", "[part.backward() for part in losses]; return sum(losses).item()"),
    )
)
accumulate_gradients__gradients_are_there = fails("NoneType")(
    accumulate_with((CLEARS, "[param.grad.zero_() for param in model.parameters()]"))
)
accumulate_gradients__seeds = fails("draws or seeds random numbers")(
    accumulate_with((CLEARS, CLEARS + "; torch.manual_seed(0)"))
)
accumulate_gradients__from_the_back = fails("rows of forward pass 0")(
    accumulate_with((CLEARS, CLEARS + "; x, y = x.flip(0), y.flip(0)"))
)
accumulate_gradients__loss_in_float32 = fails("loss returned by call 0")(
    accumulate_with(("part.item()", "part.float().item()"))
)
accumulate_gradients__overwrites_the_rows = fails("changes x, which is not its to change")(
    accumulate_with(("return total", "x.zero_(); return total"))
)

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


def rate_with(*edits):
    return edited(learning_rate__by_formula, *edits)


PASSED = "(step - warmup_steps) / (total_steps - warmup_steps)"

learning_rate__begins_with_0 = fails("the first step would do nothing")(
    rate_with(("(step + 1)", "step"))
)
learning_rate__no_warm_up = fails("nothing rises")(
    rate_with(("peak * (step + 1) / warmup_steps", "peak"))
)
learning_rate__cosine_of_all_steps = fails("count the steps behind the warm-up")(
    rate_with((PASSED, "step / total_steps"))
)
learning_rate__reaches_0 = fails("it would do nothing")(
    rate_with((PASSED, "(step - warmup_steps) / max(1, total_steps - warmup_steps - 1)"))
)
learning_rate__linear = fails("expected")(
    rate_with(("peak * (1 + math.cos(math.pi * passed)) / 2", "peak * (1 - passed)"))
)
learning_rate__half_a_cosine = fails("expected")(
    rate_with(("peak * (1 + math.cos(math.pi * passed)) / 2", "peak * math.cos(math.pi * passed)"))
)
learning_rate__in_degrees = fails("expected")(rate_with(("math.pi * passed", "180 * passed")))
learning_rate__one_step_late = fails("expected")(
    rate_with(("step < warmup_steps", "step <= warmup_steps"))
)
learning_rate__divides_by_the_warm_up = fails("ZeroDivisionError")(
    rate_with(
        ("if step < warmup_steps", "rising = (step + 1) / warmup_steps\n    if step < warmup_steps")
    )
)
learning_rate__stays_at_the_peak = fails("expected")(
    rate_with(("peak * (1 + math.cos(math.pi * passed)) / 2", "peak"))
)
learning_rate__ignores_the_peak = fails("expected")(rate_with(("peak *", "0.1 *")))
learning_rate__counts_calls = fails("expected")(
    rate_with(
        (
            "if step < warmup_steps",
            "counted = globals().setdefault('_counted', [0])\n    counted[0] += 1\n"
            "    step = (counted[0] - 1) % total_steps\n    if step < warmup_steps",
        )
    )
)
learning_rate__rounded = fails("expected")(
    rate_with(
        (
            "return peak * (1 + math.cos(math.pi * passed)) / 2",
            "return round(peak * (1 + math.cos(math.pi * passed)) / 2, 4)",
        )
    )
)
learning_rate__at_least_one_step_of_warm_up = fails("no warm-up")(
    rate_with(("if step <", "warmup_steps = max(1, warmup_steps)\n    if step <"))
)
learning_rate__half_is_missing = fails("without the ½")(
    rate_with(("(1 + math.cos(math.pi * passed)) / 2", "(1 + math.cos(math.pi * passed))"))
)
learning_rate__one_is_missing = fails("without the 1 +")(
    rate_with(("(1 + math.cos(math.pi * passed)) / 2", "math.cos(math.pi * passed) / 2"))
)
learning_rate__pi_is_missing = fails("a cosine without π")(
    rate_with(("math.pi * passed", "passed"))
)
learning_rate__returns_nothing = fails("is None")(rate_with(("return peak * (1", "peak * (1")))

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


def variance_with(*edits):
    return edited(gradient_variance__draw_by_draw, *edits)


DRAWS = "torch.randperm(len(x), generator=generator)[:batch_size]"
MISS = "(gradient(rows) - full).square().sum().item()"

gradient_variance__with_replacement = fails("drawn with replacement")(
    variance_with((DRAWS, "torch.randint(len(x), (batch_size,), generator=generator)"))
)
gradient_variance__single_rows = fails("the spread of single rows")(
    variance_with(("[:batch_size]", "[:1]"))
)
gradient_variance__mean_over_the_numbers = fails("a squared length is their sum")(
    variance_with((".sum()", ".mean()"))
)
gradient_variance__length_not_squared = fails("expected")(
    variance_with((".square().sum()", ".norm()"))
)
gradient_variance__square_root = fails("the square root of the variance")(
    variance_with(("return total / num_batches", "return (total / num_batches) ** 0.5"))
)
gradient_variance__sum_over_the_batches = fails("expected")(
    variance_with(("return total / num_batches", "return total"))
)
gradient_variance__absolute_values = fails("expected")(variance_with((".square()", ".abs()")))
gradient_variance__not_around_the_full_gradient = fails("expected")(variance_with((" - full", "")))
gradient_variance__the_first_batch_again = fails("is the same number in each of")(
    variance_with((DRAWS, "torch.arange(batch_size)"))
)
gradient_variance__one_batch = fails("expected")(variance_with(("range(num_batches)", "range(1)")))
gradient_variance__reseeds = fails("expected")(
    variance_with((DRAWS, DRAWS.replace("=generator", "=generator.manual_seed(3)")))
)
gradient_variance__global_generator = fails("second time, with the same seed")(
    variance_with((DRAWS, "torch.randperm(len(x))[:batch_size]"))
)
gradient_variance__the_theory_without_measuring = fails("expected")(
    variance_with(("return total / num_batches", "return full.square().sum().item() / batch_size"))
)
gradient_variance__through_backward = fails(".grad of parameter 0 after the call")(
    variance_with(
        (
            "grads = torch.autograd.grad(loss, list(model.parameters()))",
            "model.zero_grad(); loss.backward(); grads = [p.grad for p in model.parameters()]",
        )
    )
)
gradient_variance__trains = fails("parameter 0 after the call")(
    variance_with(
        ("return total / num_batches", "model[0].weight.data *= 0.9; return total / num_batches")
    )
)
gradient_variance__one_loss_for_all = fails("batches of 12 of 16 rows")(
    variance_with(("loss_fn(", "torch.nn.functional.cross_entropy("))
)
gradient_variance__a_list = fails("expected a number")(
    variance_with(("return total / num_batches", "return [total / num_batches]"))
)
gradient_variance__evaluates = fails("the model came in one mode")(
    variance_with(("full = gradient", "model.eval(); full = gradient"))
)
gradient_variance__own_generator = fails("the same number in each of 24 calls")(
    variance_with(
        ("total = 0.0", "total, mine = 0.0, torch.Generator().manual_seed(0)"),
        (DRAWS, DRAWS.replace("=generator", "=mine")),
    )
)
gradient_variance__from_the_first_seed = fails("the same number in each of 24 calls")(
    variance_with(
        (
            "total = 0.0",
            "total, mine = 0.0, torch.Generator().manual_seed(generator.initial_seed())",
        ),
        (DRAWS, DRAWS.replace("=generator", "=mine")),
    )
)
gradient_variance__always_10_batches = fails("no 2 batches give that")(
    variance_with(("num_batches):", "10):"), ("/ num_batches", "/ 10"))
)
gradient_variance__batches_of_an_epoch = fails("drawn anew from all rows")(
    variance_with(
        (
            "for _ in range(num_batches)",
            "order = [b for _ in range(num_batches) for b in torch.randperm(len(x), "
            "generator=generator).split(batch_size) if len(b) == batch_size]\n"
            "    for rows in order[:num_batches]",
        ),
        (f"rows = {DRAWS}", "pass"),
    )
)
gradient_variance__of_neighbours = fails("Each row may be in a batch with each other one")(
    variance_with(
        (
            DRAWS,
            "torch.arange(len(x)).roll(int(torch.randint(len(x), (), generator=generator)))"
            "[:batch_size]",
        )
    )
)
gradient_variance__around_its_own_mean = fails("around the batches' own mean")(
    variance_with(
        ("full = gradient(slice(None))", "found = []"),
        (f"total += {MISS}", "found.append(gradient(rows))"),
        (
            "return total / num_batches",
            "found = torch.stack(found); "
            "return (found - found.mean(0)).square().sum(1).mean().item()",
        ),
    )
)
gradient_variance__torch_var = fails("around the batches' own mean")(
    variance_with(
        ("full = gradient(slice(None))", "found = []"),
        (f"total += {MISS}", "found.append(gradient(rows))"),
        ("return total / num_batches", "return torch.stack(found).var(0).sum().item()"),
    )
)
gradient_variance__the_formula = fails("no 2 batches give that")(
    variance_with(
        ("for _ in range(num_batches)", "for i in range(len(x))"),
        (DRAWS, "[i]"),
        (
            "return total / num_batches",
            "n = len(x); return total / n / batch_size * (n - batch_size) / (n - 1)",
        ),
    )
)
gradient_variance__one_less_in_the_mean = fails("expected")(
    variance_with(("/ num_batches", "/ max(1, num_batches - 1)"))
)
gradient_variance__weights_only = fails("no 2 batches give that")(
    variance_with(("list(model.parameters())", "[p for p in model.parameters() if p.dim() > 1]"))
)
gradient_variance__gradients_are_there = fails("NoneType")(
    variance_with(
        ("full = gradient", "held = [p.grad.clone() for p in model.parameters()]; full = gradient")
    )
)


@fails("course_lib", only=["grader"])
def gradient_variance__imports_the_reference(
    model, loss_fn, x, y, batch_size, num_batches, generator
):
    import importlib

    reference = importlib.import_module("course_lib.sgd").gradient_variance

    return reference(model, loss_fn, x, y, batch_size, num_batches, generator)


# What is kept, what is nearly right, and what goes around a rule ----------------------------


@fails("chance lets them")
def minibatches__swaps_with_any_row(n, batch_size, generator, drop_last=False):
    rows = torch.arange(n)
    for i in range(n):
        j = int(torch.randint(n, (), generator=generator))
        rows[[i, j]] = rows[[j, i]]
    batches = rows.split(batch_size)
    return [batch for batch in batches if len(batch) == batch_size or not drop_last]


minibatches__never_stays_in_place = fails("Every order of the rows must be equally likely")(
    edited(
        minibatches__swaps_with_any_row,
        ("for i in range(n)", "for i in range(n - 1, 0, -1)"),
        ("torch.randint(n,", "torch.randint(i,"),
    )
)
minibatches__orders_with_ties = fails("Every order of the rows must be equally likely")(
    edited(
        minibatches__split,
        (
            "torch.randperm(n, generator=generator)",
            "torch.randint(n, (n,), generator=generator).argsort(stable=True)",
        ),
    )
)


@fails("have [4, 4, 3] rows, expected [3, 3, 3, 3]")
def minibatches__sizes_of_the_first_call(n, batch_size, generator, drop_last=False, kept={}):
    n, batch_size = kept.setdefault("sizes", (n, batch_size))
    batches = torch.randperm(n, generator=generator).split(batch_size)
    return [batch for batch in batches if len(batch) == batch_size or not drop_last]


@fails("RandomSampler is what this task asks you to write")
def minibatches__a_sampler_without_init(n, batch_size, generator, drop_last=False):
    sampler = torch.utils.data.RandomSampler.__new__(torch.utils.data.RandomSampler)
    sampler.data_source, sampler.replacement = range(n), False
    sampler._num_samples, sampler.generator = None, generator
    batches = torch.tensor(list(sampler)).split(batch_size)
    return [batch for batch in batches if len(batch) == batch_size or not drop_last]


@fails("something is kept from the call before")
def sgd_step__rate_of_the_first_call(params, lr, kept={}):
    lr = kept.setdefault("lr", lr)
    with torch.no_grad():
        for param in params:
            if param.grad is not None:
                param -= lr * param.grad


@fails(".grad is another tensor")
def sgd_step__replaces_the_gradient(params, lr):
    with torch.no_grad():
        for param in params:
            if param.grad is not None:
                param -= lr * param.grad
                param.grad = param.grad.clone()


@fails("_single_tensor_sgd is what this task asks you to write")
def sgd_step__a_part_of_the_optimizer(params, lr):
    from torch.optim.sgd import _single_tensor_sgd

    params = [param for param in params if param.grad is not None]
    grads, none = [param.grad for param in params], [None] * len(params)
    settings = {"weight_decay": 0, "momentum": 0, "lr": lr, "dampening": 0}
    settings |= {"nesterov": False, "maximize": False, "has_sparse_grad": False}
    with torch.no_grad():
        _single_tensor_sgd(params, grads, none, None, None, **settings)


accumulate_gradients__loss_by_the_targets = fails("gradient of parameter 0")(
    edited(
        accumulate_gradients__weighted,
        (
            "model.zero_grad()",
            "model.zero_grad()\n"
            "    real = y.is_floating_point()\n"
            "    loss_fn = torch.nn.functional.mse_loss if real else "
            "torch.nn.functional.cross_entropy",
        ),
    )
)


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

    params, total = {name: param.detach() for name, param in model.named_parameters()}, 0.0
    model.zero_grad()
    for rows, targets in zip(x.split(micro_batch_size), y.split(micro_batch_size), strict=True):

        def share(params, rows=rows, targets=targets):
            return loss_fn(functional_call(model, params, (rows,)), targets) * len(rows) / len(x)

        gradients, loss = grad_and_value(share)(params)
        total += loss.item()
        for name, param in model.named_parameters():
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


@fails("SGD is what this task asks you to write")
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


learning_rate__six_decimals = fails("expected")(edited(learning_rate__rounded, ("2, 4)", "2, 6)")))

gradient_variance__at_most_20_batches = fails("no 25 batches", only=("simulated", "grader"))(
    edited(gradient_variance__draw_by_draw, ("range(num_batches)", "range(min(num_batches, 20))"))
)


# Pieces of equal length, what a frozen parameter is, and what is left behind ----------------


@fails("have [3, 3, 3] rows, expected [4, 4, 1]")
def minibatches__pieces_of_equal_length(n, batch_size, generator, drop_last=False):
    batches = torch.randperm(n, generator=generator).chunk(math.ceil(n / batch_size))
    return [batch for batch in batches if len(batch) == batch_size or not drop_last]


@fails("expected a vector of row numbers (int64)")
def minibatches__rows_and_no_batches(n, batch_size, generator, drop_last=False):
    return torch.randperm(n, generator=generator)


minibatches__few_orders = fails("Every order of the rows must be equally likely")(
    batches_with(
        (
            ORDER,
            "torch.randperm(n, generator=torch.Generator().manual_seed("
            "int(torch.randint(50, (), generator=generator))))",
        )
    )
)
minibatches__the_last_rows_are_left_out = fails("in 0 of 400 epochs")(
    batches_with((ORDER, "n = n - n % batch_size if drop_last else n; order = " + ORDER))
)


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


@fails("leaves hooks on the parameters")
def sgd_step__leaves_hooks(params, lr):
    for param in params:
        if param.grad is not None:
            param.data.sub_(param.grad, alpha=lr)
            param.register_hook(lambda gradient: gradient)


@passes
def sgd_step__in_inference_mode(params, lr):
    with torch.inference_mode():
        for param in params:
            if param.grad is not None:
                param.add_(param.grad, alpha=-lr)


@fails("has shape [2], expected [3]")
def accumulate_gradients__pieces_of_equal_length(model, loss_fn, x, y, micro_batch_size):
    model.zero_grad()
    count, total = math.ceil(len(x) / micro_batch_size), 0.0
    for rows, targets in zip(x.chunk(count), y.chunk(count), strict=True):
        share = loss_fn(model(rows), targets) * len(rows) / len(x)
        share.backward()
        total += share.item()
    return total


gradient_variance__in_float32 = fails("no 2 batches give that")(
    edited(
        gradient_variance__draw_by_draw,
        ("for g in grads])", "for g in grads]).float()"),
    )
)
