"""A figure that is always displayed together with a description in words."""

from __future__ import annotations

import base64
import html
import io
import sys
from typing import Any

from matplotlib.figure import Figure


def png_of(figure: Figure) -> bytes:
    """Return the figure as a PNG of at most 256 colours; the same figure gives the same bytes.

    Figures have few colours, so a PNG with a table of colours is a third as large. This matters
    because a notebook holds every figure twice.
    """
    from PIL import Image  # installed, because matplotlib writes PNG files with it

    full = io.BytesIO()
    figure.savefig(full, format="png", bbox_inches="tight")
    png = io.BytesIO()
    reduced = Image.open(full).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    reduced.save(png, format="png", optimize=True)
    return png.getvalue()


def described(png: bytes, alt: str) -> dict[str, str]:
    """Return a PNG with its alternative text, in the forms that a notebook can show.

    Front ends drop the description of a plain image. In HTML they keep it.
    """
    data = base64.b64encode(png).decode("ascii")
    image = f'<img alt="{html.escape(alt, quote=True)}" src="data:image/png;base64,{data}">'
    return {"text/html": image, "image/png": data, "text/plain": alt}


class DescribedFigure(Figure):
    """A matplotlib figure that shows itself with its alternative text.

    This also works if nothing has imported ``matplotlib.pyplot``. IPython learns to draw figures
    only when a notebook first uses ``matplotlib.pyplot``. Until then, it would show
    ``<Figure size 900x426 with 1 Axes>``.
    """

    alt = ""
    used = False
    """Whether it was shown or saved."""

    def savefig(self, *args: Any, **options: Any) -> None:
        """Write the figure to a file, as matplotlib does."""
        self.used = True
        super().savefig(*args, **options)

    def show_when_the_cell_ends(self) -> None:
        """In a notebook, show the figure at the end of the cell if nothing has used it by then.

        So a semicolon does not hide the figure. The figures of ``matplotlib.pyplot`` behave the
        same.
        """
        if "IPython" not in sys.modules:
            return
        from IPython import get_ipython
        from IPython.display import display

        shell = get_ipython()
        if shell is None:
            return

        def ended(result: object) -> None:
            shell.events.unregister("post_run_cell", ended)
            if not self.used:
                display(self)

        shell.events.register("post_run_cell", ended)

    def __repr__(self) -> str:
        return self.alt or super().__repr__()

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return described(png_of(self), self.alt)
