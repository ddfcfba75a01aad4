"""Settings that a process has only once, such as its folder or PyTorch's default dtype.

Simulated ranks are threads of one process. Each of them has its own values, which are exchanged
when another rank runs. PyTorch does not document where some of its settings are kept.
"""

from __future__ import annotations

import copy
import gc
import locale
import logging
import multiprocessing
import os
import socket
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch._tensor_str import PRINT_OPTS
from torch.nn.modules import module

_UNKNOWN = ...
"""The value of a setting that cannot be read, such as a folder that was removed."""


def _attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    return partial(getattr, owner, name), partial(setattr, owner, name)


def _environment() -> dict[Any, Any]:
    # Undecoded values: decoding all of them would take longer than all other settings.
    return dict(getattr(os.environ, "_data", os.environ))


def _set_environment(environment: dict[Any, Any]) -> None:
    ours: Any = os.environb if hasattr(os.environ, "_data") else os.environ
    now = _environment()
    for name in now.keys() - environment.keys():
        del ours[name]
    ours.update(environment.items() - now.items())


def _set_filters(filters: list[Any]) -> None:
    changed = filters != warnings.filters
    warnings.filters = filters
    if changed:  # Python remembers what it has shown, until it hears of other filters
        with warnings.catch_warnings():
            pass


def _open_figures() -> OrderedDict[Any, Any]:
    helpers = sys.modules.get("matplotlib._pylab_helpers")
    return OrderedDict() if helpers is None else helpers.Gcf.figs


def _set_open_figures(figures: OrderedDict[Any, Any]) -> None:
    if (helpers := sys.modules.get("matplotlib._pylab_helpers")) is not None:
        helpers.Gcf.figs = figures


_SETTINGS: Sequence[tuple[Callable[[], Any], Callable[[Any], object]]] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.set_anomaly_enabled(*value),
    ),
    (torch.is_warn_always_enabled, torch.set_warn_always),
    (lambda: vars(PRINT_OPTS).copy(), vars(PRINT_OPTS).update),
    *(_attribute(torch.backends.cudnn, name) for name in ("enabled", "benchmark", "deterministic")),
    _attribute(torch.backends.mkldnn, "enabled"),
    *(_attribute(module, name) for name in vars(module) if name.startswith("_global_")),
    (_open_figures, _set_open_figures),
    (os.getcwd, os.chdir),
    (_environment, _set_environment),
    (lambda: warnings.filters, _set_filters),
    _attribute(warnings, "showwarning"),
    _attribute(warnings, "_showwarnmsg_impl"),  # with it, `catch_warnings` records
    _attribute(logging.root, "handlers"),
    (lambda: logging.root.level, logging.root.setLevel),
    (lambda: logging.root.manager.disable, logging.disable),
    _attribute(sys, "argv"),
    (sys.getrecursionlimit, sys.setrecursionlimit),
    (partial(locale.setlocale, locale.LC_ALL), partial(locale.setlocale, locale.LC_ALL)),
    (socket.getdefaulttimeout, socket.setdefaulttimeout),
    (
        partial(multiprocessing.get_start_method, allow_none=True),
        partial(multiprocessing.set_start_method, force=True),
    ),
    (gc.isenabled, lambda enabled: gc.enable() if enabled else gc.disable()),
)


def _value(get: Callable[[], Any]) -> Any:
    try:
        return get()
    except Exception:
        return _UNKNOWN


def _same(value: Any, other: Any) -> bool:
    return value is other if isinstance(value, list | dict) else bool(value == other)


def settings() -> list[Any]:
    """Return the settings of this process; changes of a list or dict are seen in them."""
    return [_value(get) for get, _ in _SETTINGS]


def copied(values: Sequence[Any]) -> list[Any]:
    """Return settings that do not share a list or dict with `values`."""
    return [copy.copy(value) for value in values]


def adopt(values: Sequence[Any]) -> None:
    """Make these the settings of this process."""
    for (get, set_value), value in zip(_SETTINGS, values, strict=True):
        if value is not _UNKNOWN and not _same(value, _value(get)):
            with suppress(Exception):  # a folder may be gone
                set_value(value)
