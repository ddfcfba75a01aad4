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

from course_lib.bucketing import Bucket
from course_lib.collectives import Group, place_in
from course_lib.gradient_sync import copy_scaled, verify_first_order
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
        self, params: Sequence[Tensor], buffers: Sequence[FlatChunks], group: Group
    ) -> None:
        self._params, self._buffers, self._group = params, buffers, group
        self._pieces: Sequence[Tensor] = ()
        self._where = {i: (b, n) for b, c in enumerate(buffers) for n, i in enumerate(c.indices)}
        self._places: dict[int, tuple[Tensor, Bucket]] = {}
        self._works: list[tuple[int, Tensor, Tensor, dist.Work | None]] = []
        self._next, self._queued, self._heard = 0, False, False
        self._kept: set[int] = set()  # parameters whose earlier gradients are not cleared

    def hook_in(self, pieces: Sequence[Tensor]) -> None:
        """Handle all gradients from now on, as long as this object exists."""
        self._pieces = pieces
        hook_gradients(self._params, self._where, self._before_gradient, self._on_gradient)

    def _before_gradient(self, index: int) -> None:
        if isinstance(self._params[index].grad, GradientElsewhere):
            self._kept.add(index)
            self._params[index].grad = None

    def _on_gradient(self, index: int) -> None:
        if not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_backward)
        number, place = self._where[index]
        param, (_, bucket) = self._params[index], self._place(number)
        assert param.grad is not None
        verify_first_order(param.grad)
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
            self._places[number] = (flat, bucket)
        return self._places[number]

    def _launch(self) -> None:
        flat, _ = self._place(self._next)
        del self._places[self._next]
        work = None
        if flat.is_cuda:
            mine = torch.empty_like(self._buffers[self._next].chunk(flat))
            work = start_reduce_scatter(mine, flat, self._group)
        else:
            with torch.no_grad():
                mine = reduce_scatter_chunks(flat, self._group).clone()
        self._works.append((self._next, mine, flat if work else mine, work))
        self._next += 1

    @torch.no_grad()
    def _finish_backward(self) -> None:
        """Reduce the buckets that lack a gradient, and give the results to the pieces."""
        self._queued, self._heard = False, True
        while self._next < len(self._buffers):
            self._launch()
        for number, mine, _, work in self._works:
            if work is not None:
                work.wait()
            chunks = self._buffers[number]
            for index in chunks.indices:
                param, piece = self._params[index], self._pieces[index]
                if piece.numel():
                    gradient = chunks.piece(index, mine)
                    kept = index in self._kept or isinstance(param.grad, GradientElsewhere)
                    if kept and piece.grad is not None:
                        gradient = gradient + piece.grad
                    piece.grad = gradient
                param.grad = gradient_elsewhere(param, piece)
        self._works, self._next = [], 0
        self._kept.clear()

    def finish(self) -> None:
        """Take part in the reductions with zeros if no backward reached a parameter here."""
        if not self._heard:
            self._finish_backward()
        self._heard = True

    def forget(self) -> None:
        """Begin the next step."""
        self._heard = False


def hook_gradients(
    params: Sequence[Tensor],
    indices: Iterable[int],
    before: Callable[[int], None],
    after: Callable[[int], None],
) -> None:
    """Call two bound methods before and after backward adds to the gradient of `params[index]`.

    The hooks do nothing when the methods' object is deleted.
    """
    for index in indices:
        params[index].register_hook(_telling(weakref.WeakMethod(before), index))  # type: ignore[no-untyped-call]
        hook = _telling(weakref.WeakMethod(after), index)
        params[index].register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def _telling(
    method: "weakref.WeakMethod[Callable[[int], None]]", index: int
) -> Callable[..., None]:
    def tell(_: Tensor) -> None:
        called = method()
        if called is not None:
            called(index)

    return tell
