"""The versions of PyTorch with which the tests of ranks have passed.

This package uses names that PyTorch does not document, so a newer one may have changed them.
"""

from __future__ import annotations

import functools
import warnings

import torch

OLDEST, NEWEST = "2.8.0", "2.15.0"


@functools.cache
def warn_if_untried(version: str = torch.__version__) -> None:
    """Warn, once, if this PyTorch is older or newer than those that were tried."""
    if not _minor(OLDEST) <= _minor(version) <= _minor(NEWEST):
        warnings.warn(
            f"the ranks were tried with PyTorch {OLDEST} to {NEWEST}, not with {version}: if "
            "something fails that should work, install one of these",
            stacklevel=3,
        )


def _minor(version: str) -> tuple[int, ...]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
