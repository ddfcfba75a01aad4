"""A pipeline trains as one process does, whatever the schedule; it sends what it must, no more."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from course_lib.pipeline_parallel import (
    Pipeline,
    bubble_fraction,
    gpipe,
    one_forward_one_backward,
    peak_activations,
    simulate,
    split_layers,
    zero_bubble_fraction,
)
from course_lib.pipeline_parallel.weight_gradients import LaterWeightGradients
from course_lib.ranks import Device, Network, RankError, Ranks, clock
from tests.helpers import pipelines

WORLDS = [("simulated", k) for k in (1, 2, 3, 4)] + [("cpu", k) for k in (2, 3)]
STEPS = 3
TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}


def pipeline_of(name, k, m, kind="plain", **options):
    plan = pipelines.SCHEDULES[name](k, m)
    return Pipeline(split_layers(pipelines.model(kind), plan.stages), F.mse_loss, plan, **options)


def train(name, k, m, kind, accumulate):
    """Return this rank's weights, the losses if it knows them, and the most that it held.

    With `accumulate`, batches in two halves, whose gradients add up.
    """
    pipeline = pipeline_of(name, k, m, kind)
    optimizer = pipelines.optimizer_of(list(pipeline.parameters()))
    losses = []
    for step in range(STEPS):
        x, y = pipelines.batch(step, kind)
        optimizer.zero_grad()
        if accumulate:
            halves = zip(x.chunk(2), y.chunk(2), strict=True)
            parts = [pipeline.step(*half) for half in halves]
            loss = None if parts[0] is None else (parts[0] + parts[1]) / 2
            for param in {p for p in pipeline.parameters() if p.grad is not None}:
                param.grad /= 2
        else:
            loss = pipeline.step(x, y)
        optimizer.step()
        losses.append(None if loss is None else loss.item())
    return pipeline.state_dict(), losses, pipeline.peak_activations


def check_like_one_process(results, kind, plan):
    weights, losses = pipelines.train_alone(kind, STEPS)
    trained = {}
    for state, _, _ in results:
        trained |= {name.split(".", 2)[2]: tensor for name, tensor in state.items()}
    assert trained.keys() == weights.keys()
    for name, tensor in weights.items():
        tolerance = {"rtol": 1e-4, "atol": 1e-5} if kind == "single" else TOLERANCE
        torch.testing.assert_close(trained[name], tensor, **tolerance, msg=name)
    losses_by_rank = [step_losses for _, step_losses, _ in results]
    assert losses_by_rank[-1] == pytest.approx(losses, rel=1e-5)
    assert all(step_losses == [None] * STEPS for step_losses in losses_by_rank[:-1])
    assert [peak for _, _, peak in results] == peak_activations(plan)


@pytest.mark.parametrize("name", pipelines.SCHEDULES)
@pytest.mark.parametrize(("on", "k"), WORLDS)
def test_weights_are_those_of_one_process(ranks_of, on, k, name):
    m = 4 if k == 4 else 6
    results = ranks_of(on, k).run(train, name, k, m, "plain", False)
    check_like_one_process(results, "plain", pipelines.SCHEDULES[name](k, m))


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("kind", pipelines.MODELS[1:])
@pytest.mark.parametrize("name", pipelines.SCHEDULES)
def test_with_float32_and_frozen_parameters(ranks_of, name, kind, k):
    results = ranks_of("simulated", k).run(train, name, k, 6, kind, False)
    check_like_one_process(results, kind, pipelines.SCHEDULES[name](k, 6))


@pytest.mark.parametrize("name", ["1f1b", "zero_bubble"])
def test_gradients_add_up_over_batches(ranks_of, name):
    results = ranks_of("simulated", 3).run(train, name, 3, 3, "plain", True)
    check_like_one_process(results, "plain", pipelines.SCHEDULES[name](3, 3))


def only_what_is_needed(k):
    """Batches only where they are needed, stages of others on the device meta, in a group."""
    import torch.distributed as dist

    group = dist.new_group([1, 2, 3])
    if dist.get_rank() == 0:
        return {}
    rank = dist.get_rank() - 1
    stages = [
        stage if i == rank else stage.to("meta")
        for i, stage in enumerate(split_layers(pipelines.model(), k))
    ]
    pipeline = Pipeline(stages, F.mse_loss, one_forward_one_backward(k, 4), group=group)
    x, y = pipelines.batch(0)
    pipeline.step(x if rank == 0 else None, y if rank == k - 1 else None)
    return {n.split(".", 2)[2]: p.grad for n, p in pipeline.named_parameters()}


@pytest.mark.parametrize("on", ["simulated", "cpu"])
def test_in_a_group_where_ranks_know_only_their_part(ranks_of, on):
    net = pipelines.model()
    x, y = pipelines.batch(0)
    F.mse_loss(net(x), y).backward()
    gradients = {}
    for part in ranks_of(on, 4).run(only_what_is_needed, 3):
        gradients |= part
    for name, param in net.named_parameters():
        torch.testing.assert_close(gradients[name], param.grad, **TOLERANCE)


def wrong(case):
    x, y = pipelines.batch(0)
    if case == "divide":
        pipeline_of("gpipe", 2, 5).step(x, y)
    if case == "shape":
        pipeline = pipeline_of("gpipe", 2, 3)
        pipeline.step(x, y)
        pipeline.step(x[:6], y[:6])
    if case == "missing":
        pipeline_of("gpipe", 2, 3).step(None, None)
    if case == "stages":
        Pipeline(split_layers(pipelines.model(), 3), F.mse_loss, gpipe(2, 3))
    if case == "shared":
        net = pipelines.model()
        net[7].up.weight = net[1].up.weight
        Pipeline(split_layers(net, 2), F.mse_loss, gpipe(2, 3))
    if case == "deadlock":
        plan = gpipe(2, 2)
        plan = plan._replace(steps=(plan.steps[0], plan.steps[1][::-1]))
        Pipeline(split_layers(pipelines.model(), 2), F.mse_loss, plan)
    if case == "integers":
        layers = nn.Sequential(nn.Flatten(), nn.Flatten())
        Pipeline(split_layers(layers, 2), F.mse_loss, gpipe(2, 1)).step(x.long(), y)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("divide", "12 inputs cannot be divided into 5 equal micro-batches"),
        ("shape", r"inputs had shape \(12, 4\), now \(6, 4\)"),
        ("missing", "needs the inputs, got inputs=None"),
        ("stages", "2 ranks and 2 stages, but there are 2 ranks and 3 stages"),
        ("shared", "is also a parameter of rank 0"),
        ("deadlock", "a deadlock"),
        ("integers", "floating-point tensors"),
    ],
)
def test_what_cannot_work_is_refused(ranks_of, case, message):
    with pytest.raises(RankError, match=message):
        ranks_of("simulated", 2).run(wrong, case)


# --- its time -------------------------------------------------------------------------------------


D = 16
M = 6
FLOPS = 1e6
FORWARD = 2 * D**3 * 2 / FLOPS  # seconds: two square products of a micro-batch with D rows


def step_of(name, k):
    """Return when this rank began and was done: a step after the one in which shapes are learned.

    Stages are products of square matrices, so that F, I and W take equally long. The inputs require
    gradients, or the first stage would have less to do.
    """
    plan = pipelines.SCHEDULES[name](k, M)
    layers = [nn.Linear(D, D, bias=False) for _ in range(2 * k)]
    stages = split_layers(nn.Sequential(*layers), plan.stages)
    pipeline = Pipeline(stages, lambda y, _: y.sum(), plan)
    x = torch.ones(M * D, D, requires_grad=True)
    pipeline.step(x, x.detach())
    torch.distributed.barrier()
    begin = clock()
    pipeline.step(x, x.detach())
    return begin, clock()


@pytest.mark.parametrize("name", pipelines.SCHEDULES)
@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_measured_bubble_is_that_of_the_formula(k, name):
    """On simulated ranks whose operators take what their arithmetic takes, and messages nothing."""
    network = Network(latency=0.0, bandwidth=float("inf"))
    with Ranks(k, on="simulated", network=network, device=Device(flops=FLOPS)) as ranks:
        times = ranks.run(step_of, name, k)
    took = max(end for _, end in times) - min(begin for begin, _ in times)
    backward = 2 * FORWARD
    work = M * (FORWARD + backward)
    plan = pipelines.SCHEDULES[name](k, M)
    run = simulate(plan, FORWARD, backward)
    assert took == pytest.approx(run.makespan, rel=1e-9)
    if name in ("gpipe", "1f1b", "interleaved"):
        assert 1 - work / took == pytest.approx(bubble_fraction(k, M, plan.chunks), abs=1e-9)
    if name == "zero_bubble":
        fraction = zero_bubble_fraction(k, M, FORWARD, backward, FORWARD)
        assert 1 - work / took == pytest.approx(fraction, abs=1e-9)


# --- backward in two halves gives the gradients of backward in one --------------------------------


def in_halves(net: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """Return what the first half gave; raise AssertionError if both together are not right."""
    x.requires_grad_()
    net(x).square().sum().backward()
    expected = [x.grad, *(param.grad for param in net.parameters())]
    x.grad = None
    net.zero_grad()
    later = LaterWeightGradients()
    with later:
        y = net(x)
    y.square().sum().backward()
    torch.testing.assert_close(x.grad, expected[0])
    first = {name: None if p.grad is None else p.grad.clone() for name, p in net.named_parameters()}
    later.compute()
    for param, gradient in zip(net.parameters(), expected[1:], strict=True):
        assert (param.grad is None) == (gradient is None)
        if gradient is not None:
            torch.testing.assert_close(param.grad, gradient)
    return first


def test_tied_frozen_and_computed_weights():
    torch.manual_seed(0)
    a, b, c, d = (nn.Linear(5, 5) for _ in range(4))
    b.weight = a.weight
    c.weight.requires_grad_(False)
    d.bias.requires_grad_(False)
    normed = parametrizations.weight_norm(nn.Linear(5, 5))
    first = in_halves(nn.Sequential(a, b, nn.Tanh(), c, d, normed), torch.randn(4, 5))
    assert first["0.weight"] is None
    assert first["5.parametrizations.weight.original0"] is not None  # behind it is more to do


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(("inputs", "outputs"), [(5, 0), (0, 5)])
def test_a_share_without_columns(inputs, outputs):
    """With more ranks than columns or rows of a weight, some rank has none."""
    in_halves(nn.Linear(inputs, outputs, bias=outputs > 0), torch.randn(2, 3, inputs))
