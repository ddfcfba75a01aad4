"""``check("02_data_parallel_sgd/shard_bounds", shard_bounds)``: the check under a task's cell."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from course_lib.checking.cases import Case, Check
from course_lib.checking.report import CheckFailed, CheckReport
from course_lib.checking.run_check import run_check
from course_lib.checking.wire import Plain, decode, encode
from course_lib.ranks import Ranks, per_rank


def check(name: str, function: Callable[..., Any]) -> CheckReport:
    """Examine `function` on several ranks of this machine and print how it went.

    Args:
        name: ``assignment/check``, as it stands under the task.
        function: what you wrote.

    Returns:
        The report.

    Raises:
        CheckFailed: a case failed; the printed report says which, and why.
        LookupError: there is no such check, or its file was not found.

    """
    assignment, _, short = name.partition("/")
    checks = load_checks(find_assignment(assignment) / "checks.py")
    if short not in checks:
        raise LookupError(f"{assignment} has no check '{short}'; it has {', '.join(checks)}")
    with LocalRunner(function) as run:
        report = run_check(name, checks[short], run, seed="public")
    print(report)
    if not report.passed:
        raise CheckFailed(report)
    return report


def find_assignment(name: str) -> Path:
    """Return the folder that holds the assignment's ``checks.py``.

    It is looked for beside the notebook, then in ``assignments/`` of the folders above it, then
    beside the installed course.
    """
    here = Path.cwd()
    candidates = [here, here / name]
    candidates += [parent / "assignments" / name for parent in (here, *here.parents)]
    candidates.append(Path(__file__).resolve().parents[2] / "assignments" / name)
    for folder in candidates:
        beside = folder != here or here.name == name or any(here.glob(f"{name}.ipynb"))
        if beside and (folder / "checks.py").is_file():
            return folder
    raise LookupError(
        f"checks.py of '{name}' was not found. Keep it beside the notebook, as it was handed out, "
        "and start Jupyter in that folder or above it."
    )


def load_checks(path: Path) -> dict[str, Check]:
    """Return the checks that a ``checks.py`` defines as ``CHECKS``, in their order."""
    checks: dict[str, Check] = load_module(path).CHECKS
    return checks


def load_module(path: Path) -> ModuleType:
    """Import a file by its path, under a name of its own."""
    name = f"_course_{path.parent.name}_{path.stem}".replace("-", "_")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise LookupError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    # The ranks cannot import a file by a name that only this process knows.
    cloudpickle.register_pickle_by_value(module)
    return module


class LocalRunner:
    """Runs cases of one function on CPU ranks of this machine; keeps the ranks between cases."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._ranks: dict[int, Ranks] = {}

    def __call__(self, check: Check, case: Case, inputs: Sequence[Plain]) -> list[Any]:
        """Return the program's output on every rank of the case."""
        if case.world_size not in self._ranks:
            self._ranks[case.world_size] = Ranks(case.world_size, on="cpu")
        ranks = self._ranks[case.world_size]
        ranks.timeout = check.seconds
        mine = per_rank([encode(value) for value in inputs])
        outputs = ranks.run(_run_program, check.program, self._function, mine)
        return [decode(output) for output in outputs]

    def __enter__(self) -> LocalRunner:
        return self

    def __exit__(self, *_: object) -> None:
        for ranks in self._ranks.values():
            ranks.close()


def _run_program(program: Callable[..., Any], function: Callable[..., Any], mine: bytes) -> bytes:
    return encode(program(function, decode(mine)))
