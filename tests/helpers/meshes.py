"""A transformer that nothing divides, trained on a mesh and in one process."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from course_lib.mesh import (
    Shape,
    average_gradients,
    batch_of,
    divide_experts,
    divide_tensors,
    make_mesh,
    next_word_loss,
    places_of,
    take_whole,
    transformer,
    whole_state,
)
from course_lib.pipeline_parallel import Pipeline, split_layers
from tests.helpers.pipelines import schedule

STEPS, BATCH = 5, 24
DENSE = Shape(words=11, length=5, width=10, heads=5, hidden=13, layers=2)
"""Four layers. Nothing divides heads, experts or hidden units, and three ranks not the layers."""
KINDS = {
    "dense": DENSE,
    "experts": DENSE._replace(experts=5, top_k=2),
    "tied": DENSE._replace(tied=True),
    "frozen": DENSE._replace(experts=5),
    "tied and frozen": DENSE._replace(tied=True, experts=5),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.3, momentum=0.9),
    "adam": lambda params: torch.optim.AdamW(params, lr=0.01),
}


class Case(NamedTuple):
    """The training to run; the layout of the mesh is given separately."""

    kind: str = "dense"
    optimizer: str = "sgd"
    plan: str = "1f1b"
    dtype: torch.dtype = torch.float64
    micro_batches: int = 2
    rematerialize: bool = False


def whole_model(case: Case) -> nn.Sequential:
    torch.manual_seed(0)
    model = transformer(KINDS[case.kind])
    if "frozen" in case.kind:
        model[1].feed_forward.experts[1].requires_grad_(False)
        model[2].attention.requires_grad_(False)
        model[2].norms[0].weight.requires_grad_(False)
        model[2].feed_forward.router.requires_grad_(False)
        if case.kind == "frozen":
            model[0].requires_grad_(False)
    return model.to(case.dtype)


def batches(shape: Shape) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(shape.words, (BATCH, shape.length + 1), generator=generator)
        for _ in range(STEPS)
    ]


def in_and_out(rows: Tensor) -> tuple[Tensor, Tensor]:
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def divided(case: Case, sizes: dict[str, int]) -> tuple[Any, Pipeline, Callable[..., Pipeline]]:
    mesh = make_mesh(**sizes)

    def build(model: nn.Module) -> Pipeline:
        divide_tensors(model, mesh["tensor"])
        divide_experts(model, mesh["expert"])
        plan = schedule(case.plan, mesh.sizes["pipeline"], case.micro_batches)
        return Pipeline(
            split_layers(model, plan.stages), next_word_loss, plan,
            group=mesh["pipeline"], rematerialize=case.rematerialize,
        )  # fmt: skip

    return mesh, build(whole_model(case)), build


def train_on_mesh(
    sizes: dict[str, int],
    case: Case,
    steps: slice = slice(None),
    start: Any = None,
    save: bool = False,
) -> tuple[list[tuple[int, Tensor, Tensor]], list[float], Any]:
    """Return this rank's pieces (number, places, values), losses it knows, and all state saved."""
    mesh, model, build = divided(case, sizes)
    if start is not None:
        whole = whole_model(case)
        whole.load_state_dict(start["model"])
        model = build(whole)
    places = places_of(model, whole_model(case), build)
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    if start is not None:
        take_whole(places, optimizer, start)
    losses = []
    for rows in batches(KINDS[case.kind])[steps]:
        optimizer.zero_grad()
        loss = model.step(*in_and_out(batch_of(rows, mesh)))
        average_gradients(model, mesh)
        optimizer.step()
        losses += [] if loss is None else [loss.item()]
    state = whole_state(places, whole_model(case), optimizer) if save else None
    pieces = [(number, where, param.detach()) for param, number, where in places]
    return pieces, losses, state


def train_alone(case: Case, steps: slice = slice(None), start: Any = None) -> Any:
    """Return the model, its optimizer and the losses of one process with whole batches."""
    model = whole_model(case)
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    if start is not None:
        model.load_state_dict(start["model"])
        optimizer.load_state_dict(start["optimizer"])
    losses = []
    for rows in batches(KINDS[case.kind])[steps]:
        x, y = in_and_out(rows)
        optimizer.zero_grad()
        loss = next_word_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, optimizer, losses
