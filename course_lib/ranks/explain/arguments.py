"""Hints for a function that does not accept the arguments of ``run``.

Many functions were written for ``mp.spawn``, which passes the rank to the function. And options of
`Ranks` are easily given to ``run`` by mistake, which passes them to the function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

OPTIONS = ("on", "timeout", "network", "device", "metered")
"""The options of `Ranks`, by name."""
_RANK = ("rank", "local_rank", "world_size")


def argument_hint(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return a hint if this may be why ``fn(*args, **kwargs)`` cannot begin, else ``""``."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # compiled code need not say what it takes
        return ""
    parameters = signature.parameters
    try:
        bound = signature.bind_partial(*args, **kwargs).arguments
    except TypeError:  # Python says which argument the function does not take
        for name in kwargs.keys() & {*OPTIONS} - parameters.keys():
            return f"{name!r} is an option of Ranks, not of run: write Ranks(…, {name}=…)."
        return ""
    missing_names = parameters.keys() & {*_RANK} - bound.keys()
    if all(parameters[name].default is not inspect.Parameter.empty for name in missing_names):
        return ""
    return (
        "run does not pass the rank to f: inside f, dist.get_rank() returns the rank, and "
        "dist.get_world_size() the number of ranks."
    )
