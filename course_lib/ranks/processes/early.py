"""In a notebook, start the fork server as soon as this module is imported.

It loads PyTorch while the notebook does, and is ready when the first ranks are made. It ends with
the kernel. Elsewhere, in scripts and tests, nothing is started before it is needed.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

from course_lib.ranks.processes.fork_client import ForkServerError, start_server

_ipython: Any = sys.modules.get("IPython")
_shell = _ipython.get_ipython() if hasattr(_ipython, "get_ipython") else None
if getattr(_shell, "kernel", None) is not None:
    with suppress(OSError, ForkServerError):  # then the first call says why
        start_server()
