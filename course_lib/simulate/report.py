"""Tables of results, for the command line and the docs."""

from collections.abc import Sequence
from statistics import median

from course_lib.simulate.cluster import Cluster
from course_lib.simulate.layout import Layout
from course_lib.simulate.published import Run
from course_lib.simulate.search import Found
from course_lib.simulate.step_time import Estimate


def estimate_table(name: str, cluster: Cluster, layout: Layout, result: Estimate) -> str:
    """Return a table of a step's time by cause, and a rank's memory and traffic."""
    lines = [
        f"{layout.ranks} ranks of {name}: tensor {layout.tensor} x context {layout.context} x data "
        f"{layout.data} x pipeline {layout.pipeline}, ZeRO {layout.zero}, {layout.micro_batches} "
        f"micro-batches of {layout.micro_batch}, "
        f"{'interleaved' if layout.chunks > 1 else '1f1b'}, recompute {layout.recompute}",
        "",
        f"{'a step takes':24}{result.seconds:12.4g} s   {result.mfu:.1%} MFU, "
        f"{result.tokens_per_second:,.0f} tokens/s per device",
    ]
    for cause, seconds in result.causes._asdict().items():
        lines.append(f"  {cause:22}{seconds:12.4g} s   {seconds / result.seconds:6.1%}")
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


def found_table(layouts: Sequence[Found]) -> str:
    """Return a table with a line per layout, the fastest first."""
    lines = [
        "   step s    MFU  memory GB  bubble  network  binds      tensor context data pipeline "
        "chunks experts micro ZeRO recompute"
    ]
    for layout, result, binds in layouts:
        share = "" if layout.recompute != "full" else f" {layout.recomputed:.0%}"
        zero = f"{layout.zero}" + (f" in {layout.shard}" if layout.shard else "")
        lines.append(
            f"{result.seconds:9.4g} {result.mfu:6.1%} {result.memory.total / 1e9:10.1f} "
            f"{result.causes.pipeline / result.seconds:7.1%} "
            f"{result.causes.network / result.seconds:8.1%}  {binds:10} "
            f"{layout.tensor:6} {layout.context:7} {layout.data:4} {layout.pipeline:8} "
            f"{layout.chunks:6} {layout.expert:7} {layout.micro_batch:5} "
            f"{zero:>4} {layout.recompute}{share}"
        )
    return "\n".join(lines)


def runs_table(runs: Sequence[Run]) -> str:
    """Return every run's measured and predicted seconds, and a summary, in Markdown."""
    lines = [
        "| run | measured, s | predicted, s | error | not in the source |",
        "|---|---|---|---|---|",
    ]
    for run in runs:
        guessed = run.guessed.replace("_", " ")
        lines.append(
            f"| {run.name} | {run.seconds:.2f} | {run.predicted:.2f} | {run.error:+.1%} | "
            f"{'not counted. ' if run.excluded else ''}{guessed} |"
        )
    counted = [run for run in runs if not run.excluded]
    worst = max(counted, key=lambda run: abs(run.error))
    lines += [
        "",
        f"{len(counted)} runs are counted: median |error| "
        f"{median(abs(run.error) for run in counted):.1%}, "
        f"{sum(abs(run.error) <= 0.25 for run in counted)} within 25 %, worst {worst.error:+.1%} "
        f"({worst.name}).",
    ]
    return "\n".join(lines)
