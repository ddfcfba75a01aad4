"""The surroundings of a call in the notebook: the text of its cells, folder, modules, environment.

Ranks adopt it with the first call after a change. It is looked at before every call, so looking
must cost little: what is as it was is compared, not copied.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Mapping
from typing import Any

from course_lib.ranks.calls import Sources, cell_numbers, cell_sources, install_sources

# Set for the fork server, and so for the ranks; the notebook's own values are not for them.
_NOT_SENT = (
    *("GLOO_SOCKET_IFNAME", "OPENBLAS_NUM_THREADS", "MPLBACKEND", "PYTHONUNBUFFERED"),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    "TORCH_FR_BUFFER_SIZE",
)

News = tuple[Sources, str, list[str], dict[str, str]]
"""The new sources, the folder, the module path, the environment."""


class Surroundings:
    """Tells one team of ranks what has changed."""

    def __init__(self) -> None:
        self._files: set[str] = set()
        """Names in ``linecache`` that the ranks have the lines of, or can read themselves."""
        self._seen: set[str] = set()
        self._numbers: dict[str, int] = {}
        self._folder = ""
        self._path: list[str] = []
        self._environment: Mapping[Any, Any] | None = None

    def news(self) -> News | None:
        """Return the surroundings if they have changed since the last time, else ``None``.

        They have only the sources that are new.
        """
        try:
            folder = os.getcwd()
        except FileNotFoundError:
            folder = ""
        numbers = cell_numbers()
        # As the system has it: decoding all of it for every call would show.
        environment = getattr(os.environ, "_data", os.environ)
        if not (
            linecache.cache.keys() != self._seen
            or numbers != self._numbers
            or folder != self._folder
            or sys.path != self._path
            or environment != self._environment
        ):
            return None
        self._seen = set(linecache.cache)
        self._numbers, self._environment = dict(numbers), dict(environment)
        self._folder, self._path = folder, list(sys.path)
        sources = cell_sources(self._files)
        self._files |= sources.lines.keys()
        sent = {k: v for k, v in os.environ.items() if k not in _NOT_SENT}
        return sources, folder, self._path, sent


def enter(
    sources: Sources, folder: str, path: list[str], environment: dict[str, str]
) -> dict[str, str]:
    """Adopt the surroundings, on a rank; return what people call the cells, by file name."""
    install_sources(sources)
    if folder:
        os.chdir(folder)
    sys.path.extend(entry for entry in path if entry not in sys.path)
    os.environ.update(environment)
    return sources.labels
