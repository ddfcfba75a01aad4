"""The tensors that an object holds, wherever it keeps them."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_lib.checking.on_ranks.held import held_by


def in_a_closure(x: torch.Tensor):
    return lambda: x


def in_an_attribute(x: torch.Tensor):
    class Holder:
        def __init__(self) -> None:
            self.inner = {"x": [x.view(-1)]}

    return Holder()


def in_a_method_of_its_class(x: torch.Tensor):
    class Layer(nn.Module):
        def forward(self) -> torch.Tensor:
            return x

    return Layer()


def in_a_submodule(x: torch.Tensor):
    linear = nn.Linear(1, 1)
    linear.weight = nn.Parameter(x)
    return [nn.Sequential(linear)]


def in_arguments_kept_for_later(x: torch.Tensor):
    return functools.partial(print, x), in_an_attribute(x).__init__


def in_a_circle(x: torch.Tensor):
    circle = [x]
    circle.append(circle)
    return circle


HOLDERS = [
    in_a_closure,
    in_an_attribute,
    in_a_method_of_its_class,
    in_a_submodule,
    in_arguments_kept_for_later,
    in_a_circle,
]


@pytest.mark.every_case
@pytest.mark.parametrize("holder", HOLDERS)
def test_what_something_holds_is_found(holder) -> None:
    x = torch.ones(1000)
    addresses = {t.untyped_storage().data_ptr() for t in held_by(holder(x))}
    assert x.untyped_storage().data_ptr() in addresses


def test_what_it_does_not_hold_is_not() -> None:
    x = torch.ones(1000)

    class Layer(nn.Module):
        def __init__(self, part: torch.Tensor) -> None:
            super().__init__()
            self.part, self.group = nn.Parameter(part.clone()), dist.group

    layer = Layer(x[:3])
    assert [t.numel() for t in held_by(layer)] == [3]
    assert list(held_by([nn.Module, torch, 3, "x", None, print])) == []
