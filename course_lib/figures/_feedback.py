"""Draw a step of error feedback: what should be sent, what is sent, and what is left over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from course_lib.figures._explore import tip

if TYPE_CHECKING:  # matplotlib takes half a second to import; most ranks never draw
    from matplotlib.figure import Figure


def feedback_step(states: Sequence[tuple[Tensor, Tensor, Tensor]], step: int) -> Figure:
    """Draw step `step`, from 1 on, of a run with a residual; return the figure.

    A state is `(p, sent, errors)`: gradient plus residual and what was sent of it, both of shape
    (d,), and the relative error of the sum of all that was sent, with the residual and without.
    """
    import matplotlib.pyplot as plt

    figure, (bars, lines) = plt.subplots(
        1, 2, figsize=(8.8, 3.6), width_ratios=(3, 2), layout="constrained"
    )
    corrected, sent, _ = states[step - 1]
    residual = corrected - sent
    outline = {"facecolor": "none", "edgecolor": "black", "width": 0.9}
    places = range(1, len(corrected) + 1)
    bars.bar(places, corrected.tolist(), label="gradient + residual", **outline)
    for values, shift, color, hatch, name in (
        (sent, -0.2, "#E69F00", "//", "sent"),
        (residual, 0.2, "#56B4E9", "....", "new residual"),
    ):
        look = {"color": color, "hatch": hatch, "label": name, "width": 0.38}
        drawn = bars.bar([place + shift for place in places], values.tolist(), **look)
        for place, bar in zip(places, drawn, strict=True):
            tip(bar, f"{name}, number {place}: {float(values[place - 1]):.2f}")
    late = int(residual.abs().argmax())
    waits = f"{float(residual[late]):.1f}".replace("-", "−")
    bars.axhline(0, color="black", linewidth=0.8)
    bars.set(xticks=places, xlabel="which number")
    bars.set_title(f"Step {step}: {waits} of number {late + 1} wait")
    figure.legend(*bars.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    for place, name in enumerate(("with residual", "without")):
        errors = [float(state[2][place]) for state in states[:step]]
        lines.plot(range(1, step + 1), errors, label=name, markevery=1)
    highest = 1.5 * max(float(state[2].max()) for state in states)
    ends = (0.5, len(states) + 0.5)
    lines.set(xlim=ends, ylim=(0, highest), xticks=range(1, len(states) + 1), xlabel="step")
    lines.set_title("error of the sum of all that was sent")
    lines.legend(loc="upper right")
    return figure
