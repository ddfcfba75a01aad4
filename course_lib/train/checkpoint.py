"""Checkpoints: the state that a run needs to continue exactly where it stopped.

Rank 0 writes to a temporary file, makes sure that it is on the disk, and renames it. So a file with
the right name is complete, even if the process or the machine stopped at a bad moment. The newest
two are kept, in case a disk damages one.

Rank 0 also reads the file and sends the bytes to the others. So all ranks continue from the same
step, even if several machines do not see the same files, or do not see them yet.

Epoch and position in the epoch follow from the step, and the order of an epoch from the seed. None
of these is stored.
"""

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from course_lib.collectives import place_in
from course_lib.train.config import ConfigError

KEEP = 2
"""How many checkpoints of a run are kept."""


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints of `folder`, oldest first; none if there is no folder."""
    files = (path for path in folder.glob("step-*.pt") if path.stem[len("step-") :].isdecimal())
    return sorted(files, key=step_of)


def step_of(path: Path) -> int:
    """Return how many steps had been done when the checkpoint at `path` was written."""
    return int(path.stem.removeprefix("step-"))


def save_checkpoint(folder: Path, step: int, content: dict[str, Any]) -> Path:
    """Write `content` (tensors, numbers, text, lists, dicts) and return the file's path.

    Removes all checkpoints up to this step except the newest `KEEP`. Only one rank may call it.
    Raises OSError if the file cannot be written; then the older ones are still there.
    """
    path = folder / f"step-{step:08d}.pt"
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    entry = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(entry)  # the new name must also be on the disk
    finally:
        os.close(entry)
    # Checkpoints of later steps are damaged, or this run would have continued from them. So this
    # one must not count as older than they are.
    up_to_here = [path for path in checkpoints(folder) if step_of(path) <= step]
    for old in up_to_here[:-KEEP]:
        old.unlink(missing_ok=True)
    return path


def load_checkpoint(folder: Path, say: Callable[[str], None]) -> dict[str, Any] | None:
    """Return the newest checkpoint that rank 0 can read, on all ranks; None if there is none.

    All ranks must call. Creates `folder` if it is missing, and removes the remains of an
    interrupted write. Tensors are on the CPU. `say` reports which files are damaged and skipped.

    Raises ConfigError on all ranks if rank 0 cannot use the folder, so that the error comes now and
    not after a hundred steps. It also raises ConfigError if all checkpoints are damaged, because a
    person must decide whether to start over.
    """
    rank, _ = place_in(None)
    outcome: list[Any] = [None, None]  # the problem, the content of the file
    if rank == 0:
        try:
            _prepare(folder)
            outcome[1], damaged = _newest(folder)
        except OSError as error:
            outcome[0] = f"--checkpoint {folder}: {error}. Choose another folder."
        else:
            for path, reason in damaged.items():
                # Not inside the try: an OSError of `say` is not about the folder.
                say(f"{path} cannot be used ({reason}), so it is skipped")
            if damaged and outcome[1] is None:
                outcome[0] = (
                    f"none of the {len(damaged)} checkpoints in {folder} can be read. Choose "
                    "another folder with --checkpoint, or move the checkpoints away to start from "
                    "step 0."
                )
    dist.broadcast_object_list(outcome, src=0)
    problem, data = outcome
    if problem is not None:
        raise ConfigError(problem)
    return None if data is None else _read(data)


def _prepare(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob("step-*.tmp"):
        left.unlink()
    if not os.access(folder, os.W_OK):
        raise PermissionError("no permission to write there")


def _newest(folder: Path) -> tuple[bytes | None, dict[Path, str]]:
    """Return the newest readable file, if there is one, and why newer ones cannot be read."""
    damaged: dict[Path, str] = {}
    for path in reversed(checkpoints(folder)):
        data = path.read_bytes()
        try:
            _read(data)
        except ValueError as error:
            damaged[path] = str(error)
        else:
            return data, damaged
    return None, damaged


def _read(data: bytes) -> dict[str, Any]:
    try:
        # weights_only: a checkpoint is data, and must not be able to run code.
        return dict(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))
    except Exception as error:  # torch.load may raise errors of any type
        # Do not show PyTorch's message, which advises loading the file without weights_only.
        raise ValueError(f"PyTorch cannot load it: {type(error).__name__}") from error
