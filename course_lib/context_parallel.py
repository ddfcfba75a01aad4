"""Context parallelism: each rank holds a slice of the sequence, and keys and values go round.

    >>> from course_lib.context_parallel import positions_of, ring_attention
    >>> mine = positions_of(80, 2, dist.get_rank(), zigzag=True)  # 80 tokens, on two ranks
    >>> q, k, v = x[mine], x[mine], x[mine]
    >>> result = ring_attention(q, k, v, 80, causal=True, zigzag=True)  # of these tokens

In a transformer only attention looks at other tokens. So a long sequence can be cut: each rank
holds some tokens, and everything except attention runs as usual. For attention, queries stay where
they are, and the slices of keys and values travel around a ring of K ranks. In each of K steps a
rank attends to the slice that it has, while the next slice arrives:

    step     rank 0     rank 1     rank 2       the rank whose keys and values are here
     0         0          1          2
     1         2          0          1          each rank passes them on to the next rank
     2         1          2          0

A softmax over all keys can be computed slice by slice. With S = q kᵀ/√d, keep for each query its
result O and the logarithm of its denominator, L = log Σ exp S. A new slice b changes them to

    L' = log(e^L + Σ_b e^S)          O' = e^(L - L') O + Σ_b e^(S - L') v

In backward P = exp(S - L) is computed again, slice by slice, and never kept. With D = Σ dO · O,

    dv = Pᵀ dO        dS = P (dO vᵀ - D)        dq = dS k/√d        dk = dSᵀ q/√d

The gradients of keys and values travel with them, and are back on their own rank after K steps. A
rank whose slice of keys has n bytes sends 2n(K-1) bytes in forward, and 2n(K-1) + 2nK in backward.

**Causal masks.** A token sees only the tokens before it. If slices are contiguous, rank 0 sees one
slice and rank K - 1 sees all K. But the ranks take all K steps together, and in each step they wait
for the slowest. *Zigzag* cuts the sequence into 2K pieces. Rank r holds an early and a late piece,
pieces r and 2K - 1 - r, so all ranks have about the same work.

H. Liu, M. Zaharia and P. Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite
Context", 2023; T. Dao et al., "FlashAttention", NeurIPS 2022: softmax and backward by blocks.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from course_lib.collectives import Group, pair_of, place_in
from course_lib.sharding import shard_bounds

Piece = tuple[int, int]
"""The first position of neighbouring tokens, and the one after their last."""


def positions_of(length: int, world_size: int, rank: int, zigzag: bool = False) -> Tensor:
    """Return the positions of the tokens that `rank` holds, integers of shape (T,), in order.

    `length` is the length of the whole sequence. The ranks' numbers of tokens differ by at most one
    (two with `zigzag`). A rank has no tokens if there are too few.
    """
    parts = [torch.arange(*piece) for piece in _pieces(length, world_size, rank, zigzag)]
    return torch.cat(parts)


def ring_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    length: int,
    group: Group = None,
    *,
    causal: bool = False,
    zigzag: bool = False,
) -> Tensor:
    """Return the attention of this rank's tokens to those of all ranks: softmax(q kᵀ/√d) v.

    `queries`, `keys` and `values` have the shape (…, T, d), with the same other dimensions on all
    ranks, and hold the tokens of `positions_of(length, world_size, rank, zigzag)`. So does the
    result. With `causal` a token sees itself and the tokens before it in the whole sequence.

    All ranks of `group` must call this and run backward, even without tokens: the others wait for
    their slices. Numbers of less than 32 bits are computed in 32 bits and sent in their own dtype.

    Raises ValueError if the shapes differ, or T is not the number of this rank's tokens.
    """
    rank, world_size = place_in(group)
    all_pieces = [_pieces(length, world_size, r, zigzag) for r in range(world_size)]
    expected = _tokens(all_pieces[rank])
    if not queries.shape == keys.shape == values.shape:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (queries, keys, values))
        raise ValueError(f"queries, keys and values must have one shape, got {shapes}")
    if queries.shape[-2] != expected:
        raise ValueError(
            f"rank {rank} of {world_size} must have {expected} of the {length} tokens, "
            f"got {queries.shape[-2]} tokens: positions_of(…) returns the tokens of a rank"
        )
    result: Tensor = _RingAttention.apply(queries, keys, values, all_pieces, causal, group)  # type: ignore[no-untyped-call]
    return result


def _pieces(length: int, world_size: int, rank: int, zigzag: bool) -> list[Piece]:
    """Return what `rank` holds: one piece of the sequence, or an early one and a late one."""
    if not zigzag:
        return [shard_bounds(length, world_size, rank)]
    places = (rank, 2 * world_size - 1 - rank)
    return [shard_bounds(length, 2 * world_size, place) for place in places]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        pieces: list[list[Piece]],
        causal: bool,
        group: Group,
    ) -> Tensor:
        wide = torch.promote_types(queries.dtype, torch.float32)
        result = queries.new_zeros(queries.shape, dtype=wide)
        log_sums = queries.new_full(queries.shape[:-1], -torch.inf, dtype=wide)
        own_pieces = pieces[place_in(group)[0]]
        for source, (k, v) in _slices_going_round(keys, values, pieces, group):
            for rows, columns, diagonal in _visible(own_pieces, pieces[source], causal):
                scores = _scores(queries[..., rows, :], k[..., columns, :], diagonal)
                old = log_sums[..., rows]
                new = torch.logaddexp(old, scores.logsumexp(-1))
                weights = (scores - new[..., None]).exp()
                result[..., rows, :] *= (old - new).exp()[..., None]
                result[..., rows, :] += weights @ v[..., columns, :].to(wide)
                log_sums[..., rows] = new
        ctx.save_for_backward(queries, keys, values, result, log_sums)
        ctx.pieces, ctx.causal, ctx.group = pieces, causal, group
        return result.to(queries.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_result: Tensor) -> Any:
        queries, keys, values, result, log_sums = ctx.saved_tensors
        pieces, group = ctx.pieces, ctx.group
        rank, world_size = place_in(group)
        d_result = d_result.to(result.dtype)
        dots = (d_result * result).sum(-1, keepdim=True)
        dq = torch.zeros_like(result)
        arriving, messages = torch.stack([torch.zeros_like(result)] * 2), list[dist.Work]()
        for source, (k, v) in _slices_going_round(keys, values, pieces, group):
            own_terms = result.new_zeros(2, *k.shape)  # this rank's terms of dk and dv
            for rows, columns, diagonal in _visible(pieces[rank], pieces[source], ctx.causal):
                q, k_part = queries[..., rows, :], k[..., columns, :]
                weights = (_scores(q, k_part, diagonal) - log_sums[..., rows, None]).exp()
                d_rows = d_result[..., rows, :]
                d_weights = d_rows @ v[..., columns, :].to(result.dtype).mT
                d_scores = weights * (d_weights - dots[..., rows, :]) * q.shape[-1] ** -0.5
                dq[..., rows, :] += d_scores @ k_part.to(result.dtype)
                own_terms[0][..., columns, :] += d_scores.mT @ q.to(result.dtype)
                own_terms[1][..., columns, :] += weights.mT @ d_rows
            _wait(messages)  # the terms of the ranks that this slice has visited
            own_terms += arriving
            if world_size > 1:
                arriving, messages = _start_to_pass(own_terms, source, pieces, group)
        _wait(messages)
        dk, dv = arriving if world_size > 1 else own_terms
        return dq.to(queries.dtype), dk.to(keys.dtype), dv.to(values.dtype), None, None, None


def _slices_going_round(
    keys: Tensor, values: Tensor, pieces: list[list[Piece]], group: Group
) -> Iterator[tuple[int, Tensor]]:
    """Yield each rank with its keys and values, this rank first, while the next ones arrive."""
    rank, world_size = place_in(group)
    held = torch.stack([keys, values])
    for step in range(world_size):
        source = (rank - step) % world_size
        if step == world_size - 1:
            yield source, held
            return
        arriving, messages = _start_to_pass(held, source, pieces, group)
        yield source, held
        _wait(messages)
        held = arriving


def _start_to_pass(
    outgoing: Tensor, source: int, pieces: list[list[Piece]], group: Group
) -> tuple[Tensor, list[dist.Work]]:
    """Begin to pass on the slice of `source`; return the buffer of the next slice and the messages.

    This rank sends to the next rank of the ring, and receives the slice of rank source - 1 from the
    previous rank.
    """
    rank, world_size = place_in(group)
    tokens = _tokens(pieces[(source - 1) % world_size])
    incoming = outgoing.new_empty(*outgoing.shape[:-2], tokens, outgoing.shape[-1])
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    pair = pair_of(outgoing, after, incoming, before, group)
    return incoming, dist.batch_isend_irecv(pair)


def _wait(messages: list[dist.Work]) -> None:
    for message in messages:
        message.wait()


def _tokens(pieces: list[Piece]) -> int:
    return sum(stop - start for start, stop in pieces)


def _visible(
    query_pieces: list[Piece], key_pieces: list[Piece], causal: bool
) -> Iterator[tuple[slice, slice, bool]]:
    """Yield rows of queries, the columns of keys that they see, and whether a triangle is masked.

    All ranks cut the sequence at the same positions. So two pieces are either the same piece, and
    the causal mask is a triangle, or one lies before the other, and the queries see all of its keys
    or none.
    """
    row = 0
    for start, stop in query_pieces:
        rows = slice(row, row + stop - start)
        column = 0
        for key_start, key_stop in key_pieces:
            columns = slice(column, column + key_stop - key_start)
            if start < stop and key_start < key_stop and (not causal or key_start <= start):
                yield rows, columns, causal and key_start == start
            column = columns.stop
        row = rows.stop


def _scores(queries: Tensor, keys: Tensor, diagonal: bool) -> Tensor:
    """Return q kᵀ/√d, of shape (…, queries, keys), in 32 bits or more."""
    wide = torch.promote_types(queries.dtype, torch.float32)
    scores: Tensor = queries.to(wide) @ keys.to(wide).mT * queries.shape[-1] ** -0.5
    if diagonal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores
