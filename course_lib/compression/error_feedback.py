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

The residual takes as much memory as a momentum: the size of the gradients, in float32.

S. U. Stich, J.-B. Cordonnier and M. Jaggi, "Sparsified SGD with Memory", NeurIPS 2018;
S. P. Karimireddy et al., "Error Feedback Fixes SignSGD", ICML 2019.
"""

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from course_lib.compression.payload import Compressor, Payload, Shape, as_vector, forget


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

    def __init__(self, compressor: Compressor) -> None:
        self.compressor = compressor
        self.linear = compressor.linear
        self.residuals: dict[Hashable, Tensor] = {}

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

    def decode(self, payload: Payload) -> Tensor:
        """As the compressor's."""
        return self.compressor.decode(payload)

    def decode_into(self, payload: Payload, out: Tensor, add: bool = False) -> None:
        """As the compressor's."""
        self.compressor.decode_into(payload, out, add)

    def sum_over(
        self, tensor: Tensor, key: Hashable, all_reduce: Callable[[Tensor], object]
    ) -> tuple[Tensor, Tensor]:
        """As the compressor's, for `tensor` plus the residual."""
        residual = self.residual(key, as_vector(tensor)).view(tensor.shape)
        residual += tensor
        total, mine = self.compressor.sum_over(residual, key, all_reduce)
        residual -= mine
        return total, mine

    def forget(self, key: Hashable) -> None:
        """Drop the residuals of `key`."""
        forget(self.residuals, key)
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
        return residual

    def state_dict(self) -> dict[Hashable, Tensor]:
        """Return the residuals, for a checkpoint: a run resumed without them would differ."""
        return dict(self.residuals)

    def load_state_dict(self, state: dict[Hashable, Tensor]) -> None:
        """Replace the residuals by those from `state_dict`."""
        self.residuals = {key: residual.clone() for key, residual in state.items()}
