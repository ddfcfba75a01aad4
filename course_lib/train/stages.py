"""Times the stages of a rank's steps, for the question who delayed them (`frontier`)."""

import time
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.frontier import frontier, late_rank

STAGES = ("update", "data", "forward", "backward", "waiting")
"""In this order, since all ranks set off together when the sum of the step before is there: a rank
that is slow in its update makes the others wait in the next step. Waiting begins after a rank's
last own gradient. Update contains checkpoints."""

Mark = float | torch.cuda.Event


class StageClock:
    """Notes when this rank ends each stage; on a GPU by events, which do not stop it.

    Args:
        params: the trained parameters.
        device: this rank's device.
        reports: whether `report` will be called; if not, nothing is noted.

    """

    def __init__(
        self, params: Iterable[Tensor], device: torch.device, *, reports: bool = True
    ) -> None:
        self._device, self._reports = device, reports
        self._steps: list[list[tuple[str, Mark, Mark]]] = []  # the last one is not complete
        self._last = self._last_gradient = self._mark()
        for param in params if reports else ():
            param.register_post_accumulate_grad_hook(self._note_gradient)  # type: ignore[no-untyped-call]

    def end(self, stage: str) -> None:
        """Note that `stage` ends here, and began where the stage before it ended."""
        if not self._reports:
            return
        now = self._last_gradient if stage == "backward" else self._mark()
        if self._steps:
            self._steps[-1].append((stage, self._last, now))
        self._last = now
        if stage == "waiting":
            self._steps.append([])

    def report(self) -> str:
        """Return where the time of the steps since the last report went, over all ranks.

        All ranks must call. What a rank does before its next stage belongs to no stage. The first
        step does not count, because the ranks do not set off together: after it, the text is empty.
        """
        steps, self._steps = self._steps[:-1], self._steps[-1:]
        text = self._in_words(steps) if steps else ""
        self._last = self._mark()
        return text

    def _in_words(self, steps: list[list[tuple[str, Mark, Mark]]]) -> str:
        own = torch.zeros(len(steps), len(STAGES), device=self._device)
        for row, step in zip(own, steps, strict=True):
            for stage, begin, end in step:
                row[STAGES.index(stage)] += _seconds(begin, end)
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, own)
        durations = torch.stack(gathered, 1).cpu()
        total = frontier(durations)[0].sum(0)
        data, waiting = (total[STAGES.index(stage)] / total.sum() for stage in ("data", "waiting"))
        text = f" · data {data:.0%}, exposed communication {waiting:.0%}"
        if len(gathered) > 1:
            rank, place, seconds = late_rank(durations)
            text += f", last: rank {rank} in {STAGES[place]}, by {1e3 * seconds:.1f} ms"
        return text

    def _note_gradient(self, _: Tensor) -> None:
        self._last_gradient = self._mark()

    def _mark(self) -> Mark:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def _seconds(begin: Mark, end: Mark) -> float:
    if isinstance(begin, float) or isinstance(end, float):
        return float(end) - float(begin)  # type: ignore[arg-type]
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1e3
