"""Training: the same numbers on any number of ranks, through restarts, and with PyTorch's DDP.

The oracle is a plain loop on one process with the whole batch. In float64 it must be met to 1e-9,
which leaves room for sums in another order and for nothing else.
"""

from dataclasses import replace

import pytest

from course_lib.train import train
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
    torch_ddp = same_everywhere(ranks.run(train, replace(TEXT, ddp="torch")))
    if world_size != 3:  # dividing by 2 or 4 rounds nothing, before the sum or after it
        assert ours.digest() == torch_ddp.digest()
        assert ours.losses == torch_ddp.losses
    assert_same_training(ours, torch_ddp, rtol=1e-4, atol=1e-5)
