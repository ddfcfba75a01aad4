"""The figure of `validate`: one dot per published run."""

from typing import TYPE_CHECKING

from course_lib.simulate.published import Validation

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def errors_figure(result: Validation) -> "Figure":
    """Draw the signed error of every run; hollow dots are runs used to fit the constants."""
    import matplotlib.pyplot as plt

    count = len(result.predictions)
    figure, ax = plt.subplots(figsize=(8, 0.19 * count + 1), layout="constrained")
    for place, each in enumerate(result.predictions):
        ax.plot(
            100 * each.error, place, "o", color="black", ms=5,
            mfc="none" if each.fitted else "black",
        )  # fmt: skip
    ax.axvspan(-10, 10, color="0.92", zorder=0)
    ax.axvline(0, color="0.5", lw=1, zorder=1)
    ax.set_yticks(range(count), [each.run.name for each in result.predictions], fontsize=8)
    ax.invert_yaxis()
    ax.set_xlabel("predicted over measured, error in % (hollow: constants were fitted to it)")
    return figure
