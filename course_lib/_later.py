"""Lazy imports: import a package's names on first use, and block imports that nobody needs.

Programs that only compute with schedules and formulas, such as ``python -m course_lib.simulate``,
would otherwise wait longer for PyTorch than for their answer.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def later(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package, or of a module in one.

    Args:
        package: its name.
        modules: names to import, separated by spaces → the module below the package that defines
            them.

    """
    modules_by_name = {name: module for names, module in modules.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in modules_by_name:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        parent = sys.modules[package].__package__  # for a module: its package
        value = getattr(importlib.import_module(f".{modules_by_name[name]}", parent), name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: [*vars(sys.modules[package]), *modules_by_name]


def without(*modules: str) -> None:
    """Let imports of these modules fail in this process; code with an optional use continues.

    For example, reading notebooks imports jsonschema. If ``rfc3987_syntax`` is installed,
    jsonschema imports it, and it spends a second on computing a grammar of addresses. The schema of
    notebooks has no such addresses.
    """
    for module in modules:
        sys.modules.setdefault(module, None)  # type: ignore[arg-type]
