"""A test of PyTorch's (`pytorch_source`) on K processes, with plain gloo."""

import contextlib
import multiprocessing
import os
import tempfile
import time
import traceback
import unittest
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from course_lib.ddp import DistributedDataParallel
from tests.helpers import pytorch_source
from tests.helpers.pytorch_private_names import WithPrivateNames

WORLD_SIZE = 2
SECONDS = 180
"""The time limit of a test. A few wait for a time-out of their own."""
CLASSES = {"ours": WithPrivateNames, "ours-bare": DistributedDataParallel, "pytorch": TorchDDP}


def run_one(ddp: str, name: str, directory: str) -> str:
    """Run a test on this rank; return "passed", "skipped", or else raise what it raised."""
    os.environ["TEMP_DIR"] = directory
    module = pytorch_source.load(CLASSES[ddp])
    if ddp == "ours":  # which keeps no log
        module.verify_ddp_error_logged = lambda *_: None

    class Case(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[misc]
        def _barrier(self, *_: Any, **__: Any) -> None:
            # Theirs counts processes, in files; ranks may be threads.
            dist.barrier()

    case = Case(name)
    case.rank, case.file_name = dist.get_rank(), f"{directory}/store"
    torch.manual_seed(1234)
    try:
        getattr(case, name)()
    except unittest.SkipTest as skip:
        return f"skipped: {skip}"
    except SystemExit as leave:
        codes = {code.exit_code: code.message for code in module.TEST_SKIPS.values()}
        if leave.code in codes:
            return f"skipped: {codes[leave.code]}"
        raise
    return "passed"


def reason(error: BaseException) -> str:
    """Return an exception in one line, with the last line of PyTorch's tests that led to it."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [
        frame.lineno for frame in frames if frame.filename == str(pytorch_source.source_path())
    ]
    where = f" (line {inside[-1]})" if inside else ""
    text = " ".join(str(error).partition("To execute this test")[0].split())
    return f"{type(error).__name__}: {text[:300]}{where}"


def on_gloo(ddp: str, name: str) -> str:
    """Run a test on K processes of their own, with gloo; return the verdict."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    with _directory() as directory:
        ranks = [
            context.Process(target=_gloo_rank, args=(rank, ddp, name, directory, results))
            for rank in range(WORLD_SIZE)
        ]
        for process in ranks:
            process.start()
        return _first_verdict(ranks, results)


def _first_verdict(ranks: list[Any], results: Any) -> str:
    verdicts: list[str] = []
    deadline = time.monotonic() + SECONDS
    while len(verdicts) < len(ranks) and time.monotonic() < deadline:
        if not results.empty():
            verdicts.append(results.get())
            if verdicts[-1].startswith("failed"):
                deadline = min(deadline, time.monotonic() + 1)
        elif not any(process.is_alive() for process in ranks):
            break
        else:
            time.sleep(0.005)
    for process in ranks:
        if len(verdicts) < len(ranks):
            process.kill()
        process.join()
    failures = sorted(verdict for verdict in verdicts if verdict.startswith("failed"))
    if failures:
        # A connection that was closed is what the others say when one of them left.
        return min(failures, key=lambda text: "onnection" in text or "imed out" in text)
    if len(verdicts) < len(ranks):
        return f"failed: no end after {SECONDS} s, or a rank died"
    return verdicts[0]


def _gloo_rank(rank: int, ddp: str, name: str, directory: str, results: Any) -> None:
    _silence()
    store = dist.FileStore(f"{directory}/store", WORLD_SIZE)
    wait = timedelta(seconds=45)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE, timeout=wait)
    try:
        verdict = run_one(ddp, name, directory)
        dist.barrier()
    except BaseException as error:
        verdict = f"failed: {reason(error)}"
    results.put(verdict)
    os._exit(0)


def _silence() -> None:
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    warnings.simplefilter("ignore")


@contextlib.contextmanager
def _directory() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as directory:
        for inner in ("barrier", "test_dir", "init_dir"):
            (Path(directory) / inner).mkdir()
        yield directory


def verdicts(names: list[str], ddp: str) -> Iterator[tuple[str, str]]:
    """Run the tests; yield name and verdict, which begins with passed, failed or skipped.

    `ddp` is a name of `CLASSES`.
    """
    os.environ["WORLD_SIZE"] = str(WORLD_SIZE)
    pytorch_source.load(CLASSES[ddp])  # before the forks, once for all
    for name in names:
        yield name, on_gloo(ddp, name)
