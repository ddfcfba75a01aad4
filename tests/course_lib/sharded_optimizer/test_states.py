"""A saved state is that of one process: it goes on with other ranks, or without any."""

from typing import Any

import pytest
from torch import Tensor

from course_lib.sharded_optimizer import ShardedOptimizer
from tests.helpers.zero_scenarios import (
    OPTIMIZERS,
    Awkward,
    assert_equal,
    batches,
    groups_of,
    one_process,
    run_steps,
    weights,
)


def save_halfway(name: str, mode: Any) -> Any:
    net = Awkward()
    cls, options = OPTIMIZERS[name]
    optimizer = ShardedOptimizer(groups_of(net, True), cls, gradients=mode, **options)
    run_steps(net, optimizer, batches()[:3], mode == "averaged")
    return {k: v.clone() for k, v in net.state_dict().items()}, optimizer.state_dict()


def resume(name: str, mode: Any, net_state: Any, state: Any) -> list[Tensor]:
    net = Awkward(seed=5)
    net.load_state_dict(net_state)
    cls, options = OPTIMIZERS[name]
    optimizer = ShardedOptimizer(groups_of(net, True), cls, gradients=mode, **options)
    optimizer.load_state_dict(state)
    run_steps(net, optimizer, batches()[3:], mode == "averaged")
    return weights(net)


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 3), (1, 4)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_goes_on_with_another_number_of_ranks(ranks_of, name, before, after):
    saved = ranks_of("simulated", before).run(save_halfway, name, "averaged")[0]
    for replica in ranks_of("simulated", after).run(resume, name, "sharded", *saved):
        assert_equal(replica, weights(one_process(name, groups=True)[0]))
