"""The causes of failing cases, and how hard each case is to look at.

A known mistake is named only if it explains what it could explain, in all failing cases together.
Two failures have the same cause if their reasons are the same words once numbers, ranks and places
are left out. A cause is told once, for its simplest case; the others are named.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from course_lib.checking.cases import Case, Wrong
from course_lib.checking.on_ranks.effects import tensors_in

_NUMBER = r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?"
_LEFT_OUT = (
    (r"\bb?float\d+\b", "float"),  # one dtype is as good as another
    (rf"(?<![\w.]){_NUMBER}(?: ?(?:B|[KMG]iB|ns|µs|ms|s)\b)?", "#"),
    (r"\[#(?:, #)*\]", ""),  # the place of an element
    (r"#(?:(?:, |-| and | → rank )#)+", "#"),
    (r" \(#\)", ""),
    (r"\b[Rr]anks?\b", "rank"),
    (r"\b(?:transposed|strided)\b", "layout"),
)


def cause_of(reason: str) -> str:
    """Return the reason without numbers, ranks and places; what is said of each rank, once."""
    for pattern, instead in _LEFT_OUT:
        reason = re.sub(pattern, instead, reason)
    parts = (part.rstrip(".") for part in re.split(r"[.;] ", reason))
    return "; ".join(dict.fromkeys(parts))


def agreed(findings: Sequence[Wrong]) -> list[str]:
    """Return the hint of each failing case, so that no two of them tell different stories.

    A mistake may look like the one of a single case by chance. So one is named if it explains all
    the cases that it could explain. If no mistake does, the one that explains most is named, with
    a word that it does not explain all; but where every case has the same other hint, that one is
    told. Where two mistakes may be named, the one that explains more is.
    """
    could, explains = Counter[str](), Counter[str]()
    for finding in findings:
        # Each once, in their order: of two that explain as much, the first one is named.
        could.update(dict.fromkeys(map(cause_of, finding.known), 1))
        fits = [cause_of(words) for words, hint in finding.known.items() if hint]
        explains.update(dict.fromkeys(fits, 1))
    named = {cause for cause, count in explains.items() if count == could[cause]}
    partly = ""
    others = {cause_of(finding.otherwise) for finding in findings}
    if explains and not named and ("" in others or len(others) > 1):
        named = {max(explains, key=lambda cause: explains[cause])}
        partly = " (Some failing cases do not fit this exactly: correct this first.)"
    hints = []
    for finding in findings:
        fit = [words for words, hint in finding.known.items() if hint and cause_of(words) in named]
        best = max(fit, key=lambda words: explains[cause_of(words)], default="")
        hints.append(finding.known[best] + partly if best else finding.otherwise)
    return hints


_TRAITS: tuple[tuple[str, Callable[[Case], bool]], ...] = (
    # A case's name says in which layout and dtype its tensors come, where that matters.
    (
        "tensors that are not contiguous",
        lambda case: (
            case.form.layout in ("transposed", "strided") and case.form.layout in case.name
        ),
    ),
    ("several groups of ranks", lambda case: len(case.groups) > 1),
    (
        "a dtype other than float32",
        lambda case: case.form.dtype != "float32" and case.form.dtype in case.name,
    ),
)


def in_common(failed: Sequence[Case], passed: Sequence[Case]) -> str:
    """Return what all failed cases have and no passed one has, in words; mostly nothing.

    Two must have failed, and two passed: a single case may be special in many ways.
    """
    if len({case.name.partition(", after ‘")[0] for case in failed}) < 2 or len(passed) < 2:
        return ""
    return " and ".join(
        words for words, has in _TRAITS if all(map(has, failed)) and not any(map(has, passed))
    )


def difficulty_of(case: Case, inputs: Iterable[Any], first: Case) -> tuple[int, ...]:
    """Return how hard it is to find a mistake in a case; the smaller, the simpler.

    First counts in how many ways it is unusual: another dtype than float32, tensors that are not
    contiguous, no numbers at all, `degenerate` where the `first` case is not. Several groups and a
    call before it count twice. Each parameter more than the first case has counts too: of a special
    case there is more to say. Then comes the number of ranks, then the number of digits of how many
    numbers there are: 6 and 9 are alike.
    """
    numbers = sum(tensor.numel() for tensor in tensors_in(list(inputs)))
    form = case.form
    unusual = (
        (form.dtype != "float32")
        + (form.layout != "contiguous")
        + 2 * (len(case.groups) > 1)
        + 2 * (case.after is not None)
        + (numbers == 0)
        + (degenerate(case, [case, first]) and not degenerate(first, [case, first]))
        + max(0, len(case.parameters) - len(first.parameters))
    )
    return unusual, case.world_size, len(str(numbers))


def degenerate(case: Case, among: Iterable[Case]) -> bool:
    """Return whether mistakes may hide in a case because numbers coincide in it.

    One rank is its own neighbour, and a mean over one is a sum. So are nodes of one rank, a single
    node, and as many nodes as each has ranks.
    """
    size = case.network.node_size
    if size is not None and size > 0:
        nodes = case.world_size // size
        return nodes == 1 or size == 1 or nodes == size
    return case.world_size == 1 < max(each.world_size for each in among)
