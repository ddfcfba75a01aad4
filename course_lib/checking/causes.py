"""Find the causes of failing cases, and say how hard it is to find a mistake in each case.

A known mistake is named only if it explains all failing cases that it could explain. Two failures
have the same cause if their reasons are the same text without numbers, ranks and positions. The
report explains a cause once, for its simplest case, and only names the other cases.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from course_lib.checking.cases import Case, Wrong
from course_lib.checking.on_ranks.leaves import tensors_in

_NUMBER = r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?"
_LEFT_OUT = (
    (r"\bb?float\d+\b", "float"),  # all dtypes count as the same
    (rf"(?<![\w.]){_NUMBER}(?: ?(?:B|[KMG]iB|ns|µs|ms|s)\b)?", "#"),
    (r"\[#(?:, #)*\]", ""),  # the position of an element
    (r"#(?:(?:, |-| and | → rank )#)+", "#"),
    (r" \(#\)", ""),
    (r"\b[Rr]anks?\b", "rank"),
    (r"\b(?:transposed|strided)\b", "layout"),
)


def cause_of(reason: str) -> str:
    """Return the reason without numbers, ranks and positions; keep equal sentences only once."""
    for pattern, instead in _LEFT_OUT:
        reason = re.sub(pattern, instead, reason)
    parts = (part.rstrip(". ") for part in re.split(r"[.;] ", reason))
    return "; ".join(dict.fromkeys(parts))


def agreed(findings: Sequence[Wrong], refuted: Collection[str] = ()) -> list[str]:
    """Return the hint of each failing case, so that no two hints contradict each other.

    In a single case, a known mistake may fit by chance. So a mistake is named only if it explains
    all the cases that it could explain, and no case that passed has `refuted` it. If two mistakes
    may be named, the one that explains more cases is.
    """
    could, explains = Counter[str](), Counter[str]()
    for finding in findings:
        # Count each mistake once, in order: if two explain equally many, the first one is named.
        could.update(dict.fromkeys(map(cause_of, finding.known), 1))
        fits = [cause_of(words) for words, hint in finding.known.items() if hint]
        explains.update(dict.fromkeys(fits, 1))
    named = {cause for cause, n in explains.items() if n == could[cause] and cause not in refuted}
    hints = []
    for finding in findings:
        fit = [words for words, hint in finding.known.items() if hint and cause_of(words) in named]
        best = max(fit, key=lambda words: explains[cause_of(words)], default="")
        hints.append(finding.known[best] if best else finding.otherwise)
    return hints


_TRAITS: dict[str, Callable[[Case], Any]] = {
    # A case's name contains the layout and dtype of its tensors if they matter.
    "tensors that are not contiguous": lambda case: (
        case.form.layout != "contiguous" and case.form.layout in case.name
    ),
    "several groups of ranks": lambda case: len(case.groups) > 1,
    "a dtype other than float32": lambda case: (
        case.form.dtype != "float32" and case.form.dtype in case.name
    ),
    "": lambda case: case.form.iterable,  # these two may separate the cases, but are not named
    " ": lambda case: case.form.training,
}


def in_common(failed: Sequence[Case], passed: Sequence[Case]) -> str:
    """Return in words what all failed cases have and no passed case has; usually empty.

    At least two cases must have failed and two must have passed. If two traits separate failed
    cases from passed ones, either may be the reason, so nothing is said.
    """
    if len({case.name.partition(", after ‘")[0] for case in failed}) < 2 or len(passed) < 2:
        return ""
    separate = [
        words
        for words, trait in _TRAITS.items()
        if not set(map(trait, failed)) & set(map(trait, passed))
    ]
    words = separate[0].strip() if len(separate) == 1 else ""
    return words if words and all(map(_TRAITS[words], failed)) else ""


def difficulty_of(case: Case, inputs: Iterable[Any], first: Case) -> tuple[int, ...]:
    """Return how hard it is to find a mistake in a case; a smaller tuple is a simpler case.

    The first number counts how unusual the case is. It counts a dtype other than float32, tensors
    that are not contiguous, inputs without any numbers, and a case that is `degenerate` although
    the `first` case is not. Several groups and an earlier call count twice. Each parameter more
    than the first case has also counts, because a special case needs more parameters. The second
    number is the number of ranks. The third is the number of digits in the count of the inputs'
    numbers, so 6 numbers and 9 numbers are equally hard.
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
    """Return whether mistakes may hide in a case because some of its numbers coincide.

    With one rank, the rank is its own neighbour, and a mean equals a sum. Nodes of one rank, a
    single node, and as many nodes as ranks per node also hide mistakes.
    """
    size = case.network.node_size
    if size is not None and size > 0:
        nodes = case.world_size // size
        return nodes == 1 or size == 1 or nodes == size
    return case.world_size == 1 < max(each.world_size for each in among)
