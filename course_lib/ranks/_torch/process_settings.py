"""Settings that a process has only once, such as its folder or PyTorch's default dtype.

Simulated ranks are threads of one process. Each of them has its own values, which are exchanged
when another rank runs. PyTorch does not document where some of its settings are kept.
"""

from __future__ import annotations

import locale
import logging
import os
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

_mkldnn: Any = torch.backends.mkldnn
_UNKNOWN = ...
"""The value of a setting that cannot be read, such as a folder that was removed."""


def _attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    return partial(getattr, owner, name), partial(setattr, owner, name)


def _environment() -> dict[bytes, bytes]:
    # Undecoded values: decoding all of them would take longer than all other settings.
    return dict(os.environ._data)  # type: ignore[attr-defined]


def _set_environment(environment: dict[bytes, bytes]) -> None:
    now = _environment()
    for name in now.keys() - environment.keys():
        del os.environb[name]
    os.environb.update(environment.items() - now.items())


def _set_filters(filters: list[Any]) -> None:
    changed = filters != warnings.filters
    warnings.filters = filters
    if changed:  # Python remembers what it has shown, until it hears of other filters
        with warnings.catch_warnings():
            pass


def _open_figures() -> OrderedDict[Any, Any]:
    helpers: Any = sys.modules.get("matplotlib._pylab_helpers")
    return helpers.Gcf.figs if helpers else OrderedDict()


def _set_open_figures(figures: OrderedDict[Any, Any]) -> None:
    if helpers := sys.modules.get("matplotlib._pylab_helpers"):
        helpers.Gcf.figs = figures


_SETTINGS: Sequence[tuple[Callable[[], Any], Callable[[Any], object]]] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (  # comes later, because the one above sets it too; PyTorch 2.8 does not have it
        lambda: _mkldnn.matmul.fp32_precision,
        lambda value: setattr(_mkldnn.matmul, "fp32_precision", value),
    ),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.set_anomaly_enabled(*value),
    ),
    (lambda: vars(PRINT_OPTS).copy(), vars(PRINT_OPTS).update),
    _attribute(torch.backends.cudnn, "benchmark"),
    *(_attribute(module, name) for name in vars(module) if name.startswith("_global_")),  # hooks
    (_open_figures, _set_open_figures),
    (os.getcwd, os.chdir),
    (_environment, _set_environment),
    (lambda: warnings.filters, _set_filters),
    _attribute(warnings, "showwarning"),
    _attribute(warnings, "_showwarnmsg_impl"),  # with it, `catch_warnings` records
    _attribute(logging.root, "handlers"),
    (lambda: logging.root.level, logging.root.setLevel),
    _attribute(sys, "argv"),
    (sys.getrecursionlimit, sys.setrecursionlimit),
    (partial(locale.setlocale, locale.LC_ALL), partial(locale.setlocale, locale.LC_ALL)),
)


def _value(get: Callable[[], Any]) -> Any:
    try:
        return get()
    except Exception:
        return _UNKNOWN


def settings() -> list[Any]:
    """Return the settings of this process. A list or dict in it is the one that is in use."""
    return [_value(get) for get, _ in _SETTINGS]


def adopt(values: Sequence[Any]) -> None:
    """Make these the settings of this process."""
    for (get, set_value), value in zip(_SETTINGS, values, strict=True):
        now = _value(get)
        if value is now or (value == now and not isinstance(value, list | dict)):
            continue
        if value is not _UNKNOWN:
            with suppress(Exception):  # a folder may be gone
                set_value(value)
