"""Every reference runs in the cases of some hundred seeds: a draw makes no case that is illegal."""

from __future__ import annotations

from pathlib import Path

import pytest

from course_lib.checking.cases import case_generator
from tests.helpers.course_folders import SOURCES, assignments, needs_sources
from tests.helpers.solutions import checks_of, readable

pytestmark = needs_sources
SEEDS = 300
DRAWN = [
    pytest.param(folder, task, id=f"{folder.name}-{task}")
    for folder in readable(assignments(SOURCES))
    for task, check in checks_of(folder).items()
    if check.drawn is not None
]


@pytest.mark.large
@pytest.mark.parametrize(("folder", "task"), DRAWN)
def test_a_reference_runs_in_every_case_that_is_drawn(folder: Path, task: str) -> None:
    check, name = checks_of(folder)[task], f"{folder.name}/{task}"
    assert check.drawn is not None
    for seed in range(SEEDS):
        case = check.drawn(seed)
        check.prepare(case, check.inputs(case, case_generator("tests", name, case)))
