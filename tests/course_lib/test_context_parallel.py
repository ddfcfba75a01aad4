"""Attention over a sequence that is cut between ranks is that of one process, both ways."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from course_lib.context_parallel import positions_of, ring_attention
from course_lib.ranks import Device, Network, RankError, Ranks

WORLDS = [("simulated", k) for k in (1, 2, 3, 4)] + [("cpu", k) for k in (2, 3)]
LENGTHS = [16, 13, 3]  # the last is shorter than the number of pieces
SHAPE = (2, 3)  # batch, heads
SIZE = 4


def whole(length: int, dtype: torch.dtype = torch.float64):
    """Return queries, keys, values and the gradient of the result."""
    torch.manual_seed(length)
    return [torch.randn(*SHAPE, length, SIZE, dtype=dtype) for _ in range(4)]


def on_a_rank(length: int, causal: bool, zigzag: bool, dtype: torch.dtype = torch.float64):
    positions = positions_of(length, dist.get_world_size(), dist.get_rank(), zigzag)
    *inputs, gradient = (tensor[..., positions, :].clone() for tensor in whole(length, dtype))
    q, k, v = (tensor.requires_grad_() for tensor in inputs)
    result = ring_attention(q, k, v, length, causal=causal, zigzag=zigzag)
    result.backward(gradient)
    return positions, [result.detach(), q.grad, k.grad, v.grad]


def of_one_process(length: int, causal: bool, dtype: torch.dtype = torch.float64):
    *inputs, gradient = (tensor.double() for tensor in whole(length, dtype))
    q, k, v = (tensor.requires_grad_() for tensor in inputs)
    result = scaled_dot_product_attention(q, k, v, is_causal=causal)
    result.backward(gradient)
    return [result.detach(), q.grad, k.grad, v.grad]


def put_together(results, length: int):
    """Return the ranks' slices at their places in the sequence."""
    together = [torch.full((*SHAPE, length, SIZE), torch.nan).double() for _ in range(4)]
    for positions, slices in results:
        for target, part in zip(together, slices, strict=True):
            target[..., positions, :] = part.double()
    return together


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("zigzag", [True, False])
@pytest.mark.parametrize(
    ("on", "k"), [*WORLDS, ("nccl", 2), pytest.param("nccl", 3, marks=pytest.mark.large)]
)
def test_results_and_gradients_are_those_of_the_whole_sequence(
    ranks_of, on, k, zigzag, causal, length
):
    results = ranks_of(on, k).run(on_a_rank, length, causal, zigzag)
    tensors = put_together(results, length)
    torch.testing.assert_close(tensors, of_one_process(length, causal))


def test_in_16_bits_it_is_as_exact_as_these(ranks_of):
    """The result and gradients are rounded once, to the 8 bits of a bfloat16."""
    results = ranks_of("simulated", 3).run(on_a_rank, 13, True, True, torch.bfloat16)
    right = of_one_process(13, True, torch.bfloat16)
    torch.testing.assert_close(put_together(results, 13), right, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_bytes_are_those_of_the_formula(ranks_of, k):
    """2n(K-1) forward; as many and 2nK backward, with n bytes of a rank's keys."""
    ranks = ranks_of("simulated", k)
    ranks.run(on_a_rank, 12, True, False)
    n = 6 * SIZE * 8 * 12 // k
    sent = 2 * n * (k - 1) + 2 * n * (k - 1) + 2 * n * k if k > 1 else 0
    assert [ranks.trace.bytes_sent(rank) for rank in range(k)] == [sent] * k


def forward_only(length: int, zigzag: bool) -> None:
    positions = positions_of(length, dist.get_world_size(), dist.get_rank(), zigzag)
    q, k, v, _ = (tensor[..., positions, :] for tensor in whole(length))
    ring_attention(q, k, v, length, causal=True, zigzag=zigzag)


def test_zigzag_evens_out_the_work_of_a_causal_mask():
    """In units of a square of T/2 by T/2 scores, T tokens on each of 4 ranks.

    Contiguous: rank r has r + 1 slices of 4 squares, and all wait for rank 3. Zigzag: every rank
    has 3 squares of its own slice, and 2 of each other.
    """
    length, k = 64, 4
    square = 2 * 2 * (length // k // 2) ** 2 * SIZE * 6 / 1e9  # two products, seconds
    network = Network(latency=0.0, bandwidth=float("inf"))
    with Ranks(k, on="simulated", network=network, device=Device(1e9)) as ranks:
        ranks.run(forward_only, length, False)
        busy = [computing(ranks.trace, rank) for rank in range(k)]
        assert busy == pytest.approx([4 * (rank + 1) * square for rank in range(k)], rel=1e-6)
        ranks.run(forward_only, length, True)
        busy = [computing(ranks.trace, rank) for rank in range(k)]
        assert busy == pytest.approx([(3 + 2 * (k - 1)) * square] * k, rel=1e-6)


def computing(trace, rank: int) -> float:
    events = [event for event in trace.events if (event.rank, event.kind) == (rank, "compute")]
    return sum(event.end - event.start for event in events)


@pytest.mark.parametrize(
    ("tokens", "other", "message"),
    [(4, 3, "must have one shape"), (5, 5, r"must have 4 of the 8 tokens, ")],
)
def test_slices_of_other_sizes_are_refused(ranks_of, tokens, other, message):
    q, k = torch.ones(1, 1, tokens, 4), torch.ones(1, 1, other, 4)
    with pytest.raises(RankError, match=message):
        ranks_of("simulated", 2).run(ring_attention, q, k, k, 8)
