"""Run the check of a task: ``check("02_data_parallel_sgd/shard_bounds", shard_bounds)``.

The check runs on simulated ranks, which are exact and fast. Where this machine has a GPU for each
rank, a function that is right there then runs on GPU ranks, too.
If a function ends its process or never returns, the report says so and the kernel goes on.
"""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import replace
from typing import Any, Literal

import torch

from course_lib import diary
from course_lib.checking.answers import describe
from course_lib.checking.cases import Case, Check, Observed
from course_lib.checking.loading import find_check
from course_lib.checking.report import CheckFailed, CheckReport, html_of
from course_lib.checking.run_check import run_on_each
from course_lib.ranks import MisuseWarning, Ranks, RanksError, RankTimeout, per_rank
from course_lib.ranks.explain.failure import timed_out
from course_lib.ranks.for_graders import Line, end_soon, in_notebook, preload
from course_lib.ranks.wire import Plain, decode, encode

Kind = Literal["simulated", "cpu", "gpu"]
_MAX_PRINTED = 20_000
WORDS = {"simulated": "simulated ranks", "cpu": "CPU ranks", "gpu": "GPU ranks"}


def check(
    name: str, function: Callable[..., Any], *, on: Kind | None = None, case: str | None = None
) -> CheckReport:
    """Check `function` on several ranks of this machine and show the result.

    The check first runs on simulated ranks, which are exact. If the function is right there, and
    real ranks are asked for or the machine has enough GPUs, the check then runs on real ranks. A
    notebook also shows what the ranks did over time in a case that failed.

    Args:
        name: ``assignment/check``, as written under the task; the assignment's number is enough.
        function: what you wrote.
        on: the kind of real ranks, ``"cpu"`` or ``"gpu"``; ``"simulated"``: no real ranks. By
            default, GPU ranks if there is a GPU for each rank, else no real ranks.
        case: the name of one case, as in a report. Only this case is run, and the result is not
            recorded in your progress.

    Returns:
        The report.

    Raises:
        CheckFailed: a case failed; the report above the error explains which, and why.
        LookupError: there is no such check or case, or the check's file was not found.
        TypeError: `function` is not a function.

    """
    if not callable(function):
        raise TypeError(
            f"check(name, function) needs the function itself: check({name!r}, f), not "
            f"check({name!r}, f()). Instead of a function it got {describe(function)}"
        )
    with _Shown() as shown, ExitStack() as stack:
        shown.show(f"reading {name} …")
        name, task = find_check(name)
        if case is not None:
            task = _only(task, case)
        size = max(listed.world_size for listed in task.cases)
        real = on or ("gpu" if torch.cuda.device_count() >= size else "simulated")
        runners = {}
        kinds: tuple[Kind, ...] = ("simulated", real)
        for kind in dict.fromkeys(kinds):
            # What simulated ranks have printed, real ranks need not print again.
            echo = shown.echo if kind == "simulated" else None
            runner = LocalRunner(function, kind, say=shown.show, echo=echo)
            runners[WORDS[kind]] = stack.enter_context(runner)
        report = run_on_each(name, task, runners, seed="public")
        report = replace(report, only_form=task.only_form)
        shown.report(report)
    if case is None:
        entry = {"checked": name, "fraction": report.fraction, "all": report.passed}
        diary.keep(diary.CHECKS, entry | ({"open": True} if report.undecided else {}))
    if not report.passed:
        raise CheckFailed(report)
    return report


def _only(check: Check, case: str) -> Check:
    """Return the check with only this case."""
    chosen = tuple(listed for listed in check.cases if listed.name == case)
    if not chosen:
        names = "; ".join(listed.name for listed in check.cases)
        raise LookupError(f"there is no case '{case}'. The cases: {names}")
    return replace(check, cases=chosen)


class LocalRunner:
    """Runs cases of one function on ranks of this machine; keeps the ranks between cases.

    Args:
        function: the student's function; another one may take its place between two cases.
        on: the kind of ranks.
        say: called with a description of each case before it is run.
        echo: called with the text that the ranks print in a case; ``None`` to drop it.

    """

    def __init__(
        self,
        function: Callable[..., Any],
        on: Kind = "simulated",
        *,
        say: Callable[[str], None] = lambda _: None,
        echo: Callable[[str], None] | None = lambda text: print(text, end=""),
    ) -> None:
        self._say, self._echo = say, echo
        self.function = function
        self._on = on
        self._ranks: dict[int, Ranks] = {}

    def __call__(self, check: Check, case: Case, inputs: Sequence[Plain]) -> Observed:
        """Run one case and return what was observed.

        Raises:
            RanksError: the case failed; the error's `trace` holds the operations until then.

        """
        number = next((i for i, listed in enumerate(check.cases, 1) if listed is case), "?")
        self._say(f"{WORDS[self._on]}, case {number} of {len(check.cases)}: {case.name}")
        encoded_inputs = [encode(value) for value in inputs]
        ranks, printed = self._ranks_of(case, check), io.StringIO()
        touched: list[str] = []
        try:
            with redirect_stdout(printed), _told_of_misuse(touched):
                outputs = ranks.run(
                    _run_program, check.program, self.function, per_rank(encoded_inputs)
                )
        except RanksError as error:
            if isinstance(error, RankTimeout):  # its report has the check's time limit
                error = timed_out("case", check.case_seconds(), error.states)
            error.trace = ranks.trace
            raise error from None
        finally:
            text = printed.getvalue()[:_MAX_PRINTED]
            if text and self._echo is not None:
                self._echo(text)
        network = case.network if self._on == "simulated" else None
        return Observed([decode(output) for output in outputs], ranks.trace, network, touched)

    def _ranks_of(self, case: Case, check: Check) -> Ranks:
        size, seconds = case.world_size, check.case_seconds()
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
        end_soon(pid for ranks in self._ranks.values() for pid in ranks.processes())
        for ranks in self._ranks.values():
            ranks.close()


def _run_program(
    program: Callable[..., Any], function: Callable[..., Any], encoded_input: bytes
) -> bytes:
    return encode(program(function, decode(encoded_input)))


@contextmanager
def _told_of_misuse(touched: list[str]) -> Iterator[None]:
    """Collect what is said about buffers touched before ``wait()``; show other warnings as usual.

    The events show the handles that nobody waits for, so they are left out here.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("always", MisuseWarning)
        show = warnings.showwarning

        def hear(message: Any, category: type[Warning], *place: Any) -> None:
            if isinstance(message, MisuseWarning):
                touched.extend(message.touched)
            else:
                show(message, category, *place)

        warnings.showwarning = hear  # type: ignore[assignment]
        yield


class _Shown(Line):
    """The display of a check's progress and report; a context that leaves no unfinished line.

    In a notebook, the display is one output that changes: it shows the progress, then the report,
    then the report with its picture. In a terminal, it is a progress line that overwrites itself,
    followed by the report. If there is neither a notebook nor a terminal, it is only the report.
    """

    def echo(self, text: str) -> None:
        """Print the text that the ranks printed."""
        self.end()
        print(text, end="", flush=True)

    def report(self, report: CheckReport) -> None:
        """Show the report, and add its picture after it is drawn."""
        if not in_notebook():
            self.end()
            print(report, flush=True)
            return
        self.show(str(report), html_of(report))
        if not report.passed and report.picture is not None:
            self.show(str(report), report._repr_html_())

    def __enter__(self) -> _Shown:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # If a person interrupts the check, the line stays: it says what took so long.
        if kind is not None and issubclass(kind, Exception):
            self.clear()
        self.end()
