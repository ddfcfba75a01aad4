"""Error feedback: the part that a compressor left out in this step is added in the next one.

    >>> from course_lib.compression import ErrorFeedback, TopK
    >>> compressor = ErrorFeedback(TopK(0.01))
    >>> payload = compressor.encode(gradient, key="bucket 0")

    p_t = x_t + e_t           should be sent by now
    send C(p_t)
    e_{t+1} = p_t - C(p_t)    was not sent

So Σ C(p_t) = Σ x_t - e_{T+1}: everything is sent in the end, only later. The error of the sum is
the error of *one* step, for any number of steps. With a contraction, ‖C(x) - x‖² ≤ (1 - δ)‖x‖² with
δ > 0, the residual e stays bounded, and after enough steps SGD converges as fast as without
compression. Without error feedback, biased compressors (top-k, one bit) may not converge at all.

An unbiased compressor that enlarges x, such as random-k scaled by n/k, is *no* contraction: its
residual grows without bound. Use it without scaling here.

If a gradient is not finite, as in a step that a `GradScaler` skips, the residual would never be
finite again. So the payload of this step is not finite, and then the residual is dropped, with a
warning. `compressed_all_reduce` looks at the sum, which is the same on all ranks. So all ranks drop
their residuals, or none does, and no message is needed to agree.

The residual takes as much memory as a momentum: the size of the gradients, in float32.

S. U. Stich, J.-B. Cordonnier and M. Jaggi, "Sparsified SGD with Memory", NeurIPS 2018;
S. P. Karimireddy et al., "Error Feedback Fixes SignSGD", ICML 2019.
"""

import math
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.compression.payload import (
    Compressor,
    Payload,
    Shape,
    as_vector,
    fill_unless,
    is_finite,
    keys_of,
)


def with_feedback(compress: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Hashable], Tensor]:
    """Return ``send(x, key)``, which gives C(x + e) and keeps what was left out: the idea alone.

    `compress` is C: it takes a float32 tensor and returns a new one of the same shape. Residuals
    are float32, one for each key, and 0 at first. The result has the dtype of `x`.
    """
    residuals: dict[Hashable, Tensor] = {}

    def send(x: Tensor, key: Hashable) -> Tensor:
        p = x.float() + residuals.get(key, 0)
        sent = compress(p)
        residuals[key] = p - sent
        return sent.to(x.dtype, copy=True)

    return send


class ErrorFeedback(Compressor):
    """Adds a memory for each key to `compressor`.

    Attributes:
        compressor: the compressor that is used.
        residuals: key → the part that has not been sent yet, a float32 vector.

    """

    memory = ("residuals",)

    def __init__(self, compressor: Compressor) -> None:
        self.compressor = compressor
        self.linear = compressor.linear
        self.residuals: dict[Hashable, Tensor] = {}
        self._unchecked: set[Hashable] = set()  # whose residuals may have become infinite
        self._dropped, self._warned = torch.zeros((), dtype=torch.int64), 0
        self._visible = self._dropped

    def nbytes(self, shape: Shape) -> int:
        """As the compressor's: the residual is not sent."""
        return self.compressor.nbytes(shape)

    def encode(self, tensor: Tensor, key: Hashable = None) -> Payload:
        """Return `tensor` plus the residual of `key`, compressed; keep the part that is left out.

        Raises ValueError if earlier tensors of `key` had a different length.
        """
        x = as_vector(tensor)
        residual = self.residual(key, x)
        payload = self.compressor.encode_with_residual(x, residual, key)
        return Payload(payload.wire, tensor.shape, tensor.dtype, payload.agreed)

    def decode_into(self, payload: Payload, out: Tensor, add: bool = False) -> None:
        """As the compressor's."""
        self.compressor.decode_into(payload, out, add)

    def sum_over(
        self, tensor: Tensor, key: Hashable, all_reduce: Callable[[Tensor], object]
    ) -> tuple[Tensor, Tensor]:
        """As the compressor's, for `tensor` plus the residual."""
        residual = self.residual(key, as_vector(tensor)).view(tensor.shape)
        residual += tensor
        fill_unless(is_finite(residual), residual, math.nan)  # else it might not be sent at all
        total, own_part = self.compressor.sum_over(residual, key, all_reduce)
        residual -= own_part
        self.drop_overflow(key, total)
        return total, own_part

    def forget(self, key: Hashable) -> None:
        """Drop the residuals of `key`, and what the compressor remembers of it."""
        super().forget(key)
        self.compressor.forget(key)

    def residual(self, key: Hashable, x: Tensor) -> Tensor:
        """Return the residual for vectors like `x`; zeros at first."""
        if key not in self.residuals:
            self.residuals[key] = torch.zeros_like(x)
        residual = self.residuals[key]
        if residual.numel() != x.numel():
            raise ValueError(
                f"the earlier tensors of key {key!r} had {residual.numel()} elements, but this "
                f"tensor has {x.numel()}: use a different key for tensors of a different size"
            )
        if key in self._unchecked:
            self._drop_unless(is_finite(residual), [residual])
        self._unchecked.add(key)
        return residual

    def drop_overflow(self, key: Hashable, total: Tensor) -> None:
        """As `Compressor.drop_overflow`, for the residuals."""
        keys = keys_of(self.residuals, key)
        self._drop_unless(is_finite(total), [self.residuals[member] for member in keys])
        self._unchecked.difference_update(keys)

    def _drop_unless(self, finite: Tensor, residuals: Sequence[Tensor]) -> None:
        """Drop the residuals unless `finite`, and warn: on a GPU a few calls later."""
        for residual in residuals:
            fill_unless(finite, residual, 0)
        if self._dropped.device != finite.device:
            self._dropped = self._dropped.to(finite.device)
            self._visible = torch.zeros_like(self._visible, pin_memory=True)
        self._dropped += ~finite
        self._visible.copy_(self._dropped, non_blocking=True)  # the host does not wait for it
        if int(self._visible) > self._warned:
            self._warned = int(self._visible)
            rank = f"rank {dist.get_rank()}: " if dist.is_initialized() else ""
            warnings.warn(
                f"{rank}a gradient was not finite (inf or NaN), so what error feedback had kept of "
                "earlier gradients is dropped. Use a GradScaler, which skips such a step, or clip",
                RuntimeWarning,
                stacklevel=2,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals, and what the compressor remembers."""
        return {**super().state_dict(), "compressor": self.compressor.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace both by those from `state_dict`."""
        super().load_state_dict(state)
        self.compressor.load_state_dict(state["compressor"])
        self._unchecked = set(self.residuals)
