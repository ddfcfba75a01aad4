"""The figure of `validate`: one dot per published run, a line of dots per source."""

from typing import TYPE_CHECKING

from course_lib.simulate.published import Validation

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def errors_figure(result: Validation) -> "Figure":
    """Draw the signed error of every run, predicted without its source; a bar is a median."""
    import matplotlib.pyplot as plt

    groups = result.groups()
    figure, ax = plt.subplots(figsize=(8, 0.42 * len(groups) + 1), layout="constrained")
    ax.axvspan(-25, 25, color="0.93", zorder=0)
    ax.axvline(0, color="0.5", lw=1, zorder=1)
    for place, group in enumerate(groups.values()):
        errors = sorted(100 * each.error for each in group)
        spread = [place + 0.09 * (at % 5 - 2) for at in range(len(errors))]
        ax.plot(errors, spread, "o", color="black", ms=4, mfc="none", lw=0)
        middle = (errors[(len(errors) - 1) // 2] + errors[len(errors) // 2]) / 2
        ax.plot([middle] * 2, [place - 0.35, place + 0.35], color="black", lw=2)
    names = [f"{name} ({len(group)})" for name, group in groups.items()]
    ax.set_yticks(range(len(groups)), names)
    ax.invert_yaxis()
    ax.set_xlabel("predicted over measured, error in %, without the runs of the same source")
    return figure
