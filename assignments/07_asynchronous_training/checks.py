"""The checks of this assignment. They are handed out: read them if a message is not enough.

A check has a reference in `course_lib`, a program that calls a function on a rank, and a draw that
makes a case from a seed. The order of events is part of a case, and never the outcome of a race.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.checking import Allowed, Case, Draw, Given, Observed, Variety, by_reference
from course_lib.checking.communication import computes_between
from course_lib.checking.on_ranks.given import expect_function, expect_pair
from course_lib.ranks import compute
from course_lib.ranks.explain.words import counted

DTYPES = ("float32", "float64")
SHAPES = ([(3, 2)], [(2,), (3, 2)], [(3,), ()], [(2, 3), (0,)], [(2, 2), (2, 2)])


# Task 1: the age of a gradient --------------------------------------------------------------------

AGE = "staleness of push {}"


def draw_events(d: Draw) -> list[tuple[str, int]]:
    """Draw the order of events. A worker pushes and pulls again at once, if nothing is unusual."""
    crowd, first, distance = d.maybe("a crowd", one_in=4), d.one_of(0, 1, 4), d.one_of(1, 2, 2**40)
    count = 300 if crowd else d.one_of(1, 2, 3, 3, 4)
    workers = [first + distance * n for n in range(count)]
    d.say(counted(count, "worker") + (" with large numbers" if distance > 2 else ""))
    habit = d.one_of("", "late pulls", "two pushes in a row", "two pulls in a row")
    if habit:
        d.say(habit)
    events = [("pull", worker) for worker in workers]
    ready = set(workers)
    for _ in range(d.one_of(5, 8, 12)):
        worker = d.one_of(*workers)
        if worker in ready:
            events += [("push", worker)] * d.one_of(1, 2 if "pushes" in habit else 1)
            ready.discard(worker)
        if worker not in ready and not ("late" in habit and d.one_of(0, 1, 1)):
            events.append(("pull", worker))
            ready.add(worker)
        if "two pulls" in habit and d.one_of(0, 1):
            events.append(("pull", d.one_of(*workers)))
    return events


def draw_staleness(d: Draw) -> list[Any]:
    """Draw the pulls and pushes of some workers; in some cases nobody pushes."""
    events = draw_events(d)
    if d.maybe("nothing is pushed", one_in=6):
        events = [event for event in events if event[0] == "pull"][: d.one_of(0, 3)]
    return [{"events": events}]


def run_staleness(staleness: Callable[..., Any], inputs: Any, case: Given) -> Any:
    """Call ``staleness(events)``; return the age of each push, of which every one counts."""
    return {AGE: staleness(case.iterable([tuple(event) for event in inputs["events"]]))}


def since(kind: str, others_only: bool = False) -> Callable[..., Any]:
    """Return the mistake that counts the pushes since this worker's last event of a kind."""

    def mistake(inputs: Sequence[Any], me: int, expected: Sequence[Any]) -> Any:
        events, ages = inputs[me]["events"], []
        for at, (name, worker) in enumerate(events):
            if name == "push":
                begin = max((n for n in range(at) if events[n] == (kind, worker)), default=-1)
                pushes = [pusher for pushed, pusher in events[begin + 1 : at] if pushed == "push"]
                ages.append(sum(not others_only or pusher != worker for pusher in pushes))
        return {AGE: ages}

    return mistake


AGE_MISTAKES = {
    "the right list plus 1: do not count a gradient's own push": lambda inputs, me, expected: {
        AGE: [age + 1 for age in expected[me][AGE]]
    },
    "the versions that were pulled, not their staleness": lambda inputs, me, expected: {
        AGE: [n - age for n, age in enumerate(expected[me][AGE])]
    },
    "the right list if each worker pulls right after its push: count from its last pull, which may "
    "come later": since("push"),
    "the number of pushes by other workers: if a worker pushes twice before it pulls again, its "
    "first push counts, too": since("pull", others_only=True),
}


# Tasks 2 and 4: servers ---------------------------------------------------------------------------

COUNTED, PULLED = "push {} counts", "weights of pull {}, parameter {}"
AFTER = "server's weights after push {}, parameter {}"
NONSENSE = 8.0
"""A number that a worker writes into its gradient after the push."""


def draw_server(d: Draw) -> list[Any]:
    """Draw events, the server's weights, and gradients for each push."""
    size, zeros = d.maybe("large gradients", 300.0, 1.0), d.maybe("gradients of zeros")
    overflow = d.maybe("a gradient with an inf or a NaN", one_in=2)
    events, shapes = draw_events(d), d.one_of(*SHAPES)
    pushes = sum(kind == "push" for kind, _ in events)
    sizes = [0.0 if zeros and n % 2 else size for n in range(pushes)]
    gradients = [[factor * d.randn(*shape) for shape in shapes] for factor in sizes]
    if overflow:
        gradients[0][0] = d.not_finite(gradients[0][0])
    params, lr = [d.randn(*shape) for shape in shapes], d.one_of(0.125, 0.25, 0.3, 0.5, 1.0)
    return [{"events": events, "params": params, "gradients": gradients, "lr": lr}]


def draw_backup(d: Draw) -> list[Any]:
    """Draw a server as for the task before, and for how many gradients it waits."""
    wait_for = d.one_of(1, 2, 2, 3, 4)
    d.say(f"N = {wait_for}")
    return [{**server, "wait_for": wait_for} for server in draw_server(d)]


def run_server(make: Callable[..., Any], inputs: Any, case: Given) -> Any:
    """Call ``(pull, push)`` of a server as the events say; return their results.

    Between two events, a second server from the same function serves the same workers, so the
    servers must not share anything. Each gradient is overwritten after its push, as its owner may
    do.
    """
    options = [inputs[key] for key in ("lr", "wait_for") if key in inputs]
    params = inputs["params"]
    case.watch.add_memory(params)
    pull, push = pull_and_push(make(case.iterable(params), *options))
    other_pull, other_push = pull_and_push(make([torch.zeros_like(p) for p in params], *options))
    pulled, answers, after, left = [], [], [], []
    for kind, worker in inputs["events"]:
        other_pull(worker)
        other_push(worker, [torch.ones_like(param) for param in params])
        if kind == "pull":
            pulled.append(pull(worker))
        else:
            gradients = inputs["gradients"][len(answers)]
            answers.append(push(worker, case.iterable(gradients)))
            after.append([param.clone() for param in params])
            left.append([gradient.clone() for gradient in gradients])
            for gradient in gradients:
                gradient.fill_(NONSENSE)
    for gradients, values in zip(inputs["gradients"], left, strict=True):
        for gradient, value in zip(gradients, values, strict=True):
            gradient.copy_(value)  # as after the push, so that a change by the push shows
    return {
        COUNTED if "wait_for" in inputs else AGE: answers,
        AFTER: after,
        PULLED: pulled,
    }


def pull_and_push(server: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    pull, push = expect_pair(server, "your function", "two functions (pull, push)")
    return expect_function(pull, "pull"), expect_function(push, "push")


def stepping(step: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return the mistake of a push that makes ``step(w, g, lr, answer, N, right)`` of weights w.

    All pushes before it were right.
    """

    def mistake(inputs: Sequence[Any], me: int, expected: Sequence[Any]) -> Any:
        server, right = inputs[me], expected[me]
        weights, answers = [server["params"], *right[AFTER]], right.get(AGE, right.get(COUNTED))
        after: list[list[Tensor]] = []
        for n, (gradients, answer) in enumerate(zip(server["gradients"], answers, strict=True)):
            options = server["lr"], answer, server.get("wait_for")
            rows = zip(weights[n], gradients, weights[n + 1], strict=True)
            after.append([step(w, g, *options, new) for w, g, new in rows])
        return {AFTER: after}

    return mistake


def live_weights(inputs: Sequence[Any], me: int, expected: Sequence[Any]) -> Any:
    right = expected[me]
    return {PULLED: [right[AFTER][-1] for _ in right[PULLED]] if right[AFTER] else []}


def weights_at_the_start(inputs: Sequence[Any], me: int, expected: Sequence[Any]) -> Any:
    return {AFTER: [inputs[me]["params"] for _ in expected[me][AFTER]]}


SERVER_MISTAKES = {
    "the weights at the end: pull must return copies, so that later updates do not change them": (
        live_weights
    ),
    "the weights at the start: write into the weights' own memory": weights_at_the_start,
}
ASYNC_MISTAKES = {
    "a step that does not divide by 1 + τ": stepping(lambda w, g, lr, *_: w - lr * g),
    "a step that divides by τ: divide by 1 + τ, as τ may be 0": stepping(
        lambda w, g, lr, age, *_: w - lr / max(age, 1) * g
    ),
}
BACKUP_MISTAKES = {
    "a step with the sum of the gradients: take their mean": stepping(
        lambda w, g, lr, counts, n, right: w + n * (right - w)
    ),
    "a step with gradients that their owners have overwritten: keep copies": stepping(
        lambda w, g, lr, counts, n, right: w - lr * (g + (n - 1) * NONSENSE) / n
    ),
    "a part of the step in every push: the weights stay as they are until the N-th gradient": (
        stepping(lambda w, g, lr, counts, n, right: w - counts * lr / n * g)
    ),
}

# Task 3: a worker ---------------------------------------------------------------------------------

GRADIENT, SERVED = "gradient of push {}", "server's weights after push {}"
SEEN, LAST = "weights at gradient {}", "weights at the end (those received last)"


def draw_work(d: Draw) -> list[Any]:
    """Draw how long each worker computes; this gives the order in which the server hears of them.

    The gradient of a worker's loss is its weights times its targets.
    """
    size, zeros = d.maybe("large gradients", 300.0, 1.0), d.maybe("a worker's gradients are zero")
    overflow = d.maybe("a gradient with an inf or a NaN")
    before, server = d.maybe(".grad is not empty"), d.one_of(0, *d.ranks)
    if server:
        d.say(f"the server is rank {server}")
    workers, shapes = [rank for rank in d.ranks if rank != server], d.one_of(*SHAPES, [()])
    times = {worker: 1e-4 * d.one_of(1.0, 1.3, 1.7, 2.3, 9.1) for worker in workers}
    numbers = {worker: d.one_of(1, 2, 3, 3) for worker in workers}
    pushes = sorted((n * times[w], w) for w in workers for n in range(1, numbers[w] + 1))
    unusual, lr, inputs = d.one_of(*workers), d.one_of(0.1, 0.3, 0.5) / size, []
    for rank in d.ranks:
        factors = [0.0 if zeros and rank == unusual else size] * numbers.get(rank, 0)
        targets = [[factor * d.randn(*shape) for shape in shapes] for factor in factors]
        if overflow and rank == unusual:
            targets[-1][0] = d.not_finite(targets[-1][0])
        member = {"values": [d.randn(*shape) for shape in shapes], "targets": targets, "lr": lr}
        order = [worker for _, worker in pushes]
        options = {"server": server, "order": order, "before": before}
        inputs.append({**member, **options, "seconds": times.get(rank, 0.0)})
    return inputs


def run_work(work: Callable[..., Any], inputs: Any, case: Given) -> Any:
    """Serve in the case's order on the server's rank; call the student's function on the others."""
    if dist.get_rank() == inputs["server"]:
        return served(inputs)
    params = [nn.Parameter(value) for value in inputs["values"]]
    for param in params if inputs["before"] else ():
        param.grad = torch.ones_like(param)
    case.watch.add_parameters("the parameters", params, values=False)
    weights_at_gradients: list[Tensor] = []

    def loss() -> Any:
        if len(weights_at_gradients) >= len(inputs["targets"]):
            limit = counted(len(inputs["targets"]), "time")
            raise RuntimeError(f"loss() is called more than {limit}")
        targets = inputs["targets"][len(weights_at_gradients)]
        weights_at_gradients.append(joined(params))
        compute(inputs["seconds"])
        return sum((p * p * t).sum() / 2 for p, t in zip(params, targets, strict=True))

    work(case.iterable(params), loss, len(inputs["targets"]), inputs["server"])
    return {SEEN: weights_at_gradients, LAST: joined(params)}


def served(inputs: Any) -> Any:
    left = {worker: inputs["order"].count(worker) for worker in sorted(set(inputs["order"]))}
    weights, gradients, after = joined(inputs["values"]), [], []
    for worker in left:
        dist.send(weights, worker)
    for worker in inputs["order"]:
        dist.recv(gradient := torch.empty_like(weights), worker)
        weights = weights - inputs["lr"] * gradient
        gradients.append(gradient)
        after.append(weights)
        left[worker] -= 1
        if left[worker]:
            dist.send(weights, worker)
    return {GRADIENT: gradients, SERVED: after}


def joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def pushing(mistaken: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Any]:
    """Return a worker's mistake.

    ``mistaken(received, first, target, older)`` gives the weights at which the worker computes, and
    what it pushes. `first` are its own weights at the start, `older` is the sum of its gradients.
    """

    def mistake(inputs: Sequence[Any], me: int, expected: Sequence[Any]) -> Any:
        server, firsts = inputs[me]["server"], [joined(member["values"]) for member in inputs]
        older = [torch.full_like(first, float(inputs[me]["before"])) for first in firsts]
        received, pushed, after = [firsts[server] for _ in inputs], [], [firsts[server]]
        places: list[list[Tensor]] = [[] for _ in inputs]
        for worker in inputs[me]["order"]:
            target = joined(inputs[worker]["targets"][len(places[worker])])
            place, push = mistaken(received[worker], firsts[worker], target, older[worker])
            older[worker] = older[worker] + place * target
            places[worker].append(place)
            pushed.append(push)
            after.append(after[-1] - inputs[me]["lr"] * push)
            received[worker] = after[-1]
        if me == server:
            return {GRADIENT: pushed, SERVED: after[1:]}
        return {SEEN: places[me], LAST: places[me][-1]}

    return mistake


WORK_MISTAKES = {
    "the result with this worker's own first weights: receive the server's weights": pushing(
        lambda received, first, target, older: (first, first * target)
    ),
    "the result if a gradient is added to older ones: clear .grad": pushing(
        lambda received, first, target, older: (received, older + received * target)
    ),
    "the result if the workers push weights: push gradients": pushing(
        lambda received, first, target, older: (received, received)
    ),
}


def computed_at_pushes(case: Case, observed: Observed, rank: int) -> list[tuple[float, float]]:
    """Return for each push the time of the gradients up to it: they come before the push."""
    member = observed.inputs[rank]["own"]
    return [((n + 1) * member["seconds"], math.inf) for n in range(len(member["targets"]))]


def computed_at_pulls(case: Case, observed: Observed, rank: int) -> list[tuple[float, float]]:
    """Return for each pull the time of the gradients before it: no later one comes before it."""
    member = observed.inputs[rank]["own"]
    return [(0.0, n * member["seconds"]) for n in range(len(member["targets"]))]


# Task 5: DiLoCo -----------------------------------------------------------------------------------

INNER_STEP = 10e-6
"""Seconds."""


def draw_rounds(d: Draw) -> list[Any]:
    """Draw equal weights for all ranks, and different inner steps for each.

    An inner step shrinks the weights and adds a move to them.
    """
    size, quiet = d.maybe("large weights", 300.0, 1.0), d.maybe("nobody moves in round 2")
    still, overflow = d.rank("rank {} stays where it is"), d.rank("rank {} has a NaN")
    other_models, filled = d.maybe("other models train, too"), d.one_of(True, False)
    every, rounds = d.one_of(1, 2, 2, 3, 4), 2 if quiet else d.one_of(0, 2, 2, 2, 3, 3)
    steps = max(1, every * rounds + d.one_of(*range(every)))
    momentum = d.one_of(0.3 if quiet else 0.0, 0.3, 0.5, 0.9)
    outer_lr = d.one_of(0.5, 0.6, 0.7, 0.8)
    d.say(f"H = {every}, μ = {momentum}, {counted(steps, 'step')}")
    options = {"every": every, "outer_lr": outer_lr, "momentum": momentum, "others": other_models}
    shapes, inputs = d.one_of(*SHAPES), []
    start = [size * d.randn(*shape) for shape in shapes]
    for rank in d.ranks:
        rests = [rank == still or (quiet and n // every == 1) for n in range(steps)]
        moves = [[(not at_rest) * size * d.randn(*shape) for shape in shapes] for at_rest in rests]
        if rank == overflow:
            moves[d.one_of(*range(steps))][0].view(-1)[0] = torch.nan
        gradients = [d.randn(*shape) for shape in shapes] if filled else None
        shrinks = [1.0 if at_rest else 0.75 for at_rest in rests]
        model = {"values": start, "moves": moves, "shrinks": shrinks, "gradients": gradients}
        inputs.append({**model, **options, "members": d.members(rank)})
    return inputs


def run_rounds(diloco: Callable[..., Any], inputs: Any, case: Given) -> Any:
    """Take the case's steps; return the weights after each of them."""
    params = [nn.Parameter(value) for value in inputs["values"]]
    case.watch.add_memory(params)
    steps, after, calls = len(inputs["moves"]), list[Any](), 0
    for param, gradient in zip(params, inputs["gradients"] or [None] * len(params), strict=True):
        param.grad = None if gradient is None else gradient.clone()
    case.watch.add_parameters("the parameters", params, values=False)

    @torch.no_grad()
    def inner_step() -> None:
        nonlocal calls
        compute(INNER_STEP)
        at = min(calls, steps - 1)
        calls += 1
        for param, move in zip(params, inputs["moves"][at], strict=True):
            param.mul_(inputs["shrinks"][at]).add_(move)

    def other_step() -> Any:
        """Return the step of another model, whose round does not end."""
        other = [nn.Parameter(torch.ones_like(param)) for param in params]
        return diloco(other, lambda: None, steps + 1, *options, group=case.group)

    options = inputs["outer_lr"], inputs["momentum"]
    before = other_step()
    step = diloco(case.iterable(params), inner_step, inputs["every"], *options, group=case.group)
    expect_function(step, "what diloco returns")
    other_steps = (before, other_step()) if inputs["others"] else ()
    for _ in range(steps):
        for other in other_steps:
            other()
        step()
        after.append([param.detach().clone() for param in params])
    return {
        "inner steps": calls,
        **{f"weights after step {n}, parameter {{}}": w for n, w in enumerate(after, 1)},
        ".grad of parameter {}": [param.grad for param in params],
    }


def with_options(change: Callable[[Any], dict[str, float]]) -> Callable[..., Any]:
    """Return the mistake of an outer step that has other options."""
    return lambda inputs: [{**member, **change(member)} for member in inputs]


ROUND_MISTAKES = {
    "the plain mean of the weights: take an outer step towards this mean": with_options(
        lambda _: {"outer_lr": 1.0, "momentum": 0.0}
    ),
    "a step of m alone (plain momentum), or of Δ + μ m with the m of the round before, or of Δ "
    "alone: Nesterov's step is Δ + μ m with the new m": with_options(lambda _: {"momentum": 0.0}),
    "the sum of the changes over the ranks, not their mean": with_options(
        lambda member: {"outer_lr": member["outer_lr"] * len(member["members"])}
    ),
    "a step away from the mean: Δ is the weights before the round minus the mean": with_options(
        lambda member: {"outer_lr": -member["outer_lr"]}
    ),
}


# The checks ---------------------------------------------------------------------------------------

ON_ONE_RANK = Variety(ranks=(1,), dtypes=DTYPES, groups=False)

CHECKS = {
    "staleness": by_reference(
        "staleness",
        seeds=(0, 4, 10, 31, 56),
        reference="course_lib.asynchronous:staleness_of",
        program=run_staleness,
        draw=draw_staleness,
        variety=Variety(ranks=(1,), dtypes=("float32",), layouts=(), groups=False),
        mistakes=AGE_MISTAKES,
        exact=True,
    ),
    "async_server": by_reference(
        "async_server",
        seeds=(1, 4, 9, 10, 13, 20, 28, 58),
        reference="course_lib.asynchronous:async_server",
        program=run_server,
        draw=draw_server,
        variety=ON_ONE_RANK,
        mistakes={**AGE_MISTAKES, **ASYNC_MISTAKES, **SERVER_MISTAKES},
        may_change=["params"],
    ),
    "work": by_reference(
        "work",
        seeds=(4, 8, 11, 20, 22, 28, 39, 42),
        reference="course_lib.asynchronous:push_gradients",
        program=run_work,
        draw=draw_work,
        variety=Variety(ranks=(2, 3, 4, 3, 5), dtypes=DTYPES, groups=False),
        mistakes=WORK_MISTAKES,
        may_change=["values"],
        allowed=Allowed(
            time=1.02,
            hint="For each gradient, receive the weights in one message, and send the gradient in "
            "one message. Wait only for the server.",
        ),
        expects=[
            computes_between(computed_at_pushes, "send"),
            computes_between(computed_at_pulls, "recv"),
        ],
        worth={"values": 2, "communication": 1},
    ),
    "backup_server": by_reference(
        "backup_server",
        seeds=(2, 10, 13, 24, 29, 33, 44, 46),
        reference="course_lib.asynchronous:backup_server",
        program=run_server,
        draw=draw_backup,
        variety=ON_ONE_RANK,
        mistakes={**BACKUP_MISTAKES, **SERVER_MISTAKES},
        may_change=["params"],
    ),
    "diloco": by_reference(
        "diloco",
        seeds=(2, 3, 8, 11, 22, 39, 44, 46, 49, 60),
        reference="course_lib.local_sgd:diloco",
        program=run_rounds,
        draw=draw_rounds,
        variety=Variety(dtypes=DTYPES),
        as_if=ROUND_MISTAKES,
        may_change=["values"],
        allowed=Allowed(
            kinds=("all_reduce",),
            hint="After every H steps, call all_reduce once, with all parameters together. Send "
            "nothing in between.",
        ),
        worth={"values": 3, "communication": 1},
    ),
}
