"""Under torchrun the progress lines name the rank that was made slow, and its stage."""

import os
import random
import re
import subprocess
import sys

import pytest

from tests.helpers import ROOT

SLOW = """
import os, sys, time, torch
from course_lib.train import loop, trainer
from course_lib.train.__main__ import leave, main

stage, rank = sys.argv.pop(1), sys.argv.pop(1)
batches, mean_loss, update = loop._batches, trainer.mean_loss, torch.optim.AdamW.step

def wait(*_):
    time.sleep(0.05)

def slow_batches(*arguments):
    yield from map(lambda batch: wait() or batch, batches(*arguments))

def slow_forward(*arguments):
    wait()
    return mean_loss(*arguments)

def slow_backward(*arguments):
    loss = mean_loss(*arguments)
    if loss.requires_grad:
        loss.register_hook(wait)
    return loss

def slow_update(*arguments, **options):
    wait()
    return update(*arguments, **options)

if os.environ["RANK"] == rank:
    if stage == "data":
        loop._batches = slow_batches
    elif stage == "update":
        torch.optim.AdamW.step = slow_update
    else:
        trainer.mean_loss = {"forward": slow_forward, "backward": slow_backward}[stage]
leave(main())
"""


@pytest.mark.large
@pytest.mark.parametrize("seed", range(20))
def test_the_late_rank_is_named(tmp_path, seed):
    choose = random.Random(seed)
    k = choose.choice((2, 3, 4))
    rank, stage = choose.randrange(k), choose.choice(("data", "forward", "backward", "update"))
    script = tmp_path / "slow.py"
    script.write_text(SLOW)
    run = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", f"{k}", script, stage, f"{rank}", "--batch-size", "48"),
            *("--steps", "15", "--log-every", "5", "--ddp", choose.choice(("ours", "torch"))),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    lines = re.findall(r"exposed communication \d+%, last: rank (\d) in (\w+), by", run.stdout)
    assert lines == 3 * [(f"{rank}", stage)], run.stdout
