"""A unit: parameters that are gathered together, used, and freed again.

    at rest      rank r holds chunk r, Ψ/K numbers in fp32: the master weights
    gather       chunk in compute dtype  →  all-gather  →  the whole, for as long as it is used
    free         the whole is freed; the chunk stays
    reduce       gradient of the whole  →  reduce-scatter  →  gradient of the chunk, in fp32

It is based on three ideas:

- **A parameter is two tensors.** Under the parameter's name the module registers this rank's
  *piece*, a vector, and `parameters()` gives it to an optimizer. While the unit is gathered, an
  attribute of the same name hides the piece. It is the whole parameter, in its shape, and `forward`
  reads it.
- **The memory is freed, the tensor stays.** Autograd keeps views of the weights for backward. So
  their storage is freed (`resize_(0)`), and filled again before backward reads it.
- **The whole is a leaf.** Its gradient is sent as soon as it is complete, and never kept.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import _foreach_supported_types

from course_lib.bucketing import Bucket
from course_lib.collectives import Group, place_in
from course_lib.gradient_sync import copy_scaled, verify_first_order
from course_lib.parts import Part, as_part
from course_lib.sharded_optimizer import (
    FlatChunks,
    all_gather_chunks,
    start_all_gather,
    start_reduce_scatter,
)

Place = tuple[nn.Module, str]
"""A module, and the name of one of its parameters."""


class Piece(Part):
    """The part of a parameter that this rank has, shape (stop - start,), which may be empty."""

    what = (
        "'{label}' is read outside the forward of its module, where this name holds only this "
        "rank's piece, a vector of {count} elements"
    )
    instead = (
        "Compute with it inside that forward, or share it: a parameter that several modules have "
        "is whole during the whole forward of the FullyShardedDataParallel. For norms, on all "
        "ranks, call whole_norms(parameters) of course_lib.parts"
    )


# An optimizer takes all parameters at once only if it knows the type.
_foreach_supported_types.append(Piece)


class Unit:
    """Parameters of one dtype and device, cut into K chunks; this rank keeps one chunk.

    Attributes:
        chunk: shape (c,), this rank's part of all parameters, in their dtype.
        pieces: for each parameter, this rank's part of it, a view of `chunk`; they are optimized.
        gathered: whether the whole is gathered.

    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        places: Sequence[Sequence[Place]],
        compute_dtype: torch.dtype | None,
        group: Group,
    ) -> None:
        """Shard `params`; `places[i]` lists where modules have parameter i: several if tied."""
        kinds = {(param.dtype, param.device) for param in params}
        if len(kinds) > 1:
            raise ValueError(
                f"the parameters of a unit must have one dtype and one device, got {kinds}"
            )
        everything = range(len(params))
        self._places, self._group = places, group
        self._like = [torch.empty_like(param, device="meta") for param in params]
        self._chunks = FlatChunks(params, everything, group)
        self.chunk = self._chunks.chunk().clone()
        self.pieces: list[Any] = [
            as_part(self._chunks.piece(i, self.chunk), Piece, param, group, _label(*places[i][-1]))
            for i, param in enumerate(params)
        ]
        self._whole = self._chunks.flat.to(compute_dtype or params[0].dtype)
        self._nbytes = self._whole.untyped_storage().nbytes()
        # .data: autograd must not count a write to the whole as a change of the weights.
        self._leaves = [
            view.data.requires_grad_(param.requires_grad)
            for view, param in zip(self._views(self._whole), params, strict=True)
        ]
        for index, leaf in enumerate(self._leaves):
            for module, name in places[index]:
                module._parameters[name] = self.pieces[index]
            if leaf.requires_grad:
                leaf.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]
        self.trained = sum(leaf.requires_grad for leaf in self._leaves)
        self._gathering: tuple[dist.Work | None, Tensor] | None = None
        self._reducing: list[tuple[dist.Work | None, Tensor, Tensor]] = []
        self._gradient: Bucket | None = None
        self._missing: set[int] = set()
        self.gathered = True
        self._chunks.flat.untyped_storage().resize_(0)  # it may differ from self._whole
        self.free()

    def _views(self, flat: Tensor) -> list[Tensor]:
        length = sum(like.numel() for like in self._like)
        return Bucket(self._like, range(len(self._like)), flat[:length]).views

    @property
    def bytes_held(self) -> int:
        """Bytes of weights on this rank now: the chunk, and the whole while it is gathered."""
        whole = self._whole.untyped_storage().nbytes()
        return self.chunk.untyped_storage().nbytes() + whole

    @torch.no_grad()
    def start_gathering(self) -> None:
        """Begin to gather the whole, unless it was started before; `use` waits for it."""
        if self.gathered or self._gathering is not None:
            return
        self._whole.untyped_storage().resize_(self._nbytes)
        mine = self.chunk.to(self._whole.dtype)
        work = start_all_gather(self._whole, mine, self._group)
        self._gathering = (work, mine)

    def use(self) -> None:
        """Gather the whole, and give the modules the whole parameters instead of the pieces."""
        if self.gathered:
            return
        self.start_gathering()
        assert self._gathering is not None
        work, _ = self._gathering
        if work is not None:
            work.wait()
        self._gathering, self.gathered = None, True
        for leaf, places in zip(self._leaves, self._places, strict=True):
            for module, name in places:
                module.__dict__[name] = leaf  # found before the registered piece

    def free(self) -> None:
        """Free the memory of the whole; the pieces are the parameters again."""
        if self._gathering is not None:  # gathered, but not used
            self.use()
        self._whole.untyped_storage().resize_(0)
        for places in self._places:
            for module, name in places:
                module.__dict__.pop(name, None)
        self.gathered = False

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        def on_gradient(leaf: Tensor) -> None:
            assert leaf.grad is not None
            verify_first_order(leaf.grad, f"'{self.pieces[index].label}'")
            if self._gradient is None:
                flat = torch.empty_like(self._whole)
                length = sum(like.numel() for like in self._like)
                flat[length:].zero_()  # the padding is summed up too
                self._missing = set(range(len(self._like)))
                self._gradient = Bucket(self._like, range(len(self._like)), flat[:length])
                self._gradient_flat = flat
                self._gradient.pending = self.trained
            with torch.no_grad():
                factor = 1 / place_in(self._group)[1]
                copy_scaled(leaf.grad, factor, self._gradient.views[index])
            leaf.grad = None
            self._missing.discard(index)
            self._gradient.pending -= 1
            if self._gradient.pending == 0:
                self.reduce()
                if self.trained == len(self._leaves):  # a frozen one may still be needed
                    self.free()

        return on_gradient

    @torch.no_grad()
    def reduce(self) -> None:
        """Begin to reduce-scatter the gradients, if there are any; missing ones are zero."""
        if self._gradient is None:
            return
        for index in self._missing:  # frozen, or not used this time
            self._gradient.views[index].zero_()
        flat, self._gradient = self._gradient_flat, None
        del self._gradient_flat
        mine = flat.new_empty(self.chunk.numel())
        work = start_reduce_scatter(mine, flat, self._group)
        self._reducing.append((work, mine, flat))

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the gradients, and add them to the gradients of the pieces."""
        self.reduce()
        for work, mine, _ in self._reducing:
            if work is not None:
                work.wait()
            mine = mine.to(self.chunk.dtype)
            for index, piece in enumerate(self.pieces):
                if piece.requires_grad:
                    gradient = self._chunks.piece(index, mine)
                    if piece.grad is not None:
                        gradient = gradient + piece.grad
                    piece.grad = gradient
        self._reducing = []

    @torch.no_grad()
    def whole_parameters(self) -> list[tuple[Sequence[Place], Tensor]]:
        """Return copies of the whole parameters, in their own dtype. All ranks must call."""
        flat = self.chunk.new_empty(self._chunks.flat.numel())
        self._chunks.chunk(flat).copy_(self.chunk)
        all_gather_chunks(flat, self._group)
        views = [view.clone() for view in self._views(flat)]
        return list(zip(self._places, views, strict=True))


def _label(module: nn.Module, name: str) -> str:
    return f"{type(module).__name__}.{name}"
