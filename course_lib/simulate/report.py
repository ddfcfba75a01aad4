"""Tables of results, for the command line and the docs."""

from collections.abc import Mapping, Sequence

from course_lib.simulate.cluster import Cluster
from course_lib.simulate.layout import Layout
from course_lib.simulate.published import Validation
from course_lib.simulate.search import Found
from course_lib.simulate.step_time import Estimate


def estimate_table(
    name: str, cluster: Cluster, layout: Layout, result: Estimate, on_ranks: float | None
) -> str:
    """Return a table of a step's time by cause, and a rank's memory and traffic."""
    lines = [
        f"{layout.ranks} ranks of {name}: data {layout.data} x tensor {layout.tensor} x pipeline "
        f"{layout.pipeline}, ZeRO {layout.zero}, {layout.micro_batches} micro-batches of "
        f"{layout.micro_batch}, {layout.schedule}, recompute {layout.recompute}",
        "",
        f"{'a step takes':24}{result.seconds:12.4g} s   {result.mfu:.1%} MFU, "
        f"{result.tokens_per_second:,.0f} tokens/s per device",
    ]
    for what in (
        *("computation", "tensor", "experts", "pipeline", "data", "optimizer", "waiting"),
    ):
        seconds = getattr(result, what)
        lines.append(f"  {what:22}{seconds:12.4g} s   {seconds / result.seconds:6.1%}")
    if on_ranks is not None:
        lines.append(f"{'on simulated ranks':24}{on_ranks:12.4g} s   without update and waiting")
    held = result.memory.total
    lines += [
        "",
        f"{'a rank holds':24}{held / 1e9:12.1f} GB  of {cluster.memory / 1e9:.0f}"
        + ("" if held <= cluster.memory else ": does not fit"),
        f"  {'weights and state':22}{result.memory.weights_and_state / 1e9:12.1f} GB",
        f"  {'activations':22}{result.memory.activations / 1e9:12.1f} GB",
        f"{'and sends':24}{sum(result.traffic[:4]) / 1e9:12.2f} GB  "
        f"{result.traffic.between / 1e9:.2f} of them between nodes",
    ]
    return "\n".join(lines)


def found_table(found: Sequence[Found]) -> str:
    """Return a table with a line per layout, the fastest first."""
    lines = ["   step s    MFU  memory GB  data tensor pipeline zero micro chunks recompute"]
    for layout, result in found:
        lines.append(
            f"{result.seconds:9.4g} {result.mfu:6.1%} {result.memory.total / 1e9:10.1f} "
            f"{layout.data:5} {layout.tensor:6} {layout.pipeline:8} {layout.zero:4} "
            f"{layout.micro_batch:5} {layout.chunks:6} {layout.recompute}"
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


def validation_table(result: Validation) -> str:
    """Return every run's measured and predicted seconds and the fitted constants, in Markdown."""
    lines = ["| run | measured, s | predicted, s | error | |", "|---|---|---|---|---|"]
    for each in result.predictions:
        lines.append(
            f"| {each.run.name} | {each.run.seconds:.2f} | {each.seconds:.2f} | "
            f"{each.error:+.1%} | {'fitted' if each.fitted else ''} |"
        )
    shared = result.fit.shared
    unseen = [abs(each.error) for each in result.predictions if not each.fitted]
    within = sum(error <= 0.1 for error in unseen)
    lines += [
        "",
        f"{len(unseen)} runs that were not used to fit: median |error| {result.median:.1%}, "
        f"{within} within 10 %, worst {result.worst.error:+.1%} ({result.worst.run.name}).",
        f"Fitted: matmul {result.fit.matmul['A100']:.2f} on A100 and "
        f"{result.fit.matmul['H100']:.2f} on H100, traffic {shared.traffic:.2f}, inside "
        f"{shared.inside:.2f}, between {shared.between:.2f}, hidden {shared.hidden:.2f}, waiting "
        f"{shared.waiting:.4f}.",
    ]
    return "\n".join(lines)
