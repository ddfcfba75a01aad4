"""Collectives by hand: groups, two levels, named mistakes, roots, all to all."""

import pytest
import torch
import torch.distributed as dist

from course_lib import collectives
from course_lib.collectives import all_to_all, place_in, reduce_scatter, ring_all_reduce
from course_lib.ranks import RankError
from course_lib.sharding import shard, shard_bounds
from tests.helpers import collective_cases as cases


def inside_groups(members: list[int]):
    group = dist.new_group(members)
    rank = dist.get_rank()
    results = {}
    if rank not in members:
        with pytest.raises(ValueError, match=f"rank {rank} is not a member"):
            ring_all_reduce(torch.ones(3), group)
        return results
    for name in cases.ALL_REDUCES:
        results[name] = cases.values(rank, 17)
        getattr(collectives, name)(results[name], group)
    for name in [*cases.BROADCASTS, "reduce"]:
        results[name] = cases.values(rank, 17)
        getattr(collectives, name)(results[name], members[-1], group)
    results["reduce_scatter"] = collectives.reduce_scatter(cases.values(rank, 17), group)
    tensor = cases.values(rank, 17)
    results["rotate"] = collectives.rotate(tensor, group)
    assert results["rotate"].data_ptr() != tensor.data_ptr()
    with pytest.raises(ValueError, match="is not a member of this group"):
        collectives.broadcast(torch.ones(1), min({0, 1, 2, 3} - set(members)), group)
    return results


@pytest.mark.parametrize("on", ["simulated", "cpu"])
@pytest.mark.parametrize("members", [[1, 3], [1, 2, 3], [2]])
def test_groups_translate_ranks(ranks_of, on, members):
    replicas = ranks_of(on, 4).run(inside_groups, members)
    for rank in members:
        results = replicas[rank]
        for name in cases.ALL_REDUCES:
            assert torch.equal(results[name], cases.total(members, 17)), name
        for name in cases.BROADCASTS:
            assert torch.equal(results[name], cases.values(members[-1], 17)), name
        start, stop = shard_bounds(17, len(members), members.index(rank))
        assert torch.equal(results["reduce_scatter"], cases.total(members, 17)[start:stop])
        before = members[members.index(rank) - 1]
        assert torch.equal(results["rotate"], cases.values(before, 17))
    assert torch.equal(replicas[members[-1]]["reduce"], cases.total(members, 17))


def on_two_levels(ranks_per_node: int) -> list[torch.Tensor]:
    inside, between = collectives.two_level_groups(ranks_per_node)
    results = []
    for length in cases.LENGTHS:
        tensor = cases.values(dist.get_rank(), length)
        collectives.hierarchical_all_reduce(tensor, inside, between)
        results.append(tensor)
    return results


@pytest.mark.parametrize(
    ("on", "k", "ranks_per_node"),
    [("simulated", 8, 2), ("simulated", 8, 4), ("simulated", 6, 3), ("cpu", 4, 2), ("cpu", 4, 1)],
)
def test_hierarchical_all_reduce(ranks_of, on, k, ranks_per_node):
    for replica in ranks_of(on, k).run(on_two_levels, ranks_per_node):
        for length, result in zip(cases.LENGTHS, replica, strict=True):
            assert torch.equal(result, cases.total(list(range(k)), length))


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (lambda: collectives.broadcast(torch.ones(3), src=9), "rank 9"),
        (lambda: ring_all_reduce(torch.ones(1).expand(3)), r"ValueError: .*clone\(\)"),
        (lambda: ring_all_reduce(torch.ones(3).to_sparse()), "TypeError: .*to_dense"),
    ],
)
def test_mistakes_are_named(ranks_of, program, message):
    with pytest.raises(RankError, match=message):
        ranks_of("simulated", 3).run(program)


def conjugates(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Tensors whose conjugation, or negation, has not been computed yet."""
    rank = dist.get_rank()
    z = torch.complex(cases.values(rank, 7).double(), cases.values(rank + 9, 7).double())
    conjugate, negative = z.clone().conj(), z.clone().conj().imag
    assert conjugate.is_conj() and negative.is_neg()
    getattr(collectives, name)(conjugate)
    getattr(collectives, name)(negative)
    return conjugate.resolve_conj(), negative.resolve_neg()


@pytest.mark.parametrize("name", cases.ALL_REDUCES)
@pytest.mark.parametrize(("on", "k"), [("simulated", 3), ("cpu", 2)])
def test_conjugates_are_summed_as_what_they_mean(ranks_of, on, k, name):
    real, imag = (sum(cases.values(r + offset, 7).double() for r in range(k)) for offset in (0, 9))
    for conjugate, negative in ranks_of(on, k).run(conjugates, name):
        assert torch.equal(conjugate, torch.complex(real, -imag))
        assert torch.equal(negative, -imag)


def test_without_ranks_the_message_says_how_to_get_some():
    with pytest.raises(ValueError, match="no process group"):
        place_in(None)


# --- one to all, and all to one, from every root --------------------------------------------------


def every_root(*names: str) -> list[torch.Tensor]:
    results = []
    for name in names:
        for length in cases.LENGTHS:
            for root in range(dist.get_world_size()):
                tensor = cases.values(dist.get_rank(), length)
                getattr(collectives, name)(tensor, root)
                results.append(tensor)
    return results


@pytest.mark.parametrize(("on", "k"), cases.WORLDS)
def test_broadcast_copies_the_root_s(ranks_of, on, k):
    expected = [cases.values(root, length) for length in cases.LENGTHS for root in range(k)]
    for replica in ranks_of(on, k).run(every_root, *cases.BROADCASTS):
        for result, right in zip(replica, expected * len(cases.BROADCASTS), strict=True):
            assert torch.equal(result, right)


@pytest.mark.parametrize(("on", "k"), cases.WORLDS)
def test_reduce_leaves_the_sum_at_the_root(ranks_of, on, k):
    replicas = ranks_of(on, k).run(every_root, "reduce")
    roots = [(length, root) for length in cases.LENGTHS for root in range(k)]
    for case, (length, root) in enumerate(roots):
        assert torch.equal(replicas[root][case], cases.total(list(range(k)), length))


# --- all to all -----------------------------------------------------------------------------------


TRANSPOSED = [(length, dtype) for dtype in cases.DTYPES for length in cases.LENGTHS]


def transpositions() -> list[torch.Tensor]:
    results = []
    for length, dtype in TRANSPOSED:
        tensor = cases.values(dist.get_rank(), length, dtype)
        results.append(all_to_all(tensor))
        assert torch.equal(tensor, cases.values(dist.get_rank(), length, dtype))  # left alone
        assert torch.equal(results[-1].sum(0).to(dtype), reduce_scatter(tensor))
    return results


@pytest.mark.parametrize(("on", "k"), cases.WORLDS)
def test_row_s_is_what_rank_s_had_for_this_rank(ranks_of, on, k):
    for rank, results in enumerate(ranks_of(on, k).run(transpositions)):
        for (length, dtype), result in zip(TRANSPOSED, results, strict=True):
            expected = [shard(cases.values(r, length, dtype), k, rank) for r in range(k)]
            assert torch.equal(result, torch.stack(expected))
