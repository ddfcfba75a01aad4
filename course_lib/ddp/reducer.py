"""The reducer: averages gradients during backward, bucket by bucket.

Backward computes the last layer's gradients first. Without overlap, the network would be idle while
backward computes the gradients of earlier layers. So each bucket's all-reduce starts as soon as its
last gradient is ready:

    backward    |  g₄  |  g₃  |  g₂  |  g₁  |
    network            |  all-reduce g₄ g₃ |  all-reduce g₂ g₁ |

A hook on every parameter reports that its gradient is ready (`hooks`). Three rules make this
correct:

- **The hook gets the parameter, not its gradient.** If it sent the parameter, it would average the
  weights and leave the gradients as they are.
- **Buckets are sent in one order, the same on all ranks**, even if they become complete in a
  different order: a bucket waits for those before it. Ranks match all-reduces by order alone.
- **The gradient becomes a view into its bucket.** It is copied there once and scaled by 1/K on the
  way. The memory that backward allocated is freed. So the optimizer finds the average in `grad`.

`functions` is these three rules and no more. This file adds what real models need: GPU streams,
comm hooks, an error for everything that would make the replicas differ, no gradient for a parameter
that no rank used, and buckets in the order in which gradients really become ready. This order is
known only after a backward. Then the buckets are made again.

Messages of errors end with that of PyTorch's DDP for the same mistake, so that a web search finds
other people's questions.

S. Li et al., VLDB 2020, section 3.2.
"""

import enum
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.bucketing import Bucket, assign_buckets
from course_lib.collectives import Group, place_in
from course_lib.ddp.buffers import broadcast_tensors
from course_lib.ddp.hooks import CommHook, EndOfBackward, GradBucket, hook_gradients, launch
from course_lib.gradient_sync import copy_scaled, verify_first_order
from course_lib.guard import form_of, rank_error, verify_form


class CommunicationStream:
    """A second GPU stream, so that a GPU computes and communicates at the same time.

    Work in one stream runs in order. The work on a bucket first waits for the gradients, which are
    computed in the current stream; the optimizer waits for the work on the buckets. Both waits are
    events on the GPU, so the host stays ahead of it. On a CPU, all of this does nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def after_current(self) -> Iterator[None]:
        """Run work that is launched inside after all work that is now in the current stream."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def join_current(self) -> None:
        """Run later work of the current stream after all work that was launched here."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


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
        bucket_cap_mb: float,
        first_bucket_mb: float,
        find_unused: bool,
    ) -> None:
        self.names = [name for name, _ in named_params]
        self.params = [param for _, param in named_params]
        self.group = group
        _, self.world_size = place_in(group)
        self.divisor = self.world_size
        self.find_unused = find_unused
        self.hook: tuple[Any, CommHook] | None = None
        self._stream = CommunicationStream(self.params[0].device)
        self._state = State.LOCAL
        self._in_backward = False
        self._synchronised = False  # whether any backward was synchronised so far
        self._order: dict[int, None] = {}  # indices, in the order their gradients became ready
        count = len(self.params)
        self._users = [1] * count  # see _count_users
        # With unused parameters the order differs from step to step, so it is of little use.
        self._rebuild_pending = not find_unused
        self._caps = (bucket_cap_mb, first_bucket_mb)
        self._make_buckets(range(count - 1, -1, -1))
        self._waits: list[Callable[[], object]] = []  # one for each bucket that was sent
        self._forms = [form_of(param) for param in self.params]
        self._end = EndOfBackward(self._backward_is_over)
        self.hooked = hook_gradients(self, self.params)

    def _make_buckets(self, order: Sequence[int]) -> None:
        """Make the buckets for gradients that become ready in this order."""
        self._bucket_order = list(order)
        # Drop earlier buckets first, so that their memory can be used again.
        self._buckets: list[Bucket] = []
        self._places: dict[int, tuple[Bucket, Tensor]] = {}  # index → bucket, view into it
        for indices in assign_buckets(self.params, *self._caps, order):
            bucket = Bucket(self.params, indices)
            self._buckets.append(bucket)
            for index, view in zip(indices, bucket.views, strict=True):
                self._places[index] = (bucket, view)

    # --- before a forward -------------------------------------------------------------------------

    def verify_ready(self) -> None:
        """Raise RuntimeError if gradients go to a newer reducer, or the last backward failed."""
        if not self.hooked.alive:
            raise rank_error(
                "this module, or a part of it, has been wrapped again, and gradients now go to the "
                "newer wrapper",
                "Call that wrapper, or wrap this module again.",
            )
        if self._in_backward:
            raise _interrupted()

    def prepare(self) -> None:
        """Expect a backward that is to be synchronised.

        After the first such backward, the buckets are made again, once, in the order in which the
        gradients became ready on rank 0. Raises RuntimeError as `verify_ready`.
        """
        self.verify_ready()
        self._end.forget()
        if self._rebuild_pending and self._synchronised:
            self._rebuild_pending = False
            self._rebuild()
        self._order.clear()
        self._waits.clear()
        for bucket in self._buckets:
            bucket.pending = len(bucket.indices)
        self._state = State.EXPECTING

    def watch(self, outputs: Any) -> None:
        """Learn where the expected backward begins: at one of the tensors in `outputs`."""
        self._end.watch(outputs)

    def stay_local(self) -> None:
        """Expect a backward whose gradients only add up on this rank.

        If a synchronised backward is still expected, this backward is synchronised, too. It then
        averages gradients that are already equal a second time.

        Raises RuntimeError if an exception ended the last backward half-way.
        """
        if self._in_backward and not self._end.requested:
            raise _interrupted()
        if self._state is State.DONE:
            self._state = State.LOCAL

    def _rebuild(self) -> None:
        default = self._bucket_order
        local_order = list(self._order) if len(self._order) == len(self.params) else default
        order = torch.tensor(local_order, device=self.params[0].device)
        broadcast_tensors([order], 0, self.group)
        if order.tolist() != default:
            self._make_buckets(order.tolist())

    # --- during backward --------------------------------------------------------------------------

    def on_gradient(self, index: int) -> None:
        """Take over the gradient of parameter `index`.

        Autograd sums all parts of a gradient before it calls this, once in a backward.
        """
        if self._state is State.LOCAL:
            return
        if self._in_backward and not self._end.requested:
            raise _interrupted()
        if self._state is State.DONE or index in self._order:
            raise rank_error(
                f"backward() reached '{self.names[index]}' a second time after one forward; its "
                "gradient was already averaged",
                "Call the wrapped model before each backward(), and not its .module. To add up "
                "gradients, put all but the last forward and backward in `with model.no_sync():`. "
                "Checkpoint blocks that share weights with use_reentrant=False.",
                "Expected to mark a variable ready only once.",
            )
        self._in_backward = True
        self._end.ask()
        self._take(index)
        self._launch_complete()

    def _take(self, index: int) -> None:
        """Copy the gradient into its bucket; from now on `.grad` is a view into the bucket."""
        param, (bucket, view) = self.params[index], self._places[index]
        gradient = param.grad
        if gradient is not None:
            self._verify_gradient(index, gradient)
            gradient = gradient.detach()
        copy_scaled(gradient, 1.0 if self.hook else 1 / self.divisor, view)
        if gradient is not None:
            param.grad = view.detach()  # not `view`: who sets `.grad.data` must not move our bucket
        self._order[index] = None
        bucket.pending -= 1

    def _verify_gradient(self, index: int, gradient: Tensor) -> None:
        """Raise RuntimeError if the gradient cannot be copied to its place."""
        name = f"'{self.names[index]}'"
        verify_first_order(gradient, name)
        if gradient.is_sparse:
            raise rank_error(
                f"the gradient of {name} is sparse",
                "Buckets are dense: use nn.Embedding(…, sparse=False).",
            )
        verify_form(name, self.params[index], self._forms[index])

    def _launch_complete(self) -> None:
        """Launch complete buckets in order, up to the first that is not complete."""
        while len(self._waits) < len(self._buckets):
            bucket = self._buckets[len(self._waits)]
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
        last = len(self._waits) == len(self._buckets) - 1
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
        self._verify_all_added()
        for index in range(len(self.params)):
            if index not in self._order:
                self._take(index)
        # A parameter with a gradient from an earlier, local backward counts as used.
        unused = {index for index, param in enumerate(self.params) if param.grad is None}
        self._launch_rest_and_wait(unused)
        for index in unused:
            if self._users[index]:
                self.params[index].grad = self._places[index][1].detach()

    def _verify_all_added(self) -> None:
        absent = [name for index, name in enumerate(self.names) if index not in self._order]
        if absent and not self.find_unused:
            shown = ", ".join(f"'{name}'" for name in absent)
            raise rank_error(
                f"backward() gave no gradient to {shown}",
                "If the loss should not depend on them, wrap the model with "
                "find_unused_parameters=True (zeros are averaged in their place), or freeze them "
                "before wrapping it. If you call backward() several times after one forward, add "
                "up the losses and call it once.",
                "Expected to have finished reduction in the prior iteration before starting a new "
                "one.",
            )

    def contribute_zeros(self) -> None:
        """Take part in one synchronisation of the other ranks, with zeros as gradients."""
        self.prepare()
        for bucket in self._buckets:
            bucket.buffer.zero_()
            bucket.pending = 0
        self._launch_rest_and_wait(set(range(len(self.params))))

    def _launch_rest_and_wait(self, unused: set[int]) -> None:
        self._launch_complete()
        with self._stream.after_current():
            if self.find_unused:
                self._count_users(unused)  # after all buckets, on every rank
            for wait in self._waits:
                wait()
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
        if unused:  # reading it makes the host wait for the GPU
            self._users = users.tolist()


def _interrupted() -> RuntimeError:
    return rank_error(
        "the last backward() did not end, so some buckets were sent and others not",
        "After an exception in backward, build the model and its wrapper again.",
    )
