"""Rich output of a rank: a displayed object is rendered on the rank and shown in the notebook.

A *bundle* maps MIME types to data, as in Jupyter: ``{"text/plain": …, "image/png": …}``.
"""

from __future__ import annotations

import base64
import io
import sys
import threading
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

Bundle = dict[str, Any]
_send: Callable[[Bundle], None] | None = None


class _Threads(threading.local):
    send: Callable[[Bundle], None] | None = None


_threads = _Threads()


def send_displays_of_thread_to(send: Callable[[Bundle], None]) -> None:
    """Send what `display` and `show_figures` show on this thread, a simulated rank, to `send`."""
    _threads.send = send


def send_displays_to(send: Callable[[Bundle], None]) -> None:
    """Send the output of this process's IPython ``display`` and matplotlib ``show`` to `send`.

    A rank has no notebook of its own. If a module is not loaded yet, its function is replaced as
    soon as it is loaded.
    """
    global _send
    _send = send
    waiting = {}
    for name, (attribute, ours) in _REPLACED.items():
        if name in sys.modules:
            setattr(sys.modules[name], attribute, ours)
        else:
            waiting[name] = (attribute, ours)
    if waiting:
        sys.meta_path.insert(0, _ReplaceOnImport(waiting))


class _ReplaceOnImport(MetaPathFinder):
    """Replaces one function of a module when it is imported: module → (name, function)."""

    def __init__(self, waiting: dict[str, tuple[str, Callable[..., None]]]) -> None:
        self._waiting = waiting

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of the other finders, with a loader that replaces the function."""
        if fullname not in self._waiting:
            return None
        attribute, ours = self._waiting.pop(fullname)
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            setattr(module, attribute, ours)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def display(*objects: Any, **options: Any) -> None:
    """Show objects in the notebook, as IPython's ``display`` does."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for value in objects:
        bundle = dict(value) if options.get("raw") else render(value)
        if (send := _threads.send or _send) is not None:
            send(bundle)


def show_figures(*_: Any, **__: Any) -> None:
    """Show the open figures of matplotlib and close them."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None:
        for number in pyplot.get_fignums():
            display(pyplot.figure(number))
        pyplot.close("all")


_REPLACED: dict[str, tuple[str, Callable[..., None]]] = {
    "IPython.core.display_functions": ("display", display),
    "IPython.display": ("display", display),
    "matplotlib.pyplot": ("show", show_figures),
}


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
