"""The checks of this assignment. They are handed out: read them if a message is not enough.

The cases say in which order workers push. `judges.py` has the programs that follow such a script,
and the right answers.
"""

import math
from functools import partial

import torch

from course_lib.checking import (
    Case,
    calls_at_most,
    equals,
    in_many_forms,
    only_calls,
    only_peers,
    sends_at_most,
    task,
    time_within,
)
from course_lib.checking.expectations import computes_between

from .judges import (
    AGE,
    NONSENSE,
    equals_ages,
    equals_diloco,
    follow_script,
    minus,
    order_of,
    rounds_computes,
    rounds_inputs,
    rounds_program,
    script,
    served,
    server_inputs,
    worked,
    worker_computes,
    worker_inputs,
    worker_program,
)

COUNTED = "push {} counts"
MANY = " ".join([*map(str, range(300)), *(f"+{worker}" for worker in range(0, 300, 13))])
"""So many workers pull before one of them pushes."""

# Task 1: the age of a gradient -------------------------------------------------------------------


def events_program(staleness, mine, given):
    return {AGE: staleness(given.iterable([tuple(event) for event in mine["events"]]))}


def of_events(name, text):
    return Case(name, 1, {"events": script(text)})


# Tasks 2 and 4: servers --------------------------------------------------------------------------


def async_program(async_server, mine, given):
    return follow_script(lambda params: async_server(params, mine["lr"]), mine, given, AGE)


def backup_program(backup_server, mine, given):
    def made(params):
        return backup_server(params, mine["lr"], mine["wait_for"])

    return follow_script(made, mine, given, COUNTED)


LIVE = "the weights at the end: pull must return copies, so that later updates do not change them"


def stepping(share, **options):
    """Return the oracle of an asynchronous server that uses ``share(age)`` of a gradient."""

    def rule(w, g, age, own):
        return minus(w, g, own["lr"] * share(age)), age, 1

    return served(AGE, rule, **options)


def aware(age):
    return 1 / (1 + age)


def backing_up(share=lambda n: 1 / n, kept=False, **options):
    """Return the oracle of a server that waits for N gradients, or of a mistake.

    `share` is the factor of each of the N gradients. `kept`: it keeps the workers' tensors, and the
    workers overwrite all of them except the last.
    """

    def rule(w, g, age, own):
        taken = own.setdefault("taken", [])
        if age:
            return w, False, 0
        taken.append(g)
        if len(taken) < own["wait_for"]:
            return w, True, 0
        for number, each in enumerate(taken, 1):
            lost = kept and number < len(taken)
            each = [torch.full_like(x, NONSENSE) for x in each] if lost else each
            w = minus(w, each, own["lr"] * share(len(taken)))
        taken.clear()
        return w, True, 1

    return served(COUNTED, rule, **options)


def serving(name, text, shapes, lr, **options):
    return Case(name, 1, {"events": script(text), "shapes": shapes, "lr": lr, **options})


# Task 3: a worker --------------------------------------------------------------------------------


def working(name, server, seconds, updates, shapes, lr, before=False, sizes=()):
    order = order_of(seconds, updates)
    own = {"server": server, "seconds": seconds, "order": order, "shapes": shapes}
    options = {"lr": lr, "before": before, "sizes": dict(sizes)}
    return Case(name, len(seconds) + 1, {**own, **options})


def numbers(case):
    return sum(torch.Size(shape).numel() for shape in case.parameters["shapes"])


def pushes(case, rank):
    order = case.parameters["order"]
    return len(order) if rank == case.parameters["server"] else order.count(rank)


def server_and_workers(case, rank):
    server = case.parameters["server"]
    return set(range(case.world_size)) - {rank} if rank == server else {server}


def computed_at_pushes(case, observed, rank):
    """Return for each push the time of the gradients up to it: they come before the push."""
    seconds = case.parameters["seconds"].get(rank, 0.0)
    return [((n + 1) * seconds, math.inf) for n in range(pushes(case, rank))]


def computed_at_pulls(case, observed, rank):
    """Return for each pull the time of the gradients before it: no later one comes before it."""
    seconds = case.parameters["seconds"].get(rank, 0.0)
    return [(0.0, n * seconds) for n in range(pushes(case, rank))]


def without_waiting(case, network):
    """Return the time of the slowest worker: for each push, computation and two messages."""
    per_message = network.time(numbers(case) * case.itemsize)
    each = case.parameters["seconds"].items()
    longest = max(pushes(case, rank) * (t + 2 * per_message) for rank, t in each)
    return longest + 2 * case.world_size * per_message  # the server starts workers one by one


# Task 5: DiLoCo ----------------------------------------------------------------------------------


def rounds(name, k, every, steps, outer_lr, momentum, shapes, inner="to"):
    own = {"every": every, "steps": steps, "outer_lr": outer_lr, "momentum": momentum}
    return Case(name, k, {**own, "shapes": shapes, "inner": inner})


def at_the_end_of_a_round(case, rank):
    return case.parameters["steps"] // case.parameters["every"]


ONCE = (
    "After every H steps, call all_reduce once, with all parameters together. Send nothing in "
    "between."
)


# Two dtypes: in bfloat16 a difference of nearly equal numbers may be rounded away.
in_both_forms = partial(in_many_forms, dtypes=("float32", "float64"))


CHECKS = {
    "staleness": task(
        "staleness",
        inputs=lambda case, generator: [dict(case.parameters)],
        program=events_program,
        judges=[equals_ages],
        expects=[only_calls()],
        cases=in_both_forms(
            of_events("one worker", "1 +1 1 +1"),
            of_events("workers 0 and 2 in turn", "0 2 +0 0 +2 2 +0 0 +2"),
            of_events("a straggler", "1 2 3 +1 1 +2 2 +1 1 +2 +1 +3"),
            of_events("one pulls later", "4 1048580 +4 +1048580 1048580 +1048580 4 +4"),
            of_events("one pulls twice", "1 2 +2 1 2 +2 +1"),
            of_events("one pushes twice", "1 2 +1 +2 +1 1 +2 +2 +1"),
            of_events("nothing is pushed", "5 6"),
            of_events("the example", "1 2 +1 +2"),
            of_events("three hundred workers", MANY),
        ),
    ),
    "async_server": task(
        "async_server",
        inputs=server_inputs,
        program=async_program,
        may_change=["params"],
        judges=[
            equals(
                stepping(aware),
                {
                    LIVE: stepping(aware, live=True),
                    "a step that does not divide by 1 + τ": stepping(lambda age: 1),
                    "a step that divides by τ: divide by 1 + τ, as τ may be 0": stepping(
                        lambda age: 1 / max(age, 1)
                    ),
                },
            )
        ],
        expects=[only_calls()],
        cases=in_both_forms(
            serving("one worker", "1 +1 1 +1", [(3, 2)], 0.5),
            serving("two workers", "1 0 +1 1 +0 0 +1 1 0", [(2,), (3, 2)], 0.25),
            serving("a straggler", "1 2 3 +1 1 +2 2 +1 +3 3 +2", [(2, 2)], 0.4),
            serving("others' numbers", "1048580 4 +4 4 +4 +1048580 1048580", [(3,), ()], 0.125),
            serving("one pulls twice", "1 2 +2 1 2 +2 +1 1", [(4,)], 1.0),
            serving("one pulls late", "1 2 +1 +2 2 +2 1 +1 1", [(2, 3), (0,)], 0.3),
            serving("one pushes twice", "1 2 +1 +2 +1 1 +2 2", [(3, 2)], 0.3, zeros=[1]),
            serving("large gradients", "1 2 +1 +2 1 2 +2 2", [(3, 2)], 0.005, size=300),
            serving("three hundred workers", MANY, [(2,)], 0.1),
        ),
        in_turn=[(1, 2)],
    ),
    "work": task(
        "work",
        inputs=worker_inputs,
        program=worker_program,
        computes=worker_computes,
        judges=[
            equals(
                worked(),
                {
                    "the result with this worker's own first weights: receive the server's "
                    "weights": worked(lambda w, own, g, old: (own, g(own))),
                    "the result if a gradient is added to older ones: clear .grad": worked(
                        lambda w, own, g, old: (w, g(w) + old)
                    ),
                    "the result if the workers push weights: push gradients": worked(
                        lambda w, own, g, old: (w, w)
                    ),
                },
            )
        ],
        expects=[
            only_calls("send", "recv"),
            only_peers(server_and_workers),
            calls_at_most(
                "For each gradient, receive the weights in one message, and send the gradient in "
                "one message.",
                send=pushes,
            ),
            sends_at_most(lambda case, rank: pushes(case, rank) * numbers(case) * case.itemsize),
            computes_between(computed_at_pushes, "send"),
            computes_between(computed_at_pulls, "recv"),
            time_within(without_waiting, rel=0.02, hint="Wait only for the server."),
        ],
        worth={"values": 2, "communication": 1},
        cases=in_both_forms(
            working("1 worker", 0, {1: 100e-6}, 3, [(3, 2)], 0.5),
            working("2 workers", 0, {1: 100e-6, 2: 170e-6}, 5, [(2,), (3, 2), (0,)], 0.3),
            working(
                "a straggler, server 3",
                *(3, {0: 1e-4, 1: 1.3e-4, 2: 5e-4}, 9, [(4,)], 0.002),
                sizes={0: 300},
            ),
            working(
                "2 workers, server 1, one has no gradient",
                *(1, {0: 3e-4, 2: 1e-4}, 6, [(2, 2)], 0.1),
                sizes={0: 0},
            ),
            working(
                "2 workers, .grad is not empty",
                2,
                {0: 1e-4, 1: 1.9e-4},
                4,
                *([(3,)], 0.5),
                before=True,
            ),
            groups=False,
        ),
        in_turn=[(1, 3)],
    ),
    "backup_server": task(
        "backup_server",
        inputs=server_inputs,
        program=backup_program,
        may_change=["params"],
        judges=[
            equals(
                backing_up(),
                {
                    LIVE: backing_up(live=True),
                    "a step with gradients that their owners have overwritten: keep copies": (
                        backing_up(kept=True)
                    ),
                    "a step with the sum of the gradients: take their mean": backing_up(
                        share=lambda n: 1
                    ),
                },
            )
        ],
        expects=[only_calls()],
        cases=in_both_forms(
            serving("2 of 2", "0 2 +0 +2 0 2 +2 +0 0 2", [(3, 2)], 0.5, wait_for=2),
            serving("2 of 3", "1 2 3 +1 +3 1 3 +2 2 +2 +1 1", [(2,), (0,)], 0.25, wait_for=2),
            serving("1 of 2", "1 2 +1 1 +1 +1 1 +2 2 +2 2", [(2, 2)], 0.4, wait_for=1),
            serving(
                "3 of 4",
                "5 6 7 1048581 +5 +1048581 5 +6 +7 6 7 1048581",
                [(4,), ()],
                0.3,
                wait_for=3,
            ),
            serving(
                "late by two steps",
                *("1 2 3 +1 +2 1 2 +1 +2 +3 +3 1 2 3 +3 +1 1", [(2, 3)], 0.125),
                wait_for=2,
            ),
            serving(
                "one pushes twice",
                *("1 2 3 +1 +2 +1 +3 3 1", [(2, 2)], 0.5),
                wait_for=3,
                zeros=[1],
            ),
            serving("a step that is not full", "1 2 +1 1 2", [(3,)], 1.0, wait_for=2),
            serving("3 of 2 workers", "1 2 +1 +2 1 +1 2 +2", [(2,)], 0.005, wait_for=3, size=300),
        ),
        in_turn=[(1, 2)],
    ),
    "diloco": task(
        "diloco",
        inputs=rounds_inputs,
        program=rounds_program,
        computes=rounds_computes,
        judges=[equals_diloco],
        expects=[
            only_calls("all_reduce"),
            calls_at_most(ONCE, all_reduce=at_the_end_of_a_round),
            sends_at_most(
                lambda case, rank: (
                    at_the_end_of_a_round(case, rank) * numbers(case) * case.itemsize
                ),
                hint=ONCE,
            ),
        ],
        worth={"values": 3, "communication": 1},
        cases=in_both_forms(
            rounds("1 rank, 2 rounds", 1, 2, 5, 0.5, 0.5, [(3, 2)]),
            rounds("2 ranks, 3 rounds", 2, 3, 10, 0.7, 0.9, [(2,), (3, 2), (0,)]),
            rounds("3 ranks, no momentum", 3, 2, 6, 0.5, 0.0, [(2, 2)], "along"),
            rounds("4 ranks in two groups", 4, 4, 9, 0.6, 0.8, [(3,), ()], "along"),
            rounds("4 ranks, H = 1", 4, 1, 3, 0.7, 0.3, [(4,)]),
            rounds("5 ranks in two groups", 5, 2, 7, 0.7, 0.9, [(2, 3)]),
            rounds("2 ranks, less than a round", 2, 5, 4, 0.7, 0.9, [(3, 2)], "along"),
        ),
        in_turn=[(4, 3)],
    ),
}
