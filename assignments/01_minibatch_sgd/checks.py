"""The checks of this assignment. They are handed out: read them if a message is not enough.

Everything runs on one rank. `judges.py` has the inputs, programs and judges of batches, accumulated
gradients and the variance of a gradient. A program gets only its rank's input.
"""

import math
from dataclasses import replace

import torch
from torch import nn

from course_lib.checking import Case, Form, Wrong, equals, in_many_forms, task
from course_lib.checking.forbidden import OPTIMIZERS, refusing
from course_lib.checking.shared.averaging import unchanged_in_this_form

from .judges import (
    accumulation_inputs,
    accumulation_program,
    batch_inputs,
    batch_program,
    drawn_anew,
    equals_accumulated,
    model_stays,
    variance_inputs,
    variance_program,
    without_replacement,
)

ONE_PROCESS = ("float32", "float64")
TO_THE_BIT = {"float32": 0.0, "float64": 0.0, "bfloat16": 0.0}

# Task 2: the step ------------------------------------------------------------------------------


def step_inputs(case, generator):
    shapes, frozen = case.parameters["shapes"], case.parameters.get("frozen", ())

    def draw(scale=1):
        return [scale * torch.randn(shape, generator=generator) for shape in shapes]

    # The second gradients are large, because the task does not ask for clipping.
    gradients = [[None if i in frozen else g for i, g in enumerate(draw(s))] for s in (1, 300)]
    lr, doubles = case.parameters["lr"], list(case.parameters.get("doubles", ()))
    rates = [lr, 0.7 * lr]
    return [{"weights": draw(), "gradients": gradients, "lr": rates, "doubles": doubles}]


def _double(tensors, places):
    return [t.double() if i in places and t is not None else t for i, t in enumerate(tensors)]


def step_program(sgd_step, mine, given):
    weights = _double(mine["weights"], mine["doubles"])
    pairs = zip(weights, mine["gradients"][0], strict=True)
    params = [nn.Parameter(weight, requires_grad=g is not None) for weight, g in pairs]
    given.watch.add_parameters("the parameters", params, values=False)
    in_memory = [param.detach() for param in params]
    replaced = [False] * len(params)
    with refusing(*OPTIMIZERS):
        for gradients, lr in zip(mine["gradients"], mine["lr"], strict=True):
            given_them = [
                None if g is None else g.clone() for g in _double(gradients, mine["doubles"])
            ]
            for param, gradient in zip(params, given_them, strict=True):
                param.grad = gradient
            sgd_step(given.iterable(params), lr)
            for i, (param, gradient) in enumerate(zip(params, given_them, strict=True)):
                wants = gradient is not None and gradient.requires_grad
                replaced[i] |= param.grad is not gradient or wants
    return {
        "whether gradient {} is another tensor": replaced,
        "parameter {} after two steps": in_memory,
        "gradient {} after the step": [param.grad for param in params],
    }


def stepped(sign=-1):
    def oracle(case, inputs, me):
        weights, gradients, lr = (inputs[0][key] for key in ("weights", "gradients", "lr"))
        ends = []
        for i, weight in enumerate(weights):
            end = weight.double()
            for rate, step in zip(lr, gradients, strict=True):
                end = end if step[i] is None else end + sign * rate * step[i].double()
            ends.append(end.to(torch.float64 if i in inputs[0]["doubles"] else weight.dtype))
        return {"parameter {} after two steps": ends}

    return oracle


def all_else_stays(case, inputs, values):
    last, key = inputs[0]["gradients"][-1], "gradient {} after the step"
    last = _double(last, inputs[0]["doubles"])
    try:
        equals(lambda *_: {key: last}, tolerance=TO_THE_BIT)(case, inputs, [{key: values[0][key]}])
    except Wrong as wrong:
        raise Wrong(
            wrong.message, "Leave .grad as it is: do not scale it or round it in place."
        ) from None
    if any(values[0]["whether gradient {} is another tensor"]):
        raise Wrong(
            "after the step, .grad is a different tensor, or .grad itself requires a gradient",
            "Keep every .grad as it is: do not replace it.",
        )


def stepped_only(case, inputs, values):
    key = "parameter {} after two steps"
    judge = equals(stepped(), STEP_MISTAKES, named=unchanged)
    judge(case, inputs, [{key: values[0][key]}])


def unchanged(case, inputs, me):
    words = unchanged_in_this_form(case, "the parameter before the steps", "step")
    return dict.fromkeys(words, stepped(0)(case, inputs, me))


STEP_MISTAKES = {
    "the parameter before the steps. Update each parameter that has a gradient, in its own "
    "memory": stepped(0),
    "steps up the slope: the sign is wrong": stepped(1),
}


# Task 4: warm-up -------------------------------------------------------------------------------


def rate_program(learning_rate, mine, given):
    peak, warmup, total = mine["peak"], mine["warmup"], mine["total"]
    # From the last step to the first, to find a function that counts calls instead of steps.
    with refusing(*OPTIMIZERS):
        asked = {t: learning_rate(t, peak, warmup, total) for t in reversed(range(total))}
    return {"rate in step {}": [asked[t] for t in range(total)]}


def rates(
    rising=lambda t, w: (t + 1) / w,
    passed=lambda t, w, total: (t - w) / (total - w),
):
    """Return the oracle of rates with these shares of the warm-up and of the steps after it."""

    def oracle(case, inputs, me):
        peak, warmup, total = (inputs[0][key] for key in ("peak", "warmup", "total"))

        def rate(t):
            if t < warmup:
                return peak * rising(t, warmup)
            return peak * (1 + math.cos(math.pi * passed(t, warmup, total))) / 2

        return {"rate in step {}": [rate(t) for t in range(total)]}

    return oracle


RATE_MISTAKES = {
    "peak · t/W: with this rate, the first step would do nothing": rates(lambda t, w: t / w),
    "a cosine of t/T. Count only the steps after the warm-up: (t - W)/(T - W)": rates(
        passed=lambda t, w, total: t / total
    ),
    "a cosine that is 0 in the last step: that step would do nothing": rates(
        passed=lambda t, w, total: (t - w) / max(1, total - w - 1)
    ),
}


# The tasks -------------------------------------------------------------------------------------


def batches(name, n, batch_size, drop_last=False):
    return Case(name, 1, {"n": n, "batch_size": batch_size, "drop_last": drop_last})


def stepping(name, lr, *shapes, **more):
    return Case(name, 1, {"shapes": shapes, "lr": lr, **more})


def accumulating(name, rows, micro, loss, **more):
    return Case(name, 1, {"rows": rows, "micro": micro, "loss": loss, **more})


def rising(name, peak, warmup, total):
    return Case(name, 1, {"peak": peak, "warmup": warmup, "total": total})


def measuring(n, batch_size, num_batches, calls, loss, **more):
    own = {"n": n, "batch_size": batch_size, "num_batches": num_batches, "calls": calls}
    name = f"{num_batches} batches of {batch_size} of {n} rows, {calls} times"
    return Case(name, 1, {**own, "loss": loss, **more})


CHECKS = {
    "minibatches": task(
        "minibatches",
        inputs=batch_inputs,
        program=batch_program,
        judges=[without_replacement],
        cases=[
            batches("12 rows in batches of 3", 12, 3),
            batches("11 rows in batches of 4", 11, 4),
            batches("9 rows in batches of 4", 9, 4),
            batches("10 rows in batches of 4", 10, 4),
            batches("11 rows, drop_last", 11, 4, True),
            batches("12 rows, drop_last", 12, 4, True),
            batches("5 rows by 8, drop_last", 5, 8, True),
            batches("more than there are", 9, 20),
            batches("4 single rows, many times", 4, 1),
            batches("4 rows in batches of 2, many times", 4, 2),
        ],
        in_turn=[(1, 0), (1, 3), (1, 4)],  # other in all arguments, in n, in drop_last
    ),
    "sgd_step": task(
        "sgd_step",
        inputs=step_inputs,
        program=step_program,
        judges=[stepped_only, all_else_stays],
        may_change=["weights"],
        cases=in_many_forms(
            stepping("α = 0.1", 0.1, (3, 2), (5,), ()),
            stepping("α = 0.3", 0.3, (4, 3), (2,)),  # in float64; float32 cannot represent 0.3
            stepping("α = 0.25, a frozen parameter", 0.25, (2, 2), (3,), (4, 2), frozen=[1]),
            stepping("α = 2", 2.0, (2, 3), (0,)),
            replace(stepping("two dtypes", 0.15, (2, 3), (3,), doubles=[1]), form=Form()),
        ),
        in_turn=[(0, 1)],
    ),
    "accumulate_gradients": task(
        "accumulate_gradients",
        inputs=accumulation_inputs,
        program=accumulation_program,
        judges=[
            equals_accumulated("gradient", "parameter", "rows", "micro"),
            equals_accumulated("loss", tolerance={"float64": 1e-6}),
        ],
        cases=in_many_forms(
            accumulating("8 rows by 4", [8, 8], 4, "cross_entropy"),
            accumulating("10 rows by 4", [10, 10], 4, "mse_loss"),
            accumulating("7 and 4 rows by 3", [7, 4], 3, "nll_loss"),
            accumulating("3 rows by 8", [3, 3], 8, "smooth_l1_loss"),
            accumulating(
                "4 rows by 1, .grad is None at first", [4, 2], 1, "cross_entropy", fresh=True
            ),
            accumulating(
                "6 rows by 4, the first layer is frozen", [6, 5], 4, "mse_loss", frozen=[0, 1]
            ),
            dtypes=ONE_PROCESS,
        ),
        in_turn=[(0, 2), (1, 4)],
    ),
    "learning_rate": task(
        "learning_rate",
        inputs=lambda case, generator: [dict(case.parameters)],
        program=rate_program,
        judges=[
            equals(rates(), RATE_MISTAKES, tolerance={"float32": 1e-5}, absolute={"float32": 1e-8})
        ],
        cases=[
            rising("5 of 20 steps", 0.1, 5, 20),
            rising("1 of 10 steps", 1.6, 1, 10),
            rising("no warm-up", 0.5, 0, 8),
            rising("nothing but warm-up", 0.5, 6, 6),
            rising("a small peak", 2.5e-5, 3, 12),
            rising("24 of 120 steps", 1.6, 24, 120),
            rising("5 of 20 steps, another peak", 0.3, 5, 20),
            rising("2 of 20 steps", 0.1, 2, 20),
            rising("5 of 30 steps", 0.1, 5, 30),
        ],
        # A solution may keep a result by some of its arguments: these pairs differ only in others.
        in_turn=[(0, 1), (0, 6), (0, 7), (0, 8)],
    ),
    "gradient_variance": task(
        "gradient_variance",
        inputs=variance_inputs,
        program=variance_program,
        judges=[model_stays, drawn_anew],
        cases=in_many_forms(
            measuring(4, 2, 2, 80, "nll_loss"),
            measuring(5, 3, 2, 120, "smooth_l1_loss"),
            measuring(5, 5, 5, 2, "l1_loss", fresh=True),
            measuring(3, 1, 4, 40, "l1_loss"),
            dtypes=ONE_PROCESS,
        ),
        in_turn=[(0, 3)],
    ),
}
