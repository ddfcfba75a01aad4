"""Libraries that keep the rank in a class or module, of which all simulated ranks share one."""

from __future__ import annotations

import builtins
import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from course_lib.ranks._torch.thread_worlds import current

_KEEP_THE_RANK = frozenset(
    "accelerate colossalai deepspeed fairscale horovod ignite lightning lightning_fabric megatron "
    "pytorch_lightning".split()
)


@contextmanager
def noted_libraries(locate: Callable[[], str]) -> Iterator[dict[str, str]]:
    """Note each of these libraries that a rank imports in the block, with the line that does it.

    A library that an earlier call has loaded is noted if an ``import`` statement asks for it again.
    """
    noted: dict[str, str] = {}
    before, loaded = builtins.__import__, _KEEP_THE_RANK & sys.modules.keys()

    @functools.wraps(before)
    def import_module(name: str, *args: Any, **kwargs: Any) -> Any:
        library = name.partition(".")[0]
        if library in _KEEP_THE_RANK and current() is not None:
            noted.setdefault(library, locate())
        return before(name, *args, **kwargs)

    builtins.__import__ = import_module
    try:
        yield noted
    finally:
        builtins.__import__ = before
        for library in (_KEEP_THE_RANK & sys.modules.keys()) - loaded:
            noted.setdefault(library, "")


def warn_about(libraries: Mapping[str, str]) -> None:
    """Warn about libraries that ranks have imported: name → line."""
    for library, line in libraries.items():
        where = f" ({line})" if line else ""
        text = (
            f"{library} was imported on simulated ranks{where}. It keeps the rank in its process, "
            "but simulated ranks are threads of one process: all of them may take the rank of "
            f'one, also in later calls. Use {library} on Ranks(…, on="cpu")'
        )
        # The warning names no line of the notebook and is shown each time, as `MisuseWarning` is.
        warnings.warn_explicit(text, UserWarning, "ranks", 0, registry={})
