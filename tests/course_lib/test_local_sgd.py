"""Local SGD, DiLoCo and the delayed step equal their formulas, computed in one process."""

import io
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, AdamW

from course_lib import local_sgd
from course_lib.compression import ErrorFeedback, OneBit, PowerSGD, RandomK, TopK
from course_lib.local_sgd import DiLoCo, LocalSGD, OneStepDelay, flatten, unflatten
from course_lib.ranks import Network, RankError, Ranks, clock, compute
from course_lib.sharding import shard, shard_bounds
from tests.helpers.ddp_scenarios import FEW, WORLDS, batches, mlp, own_shards, state_of

STEPS, LR = 12, 0.3
INNER = {"sgd": lambda net: SGD(net.parameters(), LR), "adamw": lambda net: AdamW(net.parameters())}


def train(method: type, inner: str = "sgd", finish: str = "", *args, **options):
    """Return this rank's weights after 12 steps on its own part of each batch.

    With `finish`, a method's name, those before it was called and those after it: shape (2, n).
    """
    net = mlp()
    optimizer = INNER[inner](net)
    stepper = method(optimizer, *args, **options)
    for x, y in own_shards(steps=STEPS):
        optimizer.zero_grad()
        mse_loss(net(x), y).backward()
        stepper.step()
    before = flatten(list(net.parameters()))
    if not finish:
        return before
    getattr(stepper, finish)()
    return torch.stack([before, flatten(list(net.parameters()))])


class Alone:
    """K replicas in this process, each with its own optimizer and its own rows."""

    def __init__(self, k: int, inner: str = "sgd", make=mlp) -> None:
        self.k = k
        self.nets = [make() for _ in range(k)]
        self.optimizers = [INNER[inner](net) for net in self.nets]

    def backward(self, x, y):
        for i, net in enumerate(self.nets):
            net.zero_grad()
            mse_loss(net(shard(x, self.k, i)), shard(y, self.k, i)).backward()
        return [torch.cat([p.grad.flatten() for p in net.parameters()]) for net in self.nets]

    def step(self, x, y) -> None:
        self.backward(x, y)
        for optimizer in self.optimizers:
            optimizer.step()

    @property
    def weights(self):
        return torch.stack([flatten(list(net.parameters())) for net in self.nets])

    def set(self, weights) -> None:
        with torch.no_grad():
            for net, vector in zip(self.nets, weights, strict=True):
                unflatten(vector, list(net.parameters()))


def close(replicas, expected) -> None:
    torch.testing.assert_close(torch.stack(replicas), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("on", "k"), WORLDS)
@pytest.mark.parametrize("inner", INNER)
def test_local_sgd_averages_every_h_steps_and_not_in_between(ranks_of, on, k, inner):
    alone = Alone(k, inner)
    for t, (x, y) in enumerate(batches(steps=STEPS), 1):
        alone.step(x, y)
        if t % 5 == 0:  # 12 steps: the ranks have parted again at the end
            alone.set(alone.weights.mean(0).expand(k, -1))
    replicas = ranks_of(on, k).run(train, LocalSGD, inner, every=5)
    close(replicas, alone.weights)
    assert k == 1 or not torch.equal(replicas[0], replicas[1])
    averaged = ranks_of(on, k).run(train, LocalSGD, inner, "average", every=5)
    close([weights[1] for weights in averaged], alone.weights.mean(0).expand(k, -1))


def diloco(k, inner, every, outer_lr=0.7, outer_momentum=0.9, fragments=1, overlap=0):
    """Return all ranks' weights at the end, and then with what was still on its way.

    The formulas, with Nesterov's momentum written out.
    """
    alone, gap = Alone(k, inner), every // fragments
    start = alone.weights[0]
    cuts = [slice(*shard_bounds(len(start), fragments, f)) for f in range(fragments)]
    outer, buffers = start.clone(), [0.0 * start[cut] for cut in cuts]
    arrivals = {}

    def arrive(f: int, change) -> None:
        buffers[f] = outer_momentum * buffers[f] + change
        outer[cuts[f]] -= outer_lr * (change + outer_momentum * buffers[f])
        weights = alone.weights
        weights[:, cuts[f]] = outer[cuts[f]]
        alone.set(weights)

    for t, (x, y) in enumerate(batches(steps=STEPS), 1):
        alone.step(x, y)
        if t % gap == 0:
            f = (t // gap - 1) % fragments
            arrivals[t + overlap] = f, outer[cuts[f]] - alone.weights[:, cuts[f]].mean(0)
        if t in arrivals:
            arrive(*arrivals.pop(t))
    before = alone.weights
    for late in arrivals.values():
        arrive(*late)
    return [before, alone.weights]


OPTIONS = [
    {"every": 1},
    {"every": 4},
    {"every": 4, "outer_lr": 0.5, "outer_momentum": 0.0},
    {"every": 4, "fragments": 2},
    {"every": 3, "fragments": 3},
    {"every": 4, "overlap": 3},
    {"every": 5},
    {"every": 6, "fragments": 3, "overlap": 1},
]


@pytest.mark.parametrize(
    ("inner", "on", "k", "options"),
    [
        (inner, *world, options)
        for options in OPTIONS
        for inner, worlds in (("sgd", WORLDS), ("adamw", FEW))
        for world in worlds
    ],
    ids=str,
)
def test_diloco_equals_its_formula(ranks_of, on, k, inner, options):
    replicas = ranks_of(on, k).run(train, DiLoCo, inner, "finish", **options)
    for part, expected in enumerate(diloco(k, inner, **options)):
        close([weights[part] for weights in replicas], expected)


class InOneMessage:
    """The function `diloco` as a class, which also sees to it that `.grad` stays the inner one."""

    def __init__(self, optimizer, *options) -> None:
        self.params = local_sgd.trained(optimizer)
        self._step = local_sgd.diloco(iter(self.params), optimizer.step, *options)

    def step(self) -> None:
        before = [(param.grad, param.grad.clone()) for param in self.params]
        self._step()
        for param, (grad, copy) in zip(self.params, before, strict=True):
            assert param.grad is grad and torch.equal(grad, copy)


@pytest.mark.parametrize("options", [(1, 0.7, 0.9), (4, 0.5, 0.0), (5, 0.7, 0.9), (13, 0.7, 0.5)])
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize(("on", "k"), WORLDS)
def test_diloco_in_one_message_equals_its_formula(ranks_of, on, k, inner, options):
    ranks = ranks_of(on, k)
    close(ranks.run(train, InOneMessage, inner, "", *options), diloco(k, inner, *options)[0])
    assert ranks.trace.calls(0)["all_reduce"] == STEPS // options[0]


@pytest.mark.parametrize(("on", "k"), [("simulated", 4), ("cpu", 2)])
def test_fragments_cut_the_peak_and_not_the_sum(ranks_of, on, k):
    ranks, sent = ranks_of(on, k), {}
    for fragments in (1, 2, 4):
        ranks.run(train, DiLoCo, every=4, fragments=fragments)
        calls = [e for e in ranks.trace.events if (e.rank, e.kind) == (0, "all_reduce")]
        sent[fragments] = [call.bytes for call in calls]
    n = sum(param.nbytes for param in mlp().parameters())
    assert {sum(sizes) for sizes in sent.values()} == {STEPS // 4 * n}
    for fragments, sizes in sent.items():
        assert len(sizes) == STEPS // 4 * fragments
        assert max(sizes) - n / fragments < 8  # 183 numbers are not cut evenly


def waiting(overlap: int) -> float:
    net = nn.Linear(1000, 1000, bias=False)
    optimizer = SGD(net.parameters(), LR)
    local = DiLoCo(optimizer, every=4, overlap=overlap)
    start = clock()
    for _ in range(8):
        net.weight.grad = torch.ones_like(net.weight)
        compute(10e-3)
        local.step()
    took = clock() - start
    local.finish()
    return took


def test_an_overlapped_exchange_hides_behind_the_next_steps():
    network = Network(latency=1e-3, bandwidth=200e6)  # 21 ms for 4 MB on two ranks' ring
    ranks = Ranks(2, on="simulated", network=network)
    waits, hides = (max(ranks.run(waiting, overlap)) for overlap in (0, 3))
    took = 2 * (1e-3 + 2e6 / 200e6)
    assert waits == pytest.approx(80e-3 + 2 * took, rel=1e-6)
    assert hides == pytest.approx(80e-3, rel=1e-6)


@pytest.mark.parametrize(("on", "k"), WORLDS)
def test_one_step_delay_equals_its_formula(ranks_of, on, k):
    alone, on_its_way = Alone(k), torch.tensor(0.0)
    for x, y in batches(steps=STEPS):
        mean = torch.stack(alone.backward(x, y)).mean(0)
        alone.set(alone.weights - LR * on_its_way)
        on_its_way = mean
    replicas = ranks_of(on, k).run(train, OneStepDelay, finish="finish")
    close([weights[0] for weights in replicas], alone.weights)
    close([weights[1] for weights in replicas], alone.weights - LR * on_its_way)


def normed(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 3)).double()


def train_normed(method: type, stop: int = 0, overflow: int = 0, **options):
    """Return parameters and buffers after 12 steps; after `stop` of them, all is loaded anew.

    In step `overflow`, the last rank's gradients are not finite.
    """
    last = dist.get_rank() == dist.get_world_size() - 1

    def make(seed: int):
        net = normed(seed)
        return net, method(INNER["adamw"](net), module=net, **options)

    net, stepper = make(0)
    for step, (x, y) in enumerate(own_shards(steps=STEPS), 1):
        net.zero_grad()
        mse_loss(net(x), y).backward()
        if step == overflow and last:
            net[0].bias.grad[0] = torch.inf
        stepper.step()
        if step == stop:
            file = io.BytesIO()
            torch.save((net.state_dict(), stepper.state_dict()), file)
            net, stepper = make(1)
            file.seek(0)
            saved, state = torch.load(file)
            net.load_state_dict(saved)
            stepper.load_state_dict(state)
    if method is DiLoCo:
        stepper.finish()
    return state_of(net)


def named(option: object) -> str | None:
    """Name the options of a test without the address of an object."""
    return ", ".join(option) if isinstance(option, dict) else None


RESUMED = [
    (LocalSGD, {"every": 4}),
    (DiLoCo, {"every": 4}),
    (DiLoCo, {"every": 6, "fragments": 2, "overlap": 2}),
    (DiLoCo, {"every": 4, "fragments": 2, "compressor": ErrorFeedback(TopK(0.1))}),
    (DiLoCo, {"every": 2, "compressor": ErrorFeedback(PowerSGD(1))}),
    (DiLoCo, {"every": 2, "compressor": ErrorFeedback(RandomK(0.1))}),
]


@pytest.mark.parametrize(("on", "k"), [("simulated", 3), ("cpu", 2)])
@pytest.mark.parametrize(("method", "options"), RESUMED, ids=named)
def test_a_run_that_stops_at_any_step_goes_on_with_the_same_bits(ranks_of, on, k, method, options):
    ranks = ranks_of(on, k)
    uninterrupted = ranks.run(train_normed, method, **options)
    for stop in range(1, options["every"] + 4):
        resumed = ranks.run(train_normed, method, stop, **options)
        torch.testing.assert_close(resumed, uninterrupted, rtol=0, atol=0)


@pytest.mark.parametrize("method", [LocalSGD, DiLoCo])
def test_batch_norm_s_statistics_are_averaged_with_the_weights(ranks_of, method):
    options = {} if method is LocalSGD else {"outer_lr": 1.0, "outer_momentum": 0.0}
    alone = Alone(3, "adamw", normed)
    for t, (x, y) in enumerate(batches(steps=STEPS), 1):
        alone.step(x, y)
        if t % 4 == 0:
            for tensors in zip(*map(state_of, alone.nets), strict=True):
                mean = sum(tensors) / 3
                for tensor in tensors:
                    tensor.copy_(mean)
    assert alone.nets[0][1].num_batches_tracked == STEPS
    for replica in ranks_of("cpu", 3).run(train_normed, method, every=4, **options):
        torch.testing.assert_close(replica, state_of(alone.nets[0]), rtol=1e-6, atol=1e-9)


def train_and_count(**options):
    with warnings.catch_warnings(record=True) as notices:
        warnings.simplefilter("always")
        return train_normed(DiLoCo, **options), len(notices)


@pytest.mark.parametrize("overflow", [1, 6, 8])
@pytest.mark.parametrize(
    "options",
    [
        {"every": 2},
        {"every": 4, "fragments": 2, "overlap": 1},
        {"every": 2, "compressor": ErrorFeedback(OneBit())},
    ],
    ids=named,
)
def test_diloco_drops_the_round_in_which_a_rank_overflows(ranks_of, options, overflow):
    ranks = ranks_of("cpu", 2)
    clean, _ = ranks.run(train_normed, DiLoCo, **options)
    (first, notices), (second, second_notices) = ranks.run(
        train_and_count, overflow=overflow, **options
    )
    assert notices == second_notices == (2 if "compressor" in options else 1)  # it says so, too
    assert all(tensor.isfinite().all() for tensor in (*first, *second))
    if options["every"] == 2:  # the last step ends a round
        torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert not torch.equal(first[0], clean[0])


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (DiLoCo, {"every": 5, "fragments": 2}, "every=5 .* multiple of fragments=2"),
        (DiLoCo, {"every": 4, "fragments": 2, "overlap": 2}, "2 steps later"),
        (
            DiLoCo,
            {"every": 4, "overlap": 1, "compressor": TopK(0.1)},
            "overlap must be 0 with a compressor",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(ranks_of, method, options, message):
    with pytest.raises(RankError, match=f"(?s)ValueError.*{message}"):
        ranks_of("simulated", 2).run(train, method, **options)


def unfrozen_later(method: type, *options):
    """Return this rank's weights if a second layer joins the optimizer between two steps."""
    first, second = mlp(), mlp()
    optimizer = SGD(first.parameters(), LR)
    stepper = method(optimizer, *options)
    for number, (x, y) in enumerate(own_shards(steps=4)):
        if number == 2:
            optimizer.add_param_group({"params": second.parameters()})
        optimizer.zero_grad()
        mse_loss(first(x) + second(x), y).backward()
        stepper.step()
    if isinstance(stepper, OneStepDelay):
        stepper.finish()
    start = flatten(list(mlp().parameters()))
    return [flatten(list(net.parameters())) - start for net in (first, second)]


@pytest.mark.parametrize("method", [(LocalSGD, 1), (OneStepDelay,)], ids=named)
def test_a_group_that_is_added_later_is_averaged_too(ranks_of, method):
    one, *others = ranks_of("simulated", 3).run(unfrozen_later, *method)
    alone = ranks_of("simulated", 1).run(unfrozen_later, *method)[0]
    for moved in others:
        torch.testing.assert_close(moved, one, rtol=0, atol=0)
    torch.testing.assert_close(one, alone)  # the mean of equal shards' gradients is the batch's


def test_diloco_refuses_a_group_that_is_added_later(ranks_of):
    with pytest.raises(RankError, match=r"rank \d: the optimizer has other parameters"):
        ranks_of("simulated", 2).run(unfrozen_later, DiLoCo, 1)
