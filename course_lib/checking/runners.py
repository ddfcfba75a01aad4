"""Run a student's own checks: on simulated ranks first, then on real ranks of this machine.

Simulated ranks are threads; they are exact and fast. They run in a separate process. So if a
function ends its process or never returns, the report says so and the kernel goes on.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from functools import partial
from os.path import basename
from typing import Any, Literal

from course_lib.checking.cases import Case, Check, Observed
from course_lib.checking.limits import seconds_of
from course_lib.checking.on_ranks.wire import Plain, decode, encode
from course_lib.ranks import (
    Event,
    MisuseWarning,
    Network,
    RankError,
    Ranks,
    RanksError,
    RankState,
    Trace,
    per_rank,
)
from course_lib.ranks.explain import errors
from course_lib.ranks.explain.failure import timed_out, with_labels
from course_lib.ranks.explain.pickling import dumps
from course_lib.ranks.for_graders import cell_labels, end_soon, pack_call, preload

Place = Literal["simulated", "cpu", "gpu"]
_START = 300.0
"""Seconds that the process of simulated ranks has to start, enough for a very busy machine."""
_GRACE = 5.0
"""Seconds that the process of simulated ranks has in addition to the limit of the ranks."""
_MAX_PRINTED = 20_000


class LocalRunner:
    """Runs cases of one function on ranks of this machine; keeps the ranks between cases.

    Args:
        function: the student's function.
        on: the kind of ranks.
        quiet: whether to discard what the ranks print.
        ranks: world size → ranks to use; the runner adds the ranks that it starts. The caller must
            close all of them.
        echo: called with the text that simulated ranks print.

    """

    def __init__(
        self,
        function: Callable[..., Any],
        on: Place = "simulated",
        *,
        quiet: bool = False,
        ranks: dict[int, Ranks] | None = None,
        echo: Callable[[str], None] = lambda text: print(text, end=""),
    ) -> None:
        self._echo = echo
        self._function = function
        self._on = on
        self._quiet = quiet
        self._ranks = {} if ranks is None else ranks
        self._own = ranks is None
        self._sealed: tuple[Check, _Sealed] | None = None

    def __call__(self, check: Check, case: Case, inputs: Sequence[Plain]) -> Observed:
        """Run one case and return what was observed.

        Raises:
            RanksError: the case failed; the error's `trace` holds the operations until then.

        """
        mine = [encode(value) for value in inputs]
        if self._sealed is None or self._sealed[0] is not check:
            self._sealed = check, _Sealed.of(check, self._function, self._quiet)
        sealed = self._sealed[1]
        if self._on == "simulated":
            return self._simulate(check, case, sealed, mine)
        ranks = self._ranks_of(case.world_size, seconds_of(check))
        try:
            outputs = ranks.run(_run_program, sealed, per_rank(mine))
        except RanksError as error:
            raise _with_trace(_of_a_case(error, check), ranks.trace) from None
        return Observed([decode(output) for output in outputs], ranks.trace)

    def start(self, check: Check) -> None:
        """Start the processes that the check's cases need, without waiting until they are ready."""
        if self._on == "simulated":
            self._host_of(check)
            return
        for case in check.cases:
            self._ranks_of(case.world_size, seconds_of(check)).start()

    def end(self) -> None:
        """Ask the runner's own processes to end, without waiting; leaving the context waits."""
        if self._own:
            end_soon(pid for ranks in self._ranks.values() for pid in ranks.processes())

    def _ranks_of(self, world_size: int, seconds: float) -> Ranks:
        if world_size not in self._ranks:
            # The fork server imports our modules once, so the ranks need not import them.
            preload(name for name in list(sys.modules) if name.startswith(__package__))
            self._ranks[world_size] = Ranks(world_size, on="gpu" if self._on == "gpu" else "cpu")
        self._ranks[world_size].timeout = seconds
        return self._ranks[world_size]

    def _host_of(self, check: Check) -> Ranks:
        """Return the process of simulated ranks, after it has imported all that they need."""
        if 1 not in self._ranks:
            # On a busy machine, the imports take many seconds, which must not count for a case.
            self._ranks_of(1, _START).run(_import_the_rest)
        return self._ranks_of(1, seconds_of(check) + _GRACE)

    def _simulate(self, check: Check, case: Case, sealed: _Sealed, mine: list[bytes]) -> Observed:
        host = self._host_of(check)
        try:
            (answer,) = host.run(_simulated, sealed.data, mine, case.network, seconds_of(check))
        except errors.RankTimeout:
            raise _timed_out(check, ()) from None
        except RanksError as error:  # the process itself has ended, so no rank can give details
            raise RanksError(error.summary.replace("Rank 0's", "A rank's")) from None
        labels = cell_labels()
        if printed := answer["printed"]:
            self._echo(printed)
        places = {f"{basename(name)}, line": f"{label}, line" for name, label in labels.items()}

        def relabelled(text: str) -> str:
            for name, label in places.items():
                text = text.replace(name, label)
            return with_labels(text, labels)

        events = [Event(*event) for event in answer["events"]]
        events = [event._replace(where=relabelled(event.where)) for event in events]
        trace = Trace(events, case.world_size)
        if answer["error"] is not None:
            kind, summary, states, detail = answer["error"]
            if kind == "RankTimeout":
                host.close()  # a thread in it may never end
                del self._ranks[1]
            told = [RankState(r, doing, relabelled(at), s) for r, doing, at, s in states]
            failure = _error(kind, relabelled(summary), told, relabelled(detail))
            raise _with_trace(_of_a_case(failure, check), trace)
        outputs = [decode(output) for output in answer["outputs"]]
        touched = [relabelled(each) for each in answer["touched"]]
        return Observed(outputs, trace, case.network, touched)

    def __enter__(self) -> LocalRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        for ranks in self._ranks.values() if self._own else ():
            ranks.close()


class _Sealed:
    """A program and a function as pickled bytes; a rank unpickles them to a call of one argument.

    The program and the function are the same for all cases, and pickling them takes as long as a
    short case. So they are pickled only once. An intermediate process, such as the process of
    simulated ranks, passes on the bytes.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data

    @classmethod
    def of(cls, check: Check, function: Callable[..., Any], quiet: bool) -> _Sealed:
        """Pickle the check's program and the function; raise TypeError if they cannot be sent."""
        return cls(pack_call(_examined, (check.program, function, quiet), {}, 1, dumps)[0])

    def __reduce__(self) -> Any:
        return _opened, (self.data,)


def _opened(data: bytes) -> Callable[[bytes], bytes]:
    called, arguments, _ = pickle.loads(data)
    return partial(called, *arguments)


def _examined(
    program: Callable[..., Any], function: Callable[..., Any], quiet: bool, mine: bytes
) -> bytes:
    with redirect_stdout(io.StringIO()) if quiet else nullcontext():
        return encode(program(function, decode(mine)))


def _run_program(opened: Callable[[bytes], bytes], mine: bytes) -> bytes:
    return opened(mine)


def _import_the_rest() -> None:
    Ranks(1, on="simulated").run(int)


def _simulated(
    sealed: bytes, mine: list[bytes], network: Network, seconds: float
) -> dict[str, Any]:
    """Run a case on simulated ranks, in a separate process; return everything as plain values."""
    ranks = Ranks(len(mine), on="simulated", network=network, timeout=seconds, misuse="warn")
    outputs: list[bytes] = []
    failure = None
    with redirect_stdout(io.StringIO()) as printed, _told_of_misuse() as told:
        try:
            outputs = ranks.run(_run_program, _Sealed(sealed), per_rank(mine))
        except RanksError as error:
            states = [(s.rank, s.doing, s.where, s.seconds) for s in error.states]
            failure = type(error).__name__, error.summary, states, error.detail
    return {
        "outputs": outputs,
        "events": [tuple(event) for event in ranks.trace.events],
        "error": failure,
        # The events show the handles that nobody waits for, so they are left out here.
        "touched": [line for line in told if " before its wait(): " in line],
        "printed": printed.getvalue()[:_MAX_PRINTED],
    }


@contextmanager
def _told_of_misuse() -> Iterator[list[str]]:
    """Collect the warnings about misused handles; show other warnings as usual."""
    told: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always", MisuseWarning)
        show = warnings.showwarning

        def hear(message: Any, category: type[Warning], *where: Any) -> None:
            if category is MisuseWarning:
                told.extend(str(message).splitlines())
            else:
                show(message, category, *where)

        warnings.showwarning = hear  # type: ignore[assignment]
        yield told


def _error(kind: str, summary: str, states: Sequence[RankState], detail: str) -> RanksError:
    if kind == "RankError":
        return RankError(summary, states, detail, rank=0)
    known = (errors.DeadlockError, errors.MismatchError, errors.RankTimeout)
    found = next((each for each in known if each.__name__ == kind), RanksError)
    return found(summary, states, detail)


def _of_a_case(error: RanksError, check: Check) -> RanksError:
    """Return the error as the report of a case shows it: a timeout has the check's time limit."""
    if isinstance(error, errors.RankTimeout):
        return _timed_out(check, error.states)
    return error


def _timed_out(check: Check, states: Sequence[RankState]) -> RanksError:
    error = timed_out("case", seconds_of(check), states)
    wanting, cores = round(os.getloadavg()[0]), os.cpu_count() or 1
    if wanting > 2 * cores:
        error.add_detail(
            f"This may be the machine's fault: in the last minute {wanting} processes wanted to "
            f"run on its {cores} cores. End programs that you do not need, and check again."
        )
    return error


def _with_trace(error: RanksError, trace: Trace) -> RanksError:
    error.trace = trace  # type: ignore[attr-defined]
    return error
