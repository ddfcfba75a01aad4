"""The surroundings of a call in the notebook: the text of its cells, folder, modules, environment.

Ranks adopt the surroundings with the first call after a change.
"""

from __future__ import annotations

import linecache
import os
import sys
from typing import Any

from course_lib.ranks.calls import Sources, cell_numbers, cell_sources, install_sources

# These are set for the fork server, and so for the ranks. Ranks must not get the notebook's values.
_NOT_SENT = (
    *("GLOO_SOCKET_IFNAME", "OPENBLAS_NUM_THREADS", "MPLBACKEND", "PYTHONUNBUFFERED"),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCH_FR_BUFFER_SIZE", "VECLIB_MAXIMUM_THREADS"),
)

News = tuple[Sources, str, list[str], dict[str, str]]
"""The new sources, the folder, the module path, the environment."""


class Surroundings:
    """Finds out what has changed since one team of ranks was last told."""

    def __init__(self) -> None:
        self._files: set[str] = set()
        """Names in ``linecache`` whose lines the ranks have, or can read themselves."""
        self._last: tuple[Any, ...] = ()

    def news(self) -> News | None:
        """Return the surroundings if they have changed since the last time, else ``None``.

        Only the new sources are returned.
        """
        try:
            folder = os.getcwd()
        except FileNotFoundError:
            folder = ""
        # Every call asks, so nothing is copied or decoded unless it has changed.
        encoded = getattr(os.environ, "_data", os.environ)
        files, numbers, path = linecache.cache.keys(), cell_numbers(), list(sys.path)
        if (files, numbers, folder, path, encoded) == self._last:
            return None
        self._last = set(files), dict(numbers), folder, path, dict(encoded)
        sources = cell_sources(self._files)
        self._files |= sources.lines.keys()
        environment = {k: v for k, v in os.environ.items() if k not in _NOT_SENT}
        return sources, folder, path, environment


def enter(
    sources: Sources, folder: str, path: list[str], environment: dict[str, str]
) -> dict[str, str]:
    """Adopt the surroundings on a rank; return file name → name of the cell for people."""
    install_sources(sources)
    if folder:
        os.chdir(folder)
    sys.path.extend(entry for entry in path if entry not in sys.path)
    os.environ.update(environment)
    return sources.labels
