"""The parts of `make gpu`, each of which yields rows: dictionaries from columns to results.

The `Place` of a part has the differences between a GPU and a CPU. So `--emulated` runs the same
code on a CPU: PyTorch has streams and a timer for both.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from models import MODELS, Model
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils import collect_env
from torch.utils.benchmark import Timer

ROOT = Path(__file__).parent.parent
MIB = 1 << 20

Row = dict[str, Any]


class NotThere(Exception):
    """The machine lacks something that a part needs; the message says what."""


# --- a GPU, or a CPU in place of it --------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """The device, and what differs between a GPU and a CPU in place of it.

    Attributes:
        device: "cuda" or "cpu".
        mebibytes: sizes of tensors.
        models: name → model.
        repeats: how often a call is timed.
        tests: pytest's options to choose tests.

    """

    device: str
    mebibytes: tuple[float, ...]
    models: dict[str, Model]
    repeats: int
    tests: tuple[str, ...]


def place(emulated: bool) -> Place:
    """Return the GPU, or the CPU in place of it."""
    if emulated:
        small = {"small MLP": Model(_small_mlp, _small_batch)}
        chosen = ("-k", "ranks_on_gpus or (cpu-1000 and bfloat16)")
        return Place("cpu", (1 / 64, 1 / 16), small, 5, chosen)
    models = {name: MODELS[name] for name in ("wide MLP", "transformer")}
    return Place("cuda", (1, 25, 256), models, 20, ("-m", "gpu"))


Rows = Callable[[Place], Iterator[Row]]


def environment(emulated: bool) -> dict[str, str]:
    """Return the environment variables for the processes of a part."""
    variables = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])}
    if emulated:
        variables |= {"TRITON_INTERPRET": "1", "SGD_TO_DDP_EMULATED": "1", "OMP_NUM_THREADS": "1"}
    return variables


def _small_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10))


def _small_batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(8, 64, generator=generator), torch.randint(10, (8,), generator=generator)


def milliseconds(place: Place, call: Callable[..., object], *arguments: Any) -> float:
    """Return the milliseconds of a call on the device: the mean of several, one after the other."""
    names = {"call": call, "arguments": arguments}
    timer = Timer("call(*arguments)", globals=names, num_threads=torch.get_num_threads())
    return 1e3 * timer.timeit(place.repeats).mean


# --- 1: facts ------------------------------------------------------------------------------------


def facts(place: Place) -> Iterator[Row]:
    """Yield what PyTorch's own report says of the machine, and NCCL's version."""
    report: str = collect_env.get_pretty_env_info()  # type: ignore[no-untyped-call]
    lines = report.partition("\nCPU:")[0].splitlines()  # many lines on the processor follow
    if place.device == "cuda":
        lines.append(f"NCCL: {'.'.join(map(str, torch.cuda.nccl.version()))}")
    for fact, _, value in (line.partition(": ") for line in lines):
        if value:
            yield {"fact": fact, "value": value}


# --- 2: kernels ----------------------------------------------------------------------------------


@contextmanager
def loops_by(fused: Any) -> Iterator[None]:
    """Make the compressors use `fused`, the module with the kernels, or plain PyTorch if None."""
    from course_lib.compression import one_bit, uniform_8bit

    with (
        mock.patch.object(uniform_8bit, "kernels_for", lambda x: fused),
        mock.patch.object(one_bit, "kernels_for", lambda x: fused),
    ):
        yield


def kernels(place: Place) -> Iterator[Row]:
    """Yield per compressor and size: whether values are equal, time, bandwidth vs a copy."""
    from course_lib.compression import OneBit, Uniform8Bit

    try:
        fused = importlib.import_module("course_lib.compression.triton_kernels")
    except ImportError:
        raise NotThere("Triton is not installed; `pip install .[gpu]` brings it") from None
    compressors = {
        "8 bits": Uniform8Bit(),
        f"8 bits, blocks of {fused.TILE}": Uniform8Bit(block=fused.TILE),
        "1 bit": OneBit(),
    }
    for mebibytes in place.mebibytes:
        for odd in (0, 1):  # a length that 16 divides, and a length that it does not divide
            n = int(mebibytes * MIB) // 4 + odd
            x, other = torch.randn(n, device=place.device), torch.empty(n, device=place.device)
            copy = milliseconds(place, other.copy_, x)
            for name, compressor in compressors.items():
                for direction, call, arguments, moved in _calls(compressor, x):
                    with loops_by(fused):
                        ours = milliseconds(place, call, *arguments)
                    with loops_by(None):
                        plain = milliseconds(place, call, *arguments)
                    yield {
                        "MiB": mebibytes,
                        "length": f"16 m + {odd}",
                        "what": f"{name}: {direction}",
                        "result": "equal" if _same(compressor, x, fused) else "FAILED",
                        "ms": ours,
                        "plain (ms)": plain,
                        "copy (ms)": copy,
                        "GB/s": moved / ours / 1e6,
                        "of a copy's": moved / ours / (8 * n / copy),
                    }


def _calls(
    compressor: Any, x: Tensor
) -> list[tuple[str, Callable[..., object], tuple[Any, ...], int]]:
    """Return the calls to time: name, function, arguments, and the bytes that each must move."""
    n, residual, total = x.numel(), torch.zeros_like(x), torch.zeros_like(x)
    payload = compressor.encode(x)
    encode, decode = compressor.encode_with_residual, compressor.decode_into
    return [
        # encode reads x and the residual, and writes the residual and the payload.
        ("encode", encode, (x, residual), 12 * n + payload.nbytes),
        # decode reads the payload and the total, and writes the total.
        ("decode", decode, (payload, total, True), 8 * n + payload.nbytes),
    ]


def _same(compressor: Any, x: Tensor, fused: Any) -> bool:
    """Return whether payload, residual and sum equal plain PyTorch's, bit for bit."""
    results = []
    for loops in (fused, None):
        residual, total = x * 0.25, x * 0.5
        with loops_by(loops):
            payload = compressor.encode_with_residual(x, residual)
            compressor.decode_into(payload, total, add=True)
        results.append((payload.wire, residual, total))
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# --- 3: one rank ---------------------------------------------------------------------------------


@contextmanager
def world_of_one(place: Place) -> Iterator[None]:
    """Make this process the only rank, without a network."""
    backend = "nccl" if place.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass
class Training:
    """A model and its optimizer, trained on one batch."""

    model: nn.Module
    optimizer: Any
    x: Tensor
    y: Tensor
    autocast: Callable[[], AbstractContextManager[Any]]

    def step(self) -> None:
        """Do one step."""
        self.optimizer.zero_grad()
        self.backward()
        self.optimizer.step()

    def backward(self) -> None:
        """Do forward and backward."""
        with self.autocast():
            loss = nn.functional.cross_entropy(self.model(self.x), self.y)
        loss.backward()


Wrap = Callable[[nn.Module], tuple[nn.Module, Any]]


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def training(place: Place, case: Model, wrap: Wrap, half: bool = False) -> Training:
    """Return a training with the same model and batch each time, wrapped by `wrap`."""
    torch.manual_seed(0)
    model, optimizer = wrap(case.make().to(place.device))
    x, y = (tensor.to(place.device) for tensor in case.batch(torch.Generator().manual_seed(1)))

    def autocast() -> AbstractContextManager[Any]:
        return torch.autocast(place.device, torch.bfloat16, enabled=half)

    return Training(model, optimizer, x, y, autocast)


def wraps() -> dict[str, tuple[Wrap, bool]]:
    """Return variant → how its model and optimizer are made, and whether it computes in bf16."""
    from course_lib.compression import (
        CompressionState,
        ErrorFeedback,
        OneBit,
        Uniform8Bit,
        compression_hook,
    )
    from course_lib.ddp import DistributedDataParallel, all_reduce_hook
    from course_lib.fully_sharded import FullyShardedDataParallel
    from course_lib.sharded_optimizer import ShardedOptimizer

    def alone(model: nn.Module) -> tuple[nn.Module, Any]:
        return model, _adam(model)

    def replica(ddp: Any, hook: Any = None, state: Any = None) -> Wrap:
        def wrap(model: nn.Module) -> tuple[nn.Module, Any]:
            wrapped = ddp(model)
            if hook is not None:
                wrapped.register_comm_hook(state() if state else None, hook)
            return wrapped, _adam(wrapped)

        return wrap

    def zero(model: nn.Module) -> tuple[nn.Module, Any]:
        wrapped = DistributedDataParallel(model)
        return wrapped, ShardedOptimizer(wrapped.parameters(), torch.optim.AdamW, lr=1e-3)

    def sharded(model: nn.Module) -> tuple[nn.Module, Any]:
        wrapped = FullyShardedDataParallel(model)
        return wrapped, _adam(wrapped)

    def compressed(codec: Any) -> Callable[[], Any]:
        return lambda: CompressionState(ErrorFeedback(codec()))

    ours, pytorch, bits = DistributedDataParallel, TorchDDP, compression_hook
    return {
        "one process": (alone, False),
        "DDP, PyTorch's": (replica(pytorch), False),
        "DDP, ours": (replica(ours), False),
        "ours, all-reduce hook": (replica(ours, all_reduce_hook), False),
        "ours, 8 bits": (replica(ours, bits, compressed(Uniform8Bit)), False),
        "PyTorch's, 8 bits": (replica(pytorch, bits, compressed(Uniform8Bit)), False),
        "ours, 1 bit": (replica(ours, bits, compressed(OneBit)), False),
        "one process, bf16": (alone, True),
        "PyTorch's, bf16": (replica(pytorch), True),
        "ours, bf16": (replica(ours), True),
        "ours, ZeRO-1": (zero, False),
        "ours, fully sharded": (sharded, False),
    }


STEPS = 4


def one_rank(place: Place) -> Iterator[Row]:
    """Yield for each way to train the difference from one process, time, and memory.

    Compression may differ from one process, and bf16 may differ from float32. Every other way must
    not differ.
    """
    from course_lib.sharded_optimizer import model_state_bytes

    with world_of_one(place):
        for model, case in place.models.items():
            right: dict[bool, list[Tensor]] = {}
            for name, (wrap, half) in wraps().items():
                row: Row = {"model": model, "what": name}
                try:
                    if place.device == "cuda":
                        torch.cuda.reset_peak_memory_stats()
                    run = training(place, case, wrap, half)
                    for _ in range(STEPS):
                        run.step()
                    peak = torch.cuda.max_memory_allocated()
                    # A sharded module's own parameters are pieces.
                    full = getattr(run.model, "full_state_dict", None)
                    values = full().values() if full else run.model.parameters()
                    weights = [value.detach().flatten().clone() for value in values]
                    vector = [torch.cat(weights)]
                    apart = float((right.setdefault(half, vector)[0] - vector[0]).abs().max())
                    exact = "bit" not in name or "bf16" in name
                    numbers = sum(tensor.numel() for tensor in weights)
                    row |= {
                        "result": "FAILED" if exact and apart > 1e-3 else "right",
                        "apart from one process": apart,
                        "ms per step": milliseconds(place, run.step),
                        "peak (MiB)": peak / MIB or "-",
                        "states by formula (MiB)": model_state_bytes(numbers, 1, 0, 4, 4, 8) / MIB,
                    }
                    del run, weights, vector
                except Exception as error:  # the other rows are still useful
                    row |= {"result": "FAILED", "error": f"{type(error).__name__}: {error}"}
                yield row


# --- 4: tests ------------------------------------------------------------------------------------

TESTS = ("tests/gpu", "tests/course_lib/compression/test_triton_kernels.py")


def tests(place: Place) -> Iterator[Row]:
    """Run the tests for GPUs; their names and results are in ``tests.log``.

    Only these files run, and no conftest.py is read, because others need packages that may be
    missing on this machine.
    """
    absent = [name for name in ("pytest", "cloudpickle") if not _importable(name)]
    if absent:
        raise NotThere(f"{' and '.join(absent)} must be installed for the tests")
    files = [name for name in TESTS if "triton" not in name or _importable("triton")]
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider"]
    command += ["--noconftest", "-c", os.devnull, "--rootdir", str(ROOT), *place.tests, *files]
    status = subprocess.run(command, cwd=ROOT).returncode
    yield {"files": ", ".join(files), "result": "FAILED" if status else "passed"}


def _importable(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


# --- 5: overlap ----------------------------------------------------------------------------------


def overlap(place: Place) -> Iterator[Row]:
    """Yield how much of the copies that simulate communication backward hides.

    With only one rank, no message is sent. So a hook copies each bucket instead, on the stream that
    DDP uses for communication, for about as long as backward takes.
    """
    with world_of_one(place):
        for model, case in place.models.items():
            yield {"model": model} | _overlap(place, case)


def _overlap(place: Place, case: Model) -> Row:
    from course_lib.ddp import DistributedDataParallel, GradBucket

    times = 1  # how often one call copies each bucket; many calls would keep the host busy
    pieces: dict[int, Tensor] = {}

    def copy(gradients: Tensor) -> None:
        gradients.new_empty(times, gradients.numel()).copy_(gradients.expand(times, -1))

    def copies(state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        pieces[bucket.index()] = bucket.buffer()
        if times:
            copy(bucket.buffer())
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def wrap(module: nn.Module) -> tuple[nn.Module, Any]:
        wrapped = DistributedDataParallel(module, bucket_cap_mb=5)
        wrapped.register_comm_hook(None, copies)
        return wrapped, _adam(wrapped)

    run = training(place, case, wrap)
    device = torch.get_device_module(place.device)
    aside, now = device.Stream(), device.current_stream()

    def only_copies() -> None:
        aside.wait_stream(now)
        with device.stream(aside):
            for gradients in pieces.values():
                copy(gradients)
        now.wait_stream(aside)

    for _ in range(5):  # the first runs take longer, and fill `pieces`
        run.backward()
    once = milliseconds(place, only_copies)
    times = 0
    backward = milliseconds(place, run.backward)
    times = min(100, max(1, round(backward / once)))
    alone = milliseconds(place, only_copies)
    together = milliseconds(place, run.backward)
    return {
        "forward and backward (ms)": backward,
        "copies (ms)": alone,
        "one after the other (ms)": backward + alone,
        "measured together (ms)": together,
        "at best (ms)": max(backward, alone),
        "hidden, of what can be": (backward + alone - together) / min(backward, alone),
    }


# --- 6: grading ----------------------------------------------------------------------------------


def grading(place: Place) -> Iterator[Row]:
    """Grade the submissions of `autograder demo`, and the right ones on real ranks, too."""
    if not _importable("nbgrader"):
        raise NotThere("nbgrader is not installed, and grading needs it")
    on = "gpu" if place.device == "cuda" else "cpu"
    command = [sys.executable, "-m", "autograder", "demo", "--on", on]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    print(process.stdout, process.stderr, flush=True)
    yield {
        "command": f"autograder demo --on {on}",
        "result": "right" if process.returncode == 0 else "FAILED",
        "output": "\n".join((process.stdout + process.stderr).strip().splitlines()[-12:]),
    }
