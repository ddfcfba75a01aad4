"""The parameter server: what it did is what its history says, and that is what time makes of it."""

import heapq
import time
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.optim import SGD

from course_lib import asynchronous
from course_lib.local_sgd import flatten, unflatten
from course_lib.ranks import Network, RankError, Ranks
from tests.helpers.ddp_scenarios import mlp

LR = 0.05
FREE = Network(latency=0.0, bandwidth=float("inf"))


def batch(worker: int, number: int):
    g = torch.Generator().manual_seed(1000 * worker + number)
    return tuple(torch.randn(4, n, generator=g, dtype=torch.float64) for n in (6, 3))


def gradient(net: torch.nn.Module, worker: int, number: int) -> None:
    x, y = batch(worker, number)
    mse_loss(net(x), y).backward()


def work(seconds: list[float], leave_after: int | None = None) -> int:
    net, rank, number = mlp(seed=dist.get_rank()), dist.get_rank(), 0
    with asynchronous.ParameterServer(net.parameters()) as server:
        while server.pull():
            if rank == 1 and number == leave_after:
                break
            gradient(net, rank, number)
            time.sleep(seconds[rank - 1])
            server.push()
            number += 1
    assert not server.pull()
    return number


def train(seconds, updates, leave_after=None, **options):
    if dist.get_rank():
        return work(seconds, leave_after)
    net = mlp()
    history = asynchronous.serve(SGD(net.parameters(), LR), updates, **options)
    return history, flatten(list(net.parameters()))


def run(ranks: Ranks, *args, **options):
    return ranks.run(train, *args, **options)[0]


def replayed(history, wait_for: int | None = None, aware: bool = False):
    """Return the weights that a history leads to, by its formula, in one process."""
    net = mlp()
    params = list(net.parameters())
    weights, numbers, collected = [flatten(params)], Counter[int](), {}
    for worker, staleness, applied, _ in history:
        unflatten(weights[len(weights) - 1 - staleness], params)
        net.zero_grad()
        gradient(net, worker, numbers[worker])
        numbers[worker] += 1
        if not applied:
            continue
        gradients = torch.cat([p.grad.flatten() for p in params if p.grad is not None])
        collected[worker] = gradients / (1 + staleness) if aware else gradients
        if len(collected) == (wait_for or 1):
            mean = torch.stack([collected[rank] for rank in sorted(collected)]).mean(0)
            weights.append(weights[-1] - LR * mean)
            collected = {}
    return weights[-1]


def by_the_clock(seconds: list[float], updates: int) -> list[tuple[int, int]]:
    """Return (worker, staleness) of each update when nobody waits, and messages take no time."""
    due = [(duration, worker) for worker, duration in enumerate(seconds, 1)]
    heapq.heapify(due)
    pulled, events = dict.fromkeys(range(1, len(seconds) + 1), 0), []
    for version in range(updates):
        now, worker = heapq.heappop(due)
        events.append((worker, version - pulled[worker]))
        pulled[worker] = version + 1
        heapq.heappush(due, (now + seconds[worker - 1], worker))
    return events


SPEEDS = {2: [0.01], 3: [0.01, 0.027], 4: [0.01, 0.0131, 0.0517]}


@pytest.mark.parametrize("k", SPEEDS)
def test_events_come_in_the_order_of_time_and_repeat_bit_for_bit(k):
    ranks = Ranks(k, on="simulated", network=FREE)
    history, weights = run(ranks, SPEEDS[k], 40)
    assert [(update.worker, update.staleness) for update in history] == by_the_clock(SPEEDS[k], 40)
    again, same = run(Ranks(k, on="simulated", network=FREE), SPEEDS[k], 40)
    assert (again, same.tolist()) == (history, weights.tolist())


MODES = [
    *({}, {"bound": 0}, {"bound": 2}, {"staleness_aware": True}),
    *({"wait_for": 1}, {"wait_for": -1}, {"wait_for": -2}),
]


@pytest.mark.parametrize("options", MODES)
@pytest.mark.parametrize(("on", "k"), [("simulated", 4), ("cpu", 2), ("cpu", 4)])
def test_the_weights_are_those_of_the_history(ranks_of, on, k, options):
    options = dict(options)
    if (n := options.get("wait_for", 1)) < 0:  # of all workers, of all but one
        options["wait_for"] = max(1, k + n)
    history, weights = run(ranks_of(on, k), [t / 5 for t in SPEEDS[k]], 20, **options)
    aware = options.get("staleness_aware", False)
    expected = replayed(history, options.get("wait_for"), aware)
    torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-13)
    assert sum(update.applied for update in history) == 20 * options.get("wait_for", 1)


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_nobody_gets_further_ahead_than_the_bound(bound):
    seconds = [0.01, 0.011, 0.3]
    history, _ = run(Ranks(4, on="simulated", network=FREE), seconds, 60, bound=bound)
    counts, lead = Counter({1: 0, 2: 0, 3: 0}), 0
    for update in history:
        counts[update.worker] += 1
        lead = max(lead, max(counts.values()) - min(counts.values()))
    assert lead == bound + 1, "a worker may finish one gradient when it is `bound` ahead"
    assert max(pushed.staleness for pushed in history) <= 2 * (2 * bound + 1)
    free, _ = run(Ranks(4, on="simulated", network=FREE), seconds, 60)
    assert max(pushed.staleness for pushed in free) > max(pushed.staleness for pushed in history)


def test_backup_workers_let_the_slowest_come_too_late():
    seconds = [0.01, 0.011, 0.012, 0.035]
    ranks = Ranks(5, on="simulated", network=FREE)
    history, _ = run(ranks, seconds, 30, wait_for=3)
    late = [update for update in history if not update.applied]
    assert {update.worker for update in late} == {4}
    assert all(update.staleness > 0 for update in late)
    assert all(update.staleness == 0 for update in history if update.applied)
    assert history[-1].seconds == pytest.approx(30 * 0.012)  # the third fastest's pace
    everyone, _ = run(ranks, seconds, 30, wait_for=4)
    assert everyone[-1].seconds == pytest.approx(30 * 0.035)  # the slowest's
    assert all(update.applied for update in everyone)


@pytest.mark.parametrize("on", ["simulated", "cpu"])
@pytest.mark.parametrize("options", [{}, {"bound": 1}, {"wait_for": 2}])
def test_a_worker_that_leaves_does_not_stop_the_others(ranks_of, on, options):
    history, _ = run(ranks_of(on, 4), [0.002] * 3, 20, leave_after=3, **options)
    assert sum(update.applied for update in history) == 20 * options.get("wait_for", 1)
    assert sum(update.worker == 1 for update in history) == 3


@pytest.mark.parametrize(
    ("k", "options", "message"),
    [
        (4, {"wait_for": 3, "leave_after": 2}, "worker 1 left: .* 3 workers, and only 2"),
        (2, {"leave_after": 2}, "all workers left after 2 of 20 updates"),
        (1, {}, "all workers left after 0 of 20 updates"),
        (3, {"bound": 1, "wait_for": 2}, "cannot be used together"),
        (3, {"wait_for": 3}, "wait_for must be 1 to 2, the number of workers; got 3"),
    ],
)
def test_what_cannot_go_on_is_named(ranks_of, k, options, message):
    with pytest.raises(RankError, match=f"(?s){message}"):
        ranks_of("simulated", k).run(train, [0.01] * (k - 1), 20, **options)


def push_first() -> None:
    asynchronous.ParameterServer(mlp().parameters()).push()


def test_wrong_use_by_a_worker_is_named(ranks_of):
    with pytest.raises(RankError, match=r"call pull\(\) before each push"):
        ranks_of("simulated", 2).run(lambda: dist.get_rank() and push_first())


# The rules of a server without messages, and a worker of so many updates --------------------------


def events_of(seed: int, workers: int) -> list[tuple[str, int]]:
    g = torch.Generator().manual_seed(seed)
    drawn = torch.randint(2 * workers, (60,), generator=g).tolist()
    pulls = [("pull", worker) for worker in range(workers)]
    return pulls + [(("pull", "push")[n % 2], n // 2) for n in drawn]


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_staleness_is_the_number_of_pushes_since_the_workers_last_pull(workers):
    events = events_of(0, workers)
    expected = []
    for at, (kind, worker) in enumerate(events):
        if kind == "push":
            pulled = max(i for i in range(at) if events[i] == ("pull", worker))
            expected.append(sum(kind == "push" for kind, _ in events[pulled:at]))
    assert asynchronous.staleness_of(iter(events)) == expected
    assert asynchronous.staleness_of([]) == []


SHAPES = ((3,), (), (2, 2))


def drawn(seed: int):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g, dtype=torch.float64) for shape in SHAPES]


def expect_equal(tensors, others) -> None:
    torch.testing.assert_close(tensors, others, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_an_async_server_divides_each_gradient_by_its_age_plus_one(workers):
    events, weights, served = events_of(1, workers), drawn(0), drawn(0)
    ages = iter(asynchronous.staleness_of(events))
    pull, push = asynchronous.async_server(iter(served), LR)
    for number, (kind, worker) in enumerate(events):
        if kind == "pull":
            pulled = pull(worker)
            expect_equal(pulled, weights)
            for tensor in pulled:
                tensor.fill_(9)  # a copy
            continue
        age = next(ages)
        assert push(worker, iter(drawn(number))) == age
        weights = [w - LR / (1 + age) * g for w, g in zip(weights, drawn(number), strict=True)]
        expect_equal(served, weights)


@pytest.mark.parametrize("wait_for", [1, 2, 3, 4])
def test_a_backup_server_steps_with_the_mean_of_the_first_gradients(wait_for):
    weights, served, fresh, collected = drawn(0), drawn(0), set[int](), []
    pull, push = asynchronous.backup_server(iter(served), LR, wait_for)
    for number, (kind, worker) in enumerate(events_of(2, 3)):
        if kind == "pull":
            fresh.add(worker)
            expect_equal(pull(worker), weights)
            continue
        gradients = drawn(number)
        assert push(worker, iter(gradients)) is (worker in fresh)
        for gradient in gradients:
            gradient.fill_(9)  # the caller may overwrite its gradients
        if worker in fresh:
            collected.append(drawn(number))
        if len(collected) == wait_for:
            means = [torch.stack(parts).mean(0) for parts in zip(*collected, strict=True)]
            weights = [w - LR * mean for w, mean in zip(weights, means, strict=True)]
            collected.clear()
            fresh.clear()
        expect_equal(served, weights)


def served_in_turn(updates: int, server: int):
    """Return, on the server's rank, (worker, weights sent, gradient received); else the weights."""
    net, rank = mlp(seed=dist.get_rank()), dist.get_rank()
    params = list(net.parameters())
    if rank != server:
        numbers = iter(range(updates))

        def loss():
            x, y = batch(rank, next(numbers))
            return mse_loss(net(x), y)

        for param in params:
            param.grad = torch.ones_like(param)  # an old one
        asynchronous.push_gradients(iter(params), loss, updates, server)
        return flatten(params)
    history = []
    for number in range(updates):
        for worker in (r for r in range(dist.get_world_size()) if r != server):
            weights = flatten(params) * (1 + number + worker)
            dist.send(weights, worker)
            dist.recv(received := torch.empty_like(weights), worker)
            history.append((worker, weights, received))
    return history


@pytest.mark.parametrize(("k", "server"), [(2, 0), (3, 2), (4, 1), (4, 0)])
@pytest.mark.parametrize("on", ["simulated", "cpu"])
def test_pushed_gradients_are_those_at_the_received_weights(ranks_of, on, k, server):
    updates, net = 3, mlp()
    params, numbers = list(net.parameters()), Counter[int]()
    results = ranks_of(on, k).run(served_in_turn, updates, server)
    for worker, weights, received in results[server]:
        unflatten(weights, params)
        net.zero_grad()
        gradient(net, worker, numbers[worker])
        numbers[worker] += 1
        expect_equal(received, torch.cat([param.grad.flatten() for param in params]))
        if numbers[worker] == updates:
            expect_equal(results[worker], weights)
