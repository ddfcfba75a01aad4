"""A linear layer that several ranks share: inputs, program, and what one process gives.

The ranks share the layer's outputs (column parallel) or its inputs (row parallel), each its
``tensor_split``. The rest is equal on all of them: what goes in or comes out whole.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn

from course_lib.checking.cases import Case
from course_lib.checking.judges import Oracle
from course_lib.checking.on_ranks.effects import aspects, tensors_in
from course_lib.checking.on_ranks.given import Given
from course_lib.checking.task import Inputs

Side = Literal["out", "in"]
"""What the ranks share of a layer."""
Mistake = Literal["", "own term", "residual", "K biases", "K times", "assigned", "copy"]
_PARTS = {"out": ("dy",), "in": ("x", "dx")}
_NUMBERS = "numbers in the module's parameters"
_BESIDE = "numbers that the module keeps in memory beside its parameters"
_HELD = "whole layer is still held"


def layer_inputs(cut: Side) -> Inputs:
    """Return what draws a layer, its input x and dY for each group.

    A case has the sizes ``out`` and ``in``, ``rows``, the shape of x before its last dimension, and
    whether there is a ``bias``; and, if it likes, ``before``: whether the gradients of the weight
    and the bias hold ones when backward begins. ``dx`` is the gradient of x that comes from
    elsewhere. All are whole numbers, so small that their dtype rounds no sum of products, and a
    smaller one does.
    """

    def inputs(case: Case, generator: torch.Generator) -> list[dict[str, Any]]:
        p, found = case.parameters, list[dict[str, Any]]([{}] * case.world_size)
        most = 3 if case.form.dtype == "bfloat16" else 200

        def draw(*shape: int) -> Tensor:
            return torch.randint(-most, most + 1, shape, generator=generator).float()

        for members in case.groups:
            bias = draw(p["out"])
            whole = {name: draw(*p["rows"], p["in"]) for name in ("x", "dx")}
            whole |= {"dy": draw(*p["rows"], p["out"]), "weight": draw(p["out"], p["in"])}
            parts = {name: whole[name].tensor_split(len(members), -1) for name in _PARTS[cut]}
            for me, rank in enumerate(members):
                own = {name: part[me].clone() for name, part in parts.items()}
                found[rank] = {**whole, **own, "bias": bias if p["bias"] else None}
                found[rank]["training"] = case.form.training
                found[rank]["before"] = p.get("before", False)
        return found

    return inputs


def layer_program(make_layer: Callable[..., Any], mine: Any, given: Given) -> Any:
    """Call ``make_layer(linear, group=group)``, then forward and backward of what it returns."""
    linear = nn.Linear(1, 1, device="meta")
    linear.out_features, linear.in_features = mine["weight"].shape
    linear.weight = nn.Parameter(mine["weight"])
    linear.register_parameter("bias", None if mine["bias"] is None else nn.Parameter(mine["bias"]))
    linear.train(mine["training"])
    before = _looks(linear)
    layer = make_layer(linear, group=given.group)
    if _looks(linear) != before:
        raise RuntimeError("the function changes linear, which is not its to change")
    whole = weakref.ref(linear.weight)
    if not isinstance(layer, nn.Module):
        raise TypeError(f"what comes back is {type(layer).__name__}, expected an nn.Module")
    del linear
    x = mine["x"].clone().requires_grad_()
    # x is used as it is, too: in a model there is a residual connection around such layers.
    # And before its backward comes another forward, of other rows that need no gradient.
    y, later, beside = layer(x), layer(2 * mine["x"]), (x * mine["dx"]).sum()
    weight, bias = _parameter(layer, "weight"), _parameter(layer, "bias")
    found = {"output": y.detach(), "later output": later.detach(), "weight": weight.detach()}
    found |= {"bias": None if bias is None else bias.detach()}
    found[_NUMBERS] = sum(param.numel() for param in layer.parameters())
    if y.shape == mine["dy"].shape:
        for param in (weight, bias) if mine["before"] else ():
            if param is not None and param.requires_grad:
                param.grad = torch.ones_like(param)
        torch.autograd.backward([y, beside], [mine["dy"], torch.ones_like(beside)])
        found |= {"gradient of x": x.grad, "gradient of weight": weight.grad}
        found |= {"gradient of bias": None if bias is None else bias.grad}
    if whole() is not None:
        gc.collect()  # a circle that nobody holds may hold it
    return {**found, _HELD: whole() is not None, _BESIDE: float(_beside(layer, mine))}


def _parameter(layer: nn.Module, name: str) -> Any:
    if not hasattr(layer, name):
        raise AttributeError(f"the module has no {name}; without one it is None")
    return getattr(layer, name)


def _looks(linear: nn.Linear) -> Any:
    shapes = [param.shape for param in linear.parameters()]
    return aspects(linear), shapes, linear.in_features, linear.out_features


def _beside(layer: nn.Module, mine: Any) -> int:
    """Return how many numbers the module's tensors keep in memory, beyond those of its parts.

    What shares the memory of `mine` is told elsewhere; single numbers are not worth a word.
    """
    memory = {}
    for module in layer.modules():
        for tensor in tensors_in(vars(module)):
            storage = tensor.untyped_storage()
            memory[storage.data_ptr()] = storage.nbytes() // tensor.itemsize
    for tensor in tensors_in(mine):
        memory.pop(tensor.untyped_storage().data_ptr(), None)
    parts = {
        id(each): each.numel()
        for each in (layer.weight, layer.bias, *layer.parameters())
        if isinstance(each, Tensor)
    }
    return max(0, sum(each for each in memory.values() if each > 1) - sum(parts.values()))


def layer_values(cut: Side, mistake: Mistake = "") -> Oracle:
    """Return the oracle: what one process computes, or what a well-known mistake gives."""
    side = {"out": 0, "in": 1}[cut]

    def oracle(case: Case, inputs: Sequence[Any], me: int) -> Any:
        k, own = len(inputs), inputs[me]

        def whole(name: str) -> Tensor:
            parts = [each[name] for each in inputs] if name in _PARTS[cut] else [own[name]]
            return torch.cat(parts, -1).double()

        x, dx, dy, weight = whole("x"), whole("dx"), whole("dy"), own["weight"].double()
        bias = torch.zeros(len(weight)) if own["bias"] is None else own["bias"].double()
        part, times = weight.tensor_split(k, side)[me], k if mistake == "K times" else 1
        back = times * (dy @ weight) + (k if mistake == "residual" else 1) * dx
        if mistake == "own term":
            back = dy.tensor_split(k, -1)[me] @ part + dx
        found = {
            "output": x @ weight.t() + (k if mistake == "K biases" else 1) * bias,
            "later output": 2 * x @ weight.t() + (k if mistake == "K biases" else 1) * bias,
            "weight": part,
            "bias": bias,
            "gradient of x": back if cut == "out" else back.tensor_split(k, -1)[me],
            "gradient of weight": _gradient(dy, x).tensor_split(k, side)[me],
            "gradient of bias": dy.reshape(-1, dy.shape[-1]).sum(0),
        }
        for name in ("output", "later output", "bias", "gradient of bias") if cut == "out" else ():
            found[name] = found[name].tensor_split(k, -1)[me]
        if own["before"] and mistake != "assigned":
            for name in ("gradient of weight", "gradient of bias"):
                found[name] = found[name] + 1
        right: dict[str, Any] = {
            name: value.to(own["weight"].dtype) for name, value in found.items()
        }
        none = dict.fromkeys(("bias", "gradient of bias") if own["bias"] is None else ())
        counted = ("weight",) if own["bias"] is None else ("weight", "bias")
        numbers = sum(right[name].numel() for name in counted)
        copied = sum(own[name].numel() for name in counted) if mistake == "copy" else numbers
        right |= {**none, _HELD: False, _NUMBERS: numbers, _BESIDE: float(copied - numbers)}
        return right

    return oracle


def _gradient(dy: Tensor, x: Tensor) -> Tensor:
    return dy.reshape(-1, dy.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


def layer_bytes(case: Case, side: Side) -> int:
    """Return the bytes of a whole input, or of a whole output."""
    return int(case.itemsize * prod(case.parameters["rows"]) * case.parameters[side])
