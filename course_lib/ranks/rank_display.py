"""Rich output of a rank: what it displays is rendered there and shown in the notebook.

A *bundle* maps MIME types to data, as Jupyter has it: ``{"text/plain": …, "image/png": …}``.
"""

from __future__ import annotations

import base64
import io
import sys
from collections.abc import Callable
from typing import Any

Bundle = dict[str, Any]
_send: Callable[[Bundle], None] | None = None


def send_displays_to(send: Callable[[Bundle], None]) -> None:
    """Give IPython's ``display`` and matplotlib's ``show`` of this process a place to show things.

    Both were loaded by the fork server or are not there; a rank has no notebook of its own.
    """
    global _send
    _send = send
    for name in ("IPython.core.display_functions", "IPython.display"):
        if name in sys.modules:
            sys.modules[name].display = display  # type: ignore[attr-defined]
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].show = show_figures  # type: ignore[attr-defined]


def display(*objects: Any, **options: Any) -> None:
    """Show objects in the notebook, as IPython's ``display`` does."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for each in objects:
        bundle = dict(each) if options.get("raw") else render(each)
        if _send is not None:
            _send(bundle)


def show_figures(*_: Any, **__: Any) -> None:
    """Show the open figures of matplotlib and close them."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None:
        for number in pyplot.get_fignums():
            display(pyplot.figure(number))
        pyplot.close("all")


def render(value: Any) -> Bundle:
    """Return `value` in the forms that a notebook can show."""
    figure = sys.modules.get("matplotlib.figure")
    if figure is not None and isinstance(value, figure.Figure):
        png = io.BytesIO()
        value.savefig(png, format="png", bbox_inches="tight")
        return {"image/png": base64.b64encode(png.getvalue()).decode(), "text/plain": repr(value)}
    try:
        from IPython.core.formatters import DisplayFormatter

        data, _ = DisplayFormatter().format(value)
    except ImportError:
        data = {}
    return {key: _text(item) for key, item in data.items()} or {"text/plain": repr(value)}


def _text(item: Any) -> Any:
    return base64.b64encode(item).decode() if isinstance(item, bytes) else item
