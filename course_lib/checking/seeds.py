"""Choose the public seeds of an assignment's tasks: ``make seeds ARGS="02 average_gradients"``.

Every solution of ``instructor/NN_name/mutants.py`` runs on the cases of many seeds. The seeds that
are kept are few: a plain case, and then those that refuse the most wrong solutions which no kept
seed refuses, and show the most features which no kept case has. A right solution that any seed
refuses is an error of the draw or of the check: it is printed, and nothing is kept.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from course_lib.checking.cases import Case, Check
from course_lib.checking.loading import find_assignment, load_checks, load_module
from course_lib.checking.mutants import Solution, mutants_of, report_on
from course_lib.installed import find_course
from course_lib.ranks.for_graders import Line

CANDIDATES = 64
"""Seeds that are tried, from 0."""


def refusing(
    name: str, check: Check, solutions: Sequence[Solution], seeds: Sequence[int]
) -> dict[str, dict[int, str]]:
    """Return mistake → the seeds that refuse the solution, each with its reason."""
    assert check.drawn is not None
    line, reasons = Line(), dict[str, dict[int, str]]()
    for number, solution in enumerate(solutions, 1):
        reasons[solution.mistake] = {}
        for seed in seeds:
            line.show(f"{name}: solution {number} of {len(solutions)}, seed {seed} of {len(seeds)}")
            single = replace(check, cases=(check.drawn(seed),))
            report = report_on(name, single, solution, explain=False)
            if not report.passed:
                reasons[solution.mistake][seed] = report.reason
    line.clear()
    return reasons


def choose(cases: Mapping[int, Case], refused: Mapping[str, Collection[int]]) -> list[int]:
    """Return few seeds whose cases refuse all solutions that any does, and have all features.

    Args:
        cases: seed → its case.
        refused: wrong solution → the seeds that refuse it.

    Two seeds shall refuse a solution, if two can: then it does not pass by luck.

    """
    features = {
        feature: [seed for seed, case in cases.items() if feature in case.parameters["features"]]
        for feature in {f for case in cases.values() for f in case.parameters["features"]}
    }
    needs = [*refused.values(), *features.values()]
    largest = max(case.world_size for case in cases.values())
    order = sorted(
        cases, key=lambda seed: (cases[seed].world_size == 1 < largest, *cases[seed].difficulty)
    )
    chosen = [order[0]]
    while True:
        unmet = [
            seeds for seeds in needs if len(set(chosen) & set(seeds)) < min(2, len(set(seeds)))
        ]
        if not unmet or len(chosen) == len(cases):
            return sorted(chosen)
        chosen.append(
            max(
                (seed for seed in order if seed not in chosen),
                key=lambda seed: sum(seed in seeds for seeds in unmet),
            )
        )


def write_seeds(path: Path, task: str, seeds: Sequence[int]) -> None:
    """Write the public seeds of a task into its ``checks.py``, in place of those that are there."""
    # Not across the next call: a task without seeds must not change those of another one.
    in_its_call = rf'by_reference\(\s*"{task}",(?:(?!by_reference\().)*?'
    text, count = re.subn(
        rf"({in_its_call}\bseeds=)\([^()]*\)",
        lambda match: f"{match[1]}{tuple(seeds)}",
        path.read_text(),
        flags=re.DOTALL,
    )
    if not count:
        raise LookupError(
            f'write by_reference("{task}", …, seeds=()) into {path}; the seeds are {seeds}'
        )
    path.write_text(text)


def main() -> int:
    """Choose and write seeds; return 1 if a right solution is refused or a wrong one is not."""
    parser = argparse.ArgumentParser(prog="make seeds", description=__doc__)
    parser.add_argument("assignment", help="its name or its number")
    parser.add_argument("tasks", nargs="*", help="only these tasks")
    parser.add_argument("--candidates", type=int, default=CANDIDATES, help="seeds to try")
    parser.add_argument("--dry", action="store_true", help="change no file")
    options = parser.parse_args()
    assignment, folder = find_assignment(options.assignment)
    path = folder / "checks.py"
    solutions = mutants_of(load_module(find_course() / "instructor" / assignment / "mutants.py"))
    amiss = 0
    for task, check in load_checks(path).items():
        if check.drawn is None or (options.tasks and task not in options.tasks):
            continue
        seeds = range(options.candidates)
        tried = [s for s in solutions if s.task == task and "simulated" in s.where]
        reasons = refusing(f"{assignment}/{task}", check, tried, seeds)
        right = {s.mistake for s in tried if s.reason is None}
        reasons_of_wrong = {name: seeds for name, seeds in reasons.items() if name not in right}
        chosen = choose({seed: check.drawn(seed) for seed in seeds}, reasons_of_wrong)
        print(f"{assignment}/{task}: seeds {chosen}")
        for name, seeds_and_reasons in reasons.items():
            refusing_seeds = [seed for seed in chosen if seed in seeds_and_reasons]
            print(
                f"  {'right' if name in right else 'wrong'} {name}: refused by "
                f"{len(seeds_and_reasons)} of {len(seeds)} seeds, {len(refusing_seeds)} chosen"
            )
            if name in right and seeds_and_reasons:
                seed, reason = next(iter(seeds_and_reasons.items()))
                print(f"    REFUSED although it is right, by seed {seed}: {reason}")
            if name not in right and not seeds_and_reasons:
                print("    SURVIVES all seeds: the draw lacks what it gets wrong")
        bad = any(reasons[name] for name in right) or not all(reasons_of_wrong.values())
        amiss += bad
        if not bad and not options.dry:
            write_seeds(path, task, chosen)
    return 1 if amiss else 0


if __name__ == "__main__":
    raise SystemExit(main())
