"""ZeRO-2: gradients that are reduced to their owner during backward, and then freed.

In ZeRO-1 a rank uses only the gradients of its pieces, so it does not have to keep the others. When
the last gradient of a bucket is ready, the ranks reduce-scatter the bucket. Each rank keeps its
chunk, Ψ/K numbers in all, and frees the rest:

    backward   g₄ g₃ → bucket → reduce-scatter → my chunk of g₄ g₃   (and `.grad` is freed)
                       g₂ g₁ → bucket → reduce-scatter → my chunk of g₂ g₁

After backward, `.grad` is a stand-in. `GradScaler` understands it, and code that looks for a whole
gradient gets an error (`parts`). Clearing it clears the rank's piece.

Buckets are reduced in one order, the same on all ranks, because ranks match collectives by their
order. On a GPU the reduce-scatter runs during backward. Over gloo it does not, because both need
the same cores.

S. Rajbhandari et al., "ZeRO", SC 2020, section 5.2.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from course_lib.bucketing import Bucket
from course_lib.collectives import Group, place_in
from course_lib.ddp import EndOfBackward
from course_lib.gradient_sync import copy_scaled, verify_first_order
from course_lib.guard import rank_error
from course_lib.parts import GradientElsewhere, gradient_elsewhere
from course_lib.sharded_optimizer.partition import (
    FlatChunks,
    reduce_scatter_chunks,
    start_reduce_scatter,
)


class ShardedGradients:
    """Moves the gradients of `params` into buckets as backward computes them, and reduces these.

    The pieces passed to `hook_in` get their parts of the mean gradient. Gradients of several
    backwards before a step add up; each of them is averaged over the ranks.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        names: Sequence[str],
        buffers: Sequence[FlatChunks],
        pieces: Sequence[Tensor],
        group: Group,
    ) -> None:
        self._params, self._names, self._buffers = params, names, buffers
        self._pieces, self._group = pieces, group
        self._where: dict[int, tuple[int, int]] = {}  # index → number of its buffer, place in it
        self._places: dict[int, tuple[Tensor, Bucket]] = {}
        self._works: list[tuple[int, Tensor, Tensor, dist.Work | None]] = []
        self._next, self._heard = 0, False
        self._end = EndOfBackward(self._finish_backward)
        self._arrived: set[int] = set()
        self._kept: set[int] = set()  # parameters whose earlier gradients are not cleared

    def hook_in(self) -> list[RemovableHandle]:
        """Handle the gradients of all buffers from now on, as long as this object exists."""
        self._where = {
            i: (b, n)
            for b, chunks in enumerate(self._buffers)
            for n, i in enumerate(chunks.indices)
        }
        return hook_gradients(self._params, self._where, self._before_gradient, self._on_gradient)

    def _before_gradient(self, index: int) -> None:
        if not self._end.requested:
            self._forget_backward()  # one that failed
            self._end.ask()
        if isinstance(self._params[index].grad, GradientElsewhere):
            self._kept.add(index)
            self._params[index].grad = None

    def _on_gradient(self, index: int) -> None:
        number, place = self._where[index]
        param, (_, bucket) = self._params[index], self._place(number)
        assert param.grad is not None
        verify_first_order(param.grad, self._names[index])
        if index in self._arrived:
            raise rank_error(
                f"backward() reached {self._names[index]} a second time, but its gradient may have "
                "been sent already",
                'Checkpoint blocks that are used twice with use_reentrant=False, or use gradients="'
                'local".',
            )
        self._arrived.add(index)
        with torch.no_grad():
            copy_scaled(param.grad, 1 / place_in(self._group)[1], bucket.views[place])
        param.grad = None
        bucket.pending -= 1
        while self._next in self._places and self._places[self._next][1].pending == 0:
            self._launch()

    def _place(self, number: int) -> tuple[Tensor, Bucket]:
        """Return the memory of a bucket's gradients, which is kept until they are reduced."""
        if number not in self._places:
            chunks = self._buffers[number]
            flat = torch.zeros_like(chunks.flat)
            bucket = Bucket(self._params, chunks.indices, flat[: len(chunks.bucket.buffer)])
            bucket.pending = sum(self._params[i].requires_grad for i in chunks.indices)
            self._places[number] = (flat, bucket)
        return self._places[number]

    def _launch(self) -> None:
        flat, _ = self._place(self._next)
        del self._places[self._next]
        work = None
        if flat.is_cuda:
            own_chunk = torch.empty_like(self._buffers[self._next].chunk(flat))
            work = start_reduce_scatter(own_chunk, flat, self._group)
        else:
            with torch.no_grad():
                own_chunk = reduce_scatter_chunks(flat, self._group).clone()
        self._works.append((self._next, own_chunk, flat if work else own_chunk, work))
        self._next += 1

    @torch.no_grad()
    def _finish_backward(self) -> None:
        """Reduce the buckets that lack a gradient, and give the results to the pieces."""
        self._heard = True
        while self._next < len(self._buffers):
            self._launch()
        for number, own_chunk, _, work in self._works:
            if work is not None:
                work.wait()
            chunks = self._buffers[number]
            for index in chunks.indices:
                param, piece = self._params[index], self._pieces[index]
                if not param.requires_grad:  # frozen since
                    continue
                if piece.numel():
                    gradient = chunks.piece(index, own_chunk)
                    accumulates = index in self._kept or isinstance(param.grad, GradientElsewhere)
                    if accumulates and piece.grad is not None:
                        gradient = gradient + piece.grad
                    piece.grad = gradient
                param.grad = gradient_elsewhere(param, piece)
        self._works = []
        self._forget_backward()

    def _forget_backward(self) -> None:
        """Drop what a backward left behind that did not end."""
        for _, _, _, work in self._works:
            if work is not None:
                work.wait()
        self._works, self._next = [], 0
        self._places.clear()
        self._arrived.clear()
        self._kept.clear()

    def finish(self, late: Sequence[int]) -> None:
        """Take part in the reductions with zeros if no backward reached a parameter here.

        `late` are parameters that got hooks only after the last backward. Raises RuntimeError if
        another gradient did not come from backward: it was not averaged.
        """
        for index, param in enumerate(self._params):
            if param.grad is None or isinstance(param.grad, GradientElsewhere):
                continue
            if index in late:
                self._on_gradient(index)
            elif param.requires_grad:
                raise rank_error(
                    f"{self._names[index]} has a gradient that backward() did not compute, so it "
                    "would not be used",
                    'To set gradients yourself, for example by torch.autograd.grad, use gradients="'
                    'local".',
                )
        if late or not self._heard:
            self._finish_backward()

    def forget(self) -> None:
        """Begin the next step."""
        self._heard = False


def hook_gradients(
    params: Sequence[Tensor],
    indices: Iterable[int],
    before: Callable[[int], None],
    after: Callable[[int], None],
) -> list[RemovableHandle]:
    """Call two bound methods before and after backward adds to the gradient of `params[index]`.

    Frozen parameters are left out. The hooks do nothing when the methods' object is deleted.
    """
    handles: list[RemovableHandle] = []
    for index in (i for i in indices if params[i].requires_grad):
        param, first, last = params[index], _telling(before, index), _telling(after, index)
        handles.append(param.register_hook(first))  # type: ignore[no-untyped-call]
        handles.append(param.register_post_accumulate_grad_hook(last))  # type: ignore[no-untyped-call]
    return handles


def _telling(method: Callable[[int], None], index: int) -> Callable[..., None]:
    reference = weakref.WeakMethod(method)

    def tell(_: Tensor) -> None:
        called = reference()
        if called is not None:
            called(index)

    return tell
