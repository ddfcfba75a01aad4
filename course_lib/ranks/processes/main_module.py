"""The notebook's modules on a rank: its ``__main__``, and those that it edits.

A class of a cell is a class of the module ``__main__``, which a rank does not have: it got the
class by value. Code that pickles on the rank (``torch.save``, ``Pool.map``, a queue) looks for it
there by name. So a rank's ``__main__`` finds what the running code itself sees under that name.

A process that a rank spawns, such as a worker of a DataLoader, has no cells either. It gets their
classes and functions by value, too, and a ``__main__`` as its rank has.
"""

from __future__ import annotations

import importlib
import itertools
import os
import sys
import types
from collections import ChainMap
from multiprocessing import reduction
from multiprocessing.process import BaseProcess
from typing import Any, ClassVar

import cloudpickle

from course_lib.ranks._torch.process_world import pickle_objects_with
from course_lib.ranks.explain.lines import is_installed
from course_lib.ranks.explain.pickling import Pickler


def become_main() -> None:
    """Give this process a ``__main__`` that stands for the notebook's."""
    main = types.ModuleType("__main__")
    main.__getattr__ = _find  # type: ignore[method-assign]
    sys.modules["__main__"] = main
    # Objects of such classes are sent to other ranks by value, as the notebook sent them.
    pickle_objects_with(Pickler)
    reduction.dump = _send_to_spawned


class _SpawnPickler(Pickler):
    """Pickles a process that is about to be spawned; locks and queues as `multiprocessing` does."""

    dispatch_table: ClassVar[Any] = ChainMap(
        reduction.ForkingPickler._extra_reducers,  # type: ignore[attr-defined]
        Pickler.dispatch_table,
    )

    def reducer_override(self, obj: Any) -> Any:
        """Return how `obj` is made where it arrives: see `pickle.Pickler`."""
        if isinstance(obj, BaseProcess):
            return _spawned, (type(obj),), obj.__dict__
        return super().reducer_override(obj)


def _send_to_spawned(obj: Any, file: Any, protocol: int | None = None) -> None:
    """Stand in for ``multiprocessing.reduction.dump``, which pickles classes by name."""
    _SpawnPickler(file, protocol).dump(obj)


def _spawned(kind: type[BaseProcess]) -> BaseProcess:
    become_main()  # before the process's function and arguments arrive, which may be of cells
    return kind.__new__(kind)


def _find(name: str) -> Any:
    """Return what the notebook's code that is running calls `name`."""
    if not name.startswith("__"):
        # A pool pickles in a thread of its own, for the main thread that waits in the cell.
        for stack in (sys._getframe(1), *sys._current_frames().values()):
            frame: types.FrameType | None = stack
            while frame is not None:
                names = frame.f_globals
                if names.get("__name__") == "__main__" and name in names:
                    return names[name]
                frame = frame.f_back
        for known in reversed(list(cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS)):
            if known.__module__ == "__main__" and known.__qualname__ == name:
                return known
    raise AttributeError(
        f"the ranks do not know {name!r}: they get only the notebook's names that the function "
        f"given to run uses. Use {name} in that function"
    )


_US = __name__.partition(".")[0]
_OURS = (_US, f"{_US}.later")
"""Modules that every rank has loaded and that are not installed only where they are written."""


class OwnModules:
    """The user's own modules that this rank has imported, and when their files were written."""

    def __init__(self) -> None:
        self._written: dict[str, tuple[str, int]] = {}
        self._last = ""

    def look(self) -> None:
        """Note the modules that were imported since the last look.

        There are thousands, and a rank that has just been forked would copy the page of every one
        that it touches: it looks only at the last ones, those that it has imported itself.
        """
        if next(reversed(sys.modules)) == self._last:  # as before most calls
            return
        new = list(itertools.takewhile(self._last.__ne__, reversed(sys.modules)))
        self._last = new[0]
        for name in new:
            path = getattr(sys.modules.get(name), "__file__", None) or ""
            if name in _OURS or name in self._written or not path or is_installed(path):
                continue
            if written := _written(path):
                self._written[name] = path, written

    def reload_changed(self) -> list[str]:
        """Import anew the modules whose files have changed; return their names."""
        self.look()
        changed = [
            (name, path, now)
            for name, (path, before) in self._written.items()
            if (now := _written(path)) not in (0, before)
        ]
        for name, path, now in changed:
            self._written[name] = path, now
            if name in sys.modules:
                importlib.reload(sys.modules[name])
        return [name for name, *_ in changed]


def _written(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0
