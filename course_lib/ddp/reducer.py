"""The reducer: averages gradients during backward, bucket by bucket.

Backward computes the last layer's gradients first. Without overlap, the network would be idle while
backward computes the gradients of earlier layers. So each bucket's all-reduce starts as soon as its
last gradient is ready:

    backward    |  g₄  |  g₃  |  g₂  |  g₁  |
    network            |  all-reduce g₄ g₃ |  all-reduce g₂ g₁ |

A hook on every parameter reports that its gradient is ready (`backward_hooks`). Three rules make
this correct:

- **The hook gets the parameter, not its gradient.** If it sent the parameter, it would average the
  weights and leave the gradients as they are.
- **Buckets are sent in one order, the same on all ranks**, even if they become complete in a
  different order: a bucket waits for those before it. Ranks match all-reduces by order alone.
- **The gradient becomes a view into its bucket.** It is copied there once and scaled by 1/K on the
  way. The memory that backward allocated is freed. So the optimizer finds the average in `grad`.

S. Li et al., VLDB 2020, section 3.2.
"""

import enum
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.bucketing import Bucket
from course_lib.collectives import Group, place_in
from course_lib.ddp.backward_hooks import EndOfBackward, hook_gradients
from course_lib.ddp.bucket_memory import Allocate, GradientBuckets
from course_lib.ddp.comm_hooks import CommHook, GradBucket, launch
from course_lib.ddp.communication_stream import CommunicationStream
from course_lib.ddp.errors import (
    changed_graph,
    second_backward,
    unfinished_backward,
    unused_parameters,
    verify_gradient,
    wrapped_anew,
)
from course_lib.ddp.module_states import broadcast_tensors
from course_lib.ddp.uses import Uses
from course_lib.gradient_sync import copy_scaled


class State(enum.Enum):
    """The way that the gradients of the next or the current backward are handled."""

    LOCAL = "gradients stay on this rank"
    EXPECTING = "the next backward will be synchronised"
    DONE = "gradients are averaged"


class Reducer:
    """Averages the gradients of `named_params`, pairs of (name, parameter), during backward.

    Call `prepare` before a forward whose backward is to be synchronised, and `stay_local` before
    any other. Backward itself calls `finish` when it ends. Either all of `named_params` need
    gradients, or none does, and there will be no backward.
    """

    def __init__(
        self,
        named_params: Sequence[tuple[str, Tensor]],
        group: Group,
        bucket_cap_mb: float | Sequence[float],
        first_bucket_mb: float,
        find_unused: bool,
        static_graph: bool,
        allocate: Allocate,
    ) -> None:
        self.names = [name for name, _ in named_params]
        self.params = [param for _, param in named_params]
        self.group = group
        _, self.world_size = place_in(group)
        self.divisor = self.world_size
        self.find_unused = find_unused
        self._static_graph = static_graph
        self.hook: tuple[Any, CommHook] | None = None
        self._stream = CommunicationStream(self.params[0].device)
        self._state = State.LOCAL
        self._in_backward = False
        self._synchronised = False  # whether any backward was synchronised so far
        self._order: dict[int, None] = {}  # indices, in the order their gradients became ready
        self._uses = Uses(len(self.params), learn=static_graph)
        self._users = [1] * len(self.params)  # see _count_users
        # With unused parameters the order differs from step to step, so it is of little use.
        self._rebuild_pending = not find_unused
        self._gradients = GradientBuckets(self.params, bucket_cap_mb, first_bucket_mb, allocate)
        self._waits: list[Callable[[], object]] = []  # one for each bucket that was sent
        self.other_waits: list[Callable[[], object]] = []  # for other work, such as buffer hooks
        self._strides = [param.stride() for param in self.params]
        self._end = EndOfBackward(self._backward_is_over)
        self.hooked = hook_gradients(self, self.params)

    # --- before a forward -------------------------------------------------------------------------

    def prepare(self) -> None:
        """Expect a backward that is to be synchronised.

        After the first such backward, the buckets are made again, once, in the order in which the
        gradients became ready on rank 0. Raises RuntimeError if an exception ended the last
        backward half-way, or if a different reducer has taken over the parameters.
        """
        if not self.hooked.alive:
            raise wrapped_anew()
        if self._in_backward:
            raise unfinished_backward()
        self._end.forget()
        if self._rebuild_pending and self._synchronised:
            self._rebuild_pending = False
            self._rebuild()
        self._order.clear()
        self._uses.begin()
        self._waits.clear()
        self._gradients.expect_all()
        self._state = State.EXPECTING

    def watch(self, outputs: Any) -> None:
        """Learn where the expected backward begins: at one of the tensors in `outputs`."""
        self._end.watch(outputs)

    def stay_local(self) -> None:
        """Expect a backward whose gradients only add up on this rank.

        If a synchronised backward is still expected, this backward is synchronised, too. It then
        averages gradients that are already equal a second time.
        """
        if self._state is State.DONE:
            self._state = State.LOCAL

    def _rebuild(self) -> None:
        default = self._gradients.order
        seen = list(self._order) if len(self._order) == len(self.params) else default
        order = torch.tensor(seen, device=self.params[0].device)
        broadcast_tensors([order], 0, self.group)
        if order.tolist() != default:
            for param in self.params:  # gradients not cleared are in memory that others will use
                param.grad = None if param.grad is None else param.grad.clone()
            self._gradients.use(order.tolist())

    # --- during backward --------------------------------------------------------------------------

    def on_gradient(self, index: int) -> None:
        """Take over the gradient of parameter `index`, if nothing more will be added to it."""
        if self._state is State.LOCAL:
            return
        self._uses.add(index)
        if self._state is State.DONE or self._uses.surplus(index):
            name = self.names[index]
            raise changed_graph(name, False) if self._static_graph else second_backward(name)
        if not self._in_backward:
            self._in_backward = True
            for unused in self._uses.never:
                self._take(unused)
        self._end.ask()
        if self._uses.ready(index):
            self._take(index)
            self._launch_complete()
        else:
            self._order.pop(index, None)
            self._order[index] = None

    def _take(self, index: int) -> None:
        """Copy the gradient into its bucket; from now on `.grad` is a view into the bucket."""
        param, (bucket, view) = self.params[index], self._gradients.place[index]
        gradient = param.grad
        if gradient is not None:
            verify_gradient(self.names[index], param, self._strides[index], view)
            gradient = gradient.detach()
        copy_scaled(gradient, 1.0 if self.hook else 1 / self.divisor, view)
        if gradient is not None:
            param.grad = view
        self._order[index] = None
        bucket.pending -= 1

    def _launch_complete(self) -> None:
        """Launch complete buckets in order, up to the first that is not complete."""
        while len(self._waits) < len(self._gradients.buckets):
            bucket = self._gradients.buckets[len(self._waits)]
            if bucket.pending:
                return
            with self._stream.after_current():
                self._waits.append(self._launch(bucket))

    def _launch(self, bucket: Bucket) -> Callable[[], object]:
        """Start to reduce the bucket; return a function that waits until it is reduced."""
        if self.hook is None:
            work = dist.all_reduce(bucket.buffer, group=self.group, async_op=True)
            assert work is not None  # it is None only on ranks outside the group
            return lambda: work.wait()
        params = [self.params[i] for i in bucket.indices]
        last = len(self._waits) == len(self._gradients.buckets) - 1
        return launch(self.hook, GradBucket(len(self._waits), bucket, params, last))

    # --- at its end -------------------------------------------------------------------------------

    def _backward_is_over(self) -> None:
        if self._in_backward:  # False if backward computed only gradients of the inputs
            self.finish()

    def finish(self) -> None:
        """Launch the remaining buckets, and wait for all of them.

        On a GPU the stream waits, not the host. It does nothing if no synchronisation is expected.
        Raises RuntimeError if parameters got no gradient, unless `find_unused`.
        """
        if self._state is not State.EXPECTING:
            return
        self._verify_uses()
        taken = set() if self._uses.learning else set(self._order)
        for index in dict.fromkeys([*self._order, *range(len(self.params))]):
            if index not in taken:
                self._take(index)
        self._uses.learn()
        # A parameter with a gradient from an earlier, local backward counts as used.
        unused = {index for index, param in enumerate(self.params) if param.grad is None}
        self._launch_rest_and_wait(unused)
        for index in unused:
            if self._users[index]:
                self.params[index].grad = self._gradients.place[index][1]

    def _verify_uses(self) -> None:
        missing = [self.names[index] for index in self._uses.missing()]
        if missing and self._static_graph:
            raise changed_graph(missing[0], True)
        if missing and not self.find_unused:
            raise unused_parameters(missing)

    def contribute_zeros(self) -> None:
        """Take part in one synchronisation of the other ranks, with zeros as gradients."""
        self.prepare()
        for bucket in self._gradients.buckets:
            bucket.buffer.zero_()
            bucket.pending = 0
        self._launch_rest_and_wait(set(range(len(self.params))))

    def _launch_rest_and_wait(self, unused: set[int]) -> None:
        self._launch_complete()
        with self._stream.after_current():
            if not self._synchronised if self._static_graph else self.find_unused:
                self._count_users(unused)  # after all buckets, on every rank
            for wait in (*self._waits, *self.other_waits):
                wait()
        self.other_waits.clear()
        self._stream.join_current()
        self._in_backward = False
        self._state = State.DONE
        self._synchronised = True

    def _count_users(self, unused: set[int]) -> None:
        """Learn how many ranks have a gradient of each parameter.

        A parameter that no rank used must not get a gradient of zeros: an optimizer with momentum
        or weight decay would change it.
        """
        counts = [int(index not in unused) for index in range(len(self.params))]
        users = torch.tensor(counts, device=self.params[0].device)
        dist.all_reduce(users, group=self.group)
        if unused or self._static_graph:  # reading it makes the host wait for the GPU
            self._users = users.tolist()
