"""PyTorch's own tests of DDP (`pytorch_source`), with our class, on plain gloo."""

import contextlib
import io
import os
import tempfile
import unittest
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from course_lib.ddp import DistributedDataParallel
from course_lib.ranks import Ranks, RanksError
from tests.helpers import pytorch_source

# The time limit of a test. A few wait for a time-out of their own.
SECONDS = 180


def run_one(name: str, directory: str) -> str:
    """Run a test on this rank; return "passed", "skipped", or else raise what it raised."""
    os.environ |= {"TEMP_DIR": directory, "WORLD_SIZE": str(dist.get_world_size())}
    warnings.simplefilter("ignore")
    module = pytorch_source.load(DistributedDataParallel)
    module.verify_ddp_error_logged = lambda *_: None  # our class keeps no log

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


def verdicts(names: list[str]):
    """Run the tests; yield name and verdict, which begins with passed, failed or skipped."""
    ranks = Ranks(2, on="cpu", timeout=SECONDS, metered=False)
    for name in names:
        with tempfile.TemporaryDirectory() as directory:
            for inner in ("barrier", "test_dir", "init_dir"):
                (Path(directory) / inner).mkdir()
            try:
                yield name, ranks.run(run_one, name, directory)[0]
            except RanksError as error:
                yield name, f"failed: {' '.join(str(error).split())[:300]}"
