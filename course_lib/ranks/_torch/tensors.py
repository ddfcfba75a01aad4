"""What PyTorch knows of tensors and does not document: how they are shown, who has their memory."""

from __future__ import annotations

import copy
from typing import Any

import torch


def print_options() -> Any:
    """Return what ``torch.set_printoptions`` has set in this process."""
    return torch._tensor_str.PRINT_OPTS


def new_print_options() -> Any:
    """Return a copy of them."""
    return copy.copy(print_options())


def use_print_options(options: Any) -> None:
    """Let this process show tensors by `options`."""
    torch._tensor_str.PRINT_OPTS = options


def has_memory_alone(tensor: torch.Tensor) -> bool:
    """Return whether no other tensor has the memory of `tensor`; not where that cannot be told."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    # One is the tensor's, one that of the object that asks.
    return count is not None and count(tensor.untyped_storage()._cdata) == 2
