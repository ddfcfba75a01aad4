"""Random programs of messages and collectives: virtual time against a second simulation."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from course_lib.ranks import Network, Ranks
from course_lib.ranks.costs.computation import compute
from tests.helpers.event_simulation import EventSimulation

# Powers of two: all times are exact, so that what happens at once does so in both simulations.
ALPHA, BETA = 2.0**-10, 2.0**20
ROOTED = ("gather", "scatter", "broadcast", "reduce")
KINDS = (*ROOTED, "all_gather", "all_reduce", "all_to_all", "barrier")


def random_program(seed: int) -> list[list[Any]]:
    """Return one whose ranks wait for nobody who waits for them: all start a phase, then wait."""
    chance = random.Random(seed)
    k = chance.randint(2, 5)
    program: list[list[Any]] = [[] for _ in range(k)]
    for _ in range(chance.randint(1, 5)):
        for actions in program:
            if chance.random() < 0.5:
                actions.append(("compute", chance.randint(1, 4) * ALPHA))
        started: list[list[Any]] = [[] for _ in range(k)]
        for _ in range(chance.randint(0, 6)):
            source, target = chance.sample(range(k), 2)
            size = 4 * 256 * chance.randint(0, 8)
            started[source].append(("send", target, size))
            started[target].append(("recv", source, size))
        for _ in range(chance.randint(0, 2)):
            kind = chance.choice(KINDS)
            root = chance.randrange(k) if kind in ROOTED else 0
            size = 0 if kind == "barrier" else 4 * 256 * chance.randint(1, 4)
            size *= k if kind == "all_reduce" else 1
            for actions in started:
                actions.append(("collective", kind, root, size))
        for actions, own_started in zip(program, started, strict=True):
            messages = [action for action in own_started if action[0] != "collective"]
            collectives = [action for action in own_started if action[0] == "collective"]
            # Messages stay in order, and so do collectives: how the two lie is the rank's own.
            while messages or collectives:
                take = messages if not collectives else collectives if not messages else None
                actions.append((take or chance.choice([messages, collectives])).pop(0))
            actions.append(("wait",))
    return program


def start(action: Any) -> Any:
    """Start an action; return its handle."""
    rank, k = dist.get_rank(), dist.get_world_size()
    if action[0] == "send":
        return dist.isend(torch.zeros(action[2] // 4), action[1])
    if action[0] == "recv":
        return dist.irecv(torch.empty(action[2] // 4), action[1])
    _, kind, root, size = action
    x = torch.zeros(size // 4)
    several = [torch.zeros(size // 4) for _ in range(k)]
    if kind == "gather":
        return dist.gather(x, several if rank == root else None, root, async_op=True)
    if kind == "scatter":
        return dist.scatter(x, several if rank == root else None, root, async_op=True)
    if kind == "broadcast":
        return dist.broadcast(x, root, async_op=True)
    if kind == "reduce":
        return dist.reduce(x, root, async_op=True)
    if kind == "all_gather":
        return dist.all_gather(several, x, async_op=True)
    if kind == "all_reduce":
        return dist.all_reduce(x, async_op=True)
    if kind == "all_to_all":
        return dist.all_to_all(several, [x.clone() for _ in range(k)], async_op=True)
    return dist.barrier(async_op=True)


def on_rank(program: list[list[Any]]) -> list[Any]:
    """Run a program; return its operations in the order of their start."""
    works, waited = [], 0
    for action in program[dist.get_rank()]:
        if action[0] == "compute":
            compute(action[1])
        elif action[0] == "wait":
            for work in works[waited:]:
                work.wait()
            waited = len(works)
        else:
            works.append(start(action))
    return [work._operation.end for work in works]


def differ(seed: int) -> str:
    """Return how the two simulations differ on a program; empty if they do not."""
    program = random_program(seed)
    eager = 4 * 256 * random.Random(-seed).choice([0, 0, 1, 4])
    expected = EventSimulation(program, ALPHA, BETA, eager).ends
    network = Network(ALPHA, BETA, eager_below=eager)
    ends = Ranks(len(program), on="simulated", network=network).run(on_rank, program)
    if ends == expected:
        return ""
    return f"seed {seed}, eager_below={eager}:\n{program}\nexpected {expected}\nfound    {ends}"


def test_an_eager_message_does_not_overtake_a_larger_one() -> None:
    def program() -> list[float]:
        first, second = torch.zeros(1000), torch.zeros(2)
        if dist.get_rank() == 0:
            works = [dist.isend(first + 1, 1), dist.isend(second + 2, 1)]
        else:
            compute(1.0)
            works = [dist.irecv(first), dist.irecv(second)]  # from anyone, and in this order too
        for work in works:
            work.wait()
        return [first[0].item(), second[0].item()]

    network = Network(ALPHA, BETA, eager_below=100)
    assert Ranks(2, on="simulated", network=network).run(program)[1] == [1, 2]


def test_a_receive_from_anyone_is_not_overtaken_by_a_later_one() -> None:
    def program() -> list[float]:
        if dist.get_rank() == 0:
            for value in (1.0, 2.0):
                dist.send(torch.tensor(value), 1)
            return []
        came = [torch.zeros(()) for _ in range(2)]
        works = [dist.irecv(came[0]), dist.irecv(came[1], 0)]
        for work in works:
            work.wait()
        return [x.item() for x in came]

    assert Ranks(2, on="simulated").run(program)[1] == [1, 2]


def test_a_few_programs() -> None:
    assert not list(filter(None, map(differ, range(20))))


@pytest.mark.parametrize("first", range(100, 300, 50))
@pytest.mark.large
def test_many_programs(first: int) -> None:
    assert not list(filter(None, map(differ, range(first, first + 50))))
