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
    """Return what to do if ``fn(*args, **kwargs)`` cannot begin; empty if it can."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # compiled code need not say what it takes
        return ""
    parameters = signature.parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        for name in kwargs.keys() - signature.parameters.keys():
            if name in OPTIONS:
                return f"{name!r} is an option of Ranks, not of run: write Ranks(…, {name}=…)."
            return f"run(f, …) passes all other arguments to f, and f has no parameter {name!r}."
    try:
        bound = signature.bind_partial(*args, **kwargs).arguments
    except TypeError:
        return "run(f, a, b) calls f(a, b) on every rank. run adds no arguments."
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    missing_names = [
        parameter.name
        for parameter in parameters
        if parameter.name not in bound
        and parameter.default is parameter.empty
        and parameter.kind not in several
    ]
    if not missing_names:
        return ""
    hint = "run(f, a, b=…) calls f(a, b=…) on every rank: give run every argument that f needs."
    if any(name in _RANK for name in missing_names):
        hint += (
            " run does not pass the rank to f: inside f, dist.get_rank() returns the rank, and "
            "dist.get_world_size() the number of ranks."
        )
    return hint
