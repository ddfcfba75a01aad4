"""A case begins as if the one before it had not been."""

import torch

from course_lib.checking.on_ranks.effects import Watch


def test_gradients_and_float32_are_there_again():
    """A function may have turned them off, and have ended by an exception."""
    try:
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        Watch({}, None)
        assert torch.is_grad_enabled()
        assert torch.get_default_dtype() == torch.float32
    finally:
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
