"""Under torchrun the progress lines name the rank that was made slow, and its stage."""

import random
import re
from dataclasses import replace

import pytest
import torch

from course_lib.ranks import Ranks
from course_lib.train.datasets import load_dataset
from course_lib.train.trainer import Trainer
from tests.helpers.torchrun import torchrun
from tests.helpers.train_runs import CPU, DIGITS

SLOW = """
import os, sys, time, torch
from course_lib.train import loop, trainer
from course_lib.train.__main__ import leave, main

stage, rank = sys.argv.pop(1), sys.argv.pop(1)

def wait(*_):
    time.sleep(0.05)

def late(function):
    return lambda *arguments, **options: wait() or function(*arguments, **options)

def slow_batches(*arguments, batches=loop._batches):
    return map(late(lambda batch: batch), batches(*arguments))

def slow_backward(*arguments, mean_loss=trainer.mean_loss):
    loss = mean_loss(*arguments)
    if loss.requires_grad:
        loss.register_hook(wait)
    return loss

if os.environ["RANK"] == rank:
    if stage == "data":
        loop._batches = slow_batches
    elif stage == "forward":
        trainer.mean_loss = late(trainer.mean_loss)
    elif stage == "backward":
        trainer.mean_loss = slow_backward
    else:
        torch.optim.AdamW.step = late(torch.optim.AdamW.step)
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
    options = [stage, f"{rank}", "--batch-size", "48", "--steps", "15", "--log-every", "5"]
    printed = torchrun(tmp_path, k, script, *options, "--ddp", choose.choice(("ours", "torch")))
    lines = re.findall(r"exposed communication \d+%, last: rank (\d) in (\w+), by", printed)
    assert lines == 3 * [(f"{rank}", stage)], printed


@pytest.mark.parametrize(("log_every", "is_noted"), [(2, True), (0, False)])
def test_stages_are_noted_only_for_a_run_that_reports(log_every, is_noted):
    def steps():
        config = replace(DIGITS, log_every=log_every)
        trainer = Trainer(config, load_dataset(config, CPU), CPU)
        for _ in range(3):
            trainer.take_step(torch.arange(4)[None])
        return trainer.stages.report()

    assert ("exposed communication" in Ranks(1, on="simulated").run(steps)[0]) == is_noted
