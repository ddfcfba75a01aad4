"""Messages between stages: their order, and how no rank has to wait for a send.

For each micro-batch, its activations cross every boundary between two stages forward, and their
gradient, of the same size, crosses it backward. A step sends

    2 m n bytes over each boundary,       n the bytes of one micro-batch's activations there

Messages from one rank to another arrive in the order in which they were sent. The receiver may need
them in a different order: with interleaving, two ranks exchange activations of one chunk and
gradients of a different one. But every rank has the whole schedule, as data. So a rank knows in
which order its neighbour sends, begins to receive in that order, and keeps messages that it does
not need yet.

A rank starts sends without waiting for them, so ranks cannot wait for one another's sends in a
circle. What it sent is kept until the step is over. Receives begin one step before they are needed,
while the rank computes. So a message that takes no longer than a step costs no time.

NCCL runs all messages between two ranks of a group in the order in which they were posted, in both
directions. With NCCL, a receive that begins early would delay the sends posted after it, and two
ranks would wait for each other. So with NCCL each direction has its own group: see `directions`.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.collectives import Group, start_recv, start_send
from course_lib.pipeline_parallel.schedule import Schedule, Work

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MAX_DIMS = 8


class Message(NamedTuple):
    """The result of forward (``forward``) or backward for a micro-batch, on its way to `stage`."""

    forward: bool
    micro_batch: int
    stage: int


class Directions(NamedTuple):
    """Two groups of the same ranks, one for each direction of messages between two of them."""

    down: Group
    """For messages to a later rank."""
    up: Group
    """For messages to an earlier rank."""

    def between(self, sender: int, receiver: int) -> Group:
        """Return the group for messages from one rank to another."""
        return self.down if sender < receiver else self.up


def directions(group: Group) -> Directions:
    """Return `group` for both directions; with NCCL, make a second group for one of them.

    Every rank of `group` must call.
    """
    if "nccl" not in dist.get_backend(group) or dist.get_world_size(group) == 1:
        return Directions(group, group)
    first = dist.group.WORLD if group is None else group
    assert first is not None, "there is a group, or its backend would not be known"
    members = dist.get_process_group_ranks(group)
    # Give it the same name, so that a trace counts both groups as one.
    name = first.group_desc
    up = dist.new_group(members, use_local_synchronization=True, group_desc=name)
    return Directions(group, up)


def outgoing(schedule: Schedule, work: Work) -> Message | None:
    """Return the message that a step sends to another stage; None at the end of the pipeline."""
    if work.action == "F" and work.stage < schedule.stages - 1:
        return Message(True, work.micro_batch, work.stage + 1)
    if work.action in ("B", "I") and work.stage > 0:
        return Message(False, work.micro_batch, work.stage - 1)
    return None


def incoming(schedule: Schedule, work: Work) -> Message | None:
    """Return the message that a step needs from another stage."""
    if work.action == "F" and work.stage > 0:
        return Message(True, work.micro_batch, work.stage)
    if work.action in ("B", "I") and work.stage < schedule.stages - 1:
        return Message(False, work.micro_batch, work.stage)
    return None


class Mailbox:
    """The messages of one rank in one step.

    `shapes` holds the shape and dtype of the tensors that cross each boundary, by the stage after
    the boundary. A missing shape is learned from a header, which is sent before the first message
    over this boundary.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        shapes: dict[int, tuple[torch.Size, torch.dtype]],
        device: torch.device,
        groups: Directions,
    ) -> None:
        self._schedule, self._rank, self._groups, self._device = schedule, rank, groups, device
        self._shapes = shapes
        self._learning = len(shapes) == 0
        self._here: dict[Message, Tensor] = {}
        self._receiving: dict[Message, tuple[dist.Work, Tensor]] = {}
        self._sent: list[tuple[dist.Work, Tensor]] = []
        self._orders = {
            source: iter(self._sent_to_me(source))
            for source in range(schedule.world_size)
            if source != rank
        }

    def _sent_to_me(self, source: int) -> Iterator[Message]:
        """Yield each message that a rank sends to this one, in order."""
        for step in self._schedule.steps[source]:
            result = outgoing(self._schedule, self._schedule.work(source, step))
            if result is not None and self._schedule.rank_of(result.stage) == self._rank:
                yield result

    def _sender(self, message: Message) -> int:
        return self._schedule.rank_of(message.stage + (-1 if message.forward else 1))

    def send(self, message: Message, tensor: Tensor) -> None:
        """Begin to send; do not change the tensor before `finish`."""
        to = self._schedule.rank_of(message.stage)
        if to == self._rank:
            self._here[message] = tensor
            return
        group = self._groups.between(self._rank, to)
        tensor = tensor.contiguous()
        if message.forward and message.stage not in self._shapes:
            self._shapes[message.stage] = tensor.shape, tensor.dtype
            header = _header(tensor).to(self._device)
            self._sent.append((start_send(header, to, group), header))
        self._sent.append((start_send(tensor, to, group), tensor))

    def expect(self, message: Message | None) -> None:
        """Begin to receive early, except while shapes are learned, because this has to wait."""
        if message is not None and not self._learning:
            self._begin(message)

    def receive(self, message: Message) -> Tensor:
        """Wait for a message and return it."""
        self._begin(message)
        if message in self._here:
            return self._here.pop(message)
        work, tensor = self._receiving.pop(message)
        work.wait()
        return tensor

    def _begin(self, message: Message) -> None:
        """Begin to receive all messages of its sender up to and including `message`."""
        source = self._sender(message)
        group = self._groups.between(source, self._rank)
        while source != self._rank and message not in self._receiving:
            following = next(self._orders[source])
            boundary = following.stage if following.forward else following.stage + 1
            if boundary not in self._shapes:
                header = torch.empty(_MAX_DIMS + 2, dtype=torch.int64, device=self._device)
                start_recv(header, source, group).wait()
                self._shapes[boundary] = _read(header)
            shape, dtype = self._shapes[boundary]
            tensor = torch.empty(shape, dtype=dtype, device=self._device)
            self._receiving[following] = start_recv(tensor, source, group), tensor

    def finish(self) -> None:
        """Wait until all sends are done."""
        for work, _ in self._sent:
            work.wait()


def _header(tensor: Tensor) -> Tensor:
    if tensor.dim() > _MAX_DIMS or tensor.dtype not in _DTYPES:
        raise TypeError(
            f"stages exchange floating-point tensors of at most {_MAX_DIMS} dimensions, got "
            f"{tensor.dtype} of shape {tuple(tensor.shape)}: cut the model elsewhere"
        )
    padding = [0] * (_MAX_DIMS - tensor.dim())
    return torch.tensor([_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape, *padding])


def _read(header: Tensor) -> tuple[torch.Size, torch.dtype]:
    dtype, dims, *sizes = header.tolist()
    return torch.Size(sizes[:dims]), _DTYPES[dtype]
