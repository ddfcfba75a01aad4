"""PyTorch's own tests of DDP (`pytorch_source`), with our class or with PyTorch's, on plain gloo.

    python -m tests.helpers.pytorch_ddp_tests                      # our DDP
    python -m tests.helpers.pytorch_ddp_tests --ddp pytorch        # what can pass on a CPU at all

A line per test: passed, failed or skipped, and why. Names (or parts of them) choose some.
"""

import argparse
import contextlib
import io
import os
import tempfile
import unittest
import warnings
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from course_lib.ddp import DistributedDataParallel
from course_lib.ranks import Ranks, RanksError
from tests.helpers import pytorch_source

# The time limit of a test. A few wait for a time-out of their own.
SECONDS = 180
CLASSES = {"ours": DistributedDataParallel, "pytorch": TorchDDP}


def run_one(ddp: str, name: str, directory: str) -> str:
    """Run a test on this rank; return "passed", "skipped", or else raise what it raised."""
    os.environ |= {"TEMP_DIR": directory, "WORLD_SIZE": str(dist.get_world_size())}
    warnings.simplefilter("ignore")
    module = pytorch_source.load(CLASSES[ddp])
    if ddp == "ours":  # which keeps no log
        module.verify_ddp_error_logged = lambda *_: None

    class Case(module.TestDistBackend, module.DistributedTest._DistTestBase):
        def _barrier(self, *_, **__):
            dist.barrier()  # PyTorch's counts processes, in files

    case = Case(name)
    case.rank, case.file_name = dist.get_rank(), f"{directory}/store"
    torch.manual_seed(1234)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            getattr(case, name)()
        except unittest.SkipTest as skip:
            return f"skipped: {skip}"
        except SystemExit as leave:
            codes = {code.exit_code: code.message for code in module.TEST_SKIPS.values()}
            if leave.code not in codes:
                raise
            return f"skipped: {codes[leave.code]}"
    return "passed"


def verdicts(names: list[str], ddp: str = "ours", world_size: int = 2):
    """Run the tests; yield name and verdict, which begins with passed, failed or skipped.

    `ddp` is a name of `CLASSES`.
    """
    ranks = Ranks(world_size, on="cpu", timeout=SECONDS, metered=False)
    for name in names:
        with tempfile.TemporaryDirectory() as directory:
            for inner in ("barrier", "test_dir", "init_dir"):
                (Path(directory) / inner).mkdir()
            try:
                yield name, ranks.run(run_one, ddp, name, directory)[0]
            except RanksError as error:
                yield name, f"failed: {' '.join(str(error).split())[:300]}"


def main() -> None:
    """Run what the command line chooses."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of names; default: all")
    parser.add_argument("--ddp", choices=list(CLASSES), default="ours")
    parser.add_argument("-k", "--world-size", type=int, default=2)
    args = parser.parse_args()
    names = pytorch_source.test_names()
    names = [n for n in names if not args.names or any(part in n for part in args.names)]
    counts: Counter[str] = Counter()
    for name, verdict in verdicts(names, args.ddp, args.world_size):
        counts[verdict.partition(":")[0]] += 1
        print(f"{verdict[:7]:8}{name}{verdict[7:]}", flush=True)
    print(", ".join(f"{number} {word}" for word, number in counts.items()))


if __name__ == "__main__":
    main()
