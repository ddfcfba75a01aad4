"""The checks of this assignment. They are handed out: read them if a message is not enough.

A check has a reference in `course_lib`, a program that calls a function on a rank, and a draw that
makes a case from a seed. A program gets only its rank's input.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.checking import (
    Allowed,
    Case,
    Check,
    Draw,
    Expectation,
    Given,
    Observed,
    Variety,
    Wrong,
    by_reference,
)
from course_lib.checking.defence import defence, drawn_network, one_of
from course_lib.checking.on_ranks.effects import aspects
from course_lib.checking.on_ranks.given import expect_function, linear_of
from course_lib.checking.on_ranks.held import held_by
from course_lib.checking.on_ranks.leaves import tensors_in, with_tensors
from course_lib.ranks import Network, Trace, compute

from .judges import (
    AS_SCHEDULED,
    BACKWARD,
    FEW_ACTIVATIONS,
    FORWARD,
    STAGE,
    as_steps,
    whole_schedule,
    wrong_steps,
)

ZEROS, OVERFLOW = "only zeros on rank {}", "rank {} has an inf or a NaN"


# Tasks 1 and 2: a linear layer over K ranks -------------------------------------------------------

NO_BIAS, ONE_ROW, FEW_EACH = "no bias", "x is one row", "fewer than one each"
FILLED = ".grad is not empty"
LARGEST = {
    torch.bfloat16: (3, 1.0),
    torch.float32: (511, 1.0),
    torch.float64: (3 * 2**23, 2.0**-14),
}
"""By dtype, the largest number in a layer, in units, and the unit: sums of products are exact."""


def draw_layer(*shared: str) -> Callable[[Draw], list[Any]]:
    """Return the draw of a layer, its input x and dY; the ranks share the tensors named here.

    ``dx`` is the gradient of x that comes from elsewhere in the model.
    """

    def draw(d: Draw) -> list[Any]:
        largest, unit = LARGEST[d.dtype]
        most_ranks, common = max(map(len, d.groups)), d.one_of(*range(2, 8))
        several = (FEW_EACH,) if most_ranks > 1 else ()
        odd = d.unusual(NO_BIAS, ONE_ROW, FILLED, ZEROS, OVERFLOW, *several)
        parted = d.one_of(*(range(1, most_ranks) if FEW_EACH in odd else range(5, 10)))
        rows = () if ONE_ROW in odd else d.one_of((2,), (3,), (5,), (2, 2), (1, 3))
        features_out, features_in = (parted, common) if "dy" in shared else (common, parted)

        def numbers(*shape: int) -> Tensor:
            return (d.whole(2 * largest + 1, *shape) - largest).double() * unit

        inputs: list[Any] = [None] * d.world_size
        for members in d.groups:
            linear = {"weight": numbers(features_out, features_in)}
            linear |= {"bias": None if NO_BIAS in odd else numbers(features_out)}
            tensors = {name: numbers(*rows, features_in) for name in ("x", "dx")}
            tensors |= {"dy": numbers(*rows, features_out)}
            parts = {name: tensors[name].tensor_split(len(members), -1) for name in shared}
            for me, rank in enumerate(members):
                member = {**tensors, **{name: part[me].clone() for name, part in parts.items()}}
                member[shared[0]] *= rank != odd.get(ZEROS)
                if rank == odd.get(OVERFLOW):
                    member[shared[0]] = d.not_finite(member[shared[0]])
                inputs[rank] = {**linear, **member, "training": d.form.training}
                inputs[rank]["before"] = FILLED in odd
        return inputs

    return draw


def run_layer(make_layer: Callable[..., Any], inputs: Any, case: Given) -> Any:
    """Call ``make_layer(linear, group=group)``, then forward and backward of the result."""
    bias = inputs["bias"]
    linear = linear_of(nn.Parameter(inputs["weight"]), None if bias is None else nn.Parameter(bias))
    linear.train(inputs["training"])
    looks = looks_of(linear)
    layer = make_layer(linear, group=case.group)
    if looks_of(linear) != looks:
        raise RuntimeError("the function changes linear. It must leave linear as it is")
    if not isinstance(layer, nn.Module):
        raise TypeError(f"your function returns {type(layer).__name__}, expected an nn.Module")
    refs = [weakref.ref(param) for param in linear.parameters()]
    del linear
    x = inputs["x"].clone().requires_grad_()
    # x is also used directly, because a model has a residual connection around such layers.
    # Before the backward, there is a second forward, of different rows that need no gradient.
    y, later, beside = layer(x), layer(2 * inputs["x"]), (x * inputs["dx"]).sum()
    weight, bias = parameter_of(layer, "weight"), parameter_of(layer, "bias")
    results = {"output": y.detach(), "later output": later.detach()}
    results |= {"weight": weight.detach(), "bias": None if bias is None else bias.detach()}
    if y.shape == inputs["dy"].shape:
        for param in (weight, bias) if inputs["before"] else ():
            if param is not None and param.requires_grad:
                param.grad = torch.ones_like(param)
        torch.autograd.backward([y, beside], [inputs["dy"], torch.ones_like(beside)])
        results |= {"gradient of x": x.grad, "gradient of weight": weight.grad}
        results |= {"gradient of bias": None if bias is None else bias.grad}
    gc.collect()  # a reference cycle that is no longer in use may hold the layer
    results["the module still holds the whole layer"] = any(ref() is not None for ref in refs)
    count = sum(param.numel() for param in layer.parameters())
    results["numbers in the module's parameters"] = count
    extra_label = "numbers that the module keeps in memory in addition to its parameters"
    return {**results, extra_label: numbers_beside(layer, inputs)}


def parameter_of(layer: nn.Module, name: str) -> Any:
    if not hasattr(layer, name):
        raise AttributeError(
            f"the module has no attribute {name}. Set this attribute, to None if there is no {name}"
        )
    return getattr(layer, name)


def looks_of(linear: nn.Linear) -> Any:
    shapes = [param.shape for param in linear.parameters()]
    return aspects(linear), shapes, linear.in_features, linear.out_features


def numbers_beside(layer: nn.Module, inputs: Any) -> int:
    """Return how many numbers the module's tensors keep in memory in addition to its own parts.

    Memory that is shared with the input is reported elsewhere; single numbers do not count.
    """
    memory = {}
    for tensor in held_by(layer):
        storage = tensor.untyped_storage()
        memory[storage.data_ptr()] = storage.nbytes() // tensor.itemsize
    for tensor in tensors_in(inputs):
        memory.pop(tensor.untyped_storage().data_ptr(), None)
    parts = {
        id(tensor): tensor.numel()
        for tensor in (layer.weight, layer.bias, *layer.parameters())
        if isinstance(tensor, Tensor)
    }
    return max(0, sum(size for size in memory.values() if size > 1) - sum(parts.values()))


def many_biases(inputs: Sequence[Any], me: int, expected: Sequence[Any]) -> Any:
    extra = 0 if inputs[me]["bias"] is None else (len(inputs) - 1) * inputs[me]["bias"]
    return {name: expected[me][name] + extra for name in ("output", "later output")}


def share_of_a_bias(inputs: Sequence[Any], me: int, expected: Sequence[Any]) -> Any:
    right, before = expected[me]["gradient of bias"], float(inputs[me]["before"])
    return None if right is None else {"gradient of bias": before + (right - before) / len(inputs)}


COLUMN_MISTAKES = {
    "this rank's term alone: dX is the sum over the ranks of dY_r A_r": (
        lambda inputs, me, expected: {
            "gradient of x": inputs[me]["dy"] @ expected[me]["weight"] + inputs[me]["dx"]
        }
    ),
    "a sum that also contains the gradient from other uses of x, which every rank has in full: sum "
    "only the gradient that comes back through your layer": lambda inputs, me, expected: {
        "gradient of x": expected[me]["gradient of x"] + (len(inputs) - 1) * inputs[me]["dx"]
    },
}
ROW_MISTAKES = {
    "the output with the bias added once by each rank: add it after the sum": many_biases,
    "K times the right gradient: do not sum dY in backward, since it is equal on all ranks": (
        lambda inputs, me, expected: {
            "gradient of x": len(inputs) * (expected[me]["gradient of x"] - inputs[me]["dx"])
            + inputs[me]["dx"]
        }
    ),
    "a K-th of the bias's gradient: add the whole bias after the sum, not a K-th of it before": (
        share_of_a_bias
    ),
}

# Task 3: a sharded optimizer ----------------------------------------------------------------------

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any], int]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}, 1),
    "AdamW": (torch.optim.AdamW, {"lr": 0.1}, 2),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01}, 1),
    "SGD without momentum": (torch.optim.SGD, {"lr": 0.5}, 0),
}
"""Name → class, options, and how many numbers of state it keeps for each number that it updates."""
COUNTS = ("updates", "state")
FEW, EQUAL = "fewer numbers than ranks", "two equal parameters"
FROZEN, TIED, LARGE = "a frozen parameter", "tied parameters", "large gradients"
LACKS = "rank {} lacks gradients in step 1"
NOBODY = "nobody has a gradient of parameter 0 in step 1"
HALVED = "the learning rate is halved after each step"


def draw_training(d: Draw) -> list[Any]:
    """Draw equal weights for every group, and gradients of some steps for every rank."""
    optimizer = d.one_of(*OPTIMIZERS)
    d.say(optimizer)
    odd = d.unusual(FEW, EQUAL, FROZEN, TIED, LARGE, LACKS, NOBODY, HALVED, ZEROS, OVERFLOW)
    shapes = d.one_of([(3, 2), (5,), ()], [(4, 3), (0,), (3,)], [(2, 3), (), (6,)], [(7, 2), (2,)])
    if FEW in odd:
        shapes = d.one_of([(2,), ()], [(), (1,)])
    if EQUAL in odd:
        shapes = [*shapes[:1], *shapes]
    places = range(len(shapes))
    unused = d.one_of((0,), places, places)
    plan = {
        "optimizer": optimizer,
        "frozen": [d.one_of(*places[1:])] if FROZEN in odd else [],
        "tied": [d.one_of(*places), 0] if TIED in odd else [],
        "before": d.one_of(True, False),
        "halved": HALVED in odd,
    }
    size, steps = 300.0 if LARGE in odd else 1.0, d.one_of(2, 3, 4)

    def gradients_of(rank: int, step: int) -> list[Tensor | None]:
        factor = size * (rank != odd.get(ZEROS))
        drawn: list[Tensor | None] = [factor * d.randn(*shape) for shape in shapes]
        if (rank, step) == (odd.get(OVERFLOW), 0):
            drawn[0] = d.not_finite(factor * d.randn(*shapes[0]))
        absent = {*plan["frozen"]}
        if step == 1 and rank == odd.get(LACKS):
            absent |= {*unused}
        if step == 1 and NOBODY in odd:
            absent |= {0}
        return [None if i in absent else gradient for i, gradient in enumerate(drawn)]

    inputs: list[Any] = [None] * d.world_size
    for members in d.groups:
        weights = [d.randn(*shape) for shape in shapes]
        if EQUAL in odd:
            weights[1] = weights[0].clone()
        for rank in members:
            gradients = [gradients_of(rank, step) for step in range(steps)]
            inputs[rank] = {**plan, "weights": weights, "gradients": gradients}
            inputs[rank]["ranks"] = len(members)
    return inputs


def run_training(sharded_optimizer: Callable[..., Any], inputs: Any, case: Given) -> Any:
    """Take the case's steps; return the weights, and the counts of updated and kept numbers."""
    params = [
        nn.Parameter(weight.clone(), requires_grad=i not in inputs["frozen"])
        for i, weight in enumerate(inputs["weights"])
    ]
    cls, options, _ = OPTIMIZERS[inputs["optimizer"]]
    for param in params if inputs["before"] else ():
        param.grad = torch.ones_like(param)  # an old gradient, which the steps must not use
    optimizers: list[Any] = []

    def make_optimizer(tensors: Any) -> Any:
        optimizers.append(cls(tensors, **options))
        return optimizers[-1]

    def make_another() -> list[nn.Parameter]:
        """Make a model with the same shapes, which is not trained meanwhile."""
        model = [nn.Parameter(torch.ones_like(weight)) for weight in inputs["weights"]]
        sharded_optimizer(model, lambda tensors: cls(tensors, **options), group=case.group)
        return model

    case.watch.add_parameters("the parameters", params, values=False)
    untrained = make_another()
    all_params = case.iterable([*params, *(params[i] for i in inputs["tied"])])
    step = sharded_optimizer(all_params, make_optimizer, group=case.group)
    untrained += make_another()
    expect_function(step, "what your function returns")
    case.watch.add_memory(params)  # a function that moves parameters in memory has done so by now
    weights = []
    for gradients in inputs["gradients"]:
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = None if gradient is None else gradient.clone()
        step()
        weights.append([param.detach().clone() for param in params])
        for optimizer in optimizers if inputs.get("forgets") else ():  # only for a mistake's value
            optimizer.state.clear()
        for optimizer in optimizers if inputs["halved"] else ():
            for group in optimizer.param_groups:
                group["lr"] /= 2
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    updated = [tensor for group in groups for tensor in group["params"]]
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    numbers = [number for state in states for number in state.values()]
    return {
        "after step {}, parameter {}": weights,
        "parameter {} of models that are not trained": [param.detach() for param in untrained],
        "updates": sum(tensor.numel() for tensor in updated),
        "state": sum(v.numel() for v in numbers if isinstance(v, Tensor) and v.dim()),
    }


def its_share(case: Case, observed: Observed, trace: Trace) -> None:
    """Expect the optimizer to update and keep at most a K-th of the numbers, rounded up."""
    for rank, (output, shown) in enumerate(zip(observed.outputs, observed.inputs, strict=True)):
        member = shown["own"]
        sizes = [weight.numel() for weight in member["weights"]]
        total = sum(size for i, size in enumerate(sizes) if i not in member["frozen"])
        share = ceil(total / member["ranks"])
        state_share = OPTIMIZERS[member["optimizer"]][2] * share
        updated, state = (output["value"][name] for name in COUNTS)
        if updated > share or state > state_share:
            raise Wrong(
                f"rank {rank}'s optimizer updates {updated} numbers and keeps {state} numbers of "
                f"state, expected at most {share} and {state_share}",
                f"There are n = {total} numbers to train. A rank may update ⌈n/K⌉ of them, and "
                "keep state for these only."
                + (" A tied parameter counts once." if member["tied"] else ""),
            )


def with_counts_apart(check: Check) -> Check:
    """Return the check with a judge that does not see the counts: `its_share` judges them."""

    def judge(case: Case, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        shown = []
        for output, right in zip(outputs, check.prepare(case, inputs).values, strict=True):
            match output:
                case {"value": {"updates": int(), "state": int(), **rest}, **report}:
                    counts = {name: right[name] for name in COUNTS}
                    output = {**report, "value": {**rest, **counts}}
            shown.append(output)
        check.judge(case, inputs, shown)

    limits, memory = check.expects
    return replace(check, judge=judge, expects=(memory, limits))


def with_sums(member: Any) -> Any:
    """Multiply the gradients by the number of ranks, so that their mean is the sum."""
    gradients = with_tensors(member["gradients"], lambda gradient: member["ranks"] * gradient)
    return {**member, "gradients": gradients}


# Task 4: a pipeline schedule, executed on ranks ---------------------------------------------------


def draw_pipeline(d: Draw) -> list[Any]:
    """Draw a bubble, two rows for each micro-batch that it asks for, and a stage for each rank."""
    p, late = d.world_size, d.world_size - 1
    m = 1 if p == 1 else d.one_of(1, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12)
    quotient = late / (m + late)
    below = late / (m - 1 + late) if p > 1 else 1.0  # so large a bubble asks for m - 1
    between = round(0.5 * (quotient + below), 3)
    largest = 1.0 if m == 1 else between
    bubble = d.one_of(quotient, between, largest)
    label = f"{late}/{m + late}" if bubble == quotient else bubble
    d.say(f"bubble {label}")
    x = d.randn(m, 2, 3)
    return [{"bubble": bubble, "x": x, "weight": d.randn(3, 3)} for _ in d.ranks]


def run_pipeline(schedule: Callable[..., Any], inputs: Any, case: Given) -> Any:
    """Call ``schedule(world_size, bubble)``, and execute it if every rank's steps are valid.

    A stage is a matrix and a tanh, and takes `FORWARD` and `BACKWARD` seconds. Sends do not wait,
    but a rank waits for the data that it needs. So a schedule that cannot continue is a deadlock.
    """
    rank, p = dist.get_rank(), dist.get_world_size()
    answer = schedule(p, inputs["bubble"])
    steps, weight = as_steps(answer), nn.Parameter(inputs["weight"].clone())
    weight.grad = torch.zeros_like(weight)
    m = len(inputs["x"])
    if len(steps) == p and not any(wrong_steps(of_rank, m) for of_rank in steps):
        run_stage(steps[rank], weight, inputs["x"], rank, p)
    else:  # its time passes, so that a wrong schedule is not reported as a missing computation
        for seconds in (FORWARD, BACKWARD) * m:
            compute(seconds)
    return {"schedule": steps, STAGE: weight.grad}


def run_stage(steps: Any, weight: nn.Parameter, inputs: Tensor, rank: int, p: int) -> None:
    held: dict[int, tuple[Tensor, Tensor]] = {}
    sent = []
    for action, m in steps:
        forward = action == "F"
        source, to = (rank - 1, rank + 1) if forward else (rank + 1, rank - 1)
        message = inputs[m].clone(memory_format=torch.contiguous_format)
        if 0 <= source < p:
            dist.recv(message, source, tag=2 * m + forward)
        compute(FORWARD if forward else BACKWARD)
        if forward:
            held[m] = message.requires_grad_(), torch.tanh(message @ weight)
            result = held[m][1].detach()
        else:
            x, y = held.pop(m)
            y.backward(message if rank < p - 1 else 2 * y.detach() / len(inputs))
            assert x.grad is not None
            result = x.grad
        if 0 <= to < p:
            result = result.contiguous()
            sent.append((dist.isend(result, to, tag=2 * m + forward), result))
    for work, _ in sent:
        if work is not None:
            work.wait()


def for_time(check: Check) -> Check:
    """Return the check with its limits on communication as the part “time” of the points."""
    limits, *further = check.expects
    return replace(check, expects=(replace(limits, part="time"), *further))


# The checks ---------------------------------------------------------------------------------------


def drawn_weights(generator: torch.Generator) -> tuple[Case, list[Any]]:
    """Draw a case of task 3 for one student: ranks, parameters and a network."""
    k, layers, steps = one_of(generator, 2, 3, 4), one_of(generator, 3, 4, 5), 3
    sizes = [one_of(generator, *range(40, 300)) for _ in range(layers)]
    frozen = one_of(generator, *range(layers))
    network, sentence = drawn_network(generator)
    name = (
        f"{k} ranks, three steps. Parameters 0 to {layers - 1} have "
        f"{', '.join(map(str, sizes))} numbers of 4 bytes. Parameter {frozen} is frozen.\n"
        f"{sentence}; reduce_scatter and all_gather are rings."
    )

    def draw() -> list[Tensor]:
        return [torch.randn(size, generator=generator) for size in sizes]

    plan = {"optimizer": "SGD", "frozen": [frozen], "tied": [], "ranks": k, "weights": draw()}
    plan |= {"before": False, "halved": False}
    inputs = []
    for _ in range(k):
        drawn = [draw() for _ in range(steps)]
        gradients = [[None if i == frozen else g for i, g in enumerate(row)] for row in drawn]
        inputs.append({**plan, "gradients": gradients})
    return Case(name, k, network=network), inputs


LAYERS = Variety(dtypes=("float32", "float64", "bfloat16"))

CHECKS = {
    "column_parallel": by_reference(
        "column_parallel",
        seeds=(0, 2, 3, 8, 9, 11, 12, 22, 28, 31, 39),
        reference="course_lib.tensor_parallel:column_parallel",
        program=run_layer,
        draw=draw_layer("dy"),
        variety=LAYERS,
        mistakes=COLUMN_MISTAKES,
        allowed=Allowed(
            hint="Send nothing in forward. In backward, sum the gradient of x once, and send "
            "nothing else."
        ),
        worth={"values": 3, "communication": 1},
    ),
    "row_parallel": by_reference(
        "row_parallel",
        seeds=(0, 2, 3, 8, 9, 11, 12, 22, 28, 31, 39),
        reference="course_lib.tensor_parallel:row_parallel",
        program=run_layer,
        draw=draw_layer("x", "dx"),
        variety=LAYERS,
        mistakes=ROW_MISTAKES,
        allowed=Allowed(
            hint="Sum the output once in each of the two forwards, and send nothing in backward."
        ),
        worth={"values": 3, "communication": 1},
    ),
    "sharded_optimizer": with_counts_apart(
        by_reference(
            "sharded_optimizer",
            seeds=(2, 3, 8, 9, 11, 28, 30, 31, 34, 44, 46, 51, 57),
            reference="course_lib.sharded_optimizer:sharded_optimizer",
            program=run_training,
            draw=draw_training,
            variety=Variety(dtypes=("float32", "float64")),
            as_if={
                "the weights of a step with the sum over the ranks, not the mean": lambda inputs: [
                    with_sums(member) for member in inputs
                ],
                "the weights if every step makes a new optimizer: make it once, so that it keeps "
                "its state": lambda inputs: [
                    {**member, "forgets": True, "halved": False} for member in inputs
                ],
            },
            same_bits=True,
            allowed=Allowed(
                hint="In each step, call one reduce-scatter for all gradients, and one all-gather "
                "for the weights. Pad with fewer than K numbers, and do not send frozen parameters."
            ),
            expects=[Expectation(its_share, part="memory")],
            worth={"values": 3, "memory": 2, "communication": 1},
        )
    ),
    "pipeline_schedule": for_time(
        by_reference(
            "pipeline_schedule",
            seeds=(2, 22, 26, 28, 30, 34, 42, 55),
            reference="course_lib.pipeline_parallel:pipeline_schedule",
            program=run_pipeline,
            draw=draw_pipeline,
            variety=Variety((2, 2, 3, 3, 4, 4, 5, 6, 1), ("float32",), (), groups=False),
            judge=whole_schedule,
            allowed=Allowed(
                time=1.01,
                hint="Let each rank but the last do enough forwards before its first backward.",
            ),
            network=Network(latency=1e-6, bandwidth=10e9),  # a message takes almost no time
            expects=[FEW_ACTIVATIONS, *AS_SCHEDULED],
            worth={"values": 2, "memory": 1, "time": 1},
        )
    ),
    "defend_sharded_optimizer": defence("sharded_optimizer", drawn_weights),
}
