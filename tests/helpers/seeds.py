"""How often a right solution is refused because of its seed: ``python -m tests.helpers.seeds``.

Each case is drawn anew for each seed, run on simulated ranks with each solution that must pass, and
judged. Options: ``--seeds N`` (``--halves N`` for cases of half precisions), and words that the
names ``assignment/task`` must contain.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from course_lib.checking.cases import Case, Check, Wrong, case_generator
from course_lib.ranks import Ranks, per_rank
from tests.helpers.course_folders import SOURCES, assignments
from tests.helpers.solutions import checks_of, hidden_cases, mutants_in, solution_of

HALVES = ("bfloat16", "float16")


def right_solutions(folder: Path, task: str) -> list[tuple[str, Callable[..., Any]]]:
    """Return the course's own solution of a task, and the others that must pass, by name."""
    others = [m for m in mutants_in(folder) if m.task == task and m.reason is None]
    return [
        ("ours", solution_of(folder, task)),
        *((each.mistake, each.function) for each in others),
    ]


def cases_of(folder: Path, task: str) -> list[Case]:
    """Return the public cases and the hidden ones."""
    return [*checks_of(folder)[task].cases, *hidden_cases(folder, task)]


def findings(
    name: str, check: Check, case: Case, function: Callable[..., Any], seeds: Sequence[str]
) -> Iterator[tuple[str, Wrong | None]]:
    """Yield each seed with the finding of the check's judge about the function, or None."""

    program = check.program  # alone: the ranks do not need the judge, and some cannot be sent

    def run_all(mine: Sequence[Any]) -> list[Any]:
        return [program(function, each) for each in mine]

    with Ranks(case.world_size, on="simulated", network=case.network, timeout=600) as ranks:
        for at in range(0, len(seeds), 50):
            some = seeds[at : at + 50]
            inputs = [check.inputs(case, case_generator(seed, name, case)) for seed in some]
            results = ranks.run(
                run_all, per_rank([list(each) for each in zip(*inputs, strict=True)])
            )
            for seed, each, outputs in zip(some, inputs, zip(*results, strict=True), strict=True):
                try:
                    check.judge(case, each, outputs)
                except Wrong as wrong:
                    yield seed, wrong
                else:
                    yield seed, None


def main() -> None:
    """Print one line for each task and case, with the number of seeds and of refused answers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--halves", type=int, default=1000)
    parser.add_argument("--name", default="seed", help="how the names of the seeds begin")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print("| task | case | seeds | refused |\n|---|---|---|---|")
    for folder in assignments(SOURCES):
        for task, check in checks_of(folder).items():
            name = f"{folder.name}/{task}"
            if asked.words and not any(word in name for word in asked.words):
                continue
            for case in cases_of(folder, task):
                count = asked.halves if case.form.dtype in HALVES else asked.seeds
                refused, right = 0, right_solutions(folder, task)
                for i, (words, function) in enumerate(right):
                    seeds = [f"{asked.name} {number}" for number in range(i, count, len(right))]
                    for seed, wrong in findings(name, check, case, function, seeds):
                        if wrong is not None:
                            refused += 1
                            print(f"<!-- {words}, seed {seed}: {wrong.message[:150]} -->")
                print(f"| {name} | {case.name} | {count} | {refused} |", flush=True)


if __name__ == "__main__":
    main()
