"""What simulated ranks share because nothing can change hands: found when a call has changed it.

Looked at before and after a call, and no deeper than a module's own names: a list that grew is
still the same list.
"""

from __future__ import annotations

import locale
import os
import signal
import sys
import types
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from course_lib.ranks.explain.lines import is_installed

_SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1]
_told: set[str] = set()


class SharedStateWarning(UserWarning):
    """A rank has changed what all simulated ranks, and the notebook, share."""


@contextmanager
def changes_told() -> Iterator[None]:
    """Warn, once for each, of what the block has changed that ranks as processes would not share.

    Warns:
        SharedStateWarning: names it, and says what to do.

    """
    modules = _own_modules()  # one that is loaded again under its name is not the same module
    before = _look(modules)
    try:
        yield
    finally:
        after = _look(modules)
        changed = {
            name for name, value in before.items() if name in after and after[name] is not value
        }
        changed = {n for n in changed if not _same(before[n], after[n])} - _told
        if changed:
            _told.update(changed)
            warnings.warn(
                f"a simulated rank has changed {', '.join(sorted(changed))}, which all ranks and "
                "the notebook share, as they are threads of one process. If each rank is to have "
                'its own: Ranks(…, on="simulated", isolated=True), or on="cpu"',
                SharedStateWarning,
                stacklevel=2,
            )


def _same(before: Any, after: Any) -> bool:
    plain = (bool, int, float, str, tuple)
    return type(before) is type(after) and isinstance(before, plain) and before == after


def _look(modules: Mapping[str, types.ModuleType]) -> dict[str, Any]:
    """Return by name what is shared: the process's settings, names in the user's own modules."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    found: dict[str, Any] = {
        "sys.path": tuple(sys.path),
        "sys.getrecursionlimit()": sys.getrecursionlimit(),
        "locale": locale.setlocale(locale.LC_ALL),
        "torch.backends.mkldnn.enabled": torch.backends.mkldnn.enabled,
        "torch.are_deterministic_algorithms_enabled()": deterministic,
    }
    for number in _SIGNALS:
        found[f"the handler of {number.name}"] = signal.getsignal(number)
    for name, module in modules.items():
        for key, value in list(vars(module).items()):
            if key.startswith("__") or isinstance(value, types.ModuleType):
                continue
            found[f"{name}.{key}"] = value
            if isinstance(value, type) and value.__module__ == name:
                for attribute, each in list(vars(value).items()):
                    if not attribute.startswith("__"):
                        found[f"{name}.{key}.{attribute}"] = each
    return found


_own: dict[str, types.ModuleType] = {}
_looked_at: tuple[int, str] = 0, ""


def _own_modules() -> dict[str, types.ModuleType]:
    """Return the user's modules, neither installed nor of this course, by name."""
    global _own, _looked_at
    now = len(sys.modules), next(reversed(sys.modules), "")
    if now != _looked_at:  # thousands of names: looked through only when there are others
        _looked_at = now
        course = __name__.partition(".")[0]
        _own = {
            name: module
            for name, module in list(sys.modules.items())
            if name.partition(".")[0] not in ("__main__", course)
            and isinstance(path := getattr(module, "__file__", None), str)
            and os.path.isabs(path)
            and not is_installed(path)
        }
    return _own
