"""The checks of this assignment. They are handed out: read them if a message is not enough.

Everything runs on one rank. What is random is judged by counting: each limit is six standard
deviations away, so that chance alone does not cross it.
"""

from contextlib import ExitStack
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

from course_lib.checking import Case, Wrong, equals, in_many_forms, task
from course_lib.checking.training import CLASSES, FEATURES, SHAPES, make_model

EPOCHS = 400
ONE_PROCESS = ("float32", "float64")


def seed_of(generator):
    return int(torch.randint(2**31, (), generator=generator))


def refusing(*classes):
    """While this context lasts, nobody makes an object of these classes."""

    def refuse(self, *_, **__):
        raise RuntimeError(f"this task asks for what {type(self).__name__} does: write it yourself")

    stack = ExitStack()
    for each in classes:
        stack.enter_context(mock.patch.object(each, "__init__", refuse))
    return stack


# Task 1: batches -------------------------------------------------------------------------------


def batch_inputs(case, generator):
    return [{**case.parameters, "seed": seed_of(generator)}]


def batch_program(minibatches, mine, given):
    data = torch.utils.data

    def epochs(count):
        generator = torch.Generator().manual_seed(mine["seed"])
        arguments = mine["n"], mine["batch_size"], generator
        with refusing(data.DataLoader, data.RandomSampler, data.BatchSampler):
            return [
                list(minibatches(*arguments, drop_last=mine["drop_last"])) for _ in range(count)
            ]

    many = [
        torch.tensor([[number, row] for number, batch in enumerate(epoch) for row in batch])
        for epoch in epochs(EPOCHS)
    ]
    return {"twice": epochs(2), "again": epochs(2), "many": torch.stack(many)}


def judge_batches(case, inputs, values):
    n, size, drop = (case.parameters[key] for key in ("n", "batch_size", "drop_last"))
    asked = f"minibatches({n}, {size}, generator, drop_last={drop})"
    first, second = values[0]["twice"]
    for number, batch in enumerate(first):
        if not isinstance(batch, torch.Tensor) or batch.dtype != torch.int64 or batch.dim() != 1:
            raise Wrong(f"{asked}: batch {number} is no vector of row numbers (int64)")
    sizes, right = [len(batch) for batch in first], [size] * (n // size) + [n % size]
    right = [rows for rows in right if rows == size or (rows and not drop)]
    if sizes != right:
        hint = "The last batch is shorter, and left out with drop_last=True only."
        raise Wrong(f"{asked}: the batches have {sizes} rows, expected {right}", hint)
    rows = torch.cat(first).tolist()
    if not set(rows) <= set(range(n)):
        raise Wrong(f"{asked}: rows {min(rows)} to {max(rows)} occur, expected 0 to {n - 1}")
    if twice := sorted(row for row in set(rows) if rows.count(row) > 1):
        hint = "Without replacement: a row that was drawn is not there to be drawn again."
        raise Wrong(f"{asked}: row {twice[0]} comes {rows.count(twice[0])} times an epoch", hint)
    if rows == torch.cat(second).tolist():
        hint = "Every epoch is shuffled anew: what the generator draws next is another order."
        raise Wrong(f"{asked}: two epochs have the same batches", hint)
    if [batch.tolist() for batch in first] != [b.tolist() for b in values[0]["again"][0]]:
        hint = "All that is random comes from `generator`: torch.randperm(…, generator=generator)."
        raise Wrong(f"{asked}: the same seed gives other batches the second time", hint)
    judge_chances(asked, n, size, values[0]["many"])


def judge_chances(asked, n, size, many):
    """Raise `Wrong` unless each row, and each pair of rows, is as often in a batch as it should."""
    held = torch.zeros(EPOCHS, n, int(many[..., 0].max()) + 1, dtype=torch.float64)
    held[torch.arange(EPOCHS)[:, None], many[..., 1], many[..., 0]] = 1
    full = many[0, :, 0].bincount() == size
    each = held[:, :, full].sum(0)
    expect_chance(asked, each, size / n, lambda row, batch: f"row {row} is in batch {batch}")
    pairs = torch.einsum("erb,esb->rs", held[:, :, full], held[:, :, full])
    chance = int(full.sum()) * size * (size - 1) / (n * (n - 1))
    pairs.fill_diagonal_(EPOCHS * chance)
    expect_chance(asked, pairs, chance, lambda a, b: f"rows {a} and {b} share a full batch")


def expect_chance(asked, counts, chance, words):
    spread = (EPOCHS * chance * (1 - chance)) ** 0.5
    far = (counts - EPOCHS * chance).abs()
    if far.numel() and far.max() > 6 * spread:
        place = [int(i) for i in torch.unravel_index(far.argmax(), far.shape)]
        raise Wrong(
            f"{asked}: {words(*place)} in {counts[tuple(place)]:.0f} of {EPOCHS} epochs, expected "
            f"about {EPOCHS * chance:.0f}",
            "Every order of the rows must be equally likely.",
        )


# Task 2: the step ------------------------------------------------------------------------------


def step_inputs(case, generator):
    shapes, frozen = case.parameters["shapes"], case.parameters.get("frozen", ())

    def draw():
        return [torch.randn(shape, generator=generator) for shape in shapes]

    gradients = [[None if i in frozen else g for i, g in enumerate(draw())] for _ in range(2)]
    return [{"weights": draw(), "gradients": gradients, "lr": case.parameters["lr"]}]


def step_program(sgd_step, mine, given):
    params = [nn.Parameter(weight) for weight in mine["weights"]]
    in_memory = [param.detach() for param in params]
    with refusing(torch.optim.Optimizer):
        for gradients in mine["gradients"]:
            for param, gradient in zip(params, gradients, strict=True):
                param.grad = None if gradient is None else gradient.clone()
            sgd_step(given.iterable(params), mine["lr"])
    return {
        "parameter {} after two steps": in_memory,
        "gradient {}, which stays,": [param.grad for param in params],
    }


def stepped(rate=lambda lr: (-lr, -lr), rounded=torch.Tensor.double):
    def oracle(case, inputs, me):
        weights, gradients, lr = (inputs[0][key] for key in ("weights", "gradients", "lr"))
        ends = []
        for i, weight in enumerate(weights):
            end = rounded(weight)
            for factor, step in zip(rate(lr), gradients, strict=True):
                end = end if step[i] is None else end + factor * rounded(step[i])
            ends.append(end.to(weight.dtype))
        return {
            "parameter {} after two steps": ends,
            "gradient {}, which stays,": list(gradients[-1]),
        }

    return oracle


STEP_MISTAKES = {
    "the parameter before the steps: update its own memory": stepped(lambda lr: (0, 0)),
    "steps up the slope: the sign is wrong": stepped(lambda lr: (lr, lr)),
    "steps with the learning rate 1": stepped(lambda lr: (-1, -1)),
    "momentum: a step uses this gradient only": stepped(lambda lr: (-1.9 * lr, -lr)),
    "the right steps, rounded to float32: keep the dtype": stepped(rounded=torch.Tensor.float),
}


# Task 3: accumulation --------------------------------------------------------------------------


def rows_of(count, loss, generator):
    x = torch.randn(count, FEATURES, generator=generator)
    y = torch.randn(count, CLASSES, generator=generator)
    return x, y if loss == "mse_loss" else y.argmax(1)


def accumulation_inputs(case, generator):
    calls = [rows_of(n, case.parameters["loss"], generator) for n in case.parameters["rows"]]
    return [
        {
            "weights": [0.3 * torch.randn(shape, generator=generator) for shape in SHAPES],
            "stale": [torch.randn(shape, generator=generator) for shape in SHAPES],
            "x": [x for x, _ in calls],
            "y": [y for _, y in calls],
            "loss": case.parameters["loss"],
            "micro": case.parameters["micro"],
        }
    ]


def accumulation_program(accumulate_gradients, mine, given):
    module, seen = make_model(mine["weights"]), []
    module.register_forward_pre_hook(lambda _, arguments: seen.append(len(arguments[0])))
    model, loss_fn = given.model(module), getattr(F, mine["loss"])
    for param, gradient in zip(model.parameters(), mine["stale"], strict=True):
        param.grad = gradient.clone()
    losses = [
        accumulate_gradients(model, loss_fn, x, y, mine["micro"])
        for x, y in zip(mine["x"], mine["y"], strict=True)
    ]
    return {
        "gradient of parameter {}": [param.grad for param in model.parameters()],
        "loss returned by call {}": losses,
        "rows of forward pass {}": seen,
        "parameter {}, which stays,": [param.detach() for param in model.parameters()],
    }


def accumulated(weigh=None, weigh_loss=None, carry=0.0):
    """What `weigh(rows of each micro-batch, micro_batch_size)` gives as weights of their means."""

    def oracle(case, inputs, me):
        mine = inputs[0]
        model = make_model([weight.double() for weight in mine["weights"]])
        gradients, losses, sizes = [g.double() for g in mine["stale"]], [], []
        for x, y in zip(mine["x"], mine["y"], strict=True):
            parts = list(zip(x.split(mine["micro"]), y.split(mine["micro"]), strict=True))
            rows = torch.tensor([float(len(part)) for part, _ in parts], dtype=torch.float64)
            right = rows / rows.sum()
            means = [one_loss(model, mine["loss"], *part) for part in parts]
            grads = [torch.autograd.grad(mean, list(model.parameters())) for mean in means]
            factors = weigh(rows, mine["micro"]) if weigh else right
            gradients = [
                carry * before + sum(f * g[i] for f, g in zip(factors, grads, strict=True))
                for i, before in enumerate(gradients)
            ]
            factors = weigh_loss(rows, mine["micro"]) if weigh_loss else right
            losses.append(sum(float(f * m) for f, m in zip(factors, means, strict=True)))
            sizes += [len(part) for part, _ in parts]
        dtype = mine["weights"][0].dtype
        return {
            "gradient of parameter {}": [gradient.to(dtype) for gradient in gradients],
            "loss returned by call {}": losses,
            "rows of forward pass {}": sizes,
            "parameter {}, which stays,": mine["weights"],
        }

    return oracle


def one_loss(model, loss, x, y):
    return getattr(F, loss)(model(x.double()), y.double() if y.is_floating_point() else y)


def last_alone(rows):
    return torch.eye(len(rows), dtype=torch.float64)[-1]


WEIGHTS = {
    "the plain mean over the micro-batches: the last one has fewer rows": lambda rows, micro: (
        torch.ones_like(rows) / len(rows)
    ),
    "the sum over the micro-batches: weigh each with its share of the rows": lambda rows, micro: (
        torch.ones_like(rows)
    ),
    "the sum over all rows: the division by B is missing": lambda rows, micro: rows,
    "weights micro_batch_size / B, also for the shorter last one": lambda rows, micro: (
        torch.full_like(rows, micro) / rows.sum()
    ),
    "that of the last micro-batch: it has wiped out the others": lambda rows, micro: last_alone(
        rows
    ),
    "the last micro-batch's share: it has wiped out the others": lambda rows, micro: (
        last_alone(rows) * rows / rows.sum()
    ),
}

ACCUMULATION_MISTAKES = {
    **{name: accumulated(weigh) for name, weigh in WEIGHTS.items()},
    **{f"{name} ": accumulated(weigh_loss=weigh) for name, weigh in WEIGHTS.items()},
    "the right gradient, added to what was there before": accumulated(carry=1.0),
}


# Task 4: warm-up -------------------------------------------------------------------------------


def rate_program(learning_rate, mine, given):
    peak, warmup, total = mine["peak"], mine["warmup"], mine["total"]
    return {"rate in step {}": [learning_rate(t, peak, warmup, total) for t in range(total)]}


def rates(rising=lambda t, w: (t + 1) / w, through=lambda t, w, total: (t - w) / (total - w)):
    def oracle(case, inputs, me):
        peak, warmup, total = (case.parameters[key] for key in ("peak", "warmup", "total"))
        return {
            "rate in step {}": [
                peak * rising(t, warmup)
                if t < warmup
                else peak * (1 + torch.cos(torch.tensor(torch.pi * through(t, warmup, total)))) / 2
                for t in range(total)
            ]
        }

    def plain(case, inputs, me):
        return {key: [float(rate) for rate in rs] for key, rs in oracle(case, inputs, me).items()}

    return plain


RATE_MISTAKES = {
    "peak t / W: then the first step does nothing": rates(lambda t, w: t / w),
    "the peak itself: nothing rises": rates(lambda t, w: 1.0),
    "a cosine over all T steps: count the steps since the peak, of T - W": rates(
        through=lambda t, w, total: t / total
    ),
    "a cosine that ends one step early: its last value would be 0": rates(
        through=lambda t, w, total: (t - w) / max(1, total - w - 1)
    ),
    "the cosine's angle for pi / 2 in place of pi, or the like": rates(
        through=lambda t, w, total: (t - w) / (total - w) / 2
    ),
}


# Task 5: the variance --------------------------------------------------------------------------


def variance_inputs(case, generator):
    (mine,) = accumulation_inputs(
        Case("", 1, {**case.parameters, "rows": [case.parameters["n"]], "micro": 1}), generator
    )
    kept = {key: mine[key] for key in ("weights", "stale", "loss")}
    more = {key: case.parameters[key] for key in ("batch_size", "num_batches")}
    return [{**kept, **more, "x": mine["x"][0], "y": mine["y"][0], "seed": seed_of(generator)}]


def variance_program(gradient_variance, mine, given):
    model, loss_fn = given.model(make_model(mine["weights"])), getattr(F, mine["loss"])
    for param, gradient in zip(model.parameters(), mine["stale"], strict=True):
        param.grad = gradient.clone()
    arguments = model, loss_fn, mine["x"], mine["y"], mine["batch_size"], mine["num_batches"]
    found = [
        gradient_variance(*arguments, torch.Generator().manual_seed(mine["seed"])) for _ in range(2)
    ]
    return {
        "variance": found,
        "stays": {
            ".grad of parameter {}": [param.grad for param in model.parameters()],
            "parameter {}": [param.detach() for param in model.parameters()],
        },
    }


def judge_variance(case, inputs, values):
    mine, n, size = inputs[0], case.parameters["n"], case.parameters["batch_size"]
    asked = f"the variance of batches of {size} of {n} rows"
    rows = row_gradients(mine)
    full = rows.mean(0)
    sigma2 = (rows - full).square().sum(1).mean().item()
    theory = sigma2 / size * (n - size) / (n - 1)
    found = [as_number(value, asked) for value in values[0]["variance"]]
    draws = torch.stack(
        [
            rows[torch.randperm(n, generator=torch.Generator().manual_seed(i))[:size]].mean(0)
            for i in range(EPOCHS)
        ]
    )
    spread = (draws - full).square().sum(1).std().item()
    allowed = 6 * spread / case.parameters["num_batches"] ** 0.5 + 1e-6 * sigma2
    if not abs(found[0] - theory) <= allowed:
        raise Wrong(
            f"{asked} is {found[0]:.5g}, expected {theory:.5g} up to {allowed:.2g}, which chance "
            "may make",
            lookalike(found[0], allowed, theory, sigma2, size, rows.shape[1], mine),
        )
    if found[0] != found[1]:
        hint = "All that is random comes from `generator`: torch.randperm(…, generator=generator)."
        raise Wrong(f"{asked} is {found[1]!r} the second time, with the same seed", hint)


def as_number(value, what):
    value = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Wrong(f"{what} is {type(value).__name__}, expected a number")
    return float(value)


def lookalike(found, allowed, theory, sigma2, size, numbers, mine):
    others = {
        "sigma²/B: these batches are drawn with replacement": sigma2 / size,
        "sigma², the spread of single rows": sigma2,
        "the mean over the parameters' numbers: a squared length is their sum": theory / numbers,
        "the square root of the variance": theory**0.5,
        "zero: every batch has the same gradient as the whole": 0.0,
    }
    for name, value in others.items():
        scale = value / theory if theory else 1.0
        if (
            abs(value - theory) > allowed
            and abs(found - value) <= max(allowed, 1e-9) * max(scale, 1e-9) + 1e-12
        ):
            return f"This is about {name}."
    return ""


def row_gradients(mine):
    """Return the gradient of every single row, one per line, in float64."""
    model = make_model([weight.double() for weight in mine["weights"]])
    lines = []
    for x, y in zip(mine["x"].split(1), mine["y"].split(1), strict=True):
        gradients = torch.autograd.grad(one_loss(model, mine["loss"], x, y), model.parameters())
        lines.append(torch.cat([gradient.flatten() for gradient in gradients]))
    return torch.stack(lines)


def what_stays(case, inputs, values):
    dtype = inputs[0]["weights"][0].dtype
    right = {
        ".grad of parameter {}": [gradient.to(dtype) for gradient in inputs[0]["stale"]],
        "parameter {}": inputs[0]["weights"],
    }
    equals(lambda *_: right)(case, inputs, [values[0]["stays"]])


# The tasks -------------------------------------------------------------------------------------

CHECKS = {
    "minibatches": task(
        "minibatches",
        inputs=batch_inputs,
        program=batch_program,
        judges=[judge_batches],
        cases=[
            Case("12 rows in batches of 3", 1, {"n": 12, "batch_size": 3, "drop_last": False}),
            Case("11 rows in batches of 4", 1, {"n": 11, "batch_size": 4, "drop_last": False}),
            Case("11 rows, drop_last", 1, {"n": 11, "batch_size": 4, "drop_last": True}),
            Case("more than there are", 1, {"n": 9, "batch_size": 20, "drop_last": False}),
        ],
    ),
    "sgd_step": task(
        "sgd_step",
        inputs=step_inputs,
        program=step_program,
        judges=[equals(stepped(), STEP_MISTAKES)],
        may_change=["weights"],
        cases=in_many_forms(
            Case("α = 0.1", 1, {"shapes": [(3, 2), (5,), ()], "lr": 0.1}),
            Case("α = 0.5", 1, {"shapes": [(4, 3), (2,)], "lr": 0.5}),
            Case(
                "α = 0.25, a frozen parameter",
                1,
                {"shapes": [(2, 2), (3,)], "lr": 0.25, "frozen": [1]},
            ),
            Case("α = 2", 1, {"shapes": [(2, 3), (0,)], "lr": 2.0}),
        ),
    ),
    "accumulate_gradients": task(
        "accumulate_gradients",
        inputs=accumulation_inputs,
        program=accumulation_program,
        judges=[equals(accumulated(), ACCUMULATION_MISTAKES, tolerance={"float64": 1e-6})],
        cases=in_many_forms(
            Case("8 rows by 4", 1, {"rows": [8, 8], "micro": 4, "loss": "cross_entropy"}),
            Case("10 rows by 4", 1, {"rows": [10, 10], "micro": 4, "loss": "mse_loss"}),
            Case("7 and 5 rows by 3", 1, {"rows": [7, 5], "micro": 3, "loss": "cross_entropy"}),
            Case("3 rows by 8", 1, {"rows": [3, 3], "micro": 8, "loss": "mse_loss"}),
            Case("4 rows by 1", 1, {"rows": [4, 2], "micro": 1, "loss": "cross_entropy"}),
            dtypes=ONE_PROCESS,
        ),
    ),
    "learning_rate": task(
        "learning_rate",
        inputs=lambda case, generator: [dict(case.parameters)],
        program=rate_program,
        judges=[equals(rates(), RATE_MISTAKES)],
        cases=[
            Case("5 of 20 steps", 1, {"peak": 0.1, "warmup": 5, "total": 20}),
            Case("1 of 10 steps", 1, {"peak": 1.6, "warmup": 1, "total": 10}),
            Case("no warm-up", 1, {"peak": 0.5, "warmup": 0, "total": 8}),
            Case("nothing but warm-up", 1, {"peak": 0.5, "warmup": 6, "total": 6}),
        ],
    ),
    "gradient_variance": task(
        "gradient_variance",
        inputs=variance_inputs,
        program=variance_program,
        judges=[judge_variance, what_stays],
        cases=in_many_forms(
            Case(
                "batches of 4 of 24 rows",
                1,
                {"n": 24, "batch_size": 4, "num_batches": 200, "loss": "cross_entropy"},
            ),
            Case(
                "batches of 12 of 16 rows",
                1,
                {"n": 16, "batch_size": 12, "num_batches": 150, "loss": "mse_loss"},
            ),
            Case(
                "all 10 rows",
                1,
                {"n": 10, "batch_size": 10, "num_batches": 5, "loss": "cross_entropy"},
            ),
            Case(
                "single rows", 1, {"n": 12, "batch_size": 1, "num_batches": 200, "loss": "mse_loss"}
            ),
            dtypes=ONE_PROCESS,
        ),
    ),
}
