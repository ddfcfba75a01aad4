"""Parts: a tensor that knows that other ranks hold the rest.

If a model is divided over ranks, a rank sees a part of the truth. Code that reads weights or
gradients (it clips, logs norms, looks for NaN, adds a penalty to the loss) would draw a conclusion
of its own on each rank, and the ranks would part without an error. So a weight carries a `Mark`:

    spread   groups whose ranks hold the other *elements* of it     FSDP, ZeRO, tensor parallelism
    apart    groups whose ranks hold other *tensors* of the model   pipeline, experts

and is one of these tensors, as its gradient is, and as are the results that are computed from it:

    Part               some elements of a weight         a function of each element is right
    Block              a block of a matrix               so are products: tensor parallelism
    GradientPiece      some elements of a gradient       a function of each element is right
    OneOfSeveral       a whole weight                    all is right, except for all norms at once
    GradientOfSeveral  a whole gradient                  a function of it alone is right
    LocalGradient      not averaged yet                  only a linear function is right
    GradientElsewhere  nothing                           the mean is in a ZeRO optimizer's pieces

Everything else raises an error that names the function to call instead. `clip_grad_norm_` knows
from the marks over which ranks it must add up, for any of these and any mixture. A `GradScaler`
works with all of them: whether a rank found an infinity is shared over the groups of its gradients,
so all ranks skip a step, or none does.

A parameter is marked in place (it changes its class), so optimizers and modules see the same object
as before. Its gradient is marked when `.grad` is read.
"""

import dataclasses
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import _foreach_supported_types
from torch.utils._pytree import tree_map_only

from course_lib.collectives import Group


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_OF_ALL_ELEMENTS = _names(
    """
    norm linalg_vector_norm linalg_norm linalg_matrix_norm _foreach_norm _foreach_max renorm
    norm_except_dim dist sum nansum mean nanmean prod std var std_mean var_mean median nanmedian
    mode quantile nanquantile max min amax amin aminmax argmax argmin any all count_nonzero nonzero
    logsumexp softmax log_softmax cumsum cumprod normalize layer_norm rms_norm histc histogram topk
    sort argsort kthvalue unique cosine_similarity trace det
    numpy __array__ tolist item __bool__ __float__ __int__ __index__ __complex__
    """
)
"""Functions that put the elements of a tensor together, or hand them to code outside torch."""
_PRODUCTS = _names(
    "dot vdot inner matmul __matmul__ __rmatmul__ mv mm addmm bmm einsum tensordot linear"
)
_NOT_LINEAR = _names(
    """
    clamp clamp_ clamp_min clamp_min_ clamp_max clamp_max_ clip clip_ sign sign_ sgn sgn_ tanh
    tanh_ nan_to_num nan_to_num_ _foreach_clamp_min _foreach_clamp_min_ _foreach_clamp_max
    _foreach_clamp_max_ _foreach_minimum_ _foreach_maximum_ _foreach_sign_
    """
)
"""Functions of each element whose mean is not the function of the mean."""
_ABOUT = _names(
    """
    __get__ size dim numel nelement element_size stride is_contiguous is_floating_point
    is_complex untyped_storage data_ptr get_device __repr__ __format__ __len__
    """
)
"""Functions that do not read the elements."""
_NEW = _names("as_subclass isclose new_zeros new_ones new_full new_empty new_tensor")
"""Functions whose result is not a part."""
_OF_SEVERAL = frozenset(["_foreach_norm", "_foreach_max"])
_JOINS = _names("stack cat concat concatenate hstack vstack")
_RESIZES = (
    _JOINS
    | _PRODUCTS
    | _names(
        """
    pad view __getitem__ narrow select split chunk tensor_split unbind index_select masked_select
    """
    )
)
"""Functions whose result is a part, although it has fewer or more elements."""
_GRADIENT = Tensor.grad.__get__  # type: ignore[union-attr]
_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"  # GradScaler calls it, with all gradients


@dataclasses.dataclass(frozen=True, eq=False)
class Mark:
    """Where the rest of a weight and of its model is; inner groups come first."""

    label: str = "a tensor"
    spread: tuple[Group, ...] = ()
    apart: tuple[Group, ...] = ()


def mark_of(tensor: Tensor) -> Mark:
    """Return the mark of a parameter or gradient; without groups if it is an ordinary tensor."""
    return tensor.mark if isinstance(tensor, Part) else Mark()


class Part(Tensor):
    """Some elements of a weight. A result computed from it is one, too."""

    mark: Mark
    reason: str = "each rank holds a different part of it"
    instead: ClassVar[str] = (
        "For the whole, call clip_grad_norm_(parameters, max_norm), gradient_norms(parameters) or "
        "whole_norms(tensors) of course_lib.parts, on all ranks. For this rank's part alone, take "
        "as_subclass(torch.Tensor)"
    )
    forbidden: ClassVar[frozenset[str]] = _OF_ALL_ELEMENTS | _PRODUCTS
    keeps_size: ClassVar[bool] = True
    """Whether a result must have as many elements: else one element was used for many."""
    marks_results: ClassVar[bool] = True

    @classmethod
    def allows(cls, name: str) -> bool:
        """Return whether the function of this name has the right result on each rank."""
        return name not in cls.forbidden

    def held(self) -> Tensor | None:
        """Return the elements that this rank holds, as a plain tensor in the same memory."""
        return self.as_subclass(Tensor)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute on this rank's part, raise RuntimeError, or share a `GradScaler`'s finding."""
        name, kwargs = func.__name__, kwargs or {}
        if name == _UNSCALE:
            return _unscale(*args)
        if func == _GRADIENT:
            return _marked_gradient(args[0])
        if func == torch.autograd.grad:
            return _gradients(*args, **kwargs)
        inside = dist.is_initialized()  # a result that has left the ranks is an ordinary tensor
        if inside and not all(kind.allows(name) for kind in types if issubclass(kind, Part)):
            raise next(p for p in _parts_in(args, kwargs) if not p.allows(name))._error(name)
        with torch._C.DisableTorchFunctionSubclass():
            try:
                result = func(*args, **kwargs)
            except RuntimeError as error:
                first = next(_parts_in(args, kwargs))
                if inside and first.keeps_size and name not in _PRODUCTS:
                    raise first._error(name, f" ({error})") from error
                raise
            if name in _NEW or not isinstance(result, Tensor | list | tuple):
                return result
            first, *parts = _parts_in(args, kwargs)
            if name.startswith("_foreach_"):
                if inside and any(isinstance(tensor, Part) for tensor in args):
                    raise first._error(name)  # one number is used for all tensors of a list
                if name.endswith("_"):
                    return result
                return [first._of_result(name, [], tensor, inside) for tensor in result]
            if isinstance(result, Tensor):
                return first._of_result(name, parts, result, inside)
            return tree_map_only(
                Tensor, lambda tensor: first._of_result(name, parts, tensor, inside), result
            )

    def _of_result(self, name: str, parts: "list[Part]", result: Tensor, inside: bool) -> Tensor:
        if inside and name not in _RESIZES:
            for part in (self, *parts):
                if part.keeps_size and part.numel() != result.numel():
                    raise part._error(name)
        return self._like(result) if self.marks_results and type(result) is Tensor else result

    def _like(self, tensor: Tensor) -> Tensor:
        part = tensor.as_subclass(type(self))
        part.mark = self.mark
        return part

    def _error(self, name: str, because: str = "") -> RuntimeError:
        reason = self.reason.format(label=self.mark.label, count=self.numel())
        noun = "a gradient" if isinstance(self, PartialGradient) else f"'{self.mark.label}'"
        return RuntimeError(
            f"rank {dist.get_rank()}: {name}() of {noun} would be wrong here: {reason}. "
            f"{self.instead}{because}"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle an ordinary tensor or parameter: what leaves the ranks cannot communicate."""
        with torch._C.DisableTorchFunctionSubclass():
            plain = self.detach().as_subclass(Tensor).requires_grad_(self.requires_grad)
            if isinstance(self, nn.Parameter):
                plain = nn.Parameter(plain, self.requires_grad)
            return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            copied = self._like(self.detach().as_subclass(Tensor).clone())
            copied.requires_grad_(self.requires_grad)
            copied.__dict__ |= self.__dict__
        memo[id(self)] = copied
        return copied


class Block(Part):
    """A block of a matrix, or of a bias. A product with it is an ordinary tensor."""

    forbidden = _OF_ALL_ELEMENTS

    def _of_result(self, name: str, parts: list[Part], result: Tensor, inside: bool) -> Tensor:
        return result if name in _PRODUCTS else super()._of_result(name, parts, result, inside)


class OneOfSeveral(Part):
    """A whole weight of a model whose other weights other ranks hold. A result is ordinary."""

    reason = "it would be the norm of this rank's weights, and other ranks hold other weights"
    forbidden = _OF_SEVERAL
    keeps_size = marks_results = False


class PartialGradient(Part):
    """A gradient of which this rank has only a part."""


class GradientPiece(PartialGradient):
    """The elements of a parameter's mean gradient that this rank has, shape (stop - start,)."""


class GradientOfSeveral(PartialGradient):
    """The whole gradient of one parameter, while other ranks have those of other parameters."""

    reason = "other ranks hold the gradients of other parameters"
    forbidden = _OF_SEVERAL
    keeps_size = False

    def _of_result(self, name: str, parts: list[Part], result: Tensor, inside: bool) -> Tensor:
        result = super()._of_result(name, parts, result, inside)
        if name in _JOINS or any(part.mark is not self.mark for part in parts):
            result.__class__ = SeveralGradients
        return result


class SeveralGradients(GradientOfSeveral):
    """A result from gradients of several parameters, such as a vector of their norms."""

    forbidden = Part.forbidden
    keeps_size = True


class LocalGradient(PartialGradient):
    """A rank's own gradient, which `ShardedOptimizer(…, gradients="local")` will average."""

    average: "weakref.WeakMethod[Callable[[], Any]]"
    reason = "it is this rank's own, and is averaged only in step()"
    instead = (
        "Call clip_grad_norm_(max_norm) or gradient_norms() of the ShardedOptimizer, on all ranks. "
        "Its averaged_parameters() are for functions of each element, such as clip_grad_value_"
    )
    forbidden = Part.forbidden | _NOT_LINEAR


class GradientElsewhere(PartialGradient):
    """Stands in for the gradient of a parameter whose mean is in `piece.grad`.

    It has the parameter's shape, but no memory of its own.
    """

    piece: Tensor
    reason = "it is already averaged, and each rank holds a different part of it"
    instead = LocalGradient.instead

    @classmethod
    def allows(cls, name: str) -> bool:
        """Return whether the function reads no element."""
        return name in _ABOUT

    def held(self) -> Tensor | None:
        """Return the gradient of the piece."""
        return None if self.piece.grad is None else self.piece.grad.as_subclass(Tensor)


_OF_WEIGHT = {Block: PartialGradient, OneOfSeveral: GradientOfSeveral}
"""The class of a weight → that of its gradient, if it is not `GradientPiece`."""
# As PyTorch does for DTensor: an optimizer takes all parameters at once only if it knows the type.
_foreach_supported_types += [Part, Block, OneOfSeveral]


def _parts_in(args: Iterable[Any], kwargs: dict[str, Any]) -> Iterator[Part]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Part):
            yield value
        elif isinstance(value, list | tuple):
            yield from _parts_in(value, {})


def _marked_gradient(param: Part) -> Any:
    """Return `.grad`, the same object each time."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient: Any = param.grad
    if gradient is not None and not isinstance(gradient, LocalGradient | GradientElsewhere):
        _mark_gradient(gradient, param)
    return gradient


def _mark_gradient(gradient: Any, param: Part) -> None:
    gradient.__class__ = _OF_WEIGHT.get(type(param), GradientPiece)
    gradient.mark = param.mark


def _gradients(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Return what `torch.autograd.grad` returns: the gradient of a part is a part."""
    with torch._C.DisableTorchFunctionSubclass():
        gradients: list[Any] = list(torch.autograd.grad(outputs, inputs, *args, **kwargs))
        params = [inputs] if isinstance(inputs, Tensor) else inputs
        for i, param in enumerate(params):
            if isinstance(param, Part) and gradients[i] is not None:
                # Another object, because it may be an argument.
                gradients[i] = gradients[i].as_subclass(Tensor)
                _mark_gradient(gradients[i], param)
    return tuple(gradients)


def as_part(
    tensor: Tensor, kind: type[Part], like: Tensor, group: Group, label: str
) -> nn.Parameter:
    """Return `tensor` as a parameter: a part of `like`, whose rest the ranks of `group` hold."""
    outer_mark = mark_of(like)
    mark = Mark(label, _with(outer_mark.spread, group), outer_mark.apart)
    return _marked(nn.Parameter(tensor, like.requires_grad), kind, mark)


def mark_apart(
    params: Iterable[tuple[str, nn.Parameter]], group: Group, *, inner: bool = False
) -> None:
    """Mark named parameters in place: the other ranks of `group` hold other ones of the model.

    If this is `inner`, the groups of earlier marks divide what is around these parameters.
    """
    for name, param in params:
        mark = mark_of(param)
        *earlier, group = _with(mark.apart, group)
        mark = dataclasses.replace(mark, apart=(group, *earlier) if inner else (*earlier, group))
        if isinstance(param, Part):
            param.mark = mark
        elif type(param) is nn.Parameter:
            _marked(param, OneOfSeveral, dataclasses.replace(mark, label=name))


def _marked(param: nn.Parameter, kind: type[Part], mark: Mark) -> nn.Parameter:
    param.__class__ = kind  # type: ignore[assignment]
    param.__dict__ |= {"mark": mark, "_is_param": True}  # which makes it an nn.Parameter
    return param


def _with(groups: tuple[Group, ...], group: Group) -> tuple[Group, ...]:
    """Return `groups` and `group`, which replaces one of the same ranks."""
    ranks = dist.get_process_group_ranks
    return (*(other for other in groups if ranks(other) != ranks(group)), group)


def local_gradient(param: Tensor, group: Group, average: Callable[[], Any]) -> None:
    """Mark the gradient of `param`: `average`, a bound method, will average it over `group`."""
    gradient: Any = param.grad
    mark = mark_of(param)
    gradient.__class__ = LocalGradient
    gradient.mark = dataclasses.replace(mark, spread=_with(mark.spread, group))
    gradient.average = weakref.WeakMethod(average)


def gradient_elsewhere(param: Tensor, piece: Tensor) -> Tensor:
    """Return a stand-in for the gradient of `param`, whose mean is in `piece.grad`."""
    # A view that repeats one of the weights: nobody reads it, and nobody can write to it.
    plain = param.detach().as_subclass(Tensor)
    element = plain.as_strided((1,), (1,)) if param.numel() > 1 else plain.new_zeros(1)
    part = element.expand(param.shape) if param.dim() else element.squeeze()
    part = part.as_subclass(GradientElsewhere)
    part.mark, part.piece = mark_of(piece), piece
    return part


@torch.no_grad()
def _unscale(gradients: Sequence[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    """Divide the gradients by the scale; tell all ranks if any rank found inf or NaN."""
    marks = [mark_of(gradient) for gradient in gradients]
    held = [gradient.held() if isinstance(gradient, Part) else gradient for gradient in gradients]
    plain = [gradient for gradient in held if gradient is not None]
    torch._amp_foreach_non_finite_check_and_unscale_(plain, found_inf, inverse_scale)
    for group in _inner_first((*mark.spread, *mark.apart) for mark in marks):
        dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=group)


def _inner_first(chains: Iterable[tuple[Group, ...]]) -> list[Group]:
    """Return the groups of all chains, so that those that hold others of a chain come last."""
    height: dict[Group, int] = {}
    for chain in chains:
        for above, group in enumerate(reversed(chain)):
            height[group] = max(height.get(group, 0), above)
    return sorted(height, key=lambda group: height[group], reverse=True)


@torch.no_grad()
def whole_norms(tensors: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """Return the norm of each whole tensor of which this rank has a part: (tensors,), in float64.

    The tensors are weights, or parts of the model's gradients. All ranks that hold parts must call.
    It takes one all-reduce for each group. Autograd does not see it.
    """
    tensors = list(tensors)
    return _norms(tensors, tensors, float(norm_type))


@torch.no_grad()
def gradient_norms(parameters: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """Return the norm of each parameter's whole gradient, shape (parameters,), in float64.

    All ranks must call, after backward and before the optimizer's step. A missing gradient counts
    as zero.
    """
    params = _holders(parameters)
    return _norms([param.grad for param in params], params, float(norm_type))


def clip_grad_norm_(
    parameters: nn.Module | Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0
) -> Tensor:
    """Clip the gradient of the whole model, as `torch.nn.utils.clip_grad_norm_` in one process.

    All ranks must call, each with its parameters (at least one), or with its module: plain ones and
    those of any wrapper, after the gradients are averaged (and after `GradScaler.unscale_`), and
    before the optimizer's step. A parameter that several ranks hold counts once. Returns the norm
    before, equal on all ranks.
    """
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    params = _holders([parameters] if isinstance(parameters, Tensor) else parameters)
    p = float(norm_type)
    norms = gradient_norms(params, p)
    # (groups over which to add up) → what is added: the norm to the power of p
    terms: dict[tuple[Group, ...], Tensor] = {(): norms.new_zeros(())}
    add, power = (torch.maximum, 1.0) if math.isinf(p) else (torch.add, p or 1.0)
    chains = [mark_of(param).apart for param in params]
    for chain in dict.fromkeys(chains):
        members = norms[[i for i, other in enumerate(chains) if other == chain]]
        terms[chain] = torch.linalg.vector_norm(members, p).pow(power)
    for group in _inner_first(terms):
        chained = [chain for chain in terms if chain[:1] == (group,)]
        sums = _over_ranks(torch.stack([terms.pop(chain) for chain in chained]), p, group)
        for chain, term in zip(chained, sums, strict=True):
            terms[chain[1:]] = add(terms.get(chain[1:], torch.zeros_like(term)), term)
    total = terms[()].pow(1 / power)
    if params:
        total = total.to(params[0].dtype.to_real())
        torch.nn.utils.clip_grads_with_norm_(params, max_norm, total)
    return total


def _holders(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors whose `.grad` is this rank's part of the mean gradients."""
    params = list(parameters)
    for param in params:
        if isinstance(param.grad, LocalGradient):
            average = param.grad.average()
            assert average is not None, "hooks of an optimizer that is gone mark no gradients"
            average()
    return [p.grad.piece if isinstance(p.grad, GradientElsewhere) else p for p in params]


def _norms(tensors: Sequence[Tensor | None], likes: Sequence[Tensor], p: float) -> Tensor:
    if not tensors:
        return torch.zeros(0, dtype=torch.float64)
    norms = torch.stack([_norm(*pair, p) for pair in zip(tensors, likes, strict=True)])
    power = 1.0 if math.isinf(p) else p or 1.0  # norm 0 counts the elements that are not zero
    chains = [mark_of(like).spread for like in likes]
    for chain in dict.fromkeys(chains):
        members = [i for i, other in enumerate(chains) if other == chain]
        terms = norms[members].pow(power)
        for group in chain:
            terms = _over_ranks(terms, p, group)
        norms[members] = terms.pow(1 / power)
    return norms


def _over_ranks(terms: Tensor, p: float, group: Group) -> Tensor:
    operation = dist.ReduceOp.MAX if math.isinf(p) else dist.ReduceOp.SUM
    dist.all_reduce(terms, operation, group=group)
    return terms


def _norm(part: Tensor | None, like: Tensor, p: float) -> Tensor:
    """Return the norm of what this rank holds, a float64."""
    if part is None or not part.numel():
        return torch.zeros((), dtype=torch.float64, device=like.device)
    plain = part.detach().as_subclass(Tensor)
    wide = torch.promote_types(plain.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(plain, p, dtype=wide)
    return norm.double()
