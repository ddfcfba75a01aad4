"""Every assignment is proven: its solution passes, its stubs and wrong solutions fail."""

from dataclasses import replace
from functools import partial

import pytest

from course_lib.checking import run_check
from course_lib.checking.defence import Defence
from course_lib.checking.local import LocalRunner
from course_lib.checking.mutants import says
from tests.helpers import solutions
from tests.helpers.course_folders import RELEASED, SOURCES, assignments, needs_sources

ASSIGNMENTS = assignments(SOURCES)

pytestmark = needs_sources


# Ranks for all mutants: starting them anew for each would take most of the time.
RUNNERS = {on: LocalRunner(print, on, echo=None) for on in ("simulated", "cpu")}


@pytest.fixture(scope="module", autouse=True)
def ranks_are_closed():
    yield
    for runner in RUNNERS.values():
        runner.__exit__()


def run(folder, task, function, on="simulated", until=None):
    """Return the report of the public cases if it is as `until` wants it, otherwise of all cases.

    On CPU ranks hidden cases take long, so they run only while something is looked for.
    """
    examine = partial(
        run_check, f"{folder.name}/{task}", solutions.checks_of(folder)[task], seed="tests"
    )
    runner = RUNNERS[on]
    runner.function = function
    if until and until(report := examine(runner)):
        return report
    hidden = solutions.hidden_cases(folder, task) if on == "simulated" or until else ()
    return examine(runner, hidden=hidden)


def told(report) -> str:
    """Return the report, and the errors that the author of a check must mend."""
    troubles = dict.fromkeys(result.trouble for result in report.results if result.trouble)
    return "\n".join([str(report), *(f"in your check: {trouble}" for trouble in troubles)])


TASKS = solutions.tasks()
PLACES = ("simulated", "cpu")


FAILING = [
    pytest.param(
        *(folder, mutant, place), id=f"{folder.name}-{mutant.task}__{mutant.mistake}-{place}"
    )
    for folder in ASSIGNMENTS
    for mutant in solutions.mutants_in(folder)
    for place in PLACES
    if place in mutant.where
]


def test_there_are_assignments_and_each_is_released() -> None:
    assert ASSIGNMENTS
    assert [folder.name for folder in assignments(RELEASED)] == [f.name for f in ASSIGNMENTS]


@pytest.mark.every_case
@pytest.mark.parametrize(("folder", "task"), TASKS)
def test_the_solution_passes_the_first_the_middle_and_the_last_case(folder, task: str) -> None:
    """As of a test with many cases, `make test` runs three of a task's public cases."""
    check = solutions.checks_of(folder)[task]
    last = len(check.cases) - 1
    three = tuple(check.cases[number] for number in sorted({0, last // 2, last}))
    runner = RUNNERS["simulated"]
    runner.function = solutions.solution_of(folder, task)
    report = run_check(f"{folder.name}/{task}", replace(check, cases=three), runner, seed="tests")
    assert report.passed, told(report)


@pytest.mark.large
@pytest.mark.parametrize("on", PLACES)
@pytest.mark.parametrize(("folder", "task"), TASKS)
def test_the_solution_passes_every_case(folder, task: str, on: str) -> None:
    report = run(folder, task, solutions.solution_of(folder, task), on)
    assert report.passed, told(report)


@pytest.mark.parametrize(("folder", "task"), TASKS)
def test_an_unwritten_function_fails_every_case(folder, task: str) -> None:
    def stub(*_, **__) -> None:
        raise NotImplementedError

    report = run(folder, task, stub)
    assert not any(result.passed for result in report.results), str(report)
    assert "NotImplementedError" in report.reason
    assert "Traceback" not in str(report)


@pytest.mark.parametrize(("folder", "mutant", "on"), FAILING)
def test_mutant(folder, mutant, on) -> None:
    if mutant.reason is None:
        report = run(folder, mutant.task, mutant.function, on)
        assert report.passed, told(report)
        assert report.fraction == 1
        return
    reason = mutant.reason

    def is_found(report) -> bool:
        return says(report, reason)

    report = run(folder, mutant.task, mutant.function, on, is_found)
    assert not report.passed, f"{mutant.mistake} got through"
    assert is_found(report), f"nowhere does it say ‘{reason}’: {told(report)}"


@pytest.mark.parametrize("folder", ASSIGNMENTS, ids=lambda folder: folder.name)
def test_every_task_has_a_test_cell_hidden_cases_and_both_kinds_of_mutants(folder) -> None:
    checks, mutants = solutions.checks_of(folder), solutions.mutants_in(folder)
    graded = {
        cell.metadata.nbgrader.grade_id
        for cell in solutions.code_cells(folder)
        if cell.metadata.get("nbgrader", {}).get("grade")
    }
    assert graded == set(checks)
    for task, check in checks.items():
        if isinstance(check, Defence):
            continue
        # Every solution that a student's own test must judge, on rank 0 alone, is public.
        assert check.only_on or solutions.hidden_cases(folder, task), f"{task}: no hidden case"
        assert any(m.task == task and m.reason is None for m in mutants), f"{task}: no right one"
        assert any(m.task == task and m.reason for m in mutants), f"{task}: no wrong one"


@pytest.mark.every_case
@pytest.mark.parametrize(("folder", "task"), TASKS)
def test_a_reference_cannot_be_imported_while_it_is_graded(folder, task: str) -> None:
    module = solutions.module_of_reference(folder, task)
    assert not module or solutions.is_masked(folder, module), (
        f"MASKED in hidden.py does not hide {module}"
    )


@pytest.mark.parametrize("folder", ASSIGNMENTS, ids=lambda folder: folder.name)
def test_no_hidden_case_is_a_public_one(folder) -> None:
    for task, check in solutions.checks_of(folder).items():
        public = [(case.world_size, case.parameters) for case in check.cases]
        for case in solutions.hidden_cases(folder, task):
            assert (case.world_size, case.parameters) not in public
            assert case.name not in [public_case.name for public_case in check.cases]
