"""Training: the same numbers on any number of ranks, through restarts, and with PyTorch's DDP.

The oracle is a plain loop on one process with the whole batch. In float64 it must be met to 1e-9,
which leaves room for sums in another order and for nothing else.
"""

from dataclasses import replace

import pytest
import torch

from course_lib.train import TrainResult, train
from tests.helpers.train_runs import (
    CONFIGS,
    EXACT,
    TEXT,
    assert_same_training,
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
    theirs = same_everywhere(ranks.run(train, replace(TEXT, ddp="torch")))
    if world_size != 3:  # dividing by 2 or 4 rounds nothing, before the sum or after it
        assert ours.digest() == theirs.digest()
        assert ours.losses == theirs.losses
    assert_same_training(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.large
def test_a_transformer_learns_and_the_caller_s_random_numbers_stay(ranks_of):
    config = replace(TEXT, width=32, context=32, lr=3e-3, steps=60, dropout=0.1)

    def run() -> tuple[TrainResult, bool]:
        before = torch.random.get_rng_state()
        return train(config), torch.equal(before, torch.random.get_rng_state())

    ((result, untouched),) = ranks_of("simulated", 1).run(run)
    assert untouched
    assert result.losses[0] == pytest.approx(5.545, abs=0.1)  # ln 256: it knows nothing
    assert sum(result.losses[-10:]) / 10 < 3.2
    assert result.test_loss < 3.3  # on text it has not seen
    assert result.test_accuracy > 0.2  # one byte in six or so is a space
