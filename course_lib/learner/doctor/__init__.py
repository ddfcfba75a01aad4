"""``course doctor``: test whether a machine has what the course needs, and if not, say what to do.

All tests run in order, and are printed as text or as JSON.

- `_finding`: the result of one test
- `_software`: Python, PyTorch, kernels, JupyterLab's extensions
- `_machine`: cores, memory, disk, GPUs, network, and whether ranks start

``autograder doctor`` tests what grading needs.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict

from course_lib.learner.doctor import _machine, _software
from course_lib.learner.doctor._finding import Finding

__all__ = ["Finding", "add_options", "findings", "run", "text_of"]
DESCRIPTION = (
    "Check whether this machine has what the course needs, and say what to do if not. Exit status: "
    "0 if lectures and checks will work, else 1. What grading needs: autograder doctor."
)
LOOKS: tuple[Callable[[], Finding | Iterator[Finding]], ...] = (
    *(_software.python, _software.packages, _software.torch_build, _software.course),
    *(_machine.memory, _machine.disk, _machine.home, _machine.port),
    *(_machine.gpus, _machine.host_name, _machine.loopback, _machine.simulated, _machine.real),
    *(_software.kernels, _software.extensions),
)
_MARKS = {"course": "✗", "nothing": "!"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Run all tests, print the results, and return the exit status."""
    found = []
    for finding in findings():
        found.append(finding)
        if not arguments.json:
            print(text_of(finding), flush=True)
    wrong = [each for each in found if not each.fine and each.needed_for == "course"]
    if arguments.json:
        told = [{**asdict(each), "fine": each.fine} for each in found]
        print(json.dumps({"fine": not wrong, "findings": told}, ensure_ascii=False, indent=1))
    else:
        print(f"\n{conclusion(wrong)}")
    return int(bool(wrong))


def findings(
    looks: Iterable[Callable[[], Finding | Iterator[Finding]]] = LOOKS,
) -> Iterator[Finding]:
    """Yield the result of each test. If a test itself raises an error, this is also a result."""
    for look in looks:
        name = look.__name__.replace("_", " ")
        try:
            found = look()
            yield from [found] if isinstance(found, Finding) else found
        except Exception as error:
            told = f"the test itself failed: {type(error).__name__}: {error}"
            yield Finding(name, told, "please report this, with the output of course doctor --json")


def text_of(finding: Finding) -> str:
    """Return a finding as lines for a terminal."""
    mark = "✓" if finding.fine else _MARKS[finding.needed_for]
    lines = textwrap.wrap(
        f"{mark} {finding.name:15} {finding.told}", 100, subsequent_indent=" " * 18
    )
    if not finding.fine:
        lines += textwrap.wrap(
            f"→ {finding.advice}", 100, initial_indent=" " * 18, subsequent_indent=" " * 20
        )
    return "\n".join(lines)


def conclusion(wrong: list[Finding]) -> str:
    """Return the last line, which says whether the learner can begin."""
    if wrong:
        names = ", ".join(each.name for each in wrong)
        return f"Not ready: {names}. The arrows show what to do."
    return "Ready: lectures and checks work here. `autograder doctor` tests grading."
