"""Function calls as bytes: what a notebook sends to its ranks, and what comes back.

Functions defined in a cell exist in no file, so cloudpickle sends their code. Their source lines
are sent too, so that tracebacks and ``inspect.getsource`` can show the cell on the rank.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from course_lib.ranks.explain.pickling import dumps, unsendable_variable
from course_lib.ranks.explain.words import counted
from course_lib.ranks.memory import Packed, pack


@dataclass(frozen=True)
class Call:
    """One call of `Ranks.run`."""

    fn: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]
    timeout: float | None = None
    """Limit in seconds of real time; ``None`` for no limit."""


class PerRank(tuple[Any, ...]):
    """Values that differ between ranks, anywhere in the arguments; made by `per_rank`."""


class _WrongNumber(ValueError):
    """A `per_rank` does not have exactly one value per rank."""


def per_rank(values: Iterable[Any]) -> PerRank:
    """Mark `values` as one per rank: rank ``r`` gets ``values[r]``.

    The result may be an argument, or be anywhere inside an argument: in a list, a dict, an object.

    Example:
        ``ranks.run(fn, per_rank(shards), lr=0.1)``: rank r runs ``fn(shards[r], lr=0.1)``.

    """
    return PerRank(values)


def pack_call(
    call: Call, world_size: int, pack: Callable[..., Packed] = pack
) -> tuple[Packed, list[Packed]]:
    """Return the call as bytes: the part that all ranks share, and each rank's own part, if any.

    `pack` makes the bytes: `memory.pack`, perhaps with other options.

    Raises:
        TypeError: something cannot be sent; the message names it.
        ValueError: a `per_rank` argument has not exactly one value per rank.

    """
    fn, args, kwargs = call.fn, call.args, call.kwargs
    if not callable(fn):
        raise TypeError(
            "run(fn, …) needs the function itself: write ranks.run(f, x), not ranks.run(f(x)). "
            f"Instead of a function it got {'None' if fn is None else f'a {type(fn).__name__}'}"
        )
    if inspect.iscoroutinefunction(fn):
        name = getattr(fn, "__name__", type(fn).__name__)
        raise TypeError(
            f"run(fn, …) needs a plain function, but {name} is async, and calling an async "
            f"function does not run it. Pass a plain function that runs {name} on the rank: "
            f"lambda: asyncio.run({name}())"
        )
    per_rank_values: list[PerRank] = []

    def number_of(part: Any) -> int | None:
        if not isinstance(part, PerRank):
            return None
        if len(part) != world_size:
            raise _WrongNumber(
                f"the arguments have a per_rank with {counted(len(part), 'value')}, but it needs "
                f"{counted(world_size, 'value')}: one for each rank"
            )
        per_rank_values.append(part)
        return len(per_rank_values) - 1

    try:
        common = pack((fn, list(args), kwargs), elsewhere=number_of)
        if not per_rank_values:
            return common, []
        own_values = ([values[rank] for values in per_rank_values] for rank in range(world_size))
        return common, [pack(values) for values in own_values]
    except _WrongNumber:
        raise
    except Exception as error:
        parts = {"the function": fn}
        parts |= {f"argument {number}": value for number, value in enumerate(args, 1)}
        parts |= {f"argument '{key}'": value for key, value in kwargs.items()}
        raise _cannot_be_sent(parts, error) from error


def _cannot_be_sent(parts: dict[str, Any], error: Exception) -> TypeError:
    for name, part in parts.items():
        try:
            dumps(part)
        except Exception as reason:
            cannot = f"{name} ({type(part).__name__}) cannot be sent to the ranks"
            if variable := unsendable_variable(part):
                cannot = f"{name} cannot be sent to the ranks: it uses {variable}"
            return TypeError(
                f"{cannot}: {reason}. Send only tensors, numbers, text and plain functions. "
                "Create files, locks and the like inside the function."
            )
    return TypeError(f"the call cannot be sent to the ranks: {error}")


def pack_result(value: Any, pack: Callable[[Any], Packed] = pack) -> Packed:
    """Return the result of a call as bytes, which `pack` makes.

    Raises:
        TypeError: the result cannot be sent; the message says what can be sent.

    """
    try:
        return pack(value)
    except Exception as error:
        raise TypeError(
            f"the result ({type(value).__name__}) cannot be sent back: {error}. "
            "Return tensors, numbers, text, or lists and dicts of them."
        ) from None


def read_results(readers: Iterable[Callable[[], Any]]) -> list[Any]:
    """Return the results of a call, which `readers` unpickle.

    Raises:
        TypeError: one cannot be read here, for example because its class is only on the ranks.

    """
    try:
        return [read() for read in readers]
    except Exception as error:
        raise TypeError(f"a result of a rank cannot be read in this process: {error}") from error


def join_call(common: Callable[[list[Any]], Any], own_values: list[Any]) -> functools.partial[Any]:
    """Return the call, on the rank, as a function without arguments.

    `common` unpickles the part that all ranks share, and `own_values` what only this rank gets.
    """
    fn, args, kwargs = common(own_values)
    return functools.partial(fn, *args, **kwargs)


@dataclass(frozen=True)
class Sources:
    """Source text of cells, by the file name in their code objects."""

    lines: dict[str, list[str]]
    labels: dict[str, str]
    """File name → its name for people, for example ``Cell In[3]``."""


def cell_sources(known_names: set[str]) -> Sources:
    """Return all labels, and the sources that exist only in this process, if they are not known.

    Names of real files are added to `known_names`, as the ranks can read these files themselves.
    A label may change while the lines stay the same: a cell that runs again has a new number.
    """
    lines = {}
    for name, entry in list(linecache.cache.items()):
        if name in known_names or len(entry) != 4:
            continue
        if os.path.exists(name):
            known_names.add(name)
            continue
        lines[name] = entry[2]
    return Sources(lines, cell_labels())


def cell_labels() -> dict[str, str]:
    """Return file name → label of its cell, such as ``Cell In[3]``; empty without IPython."""
    return {name: f"Cell In[{count}]" for name, count in cell_numbers().items()}


def cell_numbers() -> dict[str, int]:
    """Return IPython's own table of cells: file name → number of the cell."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    numbers: dict[str, int] = getattr(getattr(shell, "compile", None), "_filename_map", {})
    return numbers


def install_sources(sources: Sources) -> None:
    """Add the sources to ``linecache``, from which tracebacks and ``inspect`` read."""
    for name, lines in sources.lines.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
