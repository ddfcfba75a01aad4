"""State of a simulated rank that is exchanged with the baton: random numbers, settings, classes.

Simulated ranks are threads of one process, their host. They share everything else that a process
has only once.
"""

from __future__ import annotations

import copy
import random
import sys
import types
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from cloudpickle import cloudpickle as trackers

from course_lib.ranks._torch.process_settings import adopt, settings
from course_lib.ranks._torch.thread_worlds import World

_SEED = torch.Generator().initial_seed()


class Classes:
    """A rank's copies of the classes that exist only in the notebook, and its call's functions.

    Pickle refers to a class of a cell by its name in ``__main__``. cloudpickle, which sends the
    class, gives it an identifier and remembers which class has which identifier. If the ranks had
    one such memory, they would share every class with one another and with the notebook.

    The module ``__main__`` is one for all ranks: compiled code keeps it in PyTorch's own modules.
    """

    def __init__(self) -> None:
        self.functions: dict[str, Any] = {}
        self.by_class: Any = weakref.WeakKeyDictionary()
        self.by_name: Any = weakref.WeakValueDictionary()

    def give(self) -> None:
        """Make these the classes and the functions of the process."""
        global _functions
        _functions = self.functions
        trackers._DYNAMIC_CLASS_TRACKER_BY_CLASS = self.by_class
        trackers._DYNAMIC_CLASS_TRACKER_BY_ID = self.by_name

    def publish(self, function: Any) -> None:
        """Let pickle find, on any thread, the call's function and the functions that it uses."""
        used = getattr(function, "__globals__", {})
        for value in (function, *used.values()) if used.get("__name__") == "__main__" else ():
            if isinstance(value, types.FunctionType) and value.__module__ == "__main__":
                self.functions[value.__name__] = value


_functions: dict[str, Any] = {}


def functions_of_rank() -> dict[str, Any]:
    """Return the functions of the call of the rank that runs now, by name."""
    return _functions


class PersonalState:
    """A rank's random numbers, output, settings, and copies of the notebook's classes.

    It begins with the output of the process. As in a fresh process, PyTorch's random numbers are
    the same on every rank, and those of Python and NumPy differ.

    Args:
        rank: the rank.
        classes: the rank's classes, kept from earlier calls.
        begins_with: the settings of the process.

    """

    def __init__(self, rank: int, classes: Classes, begins_with: Sequence[Any]) -> None:
        self._torch = torch.Generator().manual_seed(_SEED).get_state()
        self._python = random.Random(_SEED + rank).getstate()
        self._numpy: Any = None
        if (numpy := sys.modules.get("numpy")) is not None:
            self._numpy = numpy.random.MT19937(numpy.random.SeedSequence([_SEED, rank]))
        self._output = sys.stdout, sys.stderr
        self._settings = [copy.copy(value) for value in begins_with]
        self._classes = classes

    def take(self) -> None:
        """Take this state from the process: the rank stops running."""
        self._torch = torch.default_generator.get_state()
        self._python = random.getstate()
        if self._numpy is not None:
            self._numpy = sys.modules["numpy"].random.get_bit_generator()
        self._output = sys.stdout, sys.stderr
        self._settings = settings()

    def give(self) -> None:
        """Give this state to the process: the rank runs."""
        torch.default_generator.set_state(self._torch)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_bit_generator(self._numpy)
        sys.stdout, sys.stderr = self._output
        adopt(self._settings)
        self._classes.give()


class Worlds:
    """The process groups of K ranks, which stay between calls.

    Attributes:
        of_rank: per rank, its process groups.
        made: name of a group → the line on which it was made.
        classes: per rank, its copies of the notebook's classes.

    """

    def __init__(self, world_size: int) -> None:
        self.made: dict[str, str] = {}
        self.classes = [Classes() for _ in range(world_size)]
        self.of_rank = [World() for _ in range(world_size)]
