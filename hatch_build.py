"""Puts the solutions into a wheel, for `course solution`, if the copy it is built from has them.

Only the notebooks: hidden cases stay with those who grade. A teacher builds the students' wheel
from a copy without ``instructor/``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Solutions(BuildHookInterface[Any]):
    """Adds ``instructor/*/*.ipynb`` beside the assignments."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Name the files before the wheel is written."""
        if version != "standard":
            return  # an editable installation uses the checkout's
        root = Path(self.root)
        for notebook in sorted(root.glob("instructor/*/*.ipynb")):
            path = notebook.relative_to(root).as_posix()
            build_data["shared_data"][str(notebook)] = f"share/sgd-to-ddp/{path}"
