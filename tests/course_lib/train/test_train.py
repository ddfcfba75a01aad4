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
from tests.helpers import train_runs


@pytest.mark.parametrize("model", train_runs.CONFIGS)
def test_any_number_of_ranks_trains_as_one_machine_with_the_whole_batch(ranks_of, model):
    config = train_runs.CONFIGS[model]
    expected = train_runs.one_machine(config)
    for world_size in (1, 2, 3, 4):
        result = train_runs.same_everywhere(
            ranks_of("simulated", world_size).run(train_runs.in_double, config)
        )
        train_runs.assert_same_training(result, expected, **train_runs.EXACT)


@pytest.mark.parametrize("ddp", ["ours", "torch"])
def test_four_micro_batches_are_one_big_batch_and_average_once(ranks_of, ddp):
    config = replace(train_runs.TEXT, accumulate=4, clip_norm=0.1, ddp=ddp)
    ranks = ranks_of("simulated", 3)
    train_runs.assert_same_training(
        train_runs.same_everywhere(ranks.run(train_runs.in_double, config)),
        train_runs.one_machine(config),
        **train_runs.EXACT,
    )
    accumulating = ranks.trace.calls(0)
    ranks.run(train_runs.in_double, replace(config, accumulate=1))
    assert accumulating == ranks.trace.calls(0)


def test_rank_0_alone_reports_and_only_when_asked(ranks_of, capsys):
    ranks = ranks_of("simulated", 2)
    config = replace(train_runs.TEXT, steps=5, log_every=2)
    losses = ranks.run(train, config)[0].losses
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("[rank 0] ") for line in lines)
    assert "batch 24 = 2 × 1 × 12 (ranks" in lines[0]
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

    data = load_dataset(train_runs.TEXT, train_runs.CPU)
    text = bytes(documentation_text().tolist())
    train_text, test_text = (bytes(part[0].flatten().tolist()) for part in (data.train, data.test))
    assert text.startswith(train_text)
    assert len(test_text) > 0.09 * len(text)
    start = text.index(test_text)  # the end of the text, after all that is trained on
    assert start >= len(train_text)
