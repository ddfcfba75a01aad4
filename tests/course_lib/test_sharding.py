"""Shards partition their data; the sampler equals PyTorch's, index for index."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data.distributed import DistributedSampler

from course_lib.sharding import ShardedSampler, shard, shard_bounds

lengths, world_sizes = st.integers(0, 300), st.integers(1, 20)


# --- shard_bounds and shard -----------------------------------------------------------------------


@given(length=lengths, world_size=world_sizes)
def test_shards_equal_tensor_split(length, world_size):
    data = torch.arange(length)
    pieces = torch.tensor_split(data, world_size)
    for rank, piece in enumerate(pieces):
        assert torch.equal(shard(data, world_size, rank), piece)


@pytest.mark.parametrize("function", [shard_bounds, lambda n, k, r: shard(range(n), k, r)])
@pytest.mark.parametrize(("length", "world_size", "rank"), [(5, 0, 0), (5, 2, 2), (5, 2, -1)])
def test_impossible_shards_are_refused(function, length, world_size, rank):
    with pytest.raises(ValueError, match="world_size"):
        function(length, world_size, rank)


# --- ShardedSampler -----------------------------------------------------------------------------


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 7, 10, 100, 101])
def test_sampler_equals_torch_index_for_index(length, world_size, shuffle, drop_last):
    for seed in (0, 1, 12345):
        for rank in range(world_size):
            arguments = (range(length), world_size, rank, shuffle, seed, drop_last)
            ours, torch_sampler = ShardedSampler(*arguments), DistributedSampler(*arguments)
            assert len(ours) == len(torch_sampler)
            for epoch in (None, 0, 1, 7):
                if epoch is not None:
                    ours.set_epoch(epoch)
                    torch_sampler.set_epoch(epoch)
                indices = list(ours)
                assert indices == list(torch_sampler)
                assert all(type(index) is int for index in indices)
