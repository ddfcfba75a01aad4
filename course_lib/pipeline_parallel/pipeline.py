"""The pipeline: an engine that executes a schedule, step by step.

    >>> from course_lib.pipeline_parallel import Pipeline, gpipe, split_layers
    >>> pipeline = Pipeline(split_layers(model, 2), loss_fn, gpipe(2, micro_batches=4))
    >>> optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)  # of this rank's layers
    >>> loss = pipeline.step(x, y)
    >>> optimizer.step()

The engine does not know about GPipe or 1F1B. For each step of this rank it receives the input, lets
the stage compute, and sends the result on. The schedule determines which rank waits for which.

The loss of a batch is the mean of the losses of its m micro-batches. So each of these is divided by
m, and the gradients add up to those of the whole batch: the update is the same as on one machine,
up to rounding. This holds for layers that treat each example by itself; BatchNorm sees only a
micro-batch.

Y. Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism",
NeurIPS 2019.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from course_lib.collectives import Group, place_in
from course_lib.parts import mark_apart
from course_lib.pipeline_parallel.messages import Mailbox, directions, incoming, outgoing
from course_lib.pipeline_parallel.schedule import Schedule, Work
from course_lib.pipeline_parallel.stage import Stage
from course_lib.pipeline_parallel.validity import check_schedule


class Pipeline(nn.Module):
    """Trains a model's stages on this rank, together with those of other ranks, by a schedule.

    Args:
        stages: all stages of the model, in order; `split_layers` makes them. Each takes a tensor
            and returns one. Only the stages of this rank are kept and used: the others may be on
            the device ``meta``, where they take no memory.
        loss_fn: ``loss_fn(output, target)``, a mean over the examples.
        schedule: see `schedules`; one stage for each chunk of each rank of `group`.
        group: the ranks of the pipeline.

    The parameters are those of this rank's stages, named ``stages.1.…`` by their position in the
    model. All ranks' `state_dict` together are that of the model. Clip with `clip_grad_norm_` of
    `parts`, which adds up over all stages; PyTorch's raises an error.

    Raises ValueError if stages, schedule and group differ in number or two ranks would train one
    parameter, and ScheduleError if the schedule cannot be executed.

    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        loss_fn: Callable[[Tensor, Tensor], Tensor],
        schedule: Schedule,
        *,
        group: Group = None,
    ) -> None:
        super().__init__()
        rank, world_size = place_in(group)
        if (schedule.world_size, schedule.stages) != (world_size, len(stages)):
            raise ValueError(
                f"the schedule is for {schedule.world_size} ranks and {schedule.stages} stages, "
                f"but there are {world_size} ranks and {len(stages)} stages"
            )
        check_schedule(schedule)
        self.schedule, self.loss_fn, self.group, self.rank = schedule, loss_fn, group, rank
        self._directions = directions(group)
        own_stages = range(rank, schedule.stages, world_size)
        self.stages = nn.ModuleDict({str(stage): stages[stage] for stage in own_stages})
        _refuse_shared(stages, schedule)
        mark_apart(self.named_parameters(), group)
        self._shapes: dict[int, tuple[torch.Size, torch.dtype]] = {}
        self._batch: dict[str, torch.Size] = {}
        self.peak_activations = 0
        """The largest number of micro-batches whose activations this rank held at once so far."""

    def step(self, inputs: Tensor | None, targets: Tensor | None) -> Tensor | None:
        """Add the gradients of one batch to `.grad`; return its loss on the last stage's rank.

        The rank of the first stage needs `inputs`, of shape (B, …), and the rank of the last stage
        needs `targets`, (B, …). On other ranks they may be `None`. The result is `None` except on
        the last stage's rank. Every batch must have the same shape, because the first step learns
        the shapes at the boundaries.

        Raises ValueError if the number of micro-batches does not divide B, the shape has changed,
        or a needed argument is missing. If only one rank raises, the others wait for it, so give
        all ranks the same batch.
        """
        self._check("inputs", inputs, needed="0" in self.stages)
        self._check("targets", targets, needed=str(self.schedule.stages - 1) in self.stages)
        fallback = torch.device("cpu") if inputs is None else inputs.device
        device = next((param.device for param in self.parameters()), fallback)
        m = self.schedule.micro_batches
        self._xs = () if inputs is None else inputs.chunk(m)
        self._ys = () if targets is None else targets.chunk(m)
        self._losses: list[Tensor] = []
        halves = self.schedule.splits_backward
        self._stages = {  # new ones, so that nothing is left of a failed step
            int(name): Stage(module, in_halves=halves) for name, module in self.stages.items()
        }
        mailbox = Mailbox(self.schedule, self.rank, self._shapes, device, self._directions)
        works = [self.schedule.work(self.rank, s) for s in self.schedule.steps[self.rank]]
        for work, following in zip(works, [*works[1:], None], strict=True):
            self._execute(work, following, mailbox)
        mailbox.finish()
        return torch.stack(self._losses).sum() if self._losses else None

    def _execute(self, work: Work, following: Work | None, mailbox: Mailbox) -> None:
        """Do one step: receive, compute, send. Begin to receive the input of the next step."""
        message = incoming(self.schedule, work)
        received = None if message is None else mailbox.receive(message)
        if following is not None:
            mailbox.expect(incoming(self.schedule, following))
        stage = self._stages[work.stage]
        if work.action == "W":
            stage.backward_weights(work.micro_batch)
            return
        if work.action == "F":
            result: Tensor | None = self._forward(stage, work, received)
        else:
            result = stage.backward(work.micro_batch, received)
        held = sum(active.activations for active in self._stages.values())
        self.peak_activations = max(self.peak_activations, held)
        to = outgoing(self.schedule, work)
        if to is not None:
            assert result is not None, "what has a stage before it was made to require a gradient"
            mailbox.send(to, result)

    def _forward(self, stage: Stage, work: Work, received: Tensor | None) -> Tensor:
        m = work.micro_batch
        x = self._xs[m] if received is None else received.detach().requires_grad_()
        if work.stage < self.schedule.stages - 1:
            return stage.forward(m, x)
        loss = stage.forward(
            m, x, lambda y: self.loss_fn(y, self._ys[m]) / self.schedule.micro_batches
        )
        self._losses.append(loss)
        return loss

    def _check(self, name: str, batch: Tensor | None, *, needed: bool) -> None:
        if batch is None:
            if needed:
                raise ValueError(
                    f"rank {self.rank} has a stage that needs the {name}, got {name}=None"
                )
            return
        micro_batches = self.schedule.micro_batches
        if len(batch) % micro_batches or not len(batch):
            raise ValueError(
                f"{len(batch)} {name} cannot be divided into {micro_batches} equal micro-batches: "
                f"use a multiple of {micro_batches}. If only the last batch is too small, give the "
                "DataLoader drop_last=True"
            )
        first_shape = self._batch.setdefault(name, batch.shape)
        if batch.shape != first_shape:
            raise ValueError(
                f"in the first step of this pipeline {name} had shape {tuple(first_shape)}, now "
                f"{tuple(batch.shape)}: make another Pipeline for this shape"
            )


def _refuse_shared(stages: Sequence[nn.Module], schedule: Schedule) -> None:
    """Raise ValueError if stages of two ranks train the same parameter: their copies would part."""
    ranks: dict[nn.Parameter, int] = {}
    for stage, module in enumerate(stages):
        rank = schedule.rank_of(stage)
        for name, param in module.named_parameters():
            if param.requires_grad and ranks.setdefault(param, rank) != rank:
                raise ValueError(
                    f"'{name}' of stage {stage} is also a parameter of rank {ranks[param]}, so "
                    "each rank would train its own copy: do not share it between ranks"
                )
