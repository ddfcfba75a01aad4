"""Training: the same numbers on any number of ranks, through restarts, and with PyTorch's DDP.

The oracle is a plain loop on one process with the whole batch. In float64 it must be met to 1e-9,
which leaves room for sums in another order and for nothing else.
"""

import re
from dataclasses import replace

import pytest
import torch

from course_lib.train import train
from course_lib.train.datasets import documentation_text, load_dataset, pieces
from tests.helpers.train_runs import (
    CONFIGS,
    CPU,
    EXACT,
    TEXT,
    assert_same_training,
    bits,
    in_double,
    one_machine,
    same_everywhere,
)


@pytest.mark.parametrize("model", CONFIGS)
def test_any_number_of_ranks_trains_as_one_machine_with_the_whole_batch(ranks_of, model):
    config = CONFIGS[model]
    expected = one_machine(config)
    for world_size in (1, 2, 3, 4):
        result = same_everywhere(ranks_of("simulated", world_size).run(in_double, config))
        assert_same_training(result, expected, **EXACT)


@pytest.mark.parametrize("ddp", ["ours", "torch"])
def test_four_micro_batches_are_one_big_batch_and_average_once(ranks_of, ddp):
    config = replace(TEXT, accumulate=4, clip_norm=0.5, ddp=ddp)
    ranks = ranks_of("simulated", 3)
    assert_same_training(
        same_everywhere(ranks.run(in_double, config)), one_machine(config), **EXACT
    )
    accumulating = ranks.trace.calls(0)
    ranks.run(in_double, replace(config, accumulate=1))
    assert accumulating == ranks.trace.calls(0)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ours_and_pytorch_s_ddp_have_the_same_losses(ranks_of, world_size):
    ranks = ranks_of("simulated", world_size)
    ours = same_everywhere(ranks.run(train, TEXT))
    torch_ddp = same_everywhere(ranks.run(train, replace(TEXT, ddp="torch")))
    if world_size != 3:  # dividing by 2 or 4 rounds nothing, before the sum or after it
        assert bits(ours) == bits(torch_ddp)
        assert ours.losses == torch_ddp.losses
    assert_same_training(ours, torch_ddp, rtol=1e-4, atol=1e-5)


def test_rank_0_alone_reports_and_only_when_asked(ranks_of, capsys):
    ranks = ranks_of("simulated", 2)
    config = replace(TEXT, steps=5, log_every=2)
    losses = ranks.run(train, config)[0].losses
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("[rank 0] ") for line in lines)
    assert "2 ranks × 12 examples" in lines[0]
    reports = [
        re.findall(r"step (\d)/5 .* loss ([\d.]+) .* tokens/s", line) for line in lines[1:-1]
    ]
    assert reports == [[(str(step), f"{losses[step - 1]:.4f}")] for step in (1, 2, 4, 5)]
    assert re.search(r"5 steps in .* test loss [\d.]+, [\d.]+ % right", lines[-1])
    ranks.run(train, replace(config, log_every=0))
    assert capsys.readouterr().out == ""


def test_targets_are_the_bytes_that_follow_and_no_test_text_is_trained_on():
    inputs, targets = pieces(torch.arange(100, dtype=torch.uint8), 7)
    assert inputs.shape == targets.shape == (14, 7)
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(inputs.flatten(), torch.arange(98, dtype=torch.uint8))

    data = load_dataset(TEXT, CPU)
    text = bytes(documentation_text().tolist())
    train_text, test_text = (bytes(part[0].flatten().tolist()) for part in (data.train, data.test))
    assert text.startswith(train_text)
    assert len(test_text) > 0.09 * len(text)
    start = text.index(test_text)  # the end of the text, after all that is trained on
    assert start >= len(train_text)
