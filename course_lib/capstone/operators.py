"""The operators that a tape may hold, and their prices.

The list says what is allowed, not what is forbidden: an operator without a price would be free.
Most operators here move memory and do a few operations per element, so their memory traffic is
their price. Operators that multiply matrices are priced by their floating-point operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from course_lib.ranks import Device

LAUNCH = 5e-6
"""Seconds for the launch of a kernel, which every operator takes in addition to its work."""

_ALLOCATE = "empty empty_like empty_strided new_empty new_empty_strided"
_FILL = """zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full fill fill_
 zero zero_ arange eye linspace scalar_tensor"""
_RANDOM = """rand randn randint randperm rand_like randn_like randint_like bernoulli bernoulli_
 uniform_ normal_ exponential_ random_ native_dropout"""
_BY_ELEMENT = """add sub rsub mul div neg abs sign sgn exp exp2 log log2 log1p expm1 sqrt rsqrt
 reciprocal pow square tanh sigmoid relu gelu silu leaky_relu elu softplus hardtanh threshold clamp
 clamp_min clamp_max maximum minimum where lerp addcmul addcdiv eq ne lt le gt ge logical_and
 logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor __and__ __or__
 __xor__ __lshift__ __rshift__ bitwise_left_shift bitwise_right_shift floor ceil round trunc frac
 remainder fmod floor_divide isnan isinf isfinite nan_to_num copysign signbit erf sin cos ldexp
 masked_fill heaviside tanh_backward sigmoid_backward threshold_backward gelu_backward silu_backward
 leaky_relu_backward elu_backward softplus_backward hardtanh_backward native_dropout_backward"""
_MOVE = """copy copy_ _to_copy clone cat stack constant_pad_nd flip roll repeat index_select index
 index_put index_put_ _index_put_impl_ _unsafe_index index_add index_fill index_copy gather scatter
 scatter_add masked_select_backward take tril triu embedding embedding_dense_backward slice_backward
 select_backward slice_scatter select_scatter diagonal_backward nonzero_static view_copy"""
_REDUCE = """sum mean amax amin max min argmax argmin prod var std var_mean norm linalg_vector_norm
 any all cumsum logsumexp topk sort argsort kthvalue count_nonzero searchsorted bucketize aminmax
 dot vdot mv addmv equal _local_scalar_dense"""
_LAYERS = """_log_softmax _log_softmax_backward_data _softmax _softmax_backward_data
 nll_loss_forward nll_loss_backward mse_loss mse_loss_backward"""
_OPTIMIZERS = {"_fused_sgd_": 3, "_fused_adam_": 6, "_fused_adamw_": 6}
"""Name of an optimizer → the number of lists of tensors that it takes."""
_UNSAFE = {"embedding_dense_backward", "_foreach_copy"}
"""These operators access memory out of bounds if an index or a length is wrong. So do the
normalisation operators, such as ``native_batch_norm``."""
_COUNTED = """mm addmm addmm_ bmm baddbmm baddbmm_ convolution convolution_backward linalg_qr"""
"""Matrix operators, some of them in place, whose floating-point operations are counted."""

_ELEMENTWISE = {*_BY_ELEMENT.split(), *_FILL.split(), *_MOVE.split(), *_REDUCE.split()}
FREE = frozenset(_ALLOCATE.split())
RANDOM = frozenset(_RANDOM.split())
KNOWN = frozenset(
    {
        *(FREE | RANDOM | _ELEMENTWISE),
        *(f"{name}_" for name in _ELEMENTWISE),
        *(f"_foreach_{name}" for name in _ELEMENTWISE),
        *(f"_foreach_{name}_" for name in _ELEMENTWISE),
        *(*_LAYERS.split(), *_OPTIMIZERS, *_COUNTED.split()),
        "addmv_",
    }
    - _UNSAFE
)
"""Names of operators without their overloads; views never appear on a tape."""
GRADIENT = "_log_softmax_backward_data"
"""An operator that appears once in every gradient of a cross-entropy; it counts gradients."""


def _qr_flops(matrices: Tensor, *_: Any, **__: Any) -> int:
    """Return the operations of Householder's QR of m × n with Q: 4 (m n² - n³/3) per matrix."""
    *batch, rows, columns = matrices.shape
    n = min(rows, columns)
    return math.prod(batch) * int(4 * (rows * n * n - n**3 / 3))


_FLOPS: dict[str, Callable[..., int]] = {
    name: flop_registry.get(getattr(torch.ops.aten, name.removesuffix("_")), _qr_flops)
    for name in _COUNTED.split()
}


def base_name(name: str) -> str:
    """Return the name without namespace and overload: ``add_`` for ``aten::add_.Tensor``."""
    return name.removeprefix("aten::").partition(".")[0]


def operator_called(name: str) -> Callable[..., Any]:
    """Return the operator with a name such as ``aten::add_.Tensor``.

    Raises:
        LookupError: a tape may not contain this operator.

    """
    base, _, overload = name.removeprefix("aten::").partition(".")
    if not name.startswith("aten::") or base not in KNOWN:
        raise LookupError(f"{name[:60]} is not an operator on the price list")
    packet = getattr(torch.ops.aten, base, None)
    operator = getattr(packet, overload or "default", None)
    if not isinstance(operator, torch._ops.OpOverload):  # a packet has other attributes, too
        raise LookupError(f"PyTorch has no operator {name[:60]}")
    return operator


def check_bounds(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Check that some of PyTorch's kernels stay in bounds, because they do not check it themselves.

    Raises:
        ValueError: the operator would read or write beyond its tensors.

    """
    if name == "nll_loss_backward":
        _, scores, labels, _, _, ignored, _ = args
        here = labels[labels != ignored]
        if bool(((here < 0) | (here >= scores.shape[-1])).any()):
            raise ValueError("each label must be the number of a class")
    elif name.endswith("softmax_backward_data"):
        grad, result, *_ = args
        if grad.shape != result.shape:
            raise ValueError("a softmax and its gradient have different shapes")
    elif name in _OPTIMIZERS:
        _check_fused(name, args, kwargs)


def _check_fused(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Check that the tensors of a fused optimizer have the shape and dtype of their parameter."""
    if len(args) != _OPTIMIZERS[name]:
        raise ValueError(
            f"{name} needs its {_OPTIMIZERS[name]} lists of tensors as positional arguments, got "
            f"{len(args)}"
        )
    params, *others = args
    steps = [] if name == "_fused_sgd_" else others.pop()
    # The last list is the momentum, or the largest squares; it is empty if it is not used.
    if not others[-1] and not kwargs.get("amsgrad") and not kwargs.get("momentum"):
        others.pop()
    lengths = {len(each) for each in (params, *others, *([steps] if steps else []))}
    if len(lengths) > 1 or (name != "_fused_sgd_" and not steps):
        raise ValueError("the lists of a fused optimizer have different lengths")
    wrong = [
        tensor
        for each in (params, *others)
        for param, tensor in zip(params, each, strict=True)
        if (tensor.shape, tensor.dtype) != (param.shape, param.dtype) or not tensor.is_contiguous()
    ]
    wrong += [step for step in steps if step.numel() != 1 or step.dtype != torch.float32]
    if wrong or any(kwargs.get(each) is not None for each in ("grad_scale", "found_inf")):
        raise ValueError("the tensors of a fused optimizer have different shapes")


def price(operator: Any, args: Any, kwargs: Any, out: Any, device: Device) -> tuple[float, int]:
    """Return the seconds and floating-point operations of one operator that has run.

    The time is t = launch + max(F/φ, M/μ). F is the operator's floating-point operations, and M is
    the bytes of all its tensors, in and out. F is counted only for matrix operators, because other
    operators need far more time for M.
    """
    packet = operator._overloadpacket
    if packet.__name__ in FREE:
        return 0.0, 0
    counted = _FLOPS.get(packet.__name__)
    flops = 0 if counted is None else counted(*args, **kwargs, out_val=out)
    tensors = {
        id(leaf): leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)
    }
    traffic = sum(leaf.nbytes for leaf in tensors.values())
    return LAUNCH + device.time(flops, traffic), flops
