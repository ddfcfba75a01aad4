"""Every collective by hand against the sum, or the copy, that it is to compute.

Inputs are small whole numbers, so that all orders of addition give the same bits in every dtype
and results can be compared exactly; another test checks with random numbers that the ranks agree
bit for bit. The same function runs on simulated ranks and on gloo's.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib import collectives
from course_lib.collectives import place_in
from course_lib.ranks import Ranks
from course_lib.ranks.costs.network import Network
from course_lib.sharding import shard_bounds
from tests.helpers.rank_values import values

ALL_REDUCES = [
    "central_all_reduce",
    "tree_all_reduce",
    "simple_ring_all_reduce",
    "pipelined_ring_all_reduce",
    "halving_doubling_all_reduce",
]
BROADCASTS = ["naive_broadcast", "tree_broadcast", "pipelined_broadcast", "broadcast"]
WORLDS = [("simulated", k) for k in (1, 2, 3, 5, 8)] + [("cpu", k) for k in (2, 3, 4)]
LENGTHS = [0, 1, 3, 5, 64, 101]
DTYPES = [torch.float64, torch.bfloat16, torch.int64, torch.complex64]


@pytest.fixture(scope="module")
def network() -> Network:
    return Network(latency=1e-3, bandwidth=1e8)


def total(members: list[int], length: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return sum((values(r, length, dtype) for r in members), torch.zeros(length, dtype=dtype))


# --- all-reduce -----------------------------------------------------------------------------------


CASES = [(n, torch.float32) for n in LENGTHS] + [(37, dtype) for dtype in DTYPES]


def all_lengths_and_dtypes() -> list[torch.Tensor]:
    results = []
    for name in ALL_REDUCES:
        for length, dtype in CASES:
            tensor = values(dist.get_rank(), length, dtype)
            address = tensor.data_ptr()
            assert getattr(collectives, name)(tensor) is None
            assert tensor.data_ptr() == address
            results.append(tensor)
    return results


@pytest.mark.parametrize(("on", "k"), WORLDS)
def test_all_reduce_gives_everyone_the_sum(ranks_of, on, k):
    expected = [total(list(range(k)), length, dtype) for length, dtype in CASES]
    named = [(name, *case) for name in ALL_REDUCES for case in zip(CASES, expected, strict=True)]
    for replica in ranks_of(on, k).run(all_lengths_and_dtypes):
        for result, (name, case, wanted) in zip(replica, named, strict=True):
            assert torch.equal(result, wanted), (name, case)


@settings(max_examples=40, deadline=None)
@given(
    k=st.integers(1, 9),
    length=st.integers(0, 200),
    segments=st.integers(1, 6),
    name=st.sampled_from([*ALL_REDUCES, "segmented"]),
)
def test_all_reduce_of_any_length_on_any_number_of_ranks(k, length, segments, name):
    def run() -> torch.Tensor:
        tensor = values(dist.get_rank(), length)
        if name == "segmented":
            collectives.ring_all_reduce(tensor, segments=segments)
        else:
            getattr(collectives, name)(tensor)
        return tensor

    for result in Ranks(k, on="simulated").run(run):
        assert torch.equal(result, total(list(range(k)), length))


def awkward_layouts() -> list[list[torch.Tensor]]:
    return [awkward_layout(name) for name in ALL_REDUCES]


def awkward_layout(name: str) -> list[torch.Tensor]:
    all_reduce = getattr(collectives, name)
    rank = dist.get_rank()
    matrix = values(rank, 35).view(5, 7)
    strided = values(rank, 40)
    tensors = [matrix.t(), strided[::3], values(rank, 1)[0], values(rank, 60).view(3, 4, 5)]
    tensors[-1] = tensors[-1].permute(2, 0, 1)
    weight = torch.nn.Parameter(values(rank, 12).view(3, 4))
    for tensor in [*tensors, weight]:
        all_reduce(tensor)
    assert torch.equal(strided[1::3], values(rank, 40)[1::3])  # what lies between is not ours
    return [*tensors, weight.detach()]


@pytest.mark.parametrize(("on", "k"), [("simulated", 3), ("cpu", 2)])
def test_all_reduce_of_tensors_not_in_one_piece(ranks_of, on, k):
    everyone = list(range(k))
    expected = [
        total(everyone, 35).view(5, 7).t(),
        total(everyone, 40)[::3],
        total(everyone, 1)[0],
        total(everyone, 60).view(3, 4, 5).permute(2, 0, 1),
        total(everyone, 12).view(3, 4),
    ]
    for replica in ranks_of(on, k).run(awkward_layouts):
        for name, results in zip(ALL_REDUCES, replica, strict=True):
            for result, wanted in zip(results, expected, strict=True):
                assert torch.equal(result, wanted), name


def random_numbers() -> list[torch.Tensor]:
    results = []
    for name in ALL_REDUCES:
        tensor = torch.randn(1001, generator=torch.Generator().manual_seed(dist.get_rank()))
        getattr(collectives, name)(tensor)
        results.append(tensor)
    return results


@pytest.mark.parametrize(("on", "k"), [("simulated", 5), ("simulated", 8), ("cpu", 3), ("cpu", 4)])
def test_ranks_agree_bit_for_bit(ranks_of, on, k):
    replicas = ranks_of(on, k).run(random_numbers)
    generators = [torch.Generator().manual_seed(r) for r in range(k)]
    exact = sum(torch.randn(1001, generator=g).double() for g in generators)
    for name, first, *others in zip(ALL_REDUCES, *replicas, strict=True):
        torch.testing.assert_close(first.double(), exact, rtol=1e-5, atol=1e-5)
        assert all(torch.equal(first, other) for other in others), name


def random_numbers_in_segments(segments: int) -> torch.Tensor:
    tensor = torch.randn(1001, generator=torch.Generator().manual_seed(dist.get_rank()))
    collectives.ring_all_reduce(tensor, segments=segments)
    return tensor


def test_segments_do_not_change_the_bits(ranks_of):
    ranks = ranks_of("cpu", 3)
    whole = ranks.run(random_numbers_in_segments, 1)
    for segments in (2, 3, 8):
        assert torch.equal(ranks.run(random_numbers_in_segments, segments)[0], whole[0])


# --- what is sent ---------------------------------------------------------------------------------


def one_all_reduce(name: str, length: int) -> None:
    getattr(collectives, name)(torch.ones(length))


@pytest.mark.parametrize(("on", "k"), [w for w in WORLDS if w[1] > 1])
@pytest.mark.parametrize("name", ["simple_ring_all_reduce", "pipelined_ring_all_reduce"])
@pytest.mark.parametrize("length", [840, 101])
def test_a_ring_sends_the_least_that_is_possible(ranks_of, on, k, name, length):
    ranks = ranks_of(on, k)
    ranks.run(one_all_reduce, name, length)
    for rank in range(k):
        own, next_one = (
            stop - start
            for start, stop in (shard_bounds(length, k, r % k) for r in (rank, rank + 1))
        )
        assert ranks.trace.bytes_sent(rank) == 4 * (2 * length - own - next_one)
        assert ranks.trace.peers(rank) == {(rank + 1) % k, (rank - 1) % k}
        assert set(ranks.trace.calls(rank)) == {"send", "recv"}
        if length % k == 0:
            assert ranks.trace.bytes_sent(rank) == 2 * (k - 1) * 4 * length // k
        if name == "simple_ring_all_reduce":
            assert ranks.trace.calls(rank)["send"] == 2 * (k - 1)


@pytest.mark.parametrize("k", [2, 3, 4, 8])
def test_bytes_of_the_other_algorithms(ranks_of, k):
    ranks, n = ranks_of("simulated", k), 4 * 840
    ranks.run(one_all_reduce, "central_all_reduce", 840)
    assert [ranks.trace.bytes_sent(r) for r in range(k)] == [(k - 1) * n] + [n] * (k - 1)
    ranks.run(one_all_reduce, "tree_all_reduce", 840)
    assert max(ranks.trace.bytes_sent(r) for r in range(k)) == (k - 1).bit_length() * n
    ranks.run(one_all_reduce, "halving_doubling_all_reduce", 840)
    sent = [ranks.trace.bytes_sent(r) for r in range(k)]
    if k != 3:
        assert sent == [2 * (k - 1) * n // k] * k
    else:  # two of them halve and double, the third one gives and takes
        assert sent == [n // 2 + n // 2 + n, n // 2 + n // 2, n]


# --- one to all, all to one -----------------------------------------------------------------------


def every_root(*names: str) -> list[torch.Tensor]:
    results = []
    for name in names:
        for length in LENGTHS:
            for root in range(dist.get_world_size()):
                tensor = values(dist.get_rank(), length)
                getattr(collectives, name)(tensor, root)
                results.append(tensor)
    return results


@pytest.mark.parametrize(("on", "k"), WORLDS)
def test_broadcast_copies_the_root_s(ranks_of, on, k):
    expected = [values(root, length) for length in LENGTHS for root in range(k)]
    for replica in ranks_of(on, k).run(every_root, *BROADCASTS):
        for result, wanted in zip(replica, expected * len(BROADCASTS), strict=True):
            assert torch.equal(result, wanted)


@pytest.mark.parametrize(("on", "k"), WORLDS)
def test_reduce_leaves_the_sum_at_the_root(ranks_of, on, k):
    replicas = ranks_of(on, k).run(every_root, "reduce")
    cases = [(length, root) for length in LENGTHS for root in range(k)]
    for case, (length, root) in enumerate(cases):
        assert torch.equal(replicas[root][case], total(list(range(k)), length))


def pieces_around() -> tuple[list[torch.Tensor], list[Any]]:
    rank, k = dist.get_rank(), dist.get_world_size()
    received, gathered = [], []
    for length in LENGTHS:
        for root in range(k):
            mine = torch.empty(length)
            pieces = [values(100 * root + r, length) for r in range(k)] if rank == root else None
            collectives.scatter(mine, pieces, root)
            received.append(mine)
            gathered.append(collectives.gather(values(rank, length), root))
    return received, gathered


@pytest.mark.parametrize(("on", "k"), WORLDS)
def test_scatter_and_gather_move_the_pieces(ranks_of, on, k):
    replicas = ranks_of(on, k).run(pieces_around)
    for rank, (received, gathered) in enumerate(replicas):
        cases = [(length, root) for length in LENGTHS for root in range(k)]
        for case, (length, root) in enumerate(cases):
            assert torch.equal(received[case], values(100 * root + rank, length))
            if rank != root:
                assert gathered[case] is None
                continue
            for r, part in enumerate(gathered[case]):
                assert torch.equal(part, values(r, length))


def halves_of_the_ring() -> list[tuple[torch.Tensor, torch.Tensor]]:
    rank, k = dist.get_rank(), dist.get_world_size()
    results = []
    for length in LENGTHS:
        whole = values(rank, length)
        chunk = collectives.reduce_scatter(whole)
        assert chunk.numel() == 0 or chunk.data_ptr() == whole[slice(*_mine(length))].data_ptr()
        start, stop = shard_bounds(length, k, rank)
        parts = torch.full((length,), float("nan"))
        parts[start:stop] = values(rank, length)[start:stop]
        collectives.all_gather(parts)
        results.append((chunk.clone(), parts))
    return results


def _mine(length: int) -> tuple[int, int]:
    return shard_bounds(length, dist.get_world_size(), dist.get_rank())


@pytest.mark.parametrize(("on", "k"), WORLDS)
def test_reduce_scatter_and_all_gather(ranks_of, on, k):
    for rank, results in enumerate(ranks_of(on, k).run(halves_of_the_ring)):
        for length, (chunk, gathered) in zip(LENGTHS, results, strict=True):
            start, stop = shard_bounds(length, k, rank)
            assert torch.equal(chunk, total(list(range(k)), length)[start:stop])
            expected = [values(r, length)[slice(*shard_bounds(length, k, r))] for r in range(k)]
            assert torch.equal(gathered, torch.cat(expected))


# --- groups ---------------------------------------------------------------------------------------


def inside_groups(members: list[int]) -> dict[str, Any] | str:
    group = dist.new_group(members)
    rank = dist.get_rank()
    if rank not in members:
        try:
            collectives.ring_all_reduce(torch.ones(3), group)
        except ValueError as error:
            return str(error)
        return "no error"
    results: dict[str, Any] = {}
    for name in ALL_REDUCES:
        results[name] = values(rank, 17)
        getattr(collectives, name)(results[name], group)
    for name in [*BROADCASTS, "reduce"]:
        results[name] = values(rank, 17)
        getattr(collectives, name)(results[name], members[-1], group)
    results["gather"] = collectives.gather(values(rank, 5), members[-1], group)
    pieces = [values(50 + r, 4) for r in members] if rank == members[-1] else None
    results["scatter"] = torch.empty(4)
    collectives.scatter(results["scatter"], pieces, members[-1], group)
    results["reduce_scatter"] = collectives.reduce_scatter(values(rank, 17), group)
    try:
        collectives.broadcast(torch.ones(1), min({0, 1, 2, 3} - set(members)), group)
    except ValueError as error:
        results["error"] = str(error)
    return results


@pytest.mark.parametrize("on", ["simulated", "cpu"])
@pytest.mark.parametrize("members", [[1, 3], [1, 2, 3], [2]])
def test_groups_translate_ranks(ranks_of, on, members):
    replicas = ranks_of(on, 4).run(inside_groups, members)
    for rank, results in enumerate(replicas):
        if rank not in members:
            assert f"rank {rank} is not a member" in results
            continue
        for name in ALL_REDUCES:
            assert torch.equal(results[name], total(members, 17)), name
        for name in BROADCASTS:
            assert torch.equal(results[name], values(members[-1], 17)), name
        start, stop = shard_bounds(17, len(members), members.index(rank))
        assert torch.equal(results["reduce_scatter"], total(members, 17)[start:stop])
        assert torch.equal(results["scatter"], values(50 + rank, 4))
        assert "is not a member of this group" in results["error"]
        if rank == members[-1]:
            assert torch.equal(results["reduce"], total(members, 17))
            for r, part in zip(members, results["gather"], strict=True):
                assert torch.equal(part, values(r, 5))


def on_two_levels(ranks_per_node: int) -> list[torch.Tensor]:
    inside, between = collectives.two_level_groups(ranks_per_node)
    results = []
    for length in LENGTHS:
        tensor = values(dist.get_rank(), length)
        collectives.hierarchical_all_reduce(tensor, inside, between)
        results.append(tensor)
    return results


@pytest.mark.parametrize(
    ("on", "k", "ranks_per_node"),
    [("simulated", 8, 2), ("simulated", 8, 4), ("simulated", 6, 3), ("cpu", 4, 2), ("cpu", 4, 1)],
)
def test_hierarchical_all_reduce(ranks_of, on, k, ranks_per_node):
    ranks = ranks_of(on, k)
    for replica in ranks.run(on_two_levels, ranks_per_node):
        for length, result in zip(LENGTHS, replica, strict=True):
            assert torch.equal(result, total(list(range(k)), length))
    between_nodes = sum(
        event.bytes
        for event in ranks.trace.events
        if event.kind == "send" and event.peer // ranks_per_node != event.rank // ranks_per_node
    )
    nodes = k // ranks_per_node
    assert between_nodes == 4 * sum(LENGTHS) * 2 * (nodes - 1)  # of all ranks together


# --- errors ---------------------------------------------------------------------------------------


def refused() -> list[str]:
    messages = []
    for call in (
        lambda: collectives.two_level_groups(2),
        lambda: collectives.pipelined_broadcast(torch.ones(3), segments=0),
        lambda: collectives.ring_all_reduce(torch.ones(3), segments=0),
        lambda: collectives.scatter(torch.ones(3), [], src=dist.get_rank()),
        lambda: collectives.broadcast(torch.ones(3), src=9),
        lambda: collectives.scatter(torch.ones(3), 3 * [torch.ones(1)], src=dist.get_rank()),
        lambda: collectives.ring_all_reduce(torch.ones(1).expand(3)),
    ):
        with pytest.raises(ValueError) as error:
            call()
        messages.append(str(error.value))
    with pytest.raises(TypeError) as wrong:
        collectives.ring_all_reduce(torch.ones(3).to_sparse())
    return [*messages, str(wrong.value)]


def test_mistakes_are_named(ranks_of):
    messages = ranks_of("simulated", 3).run(refused)[0]
    (nodes, broadcast, ring, scatter, root, piece, expanded, sparse) = messages
    assert "3 ranks do not fill nodes of 2" in nodes
    assert "segments=0" in broadcast and "segments=0" in ring
    assert "one piece for each of the 3 ranks" in scatter
    assert "rank 9" in root
    assert "a piece is (1,) torch.float32, and what receives it (3,)" in piece
    assert "clone()" in expanded
    assert "to_dense" in sparse


def conjugates(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Tensors whose conjugation, or negation, has not been computed yet."""
    rank = dist.get_rank()
    z = torch.complex(values(rank, 7).double(), values(rank + 9, 7).double())
    conjugate, negative = z.clone().conj(), z.clone().conj().imag
    assert conjugate.is_conj() and negative.is_neg()
    getattr(collectives, name)(conjugate)
    getattr(collectives, name)(negative)
    return conjugate.resolve_conj(), negative.resolve_neg()


@pytest.mark.parametrize("name", ALL_REDUCES)
@pytest.mark.parametrize(("on", "k"), [("simulated", 3), ("cpu", 2)])
def test_conjugates_are_summed_as_what_they_mean(ranks_of, on, k, name):
    real, imag = (sum(values(r + more, 7).double() for r in range(k)) for more in (0, 9))
    for conjugate, negative in ranks_of(on, k).run(conjugates, name):
        assert torch.equal(conjugate, torch.complex(real, -imag))
        assert torch.equal(negative, -imag)


def test_without_ranks_the_message_says_how_to_get_some():
    with pytest.raises(ValueError, match="no process group"):
        place_in(None)
