"""The notebook's modules on a rank: its ``__main__``, and modules whose files the user edits.

A class that a cell defines belongs to the notebook's module ``__main__``. A rank does not have that
module; it gets the class by value. Code that pickles on the rank (``torch.save``, ``Pool.map``, a
queue) looks for the class in ``__main__`` by name. So a rank's ``__main__`` returns what the
running code itself sees under that name.

A process that a rank spawns, such as a worker of a DataLoader, has no cells either. It also gets
their classes and functions by value, and the same kind of ``__main__`` as its rank.
"""

from __future__ import annotations

import importlib
import itertools
import os
import sys
import types
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from multiprocessing import reduction
from multiprocessing.process import BaseProcess
from typing import Any, ClassVar

import cloudpickle

from course_lib.ranks._torch.process_world import pickle_objects_with
from course_lib.ranks.explain.lines import frames_from, may_be_edited
from course_lib.ranks.explain.pickling import Pickler


def become_main(functions: Callable[[], Mapping[str, Any]] = dict) -> None:
    """Give this process a ``__main__`` that stands for the notebook's.

    `functions` returns what code that runs on no thread of its own must find by name.
    """
    main = types.ModuleType("__main__")
    main.__getattr__ = partial(_find, functions)  # type: ignore[method-assign]
    sys.modules["__main__"] = main
    # A rank sends objects of such classes to other ranks by value, as the notebook sent them.
    pickle_objects_with(Pickler)
    reduction.dump = _send_to_spawned


class _SpawnPickler(Pickler):
    """Pickles a process that is about to be spawned, with multiprocessing's rules for locks etc."""

    dispatch_table: ClassVar[Any] = ChainMap(
        reduction.ForkingPickler._extra_reducers,  # type: ignore[attr-defined]
        Pickler.dispatch_table,
    )

    def reducer_override(self, obj: Any) -> Any:
        """Return how `obj` is rebuilt where it arrives; see `pickle.Pickler`."""
        if isinstance(obj, BaseProcess):
            return _spawned, (type(obj),), obj.__dict__
        return super().reducer_override(obj)


def _send_to_spawned(obj: Any, file: Any, protocol: int | None = None) -> None:
    """Stand in for ``multiprocessing.reduction.dump``, which pickles classes by name."""
    _SpawnPickler(file, protocol).dump(obj)


def _spawned(kind: type[BaseProcess]) -> BaseProcess:
    become_main()  # before the process's function and arguments arrive: cells may define them
    return kind.__new__(kind)


def _find(functions: Callable[[], Mapping[str, Any]], name: str) -> Any:
    """Return what `name` means in the notebook's code that is running."""
    if not name.startswith("__"):
        # A pool pickles in its own thread, while the main thread waits in the notebook's code.
        stacks = map(_globals_of_cells, sys._current_frames().values())
        own_stack = _globals_of_cells(sys._getframe(1))
        for names in itertools.chain(own_stack, [functions()], *stacks):
            if name in names:
                return names[name]
        classes = list(cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS)
        for notebook_class in reversed(classes):
            if notebook_class.__module__ == "__main__" and notebook_class.__qualname__ == name:
                return notebook_class
    raise AttributeError(
        f"the ranks do not know {name!r}: they get only the notebook's names that the function "
        f"given to run uses. Use {name} in that function"
    )


def _globals_of_cells(frame: types.FrameType | None) -> Iterator[Mapping[str, Any]]:
    for caller in frames_from(frame):
        if caller.f_globals.get("__name__") == "__main__":
            yield caller.f_globals


class OwnModules:
    """The user's own modules that this rank has imported, and when their files were written."""

    def __init__(self) -> None:
        self._written: dict[str, tuple[str, int]] = {}
        self._last = ""

    def look(self) -> None:
        """Note the modules that were imported since the last call of this method.

        There are thousands of modules, and a rank that was just forked copies the memory page of
        each module that it touches. So it looks only at the last ones, which it imported itself.
        """
        if next(reversed(sys.modules)) == self._last:  # the usual case
            return
        new = list(itertools.takewhile(self._last.__ne__, reversed(sys.modules)))
        self._last = new[0]
        for name in new:
            path = getattr(sys.modules.get(name), "__file__", None) or ""
            if name in self._written or not may_be_edited(path):
                continue
            if written := _written(path):
                self._written[name] = path, written

    def reload_changed(self) -> list[str]:
        """Reload the modules whose files have changed; return their names."""
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
