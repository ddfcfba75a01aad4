"""The variables that ranks keep from call to call, for ``%%ranks`` cells, `push` and `pull`.

Simulated ranks are threads of one process, and this process may use several `Ranks`. So a namespace
belongs to a rank *and* to its `Ranks` object, the owner.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

Namespace = dict[str, Any]

GIVEN = ("rank", "world_size", "device", "dist", "torch")
"""The variables with which every ``%%ranks`` cell starts."""

_namespaces: dict[str, dict[int, Namespace]] = {}


def namespace(owner: str) -> Namespace:
    """Return the variables of the calling rank; empty at first."""
    return _namespaces.setdefault(owner, {}).setdefault(dist.get_rank(), {})


def forget_variables(owner: str) -> None:
    """Drop the variables that the ranks of `owner` keep in this process."""
    _namespaces.pop(owner, None)


def push_variables(owner: str, /, **values: Any) -> None:
    """Set variables of this rank."""
    namespace(owner).update(values)


def pull_variables(owner: str, names: tuple[str, ...]) -> list[Any]:
    """Return variables of this rank.

    Raises:
        NameError: it has no such variable.

    """
    variables = namespace(owner)
    for name in names:
        if name not in variables:
            raise NameError(
                f"this rank has no variable {name!r}: set it in a %%ranks cell, or push it"
            )
    return [variables[name] for name in names]
