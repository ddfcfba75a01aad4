"""Tables of results, for the command line and the docs."""

import math
from collections.abc import Mapping, Sequence
from statistics import median

from course_lib.simulate.cluster import Cluster
from course_lib.simulate.layout import Layout
from course_lib.simulate.published import FITTED, Held, Validation
from course_lib.simulate.search import Found
from course_lib.simulate.step_time import Estimate


def estimate_table(
    name: str, cluster: Cluster, layout: Layout, result: Estimate, on_ranks: float | None
) -> str:
    """Return a table of a step's time by cause, and a rank's memory and traffic."""
    lines = [
        f"{layout.ranks} ranks of {name}: tensor {layout.tensor} x context {layout.context} x data "
        f"{layout.data} x pipeline {layout.pipeline}, ZeRO {layout.zero}, {layout.micro_batches} "
        f"micro-batches of {layout.micro_batch}, {layout.schedule}, recompute {layout.recompute}",
        "",
        f"{'a step takes':24}{result.seconds:12.4g} s   {result.mfu:.1%} MFU, "
        f"{result.tokens_per_second:,.0f} tokens/s per device",
    ]
    for what in (
        *("computation", "tensor", "context", "experts", "pipeline", "data", "optimizer"),
    ):
        seconds = getattr(result, what)
        lines.append(f"  {what:22}{seconds:12.4g} s   {seconds / result.seconds:6.1%}")
    if on_ranks is not None:
        lines.append(f"{'on simulated ranks':24}{on_ranks:12.4g} s   without update")
    held = result.memory.total
    lines += [
        "",
        f"{'a rank holds':24}{held / 1e9:12.1f} GB  of {cluster.memory / 1e9:.0f}"
        + ("" if held <= cluster.memory else ": too much, this layout does not fit"),
        f"  {'weights and state':22}{result.memory.weights_and_state / 1e9:12.1f} GB",
        f"  {'activations':22}{result.memory.activations / 1e9:12.1f} GB",
        f"{'a rank sends':24}{sum(result.traffic[:5]) / 1e9:12.2f} GB  "
        f"{result.traffic.between / 1e9:.2f} GB of it between nodes",
    ]
    return "\n".join(lines)


def found_table(found: Sequence[Found]) -> str:
    """Return a table with a line per layout, the fastest first."""
    lines = [
        "   step s    MFU  memory GB  bubble  network  binds      tensor context data pipeline "
        "chunks experts micro ZeRO recompute"
    ]
    for layout, result, binds in found:
        sent = result.tensor + result.context + result.experts + result.data
        share = "" if layout.recompute != "full" else f" {layout.recomputed:.0%}"
        zero = f"{layout.zero}" + (f" in {layout.shard}" if layout.shard else "")
        lines.append(
            f"{result.seconds:9.4g} {result.mfu:6.1%} {result.memory.total / 1e9:10.1f} "
            f"{result.pipeline / result.seconds:7.1%} {sent / result.seconds:8.1%}  {binds:10} "
            f"{layout.tensor:6} {layout.context:7} {layout.data:4} {layout.pipeline:8} "
            f"{layout.chunks:6} {layout.expert:7} {layout.micro_batch:5} "
            f"{zero:>4} {layout.recompute}{share}"
        )
    return "\n".join(lines)


def failures_table(rows: Sequence[Mapping[str, float]]) -> str:
    """Return a table with a line per cluster size: time between failures, effective share."""
    lines = ["devices  a failure every  checkpoint every   restart  shrink  spares"]
    for row in rows:
        lines.append(
            f"{row['devices']:7,} {row['minutes between failures']:12.1f} min "
            f"{row['minutes between checkpoints']:13.1f} min {row['restart']:9.1%} "
            f"{row['shrink']:7.1%} {row['spares']:7.1%}"
        )
    return "\n".join(lines)


def sources_table(result: Validation) -> str:
    """Return the errors by source in Markdown; each source is predicted without its own runs."""
    lines = [
        "| source left out | runs | median error | median size | worst | within 25 % |"
        " same, fitted |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, group in result.groups().items():
        errors = [each.error for each in group]
        sizes = [abs(error) for error in errors]
        fitted = median(abs(each.fitted_error) for each in group)
        lines.append(
            f"| {name} | {len(group)} | {median(errors):+.1%} | {median(sizes):.1%} | "
            f"{max(errors, key=abs):+.1%} | {sum(size <= 0.25 for size in sizes)} | {fitted:.1%} |"
        )
    counted = result.counted
    within = sum(abs(each.error) <= 0.25 for each in counted)
    fitted = median(abs(each.fitted_error) for each in counted)
    lines += [
        "",
        f"{len(counted)} runs, each predicted without the runs of its source: median |error| "
        f"{result.median:.1%} (median over sources: {result.median_of_groups:.1%}), {within} within"
        f" 25 %, worst {result.worst.error:+.1%} ({result.worst.run.name}).",
        f"With constants that were fitted to these very runs: median {fitted:.1%}.",
        "",
        "Fitted: " + ", ".join(f"{name} {result.fit.values[name]:.2f}" for name in FITTED) + ".",
    ]
    return "\n".join(lines)


def runs_table(result: Validation) -> str:
    """Return every run's measured and predicted seconds, in Markdown."""
    lines = [
        "| run | measured, s | predicted, s | error | fitted | not in the source |",
        "|---|---|---|---|---|---|",
    ]
    for each in result.predictions:
        guessed = each.run.guessed.replace("_", " ")
        lines.append(
            f"| {each.run.name} | {each.run.seconds:.2f} | {each.left_out:.2f} | "
            f"{each.error:+.1%} | {each.fitted_error:+.1%} | "
            f"{'not counted. ' if each.run.excluded else ''}{guessed} |"
        )
    return "\n".join(lines)


def memory_table(found: Sequence[Held]) -> str:
    """Return the published and the predicted memory per device of runs, in Markdown."""
    lines = ["| run | part | reported, GB | predicted, GB | error |", "|---|---|---|---|---|"]
    for each in found:
        lines.append(
            f"| {each.run.name} | {each.part} | {each.reported / 1e9:.1f} | "
            f"{each.predicted / 1e9:.1f} | {each.error:+.1%} |"
        )
    sizes = [abs(each.error) for each in found]
    lines += ["", f"{len(found)} memories: median |error| {median(sizes):.1%}."]
    return "\n".join(lines)


def profile_table(found: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Return per constant the least error of the runs at five values of it, in Markdown."""
    lines = ["| constant | " + "error if it is held at a value" + " |", "|---|---|"]
    for name, points in found.items():
        cells = ", ".join(f"{value:.2f}: {math.expm1(lost):.1%}" for value, lost in points)
        lines.append(f"| {name} | {cells} |")
    return "\n".join(lines)
