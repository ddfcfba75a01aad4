"""Tensors as raw bytes, however they lie in memory."""

from __future__ import annotations

import pytest
import torch

from course_lib.ranks.simulated.socket_frames import to_bytes

NUMBERS = torch.arange(12, dtype=torch.int64).view(3, 4)


@pytest.mark.parametrize(
    "tensor",
    [
        NUMBERS,
        NUMBERS.t(),
        NUMBERS[:, ::2],
        NUMBERS[1, ::2],
        NUMBERS[2, 3::2],  # one element, with a stride of 2
        NUMBERS[:1, :1].expand(1, 1),
        torch.ones(()).expand(3),
        NUMBERS[:0],
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.ones(2, requires_grad=True),
    ],
)
def test_the_bytes_are_those_of_the_elements_in_order(tensor: torch.Tensor) -> None:
    copy = torch.frombuffer(bytearray(to_bytes(tensor) or b"?"), dtype=torch.uint8)
    copy = copy[: tensor.nbytes].clone().view(tensor.dtype)
    assert torch.equal(copy, tensor.detach().flatten())
