"""A transformer on any mesh has the gradients and losses of one process; bytes as in formulas."""

import math

import pytest
import torch

from course_lib.mesh import (
    AXES,
    Shape,
    average_gradients,
    batch_of,
    divide_experts,
    divide_tensors,
    make_mesh,
    next_word_loss,
    traffic,
    transformer,
    weights_held,
)
from course_lib.pipeline_parallel import Pipeline, one_forward_one_backward, split_layers
from course_lib.ranks import RankError
from tests.helpers.meshes import Case, train_alone, train_on_mesh


def check(results, case):
    """In each step all ranks know the norm of one process's gradient, and their losses its loss.

    A wrong weight on any rank changes both, from the next step on.
    """
    expected_norms, expected_losses = train_alone(case)
    for norms, _ in results:
        assert norms == pytest.approx(expected_norms, rel=1e-9)
    losses_by_rank = [losses for _, losses in results if losses]
    means = [sum(step) / len(step) for step in zip(*losses_by_rank, strict=True)]
    assert means == pytest.approx(expected_losses, rel=1e-9)


def layouts(world_size):
    """Every way to write a number as a product of sizes of the four axes, in order."""
    sizes = [d for d in range(1, world_size + 1) if world_size % d == 0]
    return [
        {axis: size for axis, size in zip(AXES, product, strict=True) if size > 1}
        for product in torch.cartesian_prod(*[torch.tensor(sizes)] * 4).reshape(-1, 4).tolist()
        if math.prod(product) == world_size
    ]


def named(sizes):
    return " ".join(f"{axis}{size}" for axis, size in sizes.items()) or "one"


def long(*values):
    return pytest.param(*values, marks=pytest.mark.large)


FOUR = layouts(4)
SOME = [{"data": 2, "tensor": 2}, {"pipeline": 2, "expert": 2}, {"tensor": 4}]
UP_TO_FOUR = [
    *(layout for k in (1, 2, 3) for layout in layouts(k)),
    *(layout if layout in SOME else long(layout) for layout in FOUR),
]


@pytest.mark.parametrize("sizes", UP_TO_FOUR, ids=named)
def test_every_layout_of_up_to_four_ranks(ranks_of, sizes):
    k = math.prod(sizes.values())
    case = Case("experts", passes=2, clip=0.3)
    check(ranks_of("simulated", k).run(train_on_mesh, sizes, case), case)


KINDS = [("dense", "adam"), ("frozen", "sgd"), ("frozen", "adam")]


@pytest.mark.parametrize(("kind", "optimizer"), KINDS)
def test_dense_and_frozen_parameters(ranks_of, kind, optimizer):
    case = Case(kind, optimizer)
    sizes = {"pipeline": 2, "tensor": 2} if kind == "dense" else {"data": 2, "pipeline": 2}
    check(ranks_of("simulated", 4).run(train_on_mesh, sizes, case), case)


# --- the mesh itself --------------------------------------------------------------------------


def who_is_with_me(sizes):
    mesh = make_mesh(**sizes)
    ranks = torch.distributed.get_process_group_ranks
    return mesh.coordinates, {name: ranks(group) for name, group in mesh.groups.items()}


@pytest.mark.parametrize("order", [AXES, AXES[::-1], ("tensor", "data", "expert", "pipeline")])
def test_groups_are_those_of_pytorchs_device_mesh(ranks_of, order):
    """The same ranks along each axis, in the same order, as a mesh of numbers has them."""
    sizes = dict(zip(order, (3, 1, 2, 2), strict=True))
    numbers = torch.arange(12).view(*sizes.values())
    for rank, (place, groups) in enumerate(ranks_of("simulated", 12).run(who_is_with_me, sizes)):
        assert numbers[tuple(place[axis] for axis in order)] == rank
        assert groups.keys() == {*AXES, "data×expert"}
        for name, ranks in groups.items():
            axes = name.split("×")
            along = [slice(None) if axis in axes else place[axis] for axis in order]
            assert ranks == sorted(numbers[tuple(along)].flatten().tolist())


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (lambda: make_mesh(rows=2), "axes must be among data, pipeline, expert, tensor"),
        (lambda: make_mesh(data=3), "data 3 have the product 3, but there are 2 ranks"),
    ],
)
def test_errors_say_what_is_wrong(ranks_of, program, message):
    with pytest.raises(RankError, match=message):
        ranks_of("simulated", 2).run(program)


# --- the bytes of each axis, counted by the trace, are those of the formulas ----------------------


LAYERS = 2
EVEN = Shape(words=8, length=4, width=8, heads=4, hidden=12, layers=LAYERS)
BATCH, M = 16, 2


def weights_then_two_steps(shape, sizes):
    """Return how many weights this rank holds, of the experts and others."""
    mesh = make_mesh(**sizes)
    torch.manual_seed(0)
    model = transformer(shape)
    divide_tensors(model, mesh["tensor"])
    divide_experts(model, mesh["expert"])
    stages = split_layers(model, mesh.sizes["pipeline"])
    plan = one_forward_one_backward(len(stages), M)
    pipeline = Pipeline(stages, next_word_loss, plan, group=mesh["pipeline"])
    rows = batch_of(torch.arange(BATCH * 5).view(BATCH, 5) % shape.words, mesh)
    for _ in range(2):
        pipeline.step(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
        average_gradients(pipeline, mesh)
    held = {name: param.numel() for name, param in pipeline.named_parameters()}
    experts = sum(number for name, number in held.items() if ".experts." in name)
    return sum(held.values()) - experts, experts


def mean_bytes(trace, k, axis):
    """Per rank and step, without the headers of the first, in which shapes are learned."""
    sent = sum(trace.bytes_sent(rank, group=axis) for rank in range(k))
    if axis == "pipeline":
        sent -= sum(e.bytes for e in trace.operations if e.kind == "send" and e.bytes == 80)
    return sent / k / 2


WITH_FORMULAS = [
    {"data": 2},
    {"tensor": 2},
    {"pipeline": 2},
    {"data": 2, "pipeline": 2},
    {"pipeline": 2, "tensor": 2},
    {"pipeline": 4},
    {"tensor": 4},
]


@pytest.mark.parametrize("sizes", WITH_FORMULAS)
def test_bytes_and_weights_are_those_of_the_formulas(ranks_of, sizes):
    k, shape = math.prod(sizes.values()), EVEN
    ranks = ranks_of("simulated", k)
    held = ranks.run(weights_then_two_steps, shape, sizes)
    assert sum(dense for dense, _ in held) / k == pytest.approx(weights_held(shape, **sizes)[0])
    expected = traffic(shape, BATCH, M, **sizes)
    measured = {axis: mean_bytes(ranks.trace, k, axis) for axis in ("tensor", "pipeline")}
    measured["data"] = sum(mean_bytes(ranks.trace, k, axis) for axis in ("data", "data×expert"))
    for axis, sent in measured.items():
        assert sent == pytest.approx(expected[axis], rel=1e-12), axis
