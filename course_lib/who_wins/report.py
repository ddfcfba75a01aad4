"""The map as tables in Markdown."""

import math
from collections.abc import Mapping, Sequence

from course_lib.who_wins.algorithms import setting_of
from course_lib.who_wins.problem import Problem, gradient_bytes
from course_lib.who_wins.winners import Cell, interval


def latency_words(seconds: float) -> str:
    """Return a latency as readable text: ``20 µs``, ``5 ms``."""
    return f"{1e6 * seconds:g} µs" if seconds < 1e-3 else f"{1e3 * seconds:g} ms"


def bandwidth_words(rate: float) -> str:
    """Return a bandwidth as readable text: ``30 kB/s``, ``1 MB/s``."""
    return f"{rate / 1e3:g} kB/s" if rate < 1e6 else f"{rate / 1e6:g} MB/s"


def map_table(cells: Sequence[Cell]) -> str:
    """Return a row per network: mean virtual seconds to the target, with the winner's interval."""
    names = list(cells[0].seconds)
    lines = [
        f"| latency, bandwidth | winner | {' | '.join(names)} |",
        "|---|---|" + "---:|" * len(names),
    ]
    for cell in cells:
        first = cell.order()[0]
        latency, bandwidth = cell.place
        winner = f"**{first}**" if cell.is_clear() else f"{first}, not clear"
        values = [
            _value(cell.seconds[name], bold=name == first, exact=cell.exact[name]) for name in names
        ]
        network = f"{latency_words(latency)}, {bandwidth_words(bandwidth)}"
        lines.append(f"| {network} | {winner} | {' | '.join(values)} |")
    return "\n".join(lines)


def _value(seconds: Sequence[float], bold: bool, exact: bool) -> str:
    summary = interval(seconds)
    if math.isinf(summary.mean):
        reached = sum(not math.isinf(time) for time in seconds)
        return f"{reached} of {len(seconds)}"
    text = ("" if exact else "~") + f"{summary.mean:.3g}"
    if bold and not math.isinf(summary.half):
        text += f" ± {summary.half:.2g}"
    return f"**{text}**" if bold else text


def steps_table(steps: Mapping[str, Sequence[float]]) -> str:
    """Return a row per algorithm with the steps to the target, which are by seed."""
    lines = ["| algorithm | optimizer, learning rate | steps to the target |", "|---|---|---:|"]
    for name, values in steps.items():
        summary = interval(values)
        text = f"{summary.mean:.1f} ± {summary.half:.1f}"
        if math.isinf(summary.mean):
            text = f"reached by {sum(not math.isinf(v) for v in values)} of {len(values)} seeds"
        lines.append(f"| {name} | {setting_of(name)} | {text} |")
    return "\n".join(lines)


def assumptions(problem: Problem, seeds: Sequence[int]) -> str:
    """Return the conditions of the map in a few sentences."""
    return (
        f"{problem.workers} workers with {problem.rows} rows each, {gradient_bytes() / 1e3:.1f} kB "
        f"of gradients, until the loss over all training rows is at most {problem.target:g}; "
        f"{len(seeds)} seeds. Virtual seconds; ± is a 95 % interval over the seeds. A number "
        "with ~ is less exact: the times of its steps did not repeat exactly. `k of n`: only k "
        "of n seeds reached the target within the allowed steps."
    )
