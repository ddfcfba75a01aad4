"""Hints for a function that does not accept the arguments of ``run``.

Many functions were written for ``mp.spawn``, which passes the rank to the function. And options of
`Ranks` are easily given to ``run`` by mistake, which passes them to the function.
"""

from __future__ import annotations

import re

OPTIONS = ("on", "timeout", "network", "device", "computation", "metered", "misuse")
"""The options of `Ranks`, by name."""
_MISSING = re.compile(r"missing \d+ required .*argument.*?: (.*)")
_UNEXPECTED = re.compile(r"unexpected keyword argument '(\w+)'")
_COUNT = re.compile(r"takes .*positional argument.* given")
_RANK = ("rank", "local_rank", "world_size")


def argument_hint(message: str) -> str:
    """Return what to do about the ``TypeError`` of a call whose function never began, or ``""``.

    Args:
        message: the error's message, for example
            ``f() missing 1 required positional argument: 'x'``.

    """
    if found := _MISSING.search(message):
        asked = re.findall(r"'(\w+)'", found[1])
        hint = "run(f, a, b=…) calls f(a, b=…) on every rank: give run every argument that f needs."
        if any(name in _RANK for name in asked):
            hint += (
                " run does not pass the rank to f: inside f, dist.get_rank() returns the rank, and "
                "dist.get_world_size() the number of ranks."
            )
        return hint
    if found := _UNEXPECTED.search(message):
        name = found[1]
        if name in OPTIONS:
            return f"{name!r} is an option of Ranks, not of run: write Ranks(…, {name}=…)."
        return f"run(f, …) passes all other arguments to f, and f has no parameter {name!r}."
    if _COUNT.search(message):
        return "run(f, a, b) calls f(a, b) on every rank. run adds no arguments."
    return ""
