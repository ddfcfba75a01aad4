"""Rank 0's messages during training, a line each."""

import sys
import time
from datetime import timedelta


def say(text: str) -> None:
    """Print a line in one piece: ranks share a pipe, and parts of lines would mix.

    Does nothing if there is no standard output (`>&-`). Raises BrokenPipeError if nobody reads it.
    """
    if sys.stdout is not None:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


class Progress:
    """Show the progress of a run: step, epoch, loss, speed, time left.

    Args:
        start: steps that were done before this run.
        total: steps when the run is complete.
        steps_per_epoch: steps of one epoch, to show the epoch.
        unit: `samples` or `tokens`.
        units_per_step: number of these units that all ranks together process in a step.

    """

    def __init__(
        self, start: int, total: int, steps_per_epoch: int, unit: str, units_per_step: int
    ) -> None:
        self._start = self._last = start
        self._total = total
        self._steps_per_epoch = steps_per_epoch
        self._unit = unit
        self._units_per_step = units_per_step
        self._began = self._last_time = time.perf_counter()

    def report(self, step: int, loss: float, where: str) -> None:
        """Show that `step` steps are done, the last one with this loss (mean over the ranks).

        `where` says where their time went; empty if that is not known yet.
        """
        now = time.perf_counter()
        speed = self._units_per_step * (step - self._last) / max(now - self._last_time, 1e-9)
        self._last, self._last_time = step, now
        left = (now - self._began) / (step - self._start) * (self._total - step)
        say(
            f"step {step:{len(str(self._total))}}/{self._total} · "
            f"epoch {(step - 1) // self._steps_per_epoch + 1} · loss {loss:.4f} · "
            f"{speed:,.0f} {self._unit}/s · {timedelta(seconds=round(left))} left{where}"
        )

    def seconds(self) -> float:
        """Return how long this run has taken."""
        return time.perf_counter() - self._began
