"""Every assignment is proven: its solution passes, its stubs and wrong solutions fail."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from course_lib.checking import CheckReport, run_check
from course_lib.checking.defence import Defence
from course_lib.checking.local import Kind, LocalRunner
from course_lib.checking.mutants import Solution, says
from course_lib.ranks import Ranks
from tests.helpers.course_folders import RELEASED, SOURCES, assignments, needs_sources
from tests.helpers.solutions import (
    checks_of,
    code_cells,
    hidden_cases,
    is_masked,
    module_of_reference,
    mutants_in,
    readable,
    solution_of,
    trouble_in,
)

ASSIGNMENTS = assignments(SOURCES)
READABLE = readable(ASSIGNMENTS)
"""For the others there is one test, `test_its_files_can_be_read`."""

pytestmark = needs_sources


POOLS: dict[Kind, dict[int, Ranks]] = {"simulated": {}, "cpu": {}}


@pytest.fixture(scope="module", autouse=True)
def pools() -> Iterator[None]:
    """Ranks for all mutants: starting them anew for each would take most of the time."""
    yield
    for pool in POOLS.values():
        for ranks in pool.values():
            ranks.close()
        pool.clear()


def run(folder, task, function, on="simulated", until=None):
    """Return the report of the public cases if it is as `until` wants it, otherwise of all cases.

    On CPU ranks hidden cases take long, so they run only while something is looked for.
    """
    examine = partial(run_check, f"{folder.name}/{task}", checks_of(folder)[task], seed="tests")
    with LocalRunner(function, on, echo=None, ranks=POOLS[on]) as runner:
        if until and until(report := examine(runner)):
            return report
        hidden = hidden_cases(folder, task) if on == "simulated" or until else ()
        return examine(runner, hidden=hidden)


def told(report: CheckReport) -> str:
    """Return the report, and the errors that the author of a check must mend."""
    troubles = dict.fromkeys(result.trouble for result in report.results if result.trouble)
    return "\n".join([str(report), *(f"in your check: {trouble}" for trouble in troubles)])


TASKS = [
    pytest.param(folder, task, id=f"{folder.name}-{task}")
    for folder in READABLE
    for task in checks_of(folder)
]
PLACES: tuple[Kind, ...] = ("simulated", "cpu")


FAILING = [
    pytest.param(
        *(folder, mutant, place), id=f"{folder.name}-{mutant.task}__{mutant.mistake}-{place}"
    )
    for folder in READABLE
    for mutant in mutants_in(folder)
    for place in PLACES
    if place in mutant.where
]


def test_there_are_assignments_and_each_is_released() -> None:
    assert ASSIGNMENTS
    assert [folder.name for folder in assignments(RELEASED)] == [f.name for f in ASSIGNMENTS]


@pytest.mark.parametrize("folder", ASSIGNMENTS, ids=lambda folder: folder.name)
def test_its_files_can_be_read(folder: Path) -> None:
    assert (trouble := trouble_in(folder)) == "", trouble


@pytest.mark.every_case
@pytest.mark.parametrize(("folder", "task"), TASKS)
def test_the_solution_passes_every_case(folder: Path, task: str) -> None:
    report = run(folder, task, solution_of(folder, task))
    assert report.passed, told(report)


@pytest.mark.parametrize(("folder", "task"), TASKS)
def test_the_solution_passes_every_case_on_cpu_ranks(folder: Path, task: str) -> None:
    report = run(folder, task, solution_of(folder, task), "cpu")
    assert report.passed, told(report)


@pytest.mark.parametrize(("folder", "task"), TASKS)
def test_an_unwritten_function_fails_every_case(folder: Path, task: str) -> None:
    def stub(*_: Any, **__: Any) -> None:
        raise NotImplementedError

    report = run(folder, task, stub)
    assert not any(result.passed for result in report.results), str(report)
    assert "NotImplementedError" in report.reason


@pytest.mark.parametrize(("folder", "mutant", "on"), FAILING)
def test_mutant(folder: Path, mutant: Solution, on: Kind) -> None:
    if mutant.reason is None:
        report = run(folder, mutant.task, mutant.function, on)
        assert report.passed, told(report)
        assert report.fraction == 1
        return
    reason = mutant.reason

    def is_found(report: CheckReport) -> bool:
        return says(report, reason)

    report = run(folder, mutant.task, mutant.function, on, is_found)
    assert not report.passed, f"{mutant.mistake} got through"
    assert is_found(report), f"nowhere does it say ‘{reason}’: {told(report)}"


@pytest.mark.parametrize("folder", READABLE, ids=lambda folder: folder.name)
def test_every_task_has_a_test_cell_hidden_cases_and_both_kinds_of_mutants(folder: Path) -> None:
    checks, mutants = checks_of(folder), mutants_in(folder)
    graded = {
        cell.metadata.nbgrader.grade_id
        for cell in code_cells(folder)
        if cell.metadata.get("nbgrader", {}).get("grade")
    }
    defended = {task for task, check in checks.items() if isinstance(check, Defence)}
    assert graded == set(checks)
    assert all(hidden_cases(folder, task) for task in set(checks) - defended)
    for task in set(checks) - defended:
        assert any(m.task == task and m.reason is None for m in mutants), f"{task}: no right one"
        assert any(m.task == task and m.reason for m in mutants), f"{task}: no wrong one"


@pytest.mark.every_case
@pytest.mark.parametrize(("folder", "task"), TASKS)
def test_a_reference_cannot_be_imported_while_it_is_graded(folder: Path, task: str) -> None:
    module = module_of_reference(folder, task)
    assert not module or is_masked(folder, module), f"MASKED in hidden.py does not hide {module}"


@pytest.mark.parametrize("folder", READABLE, ids=lambda folder: folder.name)
def test_no_hidden_case_is_a_public_one(folder: Path) -> None:
    for task, check in checks_of(folder).items():
        public = [(case.world_size, case.parameters) for case in check.cases]
        for case in hidden_cases(folder, task):
            assert (case.world_size, case.parameters) not in public
            assert case.name not in [public_case.name for public_case in check.cases]
