"""What a process has once and each simulated rank for itself: it changes hands with the baton.

What no rank can have for itself, because nothing changes hands, is in the table of ``README.md``.
"""

from __future__ import annotations

import _random
import ctypes
import functools
import os
import random
import sys
import types
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from cloudpickle import cloudpickle as trackers

from course_lib.ranks._torch.tensors import new_print_options, print_options, use_print_options
from course_lib.ranks._torch.thread_worlds import World
from course_lib.ranks.simulated.store import SimulatedStore

_SEED = torch.Generator().initial_seed()
_HEADER = object.__basicsize__
_STATE_BYTES = _random.Random.__basicsize__ - _HEADER


class Classes:
    """A rank's copies of the classes that exist only in the notebook, and its ``__main__``.

    Pickles name a class of a cell by its place in ``__main__``; cloudpickle, which sends it, gives
    it a name of its own and remembers which class has it. With one memory for all ranks, they would
    share every class with one another and with the notebook.
    """

    def __init__(self) -> None:
        self.main = types.ModuleType("__main__")
        self.by_class: Any = weakref.WeakKeyDictionary()
        self.by_name: Any = weakref.WeakValueDictionary()

    @classmethod
    def of_process(cls) -> Classes:
        """Return what the process has now."""
        here = cls()
        here.main = sys.modules["__main__"]
        here.by_class = trackers._DYNAMIC_CLASS_TRACKER_BY_CLASS
        here.by_name = trackers._DYNAMIC_CLASS_TRACKER_BY_ID
        return here

    def give(self) -> None:
        """Make these the process's."""
        sys.modules["__main__"] = self.main
        trackers._DYNAMIC_CLASS_TRACKER_BY_CLASS = self.by_class
        trackers._DYNAMIC_CLASS_TRACKER_BY_ID = self.by_name

    def publish(self) -> None:
        """Let pickles find what was sent from the notebook's ``__main__`` in this one."""
        for each in list(self.by_name.values()):
            if each.__module__ == "__main__" and "." not in each.__qualname__:
                setattr(self.main, each.__name__, each)


class PersonalState:
    """What is one rank's: the random numbers, the surroundings, the classes of the notebook.

    Args:
        classes: kept from earlier calls; ``None``: the process's own.
        surroundings: with which it begins; ``None``: the process's own.

    """

    def __init__(
        self, classes: Classes | None = None, surroundings: Surroundings | None = None
    ) -> None:
        generator = torch.Generator()
        generator.manual_seed(_SEED)
        self._torch = generator.get_state()
        self._python, self._print = _initial_python_state()
        self._dtype = torch.float32
        self._numpy: Any = None
        if (numpy := sys.modules.get("numpy")) is not None:
            self._numpy = numpy.random.MT19937(numpy.random.SeedSequence(_SEED))
        self._classes = Classes.of_process() if classes is None else classes
        self.surroundings = Surroundings() if surroundings is None else surroundings

    def take(self) -> None:
        """Take this state from the process: the rank stops running."""
        self._torch = torch.default_generator.get_state()
        if (now := _fingerprint()) != self._print:
            self._python, self._print = random.getstate(), now
        self._dtype = torch.get_default_dtype()
        if self._numpy is not None:
            self._numpy = sys.modules["numpy"].random.get_bit_generator()
        self.surroundings.take()

    def give(self, there: PersonalState | None = None) -> None:
        """Give this state to the process: the rank runs.

        `there`: what has just been taken from the process, so that nobody need look at it again.
        """
        torch.default_generator.set_state(self._torch)
        if self._print != (_fingerprint() if there is None else there._print):
            random.setstate(self._python)
        if self._dtype is not torch.get_default_dtype():
            torch.set_default_dtype(self._dtype)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_bit_generator(self._numpy)
        self._classes.give()
        self.surroundings.give(Surroundings() if there is None else there.surroundings)


@contextmanager
def state_kept() -> Iterator[None]:
    """Put back what the ranks share with the rest of the process: random numbers and the like."""
    before = PersonalState()
    before.take()
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        before.give()
        torch.set_num_threads(threads)


class Surroundings:
    """Environment, working folder, output, warnings and print options, as a rank left them.

    Made from those of the process.

    Args:
        variables: to be set in the environment.
        common: the environment before that, which many have; they differ in few variables then.

    """

    def __init__(
        self, variables: Mapping[str, str] | None = None, common: dict[Any, Any] | None = None
    ) -> None:
        self._folder = _folder()
        self._common = environment_with({}) if common is None else common
        self._environment = dict(self._common)
        for name, value in (variables or {}).items():
            self._environment[os.fsencode(name)] = os.fsencode(value)
        self._own = self._names_of_its_own()
        self._streams = sys.stdout, sys.stderr
        self._filters = list(warnings.filters)
        self._show = _ways_to_show()
        self._options = new_print_options()

    def take(self) -> None:
        self._folder = _folder()
        if (now := _environment()) != self._environment:
            self._environment = dict(now)
            self._own = self._names_of_its_own()
        self._streams = sys.stdout, sys.stderr
        self._filters = warnings.filters  # type: ignore[assignment]
        self._show = _ways_to_show()
        self._options = print_options()

    def give(self, there: Surroundings) -> None:
        """Give them to the process, whose own are `there`."""
        if self._folder != there._folder:
            os.chdir(self._folder)
        self._give_environment(there)
        sys.stdout, sys.stderr = self._streams
        if warnings.filters is not self._filters:
            changed = warnings.filters != self._filters
            warnings.filters = self._filters
            if changed:
                warnings._filters_mutated()  # type: ignore[attr-defined]
        for name, way in zip(_SHOW, self._show, strict=True):
            setattr(warnings, name, way)
        use_print_options(self._options)

    def _names_of_its_own(self) -> frozenset[Any]:
        """Return the variables that are not as in the common environment."""
        return frozenset(name for name, _ in self._environment.items() ^ self._common.items())

    def _give_environment(self, there: Surroundings) -> None:
        if self._common is there._common:
            names = self._own | there._own
        else:
            names = frozenset(self._environment.keys() | there._environment.keys())
        # Past `os.environ`, which would decode and encode what is encoded already.
        process = _environment()
        for name in names:
            value = self._environment.get(name)
            if value == process.get(name):
                continue
            if value is None:
                os.unsetenv(name)
                del process[name]
            else:
                os.putenv(name, value)
                process[name] = value

    def print_here(self) -> None:
        """Print, from the next `give` on, where the process prints now."""
        self._streams = sys.stdout, sys.stderr


def environment_with(variables: Mapping[str, str]) -> dict[Any, Any]:
    """Return the environment of the process, with some variables more, as Python keeps it."""
    added = {os.fsencode(name): os.fsencode(value) for name, value in variables.items()}
    return _environment() | added


def _environment() -> dict[Any, Any]:
    """Return the environment as Python keeps it: looking there costs nothing."""
    data: dict[Any, Any] = os.environ._data  # type: ignore[attr-defined]
    return data


def _folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # somebody removed it
        return "/"


_SHOW = [name for name in ("showwarning", "_showwarnmsg_impl") if hasattr(warnings, name)]
"""What ``warnings.catch_warnings(record=True)`` replaces."""


def _ways_to_show() -> list[Any]:
    return [getattr(warnings, name) for name in _SHOW]


def _fingerprint() -> tuple[bytes, Any]:
    """Return what differs where the states of Python's random numbers do.

    Getting and setting a state takes 15 µs, more than anything else at a change of ranks, and few
    programs use it: so look first, at the generator's memory, whether there is anything to do.
    """
    generator: Any = random._inst
    return ctypes.string_at(id(generator) + _HEADER, _STATE_BYTES), generator.gauss_next


@functools.cache
def _initial_python_state() -> tuple[Any, tuple[bytes, Any]]:
    """Return the state with which every rank begins, and its fingerprint."""
    before = random.getstate()
    random.seed(_SEED)
    state = random.getstate(), _fingerprint()
    random.setstate(before)
    return state


class Worlds:
    """The process groups and the store of K ranks, which stay between calls.

    Attributes:
        store: of all ranks.
        of_rank: per rank, its process groups.
        made: name of a group → the line on which it was made.
        classes: per rank, its copies of the notebook's.

    """

    def __init__(self, world_size: int) -> None:
        self.store = SimulatedStore(world_size)
        self.made: dict[str, str] = {}
        self.classes = [Classes() for _ in range(world_size)]
        self.of_rank = [World() for _ in range(world_size)]

    def states(self) -> list[PersonalState]:
        """Return with what each rank begins a call."""
        common = environment_with(_variables_of_all(len(self.of_rank)))
        return [
            PersonalState(classes, Surroundings(_variables_of_rank(rank), common))
            for rank, classes in enumerate(self.classes)
        ]


def _variables_of_rank(rank: int) -> dict[str, str]:
    """Return the environment variables that scripts expect, as under ``torchrun``, of one rank."""
    return {"RANK": str(rank), "LOCAL_RANK": str(rank)}


def _variables_of_all(world_size: int) -> dict[str, str]:
    """Return those that are the same on all ranks."""
    return {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
    }
