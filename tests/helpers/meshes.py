"""A transformer that nothing divides, trained on a mesh and in one process."""

from typing import NamedTuple

import torch
from torch import nn

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
# Four layers. Nothing divides heads, experts or hidden units, and three ranks not the layers.
DENSE = Shape(words=11, length=5, width=10, heads=5, hidden=13, layers=2)
KINDS = {
    "dense": DENSE,
    "experts": DENSE._replace(experts=5, top_k=2),
    "frozen": DENSE._replace(experts=5),
}
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.3, momentum=0.9),
    "adam": lambda params: torch.optim.AdamW(params, lr=0.01),
}


class Case(NamedTuple):
    """The training to run; the layout of the mesh is given separately."""

    kind: str = "dense"
    optimizer: str = "sgd"
    # Backwards before a step, each of other rows, and after each the gradients are averaged.
    passes: int = 1
    clip: float = 1e9


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


def batches(shape: Shape):
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(shape.words, (BATCH, shape.length + 1), generator=generator)
        for _ in range(STEPS)
    ]


def in_and_out(rows):
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def train_on_mesh(sizes: dict[str, int], case: Case) -> tuple[list[float], list[float]]:
    """Return the norm of the gradient in each step, and the losses that this rank knows."""
    mesh, model = make_mesh(**sizes), whole_model(case)
    divide_tensors(model, mesh["tensor"])
    divide_experts(model, mesh["expert"])
    plan = one_forward_one_backward(mesh.sizes["pipeline"], micro_batches=2)
    stages = split_layers(model, plan.stages)
    pipeline = Pipeline(stages, next_word_loss, plan, group=mesh["pipeline"])
    optimizer = OPTIMIZERS[case.optimizer](pipeline.parameters())
    norms, losses = [], []
    for rows in batches(KINDS[case.kind]):
        optimizer.zero_grad()
        for part in rows.chunk(case.passes):
            loss = pipeline.step(*in_and_out(batch_of(part, mesh)))
            average_gradients(pipeline, mesh)
        norms.append(float(clip_grad_norm_(pipeline, case.clip)))
        optimizer.step()
        losses += [] if loss is None else [loss.item()]
    return norms, losses


def train_alone(case: Case) -> tuple[list[float], list[float]]:
    """Return the same of one process with whole batches."""
    model = whole_model(case)
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    norms, losses = [], []
    for rows in batches(KINDS[case.kind]):
        x, y = in_and_out(rows)
        optimizer.zero_grad()
        for part in zip(x.chunk(case.passes), y.chunk(case.passes), strict=True):
            loss = next_word_loss(model(part[0]), part[1])
            loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), case.clip)))
        optimizer.step()
        losses.append(loss.item())
    return norms, losses
