"""The models, losses and optimizers with which the checks of this assignment call a function.

No constructor draws random numbers: weights come from a rank's input.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_lib.checking import Draw
from course_lib.checking.on_ranks.given import linear_of

FEATURES, WIDTH, CLASSES = 32, 16, 3
SHAPES = ((WIDTH, FEATURES), (WIDTH,), (CLASSES, WIDTH), (CLASSES,))
"""Shapes of the small network's parameters."""
LABELS = ("cross_entropy", "multi_margin_loss")
"""Losses whose targets are labels. The targets of other losses have one number per output."""


def draw_weights(d: Draw, size: float) -> list[Tensor]:
    """Draw the parameters of the small network."""
    return [size * d.randn(*shape) for shape in SHAPES]


def loss_of(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss of this name as a task promises it: a mean, without options."""
    return lambda input, target: getattr(F, name)(input, target)


def targets_of(loss: str, scores: Tensor) -> Tensor:
    """Return targets for the loss of this name, made from one number per row and output."""
    return scores.argmax(1) if loss in LABELS else scores


def network(
    weights: Sequence[Tensor], middle: nn.Module | None = None, frozen: Sequence[int] = ()
) -> nn.Sequential:
    """Return the small network; `middle` is between its layers (default: tanh).

    Parameters at the positions `frozen` do not require a gradient.
    """
    params = [nn.Parameter(w.clone(), i not in frozen) for i, w in enumerate(weights)]
    first, last = linear_of(*params[:2]), linear_of(*params[2:])
    return nn.Sequential(first, middle or nn.Tanh(), last)


def fill(model: nn.Module, gradients: Sequence[Tensor] | None) -> None:
    """Put copies of these gradients, if there are any, into ``.grad`` of trained parameters."""
    for param, gradient in zip(model.parameters(), gradients or (), strict=gradients is not None):
        param.grad = gradient.clone() if param.requires_grad else None


class ScaledTanh(nn.Tanh):
    """tanh times a number that is a buffer: part of the model, but no parameter."""

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale.clone())

    def forward(self, x: Tensor) -> Tensor:
        """Return scale · tanh(x)."""
        return torch.tanh(x) * self.scale


class Watched(nn.Module):
    """A classifier with BatchNorm and dropout that records how many rows it gets, and when."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(WIDTH)
        norm.running_mean, norm.running_var = weights[1].clone(), 1 + weights[1].square()
        self.layers = nn.Sequential(*network(weights, norm), nn.Dropout()).to(weights[0].dtype)
        self.rows: list[int] = []
        self.trained = False

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of these rows."""
        self.rows.append(len(x))
        self.trained |= any(module.training for module in self.layers)
        return self.layers(x)


# A run that can be saved: a model with a buffer, and an optimizer that has taken steps ------------


def named_network(weights: Sequence[Tensor], scale: Tensor) -> nn.Module:
    """Return the small network, with names that break if a prefix is removed carelessly."""
    first, middle, last = network(weights, ScaledTanh(scale))
    inner = nn.Sequential(OrderedDict(module=middle))
    return nn.Sequential(OrderedDict(encoder=first, middle=inner, last=last))


def fresh_optimizer(model: nn.Module, kind: str, lr: float) -> torch.optim.Optimizer:
    """Return an optimizer with different options for biases and matrices."""
    params = list(model.parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for p in params if p.dim() > 1]},
        {"params": [p for p in params if p.dim() < 2], "lr": lr / 3, "weight_decay": 0.0},
    ]
    if kind == "SGD":
        return torch.optim.SGD(groups, lr, momentum=0.9, weight_decay=lr / 10)
    return torch.optim.AdamW(groups, lr, betas=(0.8, 0.9 + lr / 100))


def running(run: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model and the optimizer in the state of this run."""
    model = named_network(run["weights"], run["scale"])
    optimizer = fresh_optimizer(model, run["optimizer"], run["lr"])
    for param, moment in zip(model.parameters(), run["moments"], strict=True):
        state = {"momentum_buffer": moment.clone()}
        if run["optimizer"] == "AdamW":
            state = {"step": torch.tensor(3.0), "exp_avg": moment.clone()}
            state["exp_avg_sq"] = moment.square()
        optimizer.state[param] = state
    return model, optimizer


def content_of(optimizer: Any, suffix: str = "") -> dict[str, Any]:
    """Return the content of an optimizer's ``state_dict()``, as plain values with readable keys."""
    state, groups = optimizer.get("state", {}), optimizer.get("param_groups", [])
    settings = {
        f"{key} of group {i}": group[key] for i, group in enumerate(groups) for key in group
    }
    return {
        f"optimizer's state of parameter {{}}{suffix}": [dict(state[i]) for i in sorted(state)],
        f"optimizer's setting{suffix}": settings,
    }
