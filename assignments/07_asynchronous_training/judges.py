"""Asynchronous servers and workers, and DiLoCo: inputs, programs, judges.

The order of events is part of a case, and never the outcome of a race. So a check gives the same
verdict on every kind of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checking import Case, Given, equals
from course_lib.checking.judges import Oracle
from course_lib.checking.shared.memory import KEPT, OWN_MEMORY, addresses, memory_of
from course_lib.ranks import compute
from course_lib.ranks.explain.words import counted

# Servers and workers: scripts of events, and programs that follow them ----------------------------

Events = Sequence[Sequence[Any]]
"""Pairs of ``pull`` or ``push`` and a worker."""


def script(text: str) -> list[list[Any]]:
    """Return the events of ``"1 2 +1 2"``: with ``1`` worker 1 pulls, with ``+1`` it pushes."""
    return [["push" if word[0] == "+" else "pull", int(word)] for word in text.split()]


def ages(events: Events, before: int = 0) -> list[int]:
    """Return the number of pushes between each push and its worker's last pull."""
    pulled: dict[int, int] = {}
    found: list[int] = []
    for kind, worker in events:
        if kind == "pull":
            pulled[worker] = len(found)
        else:
            found.append(len(found) - pulled[worker] + before)
    return found


def _since_the_last_push(events: Events) -> list[int]:
    """Count from a worker's last push, wrongly: a worker that pulls late has newer weights."""
    last: dict[int, int] = {}
    found: list[int] = []
    for kind, worker in events:
        if kind == "push":
            found.append(len(found) - last.get(worker, 0))
            last[worker] = len(found)
    return found


def aged(of: Callable[[Events], list[int]]) -> Oracle:
    """Return the oracle of the staleness of each push."""
    return lambda case, inputs, me: {AGE: of(case.parameters["events"])}


AGE = "staleness of push {}"
equals_ages = equals(
    aged(ages),
    {
        "the right list plus 1: do not count a gradient's own push": aged(lambda e: ages(e, 1)),
        "the versions that were pulled, not their staleness": aged(
            lambda e: [n - age for n, age in enumerate(ages(e))]
        ),
        "the right list if each worker pulls right after its push: count from its last pull, which "
        "may come later": aged(_since_the_last_push),
    },
    explain=lambda *_: (
        "Staleness is the number of other updates between this worker's last pull and its push."
    ),
)


def _draw(shapes: Sequence[Sequence[int]], generator: torch.Generator) -> list[Tensor]:
    return [torch.randn(shape, generator=generator, dtype=torch.double) for shape in shapes]


def server_inputs(case: Case, generator: torch.Generator) -> list[dict[str, Any]]:
    """Draw ``params`` of the case's ``shapes``, and gradients for each push of its ``events``.

    Gradients may be larger by ``size``; those of the pushes ``zeros`` are zero.
    """
    own, shapes = dict(case.parameters), case.parameters["shapes"]
    draw = partial(_draw, shapes, generator)
    pushes, size = sum(kind == "push" for kind, _ in own["events"]), own.get("size", 1)
    gradients = [[size * each for each in draw()] for _ in range(pushes)]
    for push in own.get("zeros", ()):
        for gradient in gradients[push]:
            gradient.zero_()
    return [{**own, "params": draw(), "gradients": gradients}]


NONSENSE = 1e3
"""A number that a worker writes into its gradient after the push."""


def follow_script(
    make: Callable[[Any], Any], mine: Any, given: Given, answer: str
) -> dict[str, Any]:
    """Call ``(pull, push)`` as the events say; return their results, with `answer` for pushes.

    `make(params)` calls the student's function, which makes a server. Between two events, a second
    server from the same function serves the same workers, so the servers must not share anything.
    Each gradient is overwritten after its push, as its owner may do.
    """
    memory = addresses(mine["params"])
    pull, push = _server(make(given.iterable(mine["params"])))
    other_pull, other_push = _server(make([torch.zeros_like(param) for param in mine["params"]]))
    pulled, answers, left, after = [], [], list(mine["gradients"]), []
    for kind, worker in mine["events"]:
        other_pull(worker)
        other_push(worker, [torch.ones_like(param) for param in mine["params"]])
        if kind == "pull":
            pulled.append(pull(worker))
        else:
            gradients = left.pop(0)
            answers.append(push(worker, given.iterable(gradients)))
            after.append([gradient.clone() for gradient in gradients])
            for gradient in gradients:
                gradient.fill_(NONSENSE)
    for gradients, theirs in zip(mine["gradients"], after, strict=True):
        for gradient, value in zip(gradients, theirs, strict=True):
            gradient.copy_(value)  # as after the push, so that a change by the push shows
    return {
        answer: answers,
        "weights of pull {}, parameter {}": pulled,
        "weight {} of the server": [param.clone() for param in mine["params"]],
        OWN_MEMORY: memory_of(mine["params"], memory),
    }


def _server(made: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    if not isinstance(made, tuple) or len(made) != 2 or not all(map(callable, made)):
        raise TypeError(
            f"your function returns {type(made).__name__}, expected two functions (pull, push)"
        )
    return made


Rule = Callable[[list[Tensor], list[Tensor], int, dict[str, Any]], tuple[list[Tensor], Any, int]]
"""``rule(w, g, τ, state)`` → the next weights, the push's answer, and its number of updates."""


def served(answer: str, rule: Rule, live: bool = False) -> Oracle:
    """Return the oracle of a server that handles a gradient by `rule`.

    With `live`, the server returns the weights themselves, which later updates change.
    """

    def oracle(case: Case, inputs: Sequence[Any], me: int) -> dict[str, Any]:
        mine = inputs[0]
        dtype, version, state = mine["params"][0].dtype, 0, dict(mine)
        w, left = [p.double() for p in mine["params"]], list(mine["gradients"])
        versions: dict[int, int] = {}
        pulled, answers = [], []
        for kind, worker in mine["events"]:
            if kind == "pull":
                versions[worker] = version
                pulled.append([p.to(dtype) for p in w])
            else:
                g = [each.double() for each in left.pop(0)]
                w, said, made = rule(w, g, version - versions[worker], state)
                answers.append(said)
                version += made
        if live:
            pulled = [[p.to(dtype) for p in w] for _ in pulled]
        return {
            answer: answers,
            "weights of pull {}, parameter {}": pulled,
            "weight {} of the server": [p.to(dtype) for p in w],
            OWN_MEMORY: KEPT,
        }

    return oracle


def minus(w: list[Tensor], g: list[Tensor], factor: float) -> list[Tensor]:
    """Return w - factor · g."""
    return [a - factor * b for a, b in zip(w, g, strict=True)]


def order_of(seconds: dict[int, float], updates: int) -> list[int]:
    """Return the order of pushes if each worker takes these seconds, without any pause."""
    times = [(n * t, worker) for worker, t in seconds.items() for n in range(1, updates + 1)]
    return [worker for _, worker in sorted(times)][:updates]


def worker_inputs(case: Case, generator: torch.Generator) -> list[dict[str, Any]]:
    """Draw the data of server and workers; the server handles pushes in the case's ``order``."""
    own, shapes, made = case.parameters, case.parameters["shapes"], []
    draw = partial(_draw, shapes, generator)
    for rank in range(case.world_size):
        size = own["sizes"].get(rank, 1)  # zero targets give zero gradients
        targets = [[size * each for each in draw()] for _ in range(own["order"].count(rank))]
        options = {key: own[key] for key in ("order", "server", "lr", "before")}
        seconds = own["seconds"].get(rank, 0.0)
        made.append({"values": draw(), "targets": targets, "seconds": seconds, **options})
    return made


def worker_program(work: Callable[..., Any], mine: Any, given: Given) -> dict[str, Any]:
    """Serve in the case's order on the server's rank; call the student's function on the others."""
    if dist.get_rank() == mine["server"]:
        return {"server's weights": _serve(mine)}
    params = [torch.nn.Parameter(value.clone()) for value in mine["values"]]
    for param in params if mine["before"] else ():
        param.grad = torch.ones_like(param)
    seen: list[Tensor] = []

    def weights() -> Tensor:
        return torch.cat([param.detach().flatten() for param in params])

    def loss() -> Any:
        if len(seen) >= len(mine["targets"]):
            most = counted(len(mine["targets"]), "time")
            raise RuntimeError(f"loss() is called more than {most}")
        targets = mine["targets"][len(seen)]
        seen.append(weights())
        compute(mine["seconds"])
        return sum((p * p * t).sum() / 2 for p, t in zip(params, targets, strict=True))

    work(given.iterable(params), loss, len(mine["targets"]), mine["server"])
    return {
        "weights at gradient {}": seen,
        "weights at the end (those received last)": weights(),
        "requires_grad of parameter {}": [param.requires_grad for param in params],
    }


def worker_computes(own: Any) -> dict[float, int]:
    """Return the times that `worker_program` computes: once for each gradient of a worker."""
    return {own["seconds"]: len(own["targets"])}


def _serve(mine: Any) -> Tensor:
    left = {worker: mine["order"].count(worker) for worker in sorted(set(mine["order"]))}
    weights = torch.cat([value.flatten() for value in mine["values"]])
    gradient = torch.empty_like(weights)
    for worker in left:
        dist.send(weights, worker)
    for worker in mine["order"]:
        dist.recv(gradient, worker)
        weights = weights - mine["lr"] * gradient
        left[worker] -= 1
        if left[worker]:
            dist.send(weights, worker)
    return weights


def worked(change: Callable[..., tuple[Tensor, Tensor]] | None = None) -> Oracle:
    """Return the oracle of `worker_program`.

    `change(w, own, g, old)` makes a mistake. It returns the weights at which the gradient is
    computed, and the tensor that is sent. Its arguments are the received weights, the worker's
    weights at the start, the gradient as a function of weights, and the earlier ``.grad``.
    """

    def oracle(case: Case, inputs: Sequence[Any], me: int) -> dict[str, Any]:
        server, order = case.parameters["server"], case.parameters["order"]
        dtype = inputs[me]["values"][0].dtype
        own = [torch.cat([v.double().flatten() for v in each["values"]]) for each in inputs]
        w, targets = own[server], [list(each["targets"]) for each in inputs]
        at = dict.fromkeys(order, w)
        old = [torch.full_like(w, float(each["before"])) for each in inputs]
        seen: list[Tensor] = []
        for worker in order:
            target = torch.cat([t.double().flatten() for t in targets[worker].pop(0)])

            def gradient(w: Tensor, target: Tensor = target) -> Tensor:
                return w * target

            place, g = at[worker], gradient(at[worker])
            if change is not None:
                place, g = change(at[worker], own[worker], gradient, old[worker])
            old[worker] = old[worker] + gradient(place)
            if worker == me:
                seen.append(place.to(dtype))
            w = w - case.parameters["lr"] * g
            at[worker] = w
        if me == server:
            return {"server's weights": w.to(dtype)}
        end = seen[-1] if seen else own[me].to(dtype)
        return {
            "weights at gradient {}": seen,
            "weights at the end (those received last)": end,
            "requires_grad of parameter {}": [True] * len(case.parameters["shapes"]),
        }

    return oracle


# DiLoCo: inner steps on every rank, an outer step together ----------------------------------------

# The inner step of a case goes a quarter of the way ``to`` a goal, or ``along`` a direction,
# farther each time. Goals and directions differ from rank to rank, so a round ends at different
# weights on every rank.

LEFT, SET = "left alone", "written, cleared or replaced"
INNER_STEP = 10e-6
"""Seconds."""


def rounds_inputs(case: Case, generator: torch.Generator) -> list[dict[str, Any]]:
    """Draw equal weights of the case's ``shapes`` for all ranks, and different goals for each."""
    shapes, own = case.parameters["shapes"], dict(case.parameters)
    draw = partial(_draw, shapes, generator)
    start = draw()
    made = [{**own, "values": start, "goals": draw()} for _ in range(case.world_size)]
    if own["inner"] == "along":  # one rank stays where it is
        made[-1]["goals"] = [torch.zeros_like(value) for value in start]
    return made


def rounds_program(diloco: Callable[..., Any], mine: Any, given: Given) -> dict[str, Any]:
    """Take the case's ``steps``; return the weights around every outer step."""
    params = [torch.nn.Parameter(value.clone()) for value in mine["values"]]
    memory, found, calls = addresses(params), {}, []
    for param in params if mine["inner"] == "along" else ():
        # The gradient is left over from the inner optimizer's last step.
        param.grad = torch.ones(param.shape, dtype=param.dtype)
        if param.dim() > 1 and mine["momentum"]:
            param.grad = param.grad.mT.contiguous().mT
    grads = [param.grad for param in params]

    @torch.no_grad()
    def inner_step() -> None:
        calls.append("inner step")
        compute(INNER_STEP)
        for param, goal in zip(params, mine["goals"], strict=True):
            if mine["inner"] == "to":
                param.add_(0.25 * (goal - param))
            else:
                param.add_(len(calls) * goal / 8)

    options = [mine[key] for key in ("every", "outer_lr", "momentum")]
    # Two other models, one made before and one after it, which are not trained meanwhile.
    others = [[torch.nn.Parameter(torch.ones(size))] for size in (3, 4)]
    diloco(others[0], lambda: None, *options, group=given.group)
    step = diloco(given.iterable(params), inner_step, *options, group=given.group)
    diloco(others[1], lambda: None, *options, group=given.group)
    if not callable(step):
        raise TypeError(f"diloco returns {type(step).__name__}, expected a function")
    for n in range(mine["steps"]):
        step()
        if (n + 1) % mine["every"] in (0, 1):
            found[_after_step(n + 1)] = [param.detach().clone() for param in params]
    same = (a.grad is b for a, b in zip(params, grads, strict=True))
    return {
        **found,
        "inner steps": len(calls),
        OWN_MEMORY: memory_of(params, memory),
        "each .grad": LEFT if all(same) and all(g is None or g.eq(1).all() for g in grads) else SET,
    }


def _after_step(n: int) -> str:
    return f"weights after step {n}, parameter {{}}"


def rounds_computes(own: Any) -> dict[float, int]:
    """Return the times that `rounds_program` computes: one inner step in each of its steps."""
    return {INNER_STEP: own["steps"]}


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.double().flatten() for tensor in tensors])


def trained_by(
    step: Callable[[Tensor, float, Tensor], Tensor] = lambda change, momentum, m: (
        change + momentum * m
    ),
    scale: Callable[[int], float] = lambda k: 1.0,
    rate: float | None = None,
) -> Oracle:
    """Return the oracle of DiLoCo, or, with an argument, of a mistake.

    `step(Δ, μ, m)` is the outer step with the new m; by default Nesterov's, Δ + μ m.
    """

    def oracle(case: Case, inputs: Sequence[Any], me: int) -> dict[str, Any]:
        own = inputs[me]
        shapes = [value.shape for value in own["values"]]
        w = torch.stack([_joined(each["values"]) for each in inputs])
        goals = torch.stack([_joined(each["goals"]) for each in inputs])
        held, m, found = w[0], torch.zeros_like(w[0]), {}
        for n in range(1, own["steps"] + 1):
            w = w + 0.25 * (goals - w) if own["inner"] == "to" else w + n * goals / 8
            if n % own["every"] == 0:
                change = scale(len(inputs)) * (held - w.mean(0))
                m = own["momentum"] * m + change
                lr = own["outer_lr"] if rate is None else rate
                held = held - lr * step(change, own["momentum"], m)
                w = held.expand_as(w)
            if n % own["every"] in (0, 1):
                ours = w[me].to(own["values"][0].dtype)
                pieces = torch.split(ours, [shape.numel() for shape in shapes])
                found[_after_step(n)] = [p.view(s) for p, s in zip(pieces, shapes, strict=True)]
        return {
            "inner steps": own["steps"],
            **found,
            OWN_MEMORY: KEPT,
            "each .grad": LEFT,
        }

    return oracle


equals_diloco = equals(
    trained_by(),
    {
        "the plain mean of the weights: take an outer step towards this mean": trained_by(
            lambda change, momentum, m: change, rate=1.0
        ),
        "a step of m alone (plain momentum), or of Δ + μ m with the m of the round before: "
        "Nesterov's step is Δ + μ m with the new m": trained_by(lambda change, momentum, m: m),
        "the sum of the changes over the ranks, not their mean": trained_by(scale=float),
    },
)
"""Judge the weights around every outer step, and that nothing else was touched."""
