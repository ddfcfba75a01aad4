"""Send a function, its cells' source and the notebook's files from the notebook to the ranks.

A notebook's function may need more than its own code: modules written with ``%%writefile``, the
working directory and module path that a cell has set, a file that it reads. All of this is sent.
The ranks, in separate cells, see copies.
"""

from __future__ import annotations

import io
import os
import pickle
import stat
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

from autograder.inside.scratch import HOME, is_own
from course_lib.ranks.calls import Sources, cell_sources
from course_lib.ranks.explain.pickling import Pickler, dumps

MAX_FILES = 1000
MAX_FILE_BYTES = 16 * 2**20
"""Largest size of all files together. Files beyond it are not sent: no task needs checkpoints."""


class Refused(Exception):
    """The function cannot be handed over; the message says why."""


class _Pickler(Pickler):
    """Sends a function wrapped by `torch.compile` unwrapped: compiled code cannot be sent."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.FunctionType):
            obj = getattr(obj, "_torchdynamo_orig_callable", obj)
        return super().reducer_override(obj)


def pack(names: dict[str, Any], name: str, usual_path: list[str]) -> bytes:
    """Return the notebook's function `name` and everything that it needs, as bytes for `unpack`.

    Raises:
        Refused: there is no such function, or it refers to something that cannot be sent.

    """
    function = names.get(name)
    if not callable(function):
        raise Refused(f"{name} is not defined as a function after the cells above were run")
    folder = os.getcwd()
    path = [entry for entry in sys.path if entry not in usual_path]
    for entry in own_modules():
        cloudpickle.register_pickle_by_value(entry)
    packed = io.BytesIO()
    try:
        _Pickler(packed).dump(function)
        files = _files()
        sources = cell_sources(set())
        return dumps((packed.getvalue(), sources, folder, path, files))
    except Exception as error:
        raise Refused(f"{name} cannot be sent to the ranks: {error}") from None


def own_modules() -> list[Any]:
    """Return the modules that the notebook has imported from its own files."""
    modules = []
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        is_notebooks = isinstance(file, str) and is_own(file)
        if is_notebooks and sys.modules.get(module.__name__) is module:
            modules.append(module)
    return modules


def _files() -> list[tuple[str, int, bytes]]:
    """Return path, mode and content of the notebook's regular files, small ones first."""
    entries = []
    for folder, folders, names in os.walk(HOME):
        folders[:] = [
            sub for sub in folders if sub != "__pycache__" and is_own(os.path.join(folder, sub))
        ]
        for name in names:
            path = os.path.join(folder, name)
            info = os.lstat(path)
            if stat.S_ISREG(info.st_mode):
                entries.append((info.st_size, path, info.st_mode))
        if len(entries) > 100 * MAX_FILES:
            break
    files, left = [], MAX_FILE_BYTES
    for size, path, mode in sorted(entries)[:MAX_FILES]:
        if size > left:
            break
        left -= size
        files.append((path, stat.S_IMODE(mode), Path(path).read_bytes()[:size]))
    return files


def unpack(data: bytes) -> tuple[Callable[..., Any], Sources]:
    """Return the function and the sources of its cells; write the files to their old paths."""
    function, sources, folder, path, files = pickle.loads(data)
    for name, mode, content in files:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content)
        os.chmod(name, mode)
    sys.path.insert(0, "")
    sys.path.extend(path)
    if os.path.isdir(folder) or is_own(folder):
        os.makedirs(folder, exist_ok=True)
        os.chdir(folder)
    return pickle.loads(function), sources
