"""Partial gradients: what `.grad` holds between backward and step if gradients are sharded.

Code between `backward()` and `step()` reads `.grad`: it clips, logs norms, looks for NaN, or
divides by the scale of a `GradScaler`. With sharded gradients a rank sees a part of the truth. Each
rank would draw its own conclusion, and the replicas would differ without an error. So `.grad` is a
tensor that knows what it holds:

    GradientPiece      some elements of the mean     a function of each element is right
    LocalGradient      not averaged yet              only a linear function is right
    GradientElsewhere  nothing                       the mean is in the optimizer's pieces

Everything else raises an error that names the function to call instead, such as `clip_grad_norm_`
of the wrapper or of the optimizer. A `GradScaler` works with all three: whether a rank found an
infinity is shared over the group, so all ranks skip a step, or none does.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map_only

from course_lib.collectives import Group

_OF_ALL_ELEMENTS = """
    norm linalg_vector_norm linalg_norm linalg_matrix_norm _foreach_norm _foreach_max renorm
    dist sum nansum mean nanmean prod std var std_mean var_mean median nanmedian mode quantile
    nanquantile max min amax amin aminmax argmax argmin any all count_nonzero nonzero logsumexp
    dot vdot inner matmul __matmul__ mv mm einsum tensordot histc histogram topk sort argsort
    kthvalue unique cosine_similarity numpy __array__ tolist
""".split()  # noqa: SIM905
"""Functions that put the elements of a tensor together, or hand them to code outside torch."""
_NOT_LINEAR = """
    clamp clamp_ clamp_min clamp_min_ clamp_max clamp_max_ clip clip_ sign sign_ sgn sgn_ tanh
    tanh_ nan_to_num nan_to_num_ _foreach_clamp_min _foreach_clamp_min_ _foreach_clamp_max
    _foreach_clamp_max_ _foreach_minimum_ _foreach_maximum_ _foreach_sign_
""".split()  # noqa: SIM905
"""Functions of each element whose mean is not the function of the mean."""
_ABOUT = """
    __get__ size dim numel nelement element_size stride is_contiguous is_floating_point
    is_complex untyped_storage data_ptr get_device __repr__ __format__ __len__
""".split()  # noqa: SIM905
"""Functions that do not read the elements."""
_NEW = """
    as_subclass isclose zeros_like ones_like full_like empty_like new_zeros new_ones new_full
    new_empty
""".split()  # noqa: SIM905
"""Functions whose result is not a part of the gradient."""
_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"  # GradScaler calls it, with all gradients


class PartialGradient(Tensor):
    """A gradient of which this rank has only a part. A result computed from it is one, too."""

    group: Group
    what: ClassVar[str]
    instead: ClassVar[str]

    @classmethod
    def allows(cls, name: str) -> bool:
        """Return whether the function of this name has the right result on each rank."""
        return name not in _OF_ALL_ELEMENTS

    def held(self) -> Tensor | None:
        """Return the elements that this rank holds, as a plain tensor in the same memory."""
        return self.as_subclass(Tensor)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute on this rank's part, raise RuntimeError, or share a `GradScaler`'s finding."""
        parts = [part for part in tree_iter((args, kwargs)) if isinstance(part, PartialGradient)]
        name = func.__name__
        if name == _UNSCALE:
            return _unscale(*args)
        # A result that has left the ranks is an ordinary tensor.
        if dist.is_initialized():
            for part in parts:
                if not part.allows(name):
                    raise RuntimeError(f"rank {dist.get_rank()}: {part._reason(name)}")
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if name in _NEW or not parts:
                return result
            return tree_map_only(
                Tensor, lambda each: parts[0]._like(each) if type(each) is Tensor else each, result
            )

    def _like(self, tensor: Tensor) -> Tensor:
        part = tensor.as_subclass(type(self))
        part.__dict__.update(self.__dict__)
        return part

    def _reason(self, name: str) -> str:
        return f"{name}() of a gradient would be wrong here: {self.what}. {self.instead}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle an ordinary tensor: what leaves the ranks cannot communicate."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self._like(self.as_subclass(Tensor).clone())


class GradientPiece(PartialGradient):
    """The elements of a parameter's mean gradient that this rank has, shape (stop - start,)."""

    what = "each rank holds a different part of it"
    instead = (
        "For the whole gradient, call clip_grad_norm_(max_norm) or gradient_norms() of the "
        "FullyShardedDataParallel or ShardedOptimizer, on all ranks. For this rank's part alone, "
        "take param.grad.as_subclass(torch.Tensor)"
    )


class LocalGradient(PartialGradient):
    """A rank's own gradient, which `ShardedOptimizer(…, gradients="local")` will average."""

    what = "it is this rank's own, and is averaged only in step()"
    instead = (
        "Call clip_grad_norm_(max_norm) or gradient_norms() of the ShardedOptimizer, on all ranks. "
        "Its averaged_parameters() are for functions of each element, such as clip_grad_value_"
    )

    @classmethod
    def allows(cls, name: str) -> bool:
        """Return whether the mean of the function's results is the function of the mean."""
        return name not in _OF_ALL_ELEMENTS and name not in _NOT_LINEAR


class GradientElsewhere(PartialGradient):
    """Stands in for the gradient of a parameter whose mean is in `piece.grad`.

    It has the parameter's shape, but no memory of its own.
    """

    piece: Tensor
    what = "it is already averaged, and each rank holds a different part of it"
    instead = LocalGradient.instead

    @classmethod
    def allows(cls, name: str) -> bool:
        """Return whether the function reads no element."""
        return name in _ABOUT

    def held(self) -> Tensor | None:
        """Return the gradient of the piece."""
        return None if self.piece.grad is None else self.piece.grad.as_subclass(Tensor)


def partial_gradient(kind: type[PartialGradient], gradient: Tensor, group: Group) -> Tensor:
    """Return `gradient` as a partial gradient of this kind, in the same memory."""
    part = gradient.as_subclass(kind)
    part.group = group
    return part


def gradient_elsewhere(param: Tensor, piece: Tensor, group: Group) -> Tensor:
    """Return a stand-in for the gradient of `param`, whose mean is in `piece.grad`."""
    # A view that repeats one of the weights: nobody reads it, and nobody can write to it.
    one = param.detach().as_strided((1,), (1,)) if param.numel() > 1 else param.new_zeros(1)
    part = one.expand(param.shape) if param.dim() else one.squeeze()
    part = part.as_subclass(GradientElsewhere)
    part.group, part.piece = group, piece
    return part


@torch.no_grad()
def _unscale(gradients: Sequence[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    """Divide the gradients by the scale; tell all ranks if any rank found inf or NaN."""
    parts = [each for each in gradients if isinstance(each, PartialGradient)]
    held = [each.held() if isinstance(each, PartialGradient) else each for each in gradients]
    plain = [each for each in held if each is not None]
    torch._amp_foreach_non_finite_check_and_unscale_(plain, found_inf, inverse_scale)
    for group in dict.fromkeys(part.group for part in parts):
        dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=group)


@torch.no_grad()
def gradient_norms(pieces: Sequence[Tensor], group: Group, norm_type: float = 2.0) -> Tensor:
    """Return the norm of each parameter's whole gradient, shape (parameters,), in float64.

    All ranks of `group` must call, with their `pieces` of the same parameters. A piece without a
    gradient counts as zero. It takes one all-reduce.
    """
    if not pieces:
        return torch.zeros(0, dtype=torch.float64)
    p = float(norm_type)
    norms = local_norms(pieces, p)
    if math.isinf(p):
        dist.all_reduce(norms, dist.ReduceOp.MAX, group=group)
        return norms
    power = p or 1.0  # norm 0 counts the elements that are not zero
    sums = norms.pow(power)
    dist.all_reduce(sums, group=group)
    return sums.pow(1 / power)


@torch.no_grad()
def local_norms(params: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the norm of what `.grad` holds on this rank, shape (params,), in float64."""
    norms = [_norm(param, norm_type) for param in params]
    return torch.stack(norms) if norms else torch.zeros(0, dtype=torch.float64)


def _norm(piece: Tensor, p: float) -> Tensor:
    gradient = piece.grad
    if gradient is None or not gradient.numel():
        return torch.zeros((), dtype=torch.float64, device=piece.device)
    plain = gradient.as_subclass(Tensor)
    wide = torch.promote_types(plain.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(plain, p, dtype=wide)
    return norm.double()


def clip_by_norms(
    params: Sequence[Tensor],
    norms: Tensor,
    max_norm: float,
    norm_type: float,
) -> Tensor:
    """Scale the gradients of `params` so that the norm of all `norms` is at most `max_norm`.

    Returns the norm before.
    """
    total: Tensor = torch.linalg.vector_norm(norms, norm_type).to(params[0].dtype.to_real())
    torch.nn.utils.clip_grads_with_norm_(params, max_norm, total)
    return total
