"""Layers and optimizers that ranks share, and pipeline schedules: inputs, programs, judges."""

from __future__ import annotations

import gc
import math
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.checking import Case, Expectation, Given, Observed, Wrong, equals, same_on_all_ranks
from course_lib.checking.answers import ANYTHING, WHOLE, Judge, Kind, ListOf, describe, sees
from course_lib.checking.expectations import computes_between, time_within
from course_lib.checking.judges import Oracle
from course_lib.checking.on_ranks.effects import aspects
from course_lib.checking.on_ranks.held import held_by
from course_lib.checking.on_ranks.leaves import tensors_in
from course_lib.checking.shared.memory import KEPT, OWN_MEMORY, addresses, memory_of
from course_lib.checking.task import Inputs
from course_lib.ranks import Network, Trace, compute
from course_lib.ranks.explain.words import counted

# A linear layer that several ranks share ----------------------------------------------------------

# The ranks share the layer's outputs (column parallel) or its inputs (row parallel): each rank has
# its part by ``tensor_split``. Every tensor that is not shared is equal on all ranks.

Side = Literal["out", "in"]
"""The side of a layer that the ranks share."""
Mistake = Literal["", "own term", "residual", "K biases", "K times", "bias/K"]
_PARTS = {"out": ("dy",), "in": ("x", "dx")}
_NUMBERS = "numbers in the module's parameters"
_BESIDE = "numbers that the module keeps in memory in addition to its parameters"
_HELD = "the module still holds the whole layer"


MOST = {"bfloat16": (3, 1.0), "float32": (511, 1.0), "float64": (3 * 2**23, 2.0**-14)}
"""Largest number of units in a layer's numbers, and the unit, by dtype. bfloat16 rounds numbers
above 256 units, float16 numbers above 2048, float32 numbers above 2²⁴."""


def layer_inputs(cut: Side) -> Inputs:
    """Return the function that draws a layer, its input x and dY for each group.

    A case has the sizes ``out`` and ``in``, ``rows`` (the shape of x before its last dimension) and
    ``bias`` (whether there is one). It may have ``before``, which fills the gradients of weight and
    bias with ones before backward, and ``zeros``, a member whose part of dY, or of x, is zero.
    ``dx`` is the gradient of x that comes from elsewhere. All numbers are whole multiples of a
    unit. Their dtype rounds hardly any sum of products, but a smaller dtype rounds the numbers
    themselves.
    """

    def inputs(case: Case, generator: torch.Generator) -> list[dict[str, Any]]:
        p, found = case.parameters, list[dict[str, Any]]([{}] * case.world_size)
        most, unit = MOST[case.form.dtype]

        def draw(*shape: int) -> Tensor:
            return torch.randint(-most, most + 1, shape, generator=generator).double() * unit

        for members in case.groups:
            bias = draw(p["out"])
            whole = {name: draw(*p["rows"], p["in"]) for name in ("x", "dx")}
            whole |= {"dy": draw(*p["rows"], p["out"]), "weight": draw(p["out"], p["in"])}
            parts = {name: whole[name].tensor_split(len(members), -1) for name in _PARTS[cut]}
            for me, rank in enumerate(members):
                own = {name: part[me].clone() for name, part in parts.items()}
                if me == p.get("zeros"):
                    own[_PARTS[cut][0]].zero_()
                found[rank] = {**whole, **own, "bias": bias if p["bias"] else None}
                found[rank]["training"] = case.form.training
                found[rank]["before"] = p.get("before", False)
        return found

    return inputs


def layer_program(make_layer: Callable[..., Any], mine: Any, given: Given) -> Any:
    """Call ``make_layer(linear, group=group)``, then forward and backward of the result."""
    linear = nn.Linear(1, 1, device="meta")
    linear.out_features, linear.in_features = mine["weight"].shape
    linear.weight = nn.Parameter(mine["weight"])
    linear.register_parameter("bias", None if mine["bias"] is None else nn.Parameter(mine["bias"]))
    linear.train(mine["training"])
    before = _looks(linear)
    layer = make_layer(linear, group=given.group)
    if _looks(linear) != before:
        raise RuntimeError("the function changes linear. It must leave linear as it is")
    whole = weakref.ref(linear.weight)
    if not isinstance(layer, nn.Module):
        raise TypeError(f"your function returns {type(layer).__name__}, expected an nn.Module")
    del linear
    x = mine["x"].clone().requires_grad_()
    # x is also used directly, because a model has a residual connection around such layers.
    # Before the backward, there is a second forward, of different rows that need no gradient.
    y, later, beside = layer(x), layer(2 * mine["x"]), (x * mine["dx"]).sum()
    weight, bias = _parameter(layer, "weight"), _parameter(layer, "bias")
    found = {"output": y.detach(), "later output": later.detach(), "weight": weight.detach()}
    found |= {"bias": None if bias is None else bias.detach()}
    found[_NUMBERS] = sum(param.numel() for param in layer.parameters())
    if y.shape == mine["dy"].shape:
        for param in (weight, bias) if mine["before"] else ():
            if param is not None and param.requires_grad:
                param.grad = torch.ones_like(param)
        torch.autograd.backward([y, beside], [mine["dy"], torch.ones_like(beside)])
        found |= {"gradient of x": x.grad, "gradient of weight": weight.grad}
        found |= {"gradient of bias": None if bias is None else bias.grad}
    if whole() is not None:
        gc.collect()  # a reference cycle that is no longer in use may hold it
    return {**found, _HELD: whole() is not None, _BESIDE: float(_beside(layer, mine))}


def _parameter(layer: nn.Module, name: str) -> Any:
    if not hasattr(layer, name):
        raise AttributeError(
            f"the module has no attribute {name}. Set this attribute, to None if there is no {name}"
        )
    return getattr(layer, name)


def _looks(linear: nn.Linear) -> Any:
    shapes = [param.shape for param in linear.parameters()]
    return aspects(linear), shapes, linear.in_features, linear.out_features


def _beside(layer: nn.Module, mine: Any) -> int:
    """Return how many numbers the module's tensors keep in memory in addition to its own parts.

    Memory that is shared with `mine` is reported elsewhere; single numbers do not count.
    """
    memory = {}
    for tensor in held_by(layer):
        storage = tensor.untyped_storage()
        memory[storage.data_ptr()] = storage.nbytes() // tensor.itemsize
    for tensor in tensors_in(mine):
        memory.pop(tensor.untyped_storage().data_ptr(), None)
    parts = {
        id(each): each.numel()
        for each in (layer.weight, layer.bias, *layer.parameters())
        if isinstance(each, Tensor)
    }
    return max(0, sum(each for each in memory.values() if each > 1) - sum(parts.values()))


def layer_values(cut: Side, mistake: Mistake = "") -> Oracle:
    """Return the oracle: the result of one process, or of a well-known mistake."""
    side = {"out": 0, "in": 1}[cut]

    def oracle(case: Case, inputs: Sequence[Any], me: int) -> Any:
        k, own = len(inputs), inputs[me]

        def whole(name: str) -> Tensor:
            parts = [each[name] for each in inputs] if name in _PARTS[cut] else [own[name]]
            return torch.cat(parts, -1).double()

        x, dx, dy, weight = whole("x"), whole("dx"), whole("dy"), own["weight"].double()
        bias = torch.zeros(len(weight)) if own["bias"] is None else own["bias"].double()
        part, times = weight.tensor_split(k, side)[me], k if mistake == "K times" else 1
        back = times * (dy @ weight) + (k if mistake == "residual" else 1) * dx
        if mistake == "own term":
            back = dy.tensor_split(k, -1)[me] @ part + dx
        found = {
            "output": x @ weight.t() + (k if mistake == "K biases" else 1) * bias,
            "later output": 2 * x @ weight.t() + (k if mistake == "K biases" else 1) * bias,
            "weight": part,
            "bias": bias,
            "gradient of x": back if cut == "out" else back.tensor_split(k, -1)[me],
            "gradient of weight": times * _gradient(dy, x).tensor_split(k, side)[me],
            "gradient of bias": dy.reshape(-1, dy.shape[-1]).sum(0)
            / (k if mistake == "bias/K" else 1),
        }
        for name in ("output", "later output", "bias", "gradient of bias") if cut == "out" else ():
            found[name] = found[name].tensor_split(k, -1)[me]
        if own["before"]:
            for name in ("gradient of weight", "gradient of bias"):
                found[name] = found[name] + 1
        right: dict[str, Any] = {
            name: value.to(own["weight"].dtype) for name, value in found.items()
        }
        none = dict.fromkeys(("bias", "gradient of bias") if own["bias"] is None else ())
        counted = ("weight",) if own["bias"] is None else ("weight", "bias")
        numbers = sum(right[name].numel() for name in counted)
        right |= {**none, _HELD: False, _NUMBERS: numbers, _BESIDE: 0.0}
        return right

    return oracle


def _gradient(dy: Tensor, x: Tensor) -> Tensor:
    return dy.reshape(-1, dy.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


def layer_bytes(case: Case, side: Side) -> int:
    """Return the number of bytes of a whole input, or of a whole output."""
    return int(case.itemsize * prod(case.parameters["rows"]) * case.parameters[side])


# An optimizer that several ranks share ------------------------------------------------------------

# Each rank has its own gradients, some of them ``None``. It makes the optimizer of its part with a
# function that it gets as an argument. So this function can count the numbers that an optimizer
# keeps and updates.

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any], int]] = {
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}, 1),
    "adamw": (torch.optim.AdamW, {"lr": 0.1}, 2),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01}, 1),
    "sgd": (torch.optim.SGD, {"lr": 0.5}, 0),
}
"""Name → class, options, and how many numbers of state it keeps for each number that it updates."""


def optimizer_inputs(case: Case, generator: torch.Generator) -> list[dict[str, Any]]:
    """Draw equal weights for each group, and gradients for each rank and step.

    A case has ``shapes``, ``steps`` and the name of the ``optimizer``. It may have:

    - positions of parameters that are ``frozen``, that are listed ``again`` because they are tied,
      or that are ``alike``: they have the same shape and the same numbers
    - ``unused``: positions of parameters that the group's last rank does not use in the first step,
      its first rank in the second, and so on
    - ``nobody``: positions of parameters that no rank uses in the second step
    - ``before``: whether ``.grad`` has values at the start
    - ``zeros``: a member of the group whose gradients are all zero
    - ``size``: a factor of all gradients
    - ``halved``: whether the learning rate is halved after each step
    """
    p = case.parameters

    def draw() -> list[Tensor]:
        return [torch.randn(s, generator=generator, dtype=torch.double) for s in p["shapes"]]

    found, frozen = [dict[str, Any]()] * case.world_size, p.get("frozen", ())
    for members in case.groups:
        weights = draw()
        for i in p.get("alike", ()):
            weights[i] = weights[p["alike"][0]].clone()
        for me, rank in enumerate(members):
            grads = []
            for step in range(p["steps"]):
                unused = me == (0 if step % 2 else len(members) - 1)
                missing = {*frozen, *(p.get("unused", ()) if unused else ())}
                missing |= set(p.get("nobody", ()) if step == 1 else ())
                size = 0 if me == p.get("zeros") else p.get("size", 1)
                grads.append([None if i in missing else size * g for i, g in enumerate(draw())])
            mine = {"weights": weights, "gradients": grads, "frozen": frozen}
            mine["halved"] = p.get("halved", False)
            mine |= {"again": p.get("again", ()), "before": p.get("before", False)}
            found[rank] = {**mine, "optimizer": p["optimizer"]}
    return found


def optimizer_program(sharded_optimizer: Callable[..., Any], mine: Any, given: Given) -> Any:
    """Take the case's steps; return the weights, and the counts of updated and kept numbers."""
    params = [
        nn.Parameter(w.clone(), requires_grad=i not in mine["frozen"])
        for i, w in enumerate(mine["weights"])
    ]
    cls, options, _ = OPTIMIZERS[mine["optimizer"]]
    for param in params if mine["before"] else ():
        param.grad = torch.ones_like(param)  # an old gradient, which the steps must not use
    made: list[Any] = []

    def make_optimizer(tensors: Any) -> Any:
        made.append(cls(tensors, **options))
        return made[-1]

    make_optimizer.__qualname__ = mine["optimizer"]
    # Two other models, one made before and one after it, which are not trained meanwhile.
    others = [[nn.Parameter(torch.ones(size))] for size in (5, 6)]
    sharded_optimizer(others[0], lambda tensors: cls(tensors, **options), group=given.group)
    tied = given.iterable([*params, *(params[i] for i in mine["again"])])
    step = sharded_optimizer(tied, make_optimizer, group=given.group)
    sharded_optimizer(others[1], lambda tensors: cls(tensors, **options), group=given.group)
    if not callable(step):
        raise TypeError(f"your function returns {type(step).__name__}, expected a function step()")
    memory = addresses(params)  # a function that moves parameters in memory has done so by now
    for grads in mine["gradients"]:
        for param, grad in zip(params, grads, strict=True):
            param.grad = None if grad is None else grad.clone()
        step()
        if any(param.requires_grad == (i in mine["frozen"]) for i, param in enumerate(params)):
            raise RuntimeError("step() changes requires_grad of a parameter: leave it as it is")
        for group in (group for each in made if mine["halved"] for group in each.param_groups):
            group["lr"] /= 2
    updated = [t for each in made for group in each.param_groups for t in group["params"]]
    state = [v for each in made for per in each.state.values() for v in per.values()]
    return {
        "parameter {}": [param.detach().clone() for param in params],
        OWN_MEMORY: memory_of(params, memory),
        "updates": sum(t.numel() for t in updated),
        "state": sum(v.numel() for v in state if isinstance(v, Tensor) and v.dim()),
    }


def _one_process(
    scale: Callable[[int], float] = lambda k: 1 / k,
    mine: bool = False,
    anew: bool = False,
) -> Oracle:
    """Return the oracle: the sum of K gradients times `scale(K)` in one optimizer, or a mistake.

    `mine`: only this rank's gradients. `anew`: a new optimizer for each step.
    """

    def oracle(case: Case, inputs: Sequence[Any], me: int) -> dict[str, Any]:
        cls, options, _ = OPTIMIZERS[case.parameters["optimizer"]]
        params = [nn.Parameter(w.double().clone()) for w in inputs[0]["weights"]]
        trained = [p for i, p in enumerate(params) if i not in inputs[0]["frozen"]]
        optimizer = cls(trained, **options)
        for step in range(case.parameters["steps"]):
            of_ranks = [each["gradients"][step] for each in ([inputs[me]] if mine else inputs)]
            for i, param in enumerate(params):
                terms = [each[i] for each in of_ranks]
                grads = [torch.zeros_like(param) if g is None else g.double() for g in terms]
                param.grad = torch.stack(grads).sum(0) * scale(len(inputs))
            optimizer = cls(trained, **options) if anew else optimizer
            optimizer.step()
            for group in optimizer.param_groups if inputs[0]["halved"] else ():
                group["lr"] /= 2
        dtype = inputs[0]["weights"][0].dtype
        ended = [param.detach().to(dtype) for param in params]
        return {"parameter {}": ended, OWN_MEMORY: KEPT}

    return oracle


def _without_counts(inner: Judge) -> Judge:
    form = {"parameter {}": ListOf(ANYTHING), OWN_MEMORY: ANYTHING}

    @sees({**form, "updates": WHOLE, "state": WHOLE})
    def judge(case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> None:
        inner(case, inputs, [{key: value[key] for key in form} for value in values])

    return judge


equals_one_optimizer = _without_counts(
    equals(
        _one_process(),
        {
            "the weights of a step with the sum over the ranks, not the mean": _one_process(
                lambda k: 1
            ),
            "the weights of a step with this rank's own gradients": _one_process(
                lambda k: 1, mine=True
            ),
            "the weights if every step makes a new optimizer: make it once, so that it keeps its "
            "state": _one_process(anew=True),
        },
    )
)
"""Compare the weights after the steps with those of one process."""

same_weights_on_all_ranks = _without_counts(same_on_all_ranks)


# A pipeline schedule: executed on ranks, and judged as data ---------------------------------------

# A schedule is a list of steps for each rank. A step is ``("F", 3)`` or ``("B", 3)``: forward or
# backward of micro-batch 3. A stage is a matrix and a tanh, and takes `FORWARD` and `BACKWARD`
# seconds. Sends do not wait, but a rank waits for the data that it needs. So a schedule that cannot
# continue is a deadlock, and is explained like one.

FORWARD, BACKWARD = 1e-3, 2e-3
NEAR = Network(latency=1e-6, bandwidth=10e9)
"""A network whose messages take almost no time compared with a step."""
STAGE = "gradient of this rank's stage"

Steps = list[list[Any]]


def fewest(world_size: int, bubble: float) -> int:
    """Return the smallest number m of micro-batches with (p-1) / (m + p-1) <= bubble."""
    late = world_size - 1
    return next(m for m in range(1, 10_000) if late / (m + late) <= bubble)


def pipeline_inputs(case: Case, generator: torch.Generator) -> list[dict[str, Any]]:
    """Draw two rows for each micro-batch, and a stage for each rank; the case has ``bubble``."""
    bubble, p = case.parameters["bubble"], case.world_size
    x = torch.randn(fewest(p, bubble), 2, 3, generator=generator)
    weights = torch.randn(p, 3, 3, generator=generator)
    return [{"bubble": bubble, "x": x, "weight": weights[rank]} for rank in range(p)]


def pipeline_program(schedule: Callable[..., Any], mine: Any, given: Given) -> Any:
    """Call ``schedule(world_size, bubble)``, and execute it if every rank's steps are valid."""
    rank, p, x = dist.get_rank(), dist.get_world_size(), mine["x"]
    made = schedule(p, mine["bubble"])
    steps = _as_steps(made)
    weight = nn.Parameter(mine["weight"].clone())
    if steps is None:
        return {"schedule": describe(made), STAGE: None}
    if len(steps) == p and not any(_wrong_steps(each, len(x)) for each in steps):
        _run_stage(steps[rank], weight, x, rank, p)
    return {"schedule": steps, STAGE: weight.grad}


def pipeline_computes(own: Any) -> dict[float, int]:
    """Return the times that `pipeline_program` computes: each micro-batch forward and backward."""
    return {FORWARD: len(own["x"]), BACKWARD: len(own["x"])}


def _as_steps(made: Any) -> list[Steps] | None:
    if not _listed(made) or not all(_listed(steps) for steps in made):
        return None
    for step in (step for steps in made for step in steps):
        if not _listed(step) or len(step) != 2 or step[0] not in ("F", "B"):
            return None
        if type(step[1]) is not int and not isinstance(step[1], np.integer):
            return None
    return [[[action, int(number)] for action, number in steps] for steps in made]


def _listed(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _wrong_steps(steps: Steps, micro_batches: int) -> str:
    """Return what is wrong with one rank's steps on their own, or an empty string."""
    counts = Counter((action, m) for action, m in steps)
    for action in ("F", "B"):
        for m in range(micro_batches):
            if counts[action, m] != 1:
                return f'has the step ("{action}", {m}) {counts[action, m]} times, expected once'
    if more := [f'("{a}", {m})' for a, m in counts if not 0 <= m < micro_batches]:
        return f"has the step {more[0]}, but the last micro-batch is {micro_batches - 1}"
    for m in range(micro_batches):
        if steps.index(["B", m]) < steps.index(["F", m]):
            return f"does the backward of micro-batch {m} before its forward"
    return ""


def _run_stage(steps: Steps, weight: nn.Parameter, inputs: Tensor, rank: int, p: int) -> None:
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


def _is_schedule(value: Any) -> bool:
    return isinstance(value, str) or _as_steps(value) is not None


_SEEN = {"schedule": Kind("lists of steps", _is_schedule), STAGE: ANYTHING}


@sees(_SEEN)
def whole_schedule(case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> None:
    """Judge a schedule as data: its form, the number of micro-batches, every rank's steps."""
    p, bubble = case.world_size, case.parameters["bubble"]
    right = fewest(p, bubble)
    for rank, value in enumerate(values):
        made = value["schedule"]
        if not isinstance(made, list):
            raise Wrong(
                f"rank {rank}: the schedule is {made}, expected a list that holds a list of steps, "
                'such as ("F", 0), for each rank'
            )
        if len(made) != p:
            ranks = counted(len(made), "rank")
            raise Wrong(f"rank {rank}: the schedule has steps for {ranks}, expected {p}")
        if made != values[0]["schedule"]:
            raise Wrong(f"rank {rank} returns a different schedule than rank 0")
    for rank, steps in enumerate(values[0]["schedule"]):
        m = sum(action == "F" for action, _ in steps)
        if m != right:
            n = min(m, right)
            waits = f"waits {p - 1}/{n + p - 1} of the time" if n + p > 1 else "never waits"
            raise Wrong(
                f"rank {rank} has {m} micro-batch{'es' * (m != 1)}, expected {right}",
                f"With m = {n} a rank {waits}. The task allows at most {bubble} of the time, and "
                "asks for as few micro-batches as possible.",
            )
        if wrong := _wrong_steps(steps, right):
            raise Wrong(f"rank {rank} {wrong}")


def equals_one_process() -> Judge:
    """Compare the stages' gradients with one process's, of the mean over the micro-batches."""

    def oracle(case: Case, inputs: Sequence[Any], me: int) -> Any:
        weights = [each["weight"].double().clone().requires_grad_() for each in inputs]
        y = inputs[0]["x"].double()
        for weight in weights:
            y = torch.tanh(y @ weight)
        (y.square().sum() / len(y)).backward()
        return {STAGE: weights[me].grad.to(inputs[me]["weight"].dtype)}

    @sees(_SEEN)
    def judge(case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> None:
        equals(oracle)(case, inputs, [{STAGE: value[STAGE]} for value in values])

    return judge


def holds_few(case: Case, observed: Observed, trace: Trace) -> None:
    """Expect rank r to keep the activations of at most p - r micro-batches."""
    p, m = case.world_size, fewest(case.world_size, case.parameters["bubble"])
    for rank, steps in enumerate(observed.outputs[0]["value"]["schedule"]):
        held = peak = 0
        for action, _ in steps:
            held += 1 if action == "F" else -1
            peak = max(peak, held)
        if peak > min(p - rank, m):
            begin = [action for action, _ in steps].index("B")
            raise Wrong(
                f"rank {rank} holds the activations of {peak} micro-batches at once, expected at "
                f"most {min(p - rank, m)}",
                f"It does {begin} forwards before its first backward, but needs only "
                f"{min(p - rank, m)}."
                if begin > min(p - rank, m)
                else "From the first backward on, do a forward and a backward in turn.",
            )


FEW_ACTIVATIONS = Expectation(holds_few, part="memory")


def _computed_in_order(sends: bool) -> Callable[[Case, Observed, int], list[tuple[float, float]]]:
    """Return what a rank's schedule has computed when a message begins, and when one has come."""

    def bounds(case: Case, observed: Observed, rank: int) -> list[tuple[float, float]]:
        found, done = [], 0.0
        for action, _ in observed.outputs[rank]["value"]["schedule"][rank]:
            forward = action == "F"
            source, to = (rank - 1, rank + 1) if forward else (rank + 1, rank - 1)
            if not sends and 0 <= source < case.world_size:
                found.append((done, done))
            done += FORWARD if forward else BACKWARD
            if sends and 0 <= to < case.world_size:
                found.append((done, math.inf))
        return found

    return bounds


AS_SCHEDULED = [
    computes_between(_computed_in_order(sends=True), "send", part="time"),
    computes_between(_computed_in_order(sends=False), "recv", part="time"),
]


def least_time(case: Case, network: Network) -> float:
    """Return (m + p - 1)(F + B): the time if no rank waits longer than it must."""
    p = case.world_size
    return (fewest(p, case.parameters["bubble"]) + p - 1) * (FORWARD + BACKWARD)


IN_TIME = replace(
    time_within(
        least_time,
        rel=0.01,  # for the messages
        hint="Let each rank but the last do enough forwards before its first backward.",
    ),
    part="time",
)
