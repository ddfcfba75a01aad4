"""PyTorch's own tests of DDP with our class, and those of collectives on our ranks.

    python -m tests.helpers.pytorch_ddp_tests                      # our DDP, on plain gloo
    python -m tests.helpers.pytorch_ddp_tests --on simulated       # on simulated ranks
    python -m tests.helpers.pytorch_ddp_tests --ddp pytorch        # what can pass on a CPU at all
    python -m tests.helpers.pytorch_ddp_tests --collectives --on cpu

A line per test: passed, failed or skipped, and why. Names (or parts of them) choose some.

Plain gloo has nothing of ours but the class: K processes per test, which fork from this one.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import unittest
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from course_lib.ddp import DistributedDataParallel
from course_lib.ranks import Ranks, RanksError
from tests.helpers import pytorch_source
from tests.helpers.pytorch_private_names import WithPrivateNames

SECONDS = 40
"""What a test may take. A few wait for a time-out of their own."""
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
    module.set_rng_seed(0) if hasattr(module, "set_rng_seed") else None
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


# --- plain gloo -----------------------------------------------------------------------------------


def on_gloo(ddp: str, name: str, world_size: int) -> str:
    """Run a test on K processes of their own, with gloo; return the verdict."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    with _directory() as directory:
        ranks = [
            context.Process(
                target=_gloo_rank, args=(rank, world_size, ddp, name, directory, results)
            )
            for rank in range(world_size)
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


def _gloo_rank(
    rank: int, world_size: int, ddp: str, name: str, directory: str, results: Any
) -> None:
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    warnings.simplefilter("ignore")
    store = dist.FileStore(f"{directory}/store", world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=15)
    )
    try:
        verdict = run_one(ddp, name, directory)
        dist.barrier()
    except BaseException as error:
        verdict = f"failed: {reason(error)}"
    results.put(verdict)
    os._exit(0)


@contextlib.contextmanager
def _directory() -> Any:
    with tempfile.TemporaryDirectory() as directory:
        for inner in ("barrier", "test_dir", "init_dir"):
            (Path(directory) / inner).mkdir()
        yield directory


# --- our ranks ------------------------------------------------------------------------------------


def on_ranks(ranks: Ranks, ddp: str, name: str) -> str:
    """Run a test on our ranks; return the verdict."""
    with _directory() as directory, open(os.devnull, "w") as nowhere:
        try:
            with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
                return str(ranks.run(run_one, ddp, name, directory)[0])
        except RanksError as error:
            return f"failed: {reason(error)}"


def verdicts(
    names: list[str], ddp: str = "ours", on: str = "gloo", world_size: int = 2, show: bool = False
) -> dict[str, str]:
    """Run the tests; return name → verdict, which begins with passed, failed or skipped."""
    os.environ["WORLD_SIZE"] = str(world_size)
    pytorch_source.load(CLASSES[ddp])
    found = {}
    ranks = None if on == "gloo" else Ranks(world_size, on=on, timeout=SECONDS)  # type: ignore[arg-type]
    try:
        for name in names:
            found[name] = (
                on_gloo(ddp, name, world_size) if ranks is None else on_ranks(ranks, ddp, name)
            )
            if show:
                print(f"{found[name][:7]:8}{name}{found[name][7:]}", flush=True)
    finally:
        if ranks is not None:
            ranks.close()
    return found


def main() -> None:
    """Run what the command line chooses."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of names; default: all")
    parser.add_argument("--on", choices=["gloo", "cpu", "simulated"], default="gloo")
    parser.add_argument("--ddp", choices=list(CLASSES), default="ours")
    parser.add_argument("--collectives", action="store_true", help="the tests that are not of DDP")
    parser.add_argument("-k", "--world-size", type=int, default=2)
    parser.add_argument("--json", help="a file for the verdicts")
    args = parser.parse_args()
    names = pytorch_source.test_names()[args.collectives]
    names = [n for n in names if not args.names or any(part in n for part in args.names)]
    warnings.simplefilter("ignore")
    found = verdicts(names, args.ddp, args.on, args.world_size, show=True)
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1))
    count = {
        w: sum(v.startswith(w) for v in found.values()) for w in ("passed", "failed", "skipped")
    }
    print(", ".join(f"{number} {word}" for word, number in count.items()))


if __name__ == "__main__":
    main()
