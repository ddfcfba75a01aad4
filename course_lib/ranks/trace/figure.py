"""A figure that a notebook shows also where nothing has imported ``matplotlib.pyplot``."""

from __future__ import annotations

import io

from matplotlib.figure import Figure


class TraceFigure(Figure):
    """A matplotlib figure that says itself how it looks.

    IPython learns to draw figures when a notebook first uses pyplot; until then it would show
    ``<Figure size 900x426 with 1 Axes>``.
    """

    def _repr_png_(self) -> bytes:
        png = io.BytesIO()
        self.savefig(png, format="png", bbox_inches="tight")
        return png.getvalue()
