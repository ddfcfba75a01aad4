"""The command line: ``torchrun --nproc-per-node K -m course_lib.train …``, or without torchrun."""

import argparse
import inspect
import os
import re
import signal
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import fields
from typing import Any, NoReturn, get_args, get_type_hints

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from course_lib.train.config import ConfigError, TrainConfig
from course_lib.train.loop import train

PROGRAM = "course_lib.train"
_EPILOG = """\
examples:
  python -m course_lib.train --model cnn
  torchrun --nproc-per-node 2 -m course_lib.train --model transformer --ddp torch
  torchrun --nproc-per-node 4 --max-restarts 3 -m course_lib.train --checkpoint runs/digits

With --checkpoint, the same command continues where the last one stopped. With torchrun's
--max-restarts, a run continues by itself after a rank has died, and ends with the same loss.
"""

STDOUT_GONE = 128 + signal.SIGPIPE
"""The exit status when the reader of our output has gone (``| head -1``)."""
_PATIENCE = 10.0  # seconds that other ranks give rank 0 to report the error


class _Parser(argparse.ArgumentParser):
    """Show the help, or report a wrong option, on one rank only."""

    def print_help(self, file: Any = None) -> None:
        if _rank() == 0:
            super().print_help(file)

    def error(self, message: str) -> NoReturn:
        if _rank() == 0:
            super().error(message)
        sys.exit(2)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))  # set by torchrun


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line: `TrainConfig`'s options, and ``--device``."""
    command = _Parser(
        prog=f"python -m {PROGRAM}",
        description="Train a small model, data parallel on the ranks that torchrun starts.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    documented = re.findall(
        r"^    (\w+): (.+(?:\n {8}.+)*)", str(inspect.getdoc(TrainConfig)), re.M
    )
    texts = {name: " ".join(text.replace("`", "").split()) for name, text in documented}
    hints = get_type_hints(TrainConfig)
    for field in fields(TrainConfig):
        kinds = [kind for kind in get_args(hints[field.name]) if kind is not type(None)]
        names = [kind for kind in kinds if isinstance(kind, str)]
        text = texts[field.name] + ("" if field.default is None else f" Default: {field.default}.")
        command.add_argument(
            f"--{field.name.replace('_', '-')}",
            default=field.default,
            help=text,
            choices=names or None,
            type=str if names else (kinds or [hints[field.name]])[0],
        )
    text = "auto: use GPUs if every rank of this machine can have one. Default: auto."
    command.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help=text)
    return command


def join(device: str) -> None:
    """Join the process group that torchrun describes, or make one with this process only.

    If every rank of this machine can have a GPU, its i-th rank takes ``cuda:i`` and NCCL is used.
    Otherwise gloo is used.

    Raises ConfigError if `device` is ``cuda`` and there are not enough GPUs.
    """
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    if device == "cuda" and gpus < ranks_here:
        raise ConfigError(
            f"--device cuda needs a GPU for each of the {ranks_here} ranks of this machine, but "
            f"PyTorch sees {gpus}. Start fewer ranks, or use --device cpu."
        )
    store, rank, world_size = _meeting_place()
    if gpus >= ranks_here:
        gpu = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(gpu)
        torch.cuda.init()  # type: ignore[no-untyped-call]
        dist.init_process_group(
            "nccl", store=store, rank=rank, world_size=world_size, device_id=gpu
        )
    else:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def _meeting_place() -> tuple[Store, int, int]:
    """Return (store through which the ranks find each other, rank, world size).

    torchrun keeps one store across restarts. A rank must not find there the address of a rank that
    was killed (https://github.com/pytorch/pytorch/issues/135712), so each start has its own names.
    """
    if "RANK" not in os.environ:
        return HashStore(), 0, 1
    store, rank, world_size = next(rendezvous("env://"))
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"start {start}", store), rank, world_size


def main() -> int:
    """Train as the command line says; return the exit status.

    The status is 0, or 2 for wrong options, or 1 if the loss is not finite. After any other error
    it does not return: it ends the process with status 1, or `STDOUT_GONE`.
    """
    first = _rank() == 0
    try:
        options = vars(parser().parse_args())
        device = options.pop("device")
        config = TrainConfig(**options)
        join(device)
        train(config)
    except SystemExit as ended:  # the parser has printed the reason, or has shown the help
        status = 2 if ended.code else 0
    except (ConfigError, FloatingPointError) as error:
        if first:
            _complain(f"{PROGRAM}: {error}\n")
        status = 2 if isinstance(error, ConfigError) else 1
    except BrokenPipeError:  # of our output; connections between ranks raise PyTorch's errors
        leave(STDOUT_GONE)
    except Exception:
        # End at once, without a message to the other ranks, which may wait for this rank. They find
        # the connection closed, and torchrun restarts all of them.
        _complain(f"{PROGRAM}: rank {_rank()} failed\n{traceback.format_exc()}")
        leave(1)
    else:
        status = 0
    if dist.is_initialized():
        dist.destroy_process_group()
    if status and not first and dist.is_torchelastic_launched():
        # torchrun ends all ranks as soon as one has failed. So rank 0, which reports the error,
        # must be the first to end.
        time.sleep(_PATIENCE)
    return status


def _complain(text: str) -> None:
    with suppress(AttributeError, OSError):  # standard error was closed, or nobody reads it
        sys.stderr.write(text)


def leave(status: int) -> NoReturn:
    """End this process with `status`, and without Python's shutdown.

    A thread of gloo can outlive the process group. It sometimes aborts the process when the
    interpreter shuts down ("terminate called without an active exception"). Then torchrun would
    think that a successful run has failed, and start it again.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:  # None if it was closed from the start
                stream.flush()
        except OSError:
            status = status or STDOUT_GONE
    os._exit(status)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank at once, without a traceback
    leave(main())
