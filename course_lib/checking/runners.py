"""Run a student's own checks: on simulated ranks first, then on real ranks of this machine.

Simulated ranks are exact and fast. If a function ends its process or never returns, the report says
so and the kernel goes on.
"""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any, Literal

from course_lib.checking.cases import Case, Check, Observed
from course_lib.checking.limits import seconds_of
from course_lib.ranks import (
    MisuseWarning,
    Ranks,
    RanksError,
    RankState,
    RankTimeout,
    per_rank,
)
from course_lib.ranks.explain.failure import timed_out
from course_lib.ranks.for_graders import end_soon, preload
from course_lib.ranks.wire import Plain, decode, encode

Kind = Literal["simulated", "cpu", "gpu"]
_MAX_PRINTED = 20_000


class LocalRunner:
    """Runs cases of one function on ranks of this machine; keeps the ranks between cases.

    Args:
        function: the student's function.
        on: the kind of ranks.
        ranks: world size → ranks to use; the runner adds the ranks that it starts. The caller must
            close all of them. Simulated ranks differ from case to case and are not among them.
        echo: called with the text that the ranks print in a case; ``None`` to drop it.

    """

    def __init__(
        self,
        function: Callable[..., Any],
        on: Kind = "simulated",
        *,
        ranks: dict[int, Ranks] | None = None,
        echo: Callable[[str], None] | None = lambda text: print(text, end=""),
    ) -> None:
        self._echo = echo
        self._function = function
        self._on = on
        self._ranks = {} if ranks is None else ranks
        self._own = ranks is None

    def __call__(self, check: Check, case: Case, inputs: Sequence[Plain]) -> Observed:
        """Run one case and return what was observed.

        Raises:
            RanksError: the case failed; the error's `trace` holds the operations until then.

        """
        own = [encode(value) for value in inputs]
        ranks, printed = self._ranks_of(case, check), io.StringIO()
        touched: list[str] = []
        try:
            with redirect_stdout(printed), _told_of_misuse(touched):
                outputs = ranks.run(_run_program, check.program, self._function, per_rank(own))
        except RanksError as error:
            if isinstance(error, RankTimeout):  # its report has the check's time limit
                error = _timed_out(check, error.states)
            error.trace = ranks.trace
            raise error from None
        finally:
            text = printed.getvalue()[:_MAX_PRINTED]
            if text and self._echo is not None:
                self._echo(text)
        network = case.network if self._on == "simulated" else None
        return Observed([decode(output) for output in outputs], ranks.trace, network, touched)

    def start(self, check: Check) -> None:
        """Start the processes that the check's cases need, without waiting until they are ready."""
        for case in check.cases:
            self._ranks_of(case, check).start()

    def end(self) -> None:
        """Ask the runner's own processes to end, without waiting; leaving the context waits."""
        if self._own:
            end_soon(pid for ranks in self._ranks.values() for pid in ranks.processes())

    def _ranks_of(self, case: Case, check: Check) -> Ranks:
        size, seconds = case.world_size, seconds_of(check)
        # The fork server imports our modules once, so the ranks need not import them.
        preload(name for name in list(sys.modules) if name.startswith(__package__))
        if self._on == "simulated":
            return Ranks(size, on="simulated", network=case.network, timeout=seconds)
        if size not in self._ranks:
            self._ranks[size] = Ranks(size, on=self._on)
        self._ranks[size].timeout = seconds
        return self._ranks[size]

    def __enter__(self) -> LocalRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        for ranks in self._ranks.values() if self._own else ():
            ranks.close()


def _run_program(program: Callable[..., Any], function: Callable[..., Any], own: bytes) -> bytes:
    return encode(program(function, decode(own)))


@contextmanager
def _told_of_misuse(touched: list[str]) -> Iterator[None]:
    """Collect what is said about buffers touched before ``wait()``; show other warnings as usual.

    The events show the handles that nobody waits for, so they are left out here.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("always", MisuseWarning)
        show = warnings.showwarning

        def hear(message: Any, category: type[Warning], *where: Any) -> None:
            if isinstance(message, MisuseWarning):
                touched.extend(message.touched)
            else:
                show(message, category, *where)

        warnings.showwarning = hear  # type: ignore[assignment]
        yield


def _timed_out(check: Check, states: Sequence[RankState]) -> RanksError:
    error = timed_out("case", seconds_of(check), states)
    wanting, cores = round(os.getloadavg()[0]), os.cpu_count() or 1
    if wanting > 2 * cores:
        error.add_detail(
            f"This may be the machine's fault: in the last minute {wanting} processes wanted to "
            f"run on its {cores} cores. End programs that you do not need, and check again."
        )
    return error
