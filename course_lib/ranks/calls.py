"""Function calls as bytes: what a notebook sends to its ranks, and what comes back.

Functions defined in a cell exist in no file, so cloudpickle sends their code. Their source lines
travel along, so that tracebacks and ``inspect.getsource`` show the cell inside the rank.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import cloudpickle

Bytes = TypeVar("Bytes")

_MAX_SOURCE = 1 << 20


class PerRank(tuple[Any, ...]):
    """Arguments that differ between ranks: made by `per_rank`."""


def per_rank(values: Iterable[Any]) -> PerRank:
    """Mark `values` as one argument per rank: rank ``r`` gets the ``r``-th.

    Example:
        ``ranks.run(fn, per_rank(shards), lr=0.1)``: rank r runs ``fn(shards[r], lr=0.1)``.

    """
    return PerRank(values)


@dataclass(frozen=True)
class _Mine:
    """Stands in the shared arguments for the `index`-th of the rank's own."""

    index: int


def pack_call(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    world_size: int,
    pack: Callable[[Any], Bytes],
) -> tuple[Bytes, list[Bytes]]:
    """Return the call as bytes: what all ranks share, and what each rank alone gets.

    `pack` makes the bytes.

    Raises:
        TypeError: something cannot be sent; names it.
        ValueError: a `per_rank` argument has not exactly one value per rank.

    """
    if not callable(fn):
        raise TypeError(f"run(fn, …) needs a function, got {type(fn).__name__}")
    own: list[PerRank] = []

    def shared(name: str, value: Any) -> Any:
        if not isinstance(value, PerRank):
            return value
        if len(value) != world_size:
            raise ValueError(
                f"{name} is per_rank with {len(value)} values, but there are {world_size} ranks"
            )
        own.append(value)
        return _Mine(len(own) - 1)

    shared_args = [shared(f"argument {i + 1}", value) for i, value in enumerate(args)]
    shared_kwargs = {key: shared(f"argument '{key}'", value) for key, value in kwargs.items()}
    try:
        common = pack((fn, shared_args, shared_kwargs))
        if not own:
            return common, [pack([])] * world_size
        return common, [pack([values[rank] for values in own]) for rank in range(world_size)]
    except Exception as error:
        parts = {"the function": fn}
        parts |= {f"argument {i + 1}": value for i, value in enumerate(args)}
        parts |= {f"argument '{key}'": value for key, value in kwargs.items()}
        raise _cannot_be_sent(parts, error) from error


def _cannot_be_sent(parts: dict[str, Any], error: Exception) -> TypeError:
    for name, part in parts.items():
        try:
            cloudpickle.dumps(part)
        except Exception as reason:
            return TypeError(
                f"{name} ({type(part).__name__}) cannot be sent to the ranks: {reason}. Send "
                "tensors, numbers and text, and open files, locks and the like on the rank."
            )
    return TypeError(f"the call cannot be sent to the ranks: {error}")


def unpack_call(common: bytes, mine: bytes) -> Callable[[], Any]:
    """Return the call, on the rank, as a function without arguments."""
    return join_call(cloudpickle.loads(common), cloudpickle.loads(mine))


def join_call(common: tuple[Any, list[Any], dict[str, Any]], own: list[Any]) -> Callable[[], Any]:
    """Return the call, on the rank, as a function without arguments."""
    fn, args, kwargs = common

    def fill(value: Any) -> Any:
        return own[value.index] if isinstance(value, _Mine) else value

    return lambda: fn(
        *(fill(value) for value in args), **{key: fill(value) for key, value in kwargs.items()}
    )


@dataclass(frozen=True)
class Sources:
    """Source text of cells, by the file name that their code objects carry."""

    lines: dict[str, list[str]]
    labels: dict[str, str]
    """File name → what a person calls it, for example ``Cell In[3]``."""


def cell_sources(known: set[str]) -> Sources:
    """Return the sources that exist only in this process, except those in `known`; all labels.

    The names of files, which the ranks can read themselves, are added to `known`. A label may
    change while the lines do not: a cell that runs again has a new number.
    """
    lines = {}
    for name, entry in list(linecache.cache.items()):
        if name in known or len(entry) != 4:
            continue
        if os.path.exists(name):
            known.add(name)
            continue
        if entry[0] <= _MAX_SOURCE:
            lines[name] = entry[2]
    return Sources(lines, cell_labels())


def cell_labels() -> dict[str, str]:
    """Ask IPython, if it runs here, which file name belongs to which cell."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    names = getattr(getattr(shell, "compile", None), "_filename_map", {})
    return {name: f"Cell In[{count}]" for name, count in names.items()}


def install_sources(sources: Sources) -> None:
    """Make the sources known to ``linecache``, and so to tracebacks and ``inspect``."""
    for name, lines in sources.lines.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
