"""A checkpoint that any mesh can load: it has the form that a single process would save.

The layout determines which rank holds which element of each weight, and the layout is code. So this
code can compute it: number the elements of the whole model, 0, 1, 2, …, and cut *the numbers* as
the weights are cut. Then every piece shows where its elements come from:

    whole weight, numbered        column parallel, T = 2, rank 1
        0  1  2                        6  7  8        this rank's piece is elements
        3  4  5             ─────►     9 10 11        6 to 11 of the whole
        6  7  8
        9 10 11

This works for every axis, alone and combined, also for an axis that is added later. It also works
for momentum and variance, which have the layout of their weights. A run saved on one mesh can
resume on a different one, or in one process with `torch.optim`.

PyTorch has `torch.distributed.checkpoint`, which never holds the whole state on one rank.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Places = list[tuple[nn.Parameter, int, Tensor]]
"""This rank's parameters, each with its number in the whole model and its elements' positions."""


def places_of(
    model: nn.Module, whole: nn.Module, build: Callable[[nn.Module], nn.Module]
) -> Places:
    """Return where the elements of `model` are in the whole model, from which `build` made it.

    `whole` is a separate model like that before `build`; its values are overwritten. No
    communication is needed.
    """
    kept = {id(param): number for number, param in enumerate(whole.parameters())}
    names = {
        name: kept[id(param)] for name, param in whole.named_parameters(remove_duplicate=False)
    }
    for param in whole.parameters():  # exact: float64 counts up to 2^53
        param.data = torch.arange(param.numel(), dtype=torch.float64).view(param.shape)
    numbered = build(whole).named_parameters()
    return [
        (param, names[_in_whole(name)], numbers.detach().long())
        for param, (name, numbers) in zip(model.parameters(), numbered, strict=True)
    ]


def _in_whole(name: str) -> str:
    """Return the name without the prefix of a pipeline, such as ``stages.1.``."""
    return name.split(".", 2)[2] if name.startswith("stages.") else name


def whole_state(
    places: Places, whole: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Return ``{"model", "optimizer"}`` as `whole` and its optimizer have them in one process.

    Only the shapes and names of `whole` are used. The optimizer must have one group, and treat each
    element by itself. All ranks must call, and all get the result.
    """
    mine = [
        (number, where, {"": param.detach(), **optimizer.state.get(param, {})})
        for param, number, where in places
    ]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    shapes = [param.shape for param in whole.parameters()]
    found: dict[int, dict[str, Any]] = {}
    for number, where, values in (piece for pieces in everyone for piece in pieces):
        state = found.setdefault(number, {})
        for key, value in values.items():
            if _of_elements(value):
                full = state.setdefault(key, value.new_zeros(shapes[number]))
                full.view(-1)[where.flatten()] = value.flatten()
            else:
                state[key] = value
    weights = {number: state.pop("") for number, state in found.items()}
    numbers = {id(param): number for number, param in enumerate(whole.parameters())}
    named = whole.named_parameters(remove_duplicate=False)
    group = {**optimizer.param_groups[0], "params": sorted(numbers.values())}
    return {
        "model": {name: weights[numbers[id(param)]] for name, param in named},
        "optimizer": {"state": {n: s for n, s in found.items() if s}, "param_groups": [group]},
    }


def take_whole(places: Places, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load this rank's pieces of the optimizer's state from a `whole_state` of any mesh.

    For the weights, load them into the whole model before you divide it.
    """
    saved = state["optimizer"]
    mine = {
        at: {
            key: value.reshape(-1)[where] if _of_elements(value) else value
            for key, value in saved["state"][number].items()
        }
        for at, (_, number, where) in enumerate(places)
        if number in saved["state"]
    }
    group = {**saved["param_groups"][0], "params": list(range(len(places)))}
    optimizer.load_state_dict({"state": mine, "param_groups": [group]})


def _of_elements(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0  # the number of steps has no dimensions
