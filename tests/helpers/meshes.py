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
    transformer,
)
from course_lib.parts import clip_grad_norm_
from course_lib.pipeline_parallel import Pipeline, one_forward_one_backward, split_layers

STEPS, BATCH = 5, 48
DENSE = Shape(words=11, length=5, width=10, heads=5, hidden=13, layers=2)
"""Four layers. Nothing divides heads, experts or hidden units, and three ranks not the layers."""
KINDS = {
    "dense": DENSE,
    "experts": DENSE._replace(experts=5, top_k=2),
    "frozen": DENSE._replace(experts=5),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.3, momentum=0.9),
    "adam": lambda params: torch.optim.AdamW(params, lr=0.01),
}


class Case(NamedTuple):
    """The training to run; the layout of the mesh is given separately."""

    kind: str = "dense"
    optimizer: str = "sgd"
    micro_batches: int = 2
    passes: int = 1
    """Backwards before a step, each of other rows, and after each the gradients are averaged."""
    clip: float | None = None


def whole_model(case: Case) -> nn.Sequential:
    torch.manual_seed(0)
    model = transformer(KINDS[case.kind])
    if case.kind == "frozen":
        model[1].feed_forward.experts[1].requires_grad_(False)
        model[2].attention.requires_grad_(False)
        model[2].norms[0].weight.requires_grad_(False)
        model[2].feed_forward.router.requires_grad_(False)
        model[0].requires_grad_(False)
    return model.double()


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
        plan = one_forward_one_backward(mesh.sizes["pipeline"], case.micro_batches)
        return Pipeline(
            split_layers(model, plan.stages), next_word_loss, plan,
            group=mesh["pipeline"],
        )  # fmt: skip

    return mesh, build(whole_model(case)), build


Places = list[tuple[nn.Parameter, int, Tensor]]
"""This rank's parameters, each with its number in the whole model and its elements' positions."""


def places_of(
    model: nn.Module, original: nn.Module, build: Callable[[nn.Module], nn.Module]
) -> Places:
    """Return where the elements of `model` are in the whole model, from which `build` made it.

    `whole` is a separate model like that before `build`. Its elements are numbered and then cut as
    the weights were cut, so every piece shows where its elements come from.
    """
    number_of = {id(param): number for number, param in enumerate(original.parameters())}
    names = {
        name: number_of[id(param)]
        for name, param in original.named_parameters(remove_duplicate=False)
    }
    for param in original.parameters():  # exact: float64 counts up to 2^53
        param.data = torch.arange(param.numel(), dtype=torch.float64).view(param.shape)
    numbered = build(original).named_parameters()
    return [
        (param, names[_in_whole(name)], numbers.detach().long())
        for param, (name, numbers) in zip(model.parameters(), numbered, strict=True)
    ]


def _in_whole(name: str) -> str:
    """Return the name without the prefix of a pipeline, such as ``stages.1.``."""
    return name.split(".", 2)[2] if name.startswith("stages.") else name


def train_on_mesh(
    sizes: dict[str, int], case: Case
) -> tuple[list[tuple[int, Tensor, Tensor]], list[float]]:
    """Return this rank's pieces (number, places, values), and the losses that it knows."""
    mesh, model, build = divided(case, sizes)
    places = places_of(model, whole_model(case), build)
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    losses = []
    for rows in batches(KINDS[case.kind]):
        optimizer.zero_grad()
        for part in rows.chunk(case.passes):
            loss = model.step(*in_and_out(batch_of(part, mesh)))
            average_gradients(model, mesh)
        if case.clip is not None:
            clip_grad_norm_(model, case.clip)
        optimizer.step()
        losses += [] if loss is None else [loss.item()]
    return [(number, positions, param.detach()) for param, number, positions in places], losses


def train_alone(case: Case) -> tuple[nn.Module, list[float]]:
    """Return the model and the losses of one process with whole batches."""
    model = whole_model(case)
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    losses = []
    for rows in batches(KINDS[case.kind]):
        x, y = in_and_out(rows)
        optimizer.zero_grad()
        for part in zip(x.chunk(case.passes), y.chunk(case.passes), strict=True):
            loss = next_word_loss(model(part[0]), part[1])
            loss.backward()
        if case.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        losses.append(loss.item())
    return model, losses
