"""A unit: parameters that are gathered together, used, and freed again.

    at rest      rank r holds its pieces, Ψ/K numbers in fp32: the master weights
    gather       pieces in compute dtype  →  all-gather  →  the whole, for as long as it is used
    free         the whole is freed; the pieces stay
    reduce       gradient of the whole  →  reduce-scatter  →  gradient of the pieces, in fp32

It is based on four ideas:

- **A parameter is two tensors.** Under the parameter's name the module registers this rank's
  *piece*, a vector, and `parameters()` gives it to an optimizer. While the unit is gathered, an
  attribute of the same name hides the piece. It is the whole parameter, in its shape, and `forward`
  reads it.
- **The memory is freed, the tensor stays.** Autograd keeps views of the weights for backward. So
  their storage is freed (`resize_(0)`), and filled again before backward reads it.
- **The whole is a leaf.** Its gradient is sent as soon as it is complete, and never kept.
- **Only the pieces count.** Each gather reads them anew, wherever they are in memory. So whoever
  writes to them, or gives them other memory (`param.data = …`), changes the weights.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.optim.optimizer import _foreach_supported_types

from course_lib.bucketing import Bucket
from course_lib.collectives import Group, place_in
from course_lib.gradient_sync import copy_scaled, verify_first_order
from course_lib.guard import form_of, rank_error, replaced, use_of, verify_form
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

    reason = (
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
        pieces: for each parameter, this rank's part of it; they are optimized.
        like: for each parameter, a tensor of its whole form, without memory.
        chunks: which part of which parameter belongs to this rank.
        gathered: whether the whole is gathered.

    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        names: Sequence[str],
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
        self._names, self._places, self._group = names, places, group
        self._dtype = compute_dtype or params[0].dtype
        self.like = [torch.empty_like(param, device="meta") for param in params]
        self.chunks = FlatChunks(params, range(len(params)), group)
        self._length = len(self.chunks.chunk())
        self.pieces = self._cut(params)
        self._forms = [form_of(piece) for piece in self.pieces]
        self._allocate()
        for index, param in enumerate(params):
            for module, name in places[index]:
                module._parameters[name] = self.pieces[index]
            if self.pieces[index] is not param:
                self._carry_hooks(index, param)
        self.chunks.flat.untyped_storage().resize_(0)

    def _cut(self, params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        chunk = self.chunks.chunk().clone()
        pieces: list[nn.Parameter] = []
        for index, param in enumerate(params):
            module, name = self._places[index][-1]
            part, label = self.chunks.piece(index, chunk), f"{type(module).__name__}.{name}"
            pieces.append(as_part(part, Piece, param, self._group, label))
        return pieces

    def _allocate(self) -> None:
        """Make the whole, which has no memory yet, and its parameters, which autograd sees."""
        length, device = self.chunks.flat.numel(), self.pieces[0].device
        self._whole = torch.empty(length, dtype=self._dtype, device=device)
        self._nbytes = self._whole.untyped_storage().nbytes()
        # .data: autograd must not count a write to the whole as a change of the weights.
        self._leaves = [view.data for view in self._views(self._whole)]
        self._whole.untyped_storage().resize_(0)
        self._gathering: tuple[dist.Work | None, Tensor] | None = None
        self._reducing: list[tuple[dist.Work | None, Tensor, Tensor]] = []
        self._gradient: Bucket | None = None
        self._missing: set[int] = set()
        self.gathered = False
        self.follow_pieces()

    def _carry_hooks(self, index: int, param: nn.Parameter) -> None:
        """Run the hooks of `param` on the gradient of the whole, before it is averaged."""
        if getattr(param, "_post_accumulate_grad_hooks", None):
            raise rank_error(
                f"'{self._names[index]}' has a hook of register_post_accumulate_grad_hook, but it "
                "becomes another parameter, this rank's piece",
                "Set this hook after wrapping, on the parameters of the FullyShardedDataParallel.",
            )
        self._leaves[index]._backward_hooks = param._backward_hooks

    def verify_pieces(self) -> None:
        """Raise RuntimeError if a piece was converted, or is not where it was registered."""
        for name, piece, form, places in zip(
            self._names, self.pieces, self._forms, self._places, strict=True
        ):
            verify_form(f"'{name}'", piece, form)
            if any(module._parameters.get(attribute) is not piece for module, attribute in places):
                raise replaced(name)

    def follow_pieces(self) -> None:
        """Train what is trained now."""
        for index, (leaf, piece) in enumerate(zip(self._leaves, self.pieces, strict=True)):
            leaf.requires_grad_(piece.requires_grad)
            if piece.requires_grad and not use_of(leaf)[1]:
                leaf.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Unit":
        twin = memo[id(self)] = copy.copy(self)
        twin._places, twin.pieces = copy.deepcopy((self._places, self.pieces), memo)
        twin._allocate()
        return twin

    def _views(self, flat: Tensor) -> list[Tensor]:
        length = sum(like.numel() for like in self.like)
        return Bucket(self.like, range(len(self.like)), flat[:length]).views

    @property
    def bytes_held(self) -> int:
        """Bytes of weights on this rank now: the pieces, and the whole while it is gathered."""
        pieces = sum(piece.nbytes for piece in self.pieces)
        return pieces + self._whole.untyped_storage().nbytes()

    def _chunk(self) -> Tensor:
        """Return this rank's chunk, shape (c,), a copy of its pieces."""
        chunk = torch.cat([piece.detach().as_subclass(Tensor) for piece in self.pieces])
        return pad(chunk, (0, self._length - len(chunk)))

    @torch.no_grad()
    def start_gathering(self) -> None:
        """Begin to gather the whole, unless it was started before; `use` waits for it."""
        if self.gathered or self._gathering is not None:
            return
        self._whole.untyped_storage().resize_(self._nbytes)
        own_chunk = self._chunk().to(self._dtype)
        self._gathering = (start_all_gather(self._whole, own_chunk, self._group), own_chunk)

    def use(self) -> None:
        """Gather the whole, and give the modules the whole parameters instead of the pieces."""
        if self.gathered:
            return
        self.start_gathering()
        assert self._gathering is not None
        work, own = self._gathering
        if work is not None:
            work.wait()
            own.untyped_storage().resize_(0)
        self._gathering, self.gathered = None, True
        for leaf, places in zip(self._leaves, self._places, strict=True):
            for module, name in places:
                module.__dict__[name] = leaf  # found before the registered piece

    def free(self) -> None:
        """Free the memory of the whole; the pieces are the parameters again."""
        if self._gathering is not None:  # gathered, but not used
            self.use()
        if not self.gathered:
            return
        self._whole.untyped_storage().resize_(0)
        for places in self._places:
            for module, name in places:
                module.__dict__.pop(name, None)
        self.gathered = False

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        def on_gradient(leaf: Tensor) -> None:
            assert leaf.grad is not None
            verify_first_order(leaf.grad, f"'{self._names[index]}'")
            if self._gradient is None:
                flat = torch.empty_like(self._whole)
                length = sum(like.numel() for like in self.like)
                flat[length:].zero_()  # the padding is summed up too
                self._missing = set(range(len(self.like)))
                self._gradient = Bucket(self.like, range(len(self.like)), flat[:length])
                self._gradient_flat = flat
            with torch.no_grad():
                factor, view = 1 / place_in(self._group)[1], self._gradient.views[index]
                if index in self._missing:
                    copy_scaled(leaf.grad, factor, view)
                else:  # twice in one backward: in blocks that are checkpointed
                    view.add_(leaf.grad, alpha=factor)
            leaf.grad = None
            self._missing.discard(index)
            trained = [i for i, leaf in enumerate(self._leaves) if leaf.requires_grad]
            if self._missing.isdisjoint(trained):
                self.reduce()
                if len(trained) == len(self._leaves):  # a frozen one may still be needed
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
        self._reducing.append(self._start_reducing(flat))

    def _start_reducing(self, flat: Tensor) -> tuple[dist.Work | None, Tensor, Tensor]:
        own_chunk = flat.new_empty(self._length)
        return start_reduce_scatter(own_chunk, flat, self._group), own_chunk, flat

    def free_sent(self) -> None:
        """Wait for the reduce-scatters that are on their way, and free what they sent."""
        for place, (work, own, flat) in enumerate(self._reducing):
            if work is not None:
                work.wait()
                self._reducing[place] = (None, own, own)
                if flat is not own:
                    flat.untyped_storage().resize_(0)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the gradients, and add them to the gradients of the pieces."""
        self.reduce()
        reduced = [chunk.to(self.pieces[0].dtype) for chunk in self._wait()]
        if not reduced:
            return
        for index, piece in enumerate(self.pieces):
            if piece.requires_grad:
                self._add(piece, self._part(index, sum(reduced[1:], reduced[0])))

    def _part(self, index: int, chunk: Tensor) -> Tensor:
        return self.chunks.piece(index, chunk)

    def _add(self, piece: nn.Parameter, gradient: Tensor) -> None:
        """Add to the gradient of a piece, and run the hooks set on it, as autograd does."""
        for hook in list((piece._backward_hooks or {}).values()):  # one may remove itself
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        piece.grad = gradient if piece.grad is None else piece.grad + gradient
        for hook in list((piece._post_accumulate_grad_hooks or {}).values()):
            hook(piece)

    def _wait(self) -> list[Tensor]:
        """Wait for all gradients that are on their way; return them, and forget them here."""
        self.free_sent()
        reduced, self._reducing = [chunk for _, chunk, _ in self._reducing], []
        return reduced

    def forget_backward(self) -> None:
        """Drop what a backward left behind that did not end."""
        self._wait()
        self._gradient = None
        for leaf in self._leaves:
            leaf.grad = None

    @torch.no_grad()
    def whole_parameters(self) -> list[tuple[Sequence[Place], Tensor]]:
        """Return copies of the whole parameters, in their own dtype. All ranks must call."""
        chunk = self._chunk()
        flat = chunk.new_empty(self.chunks.flat.numel())
        self.chunks.chunk(flat).copy_(chunk)
        all_gather_chunks(flat, self._group)
        views = [view.clone() for view in self._views(flat)]
        return list(zip(self._places, views, strict=True))


class WholeUnit(Unit):
    """Parameters that stay whole on each rank; their gradients are averaged by an all-reduce."""

    def _cut(self, params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        return list(params)

    @torch.no_grad()
    def start_gathering(self) -> None:
        """Copy the parameters in compute dtype."""
        if not self.gathered:
            self._whole.untyped_storage().resize_(self._nbytes)
            for piece, view in zip(self.pieces, self._views(self._whole), strict=True):
                view.copy_(piece)
            self._gathering = (None, self._whole)

    def _start_reducing(self, flat: Tensor) -> tuple[dist.Work | None, Tensor, Tensor]:
        return dist.all_reduce(flat, group=self._group, async_op=True), flat, flat

    def _part(self, index: int, flat: Tensor) -> Tensor:
        return self._views(flat)[index]
