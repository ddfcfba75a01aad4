"""Expert parallelism: each rank holds some experts, and tokens are sent to the experts they need.

    >>> from course_lib.expert_parallel import ExpertParallel
    >>> experts = [nn.Linear(3, 3) for _ in range(4)]  # equal lists on all ranks
    >>> layer = ExpertParallel(nn.Linear(3, 4), experts, top_k=2)
    >>> result = layer(x)  # of this rank's tokens
    >>> result.square().mean().backward()
    >>> layer.sync_gradients()

A mixture of experts is a layer with E networks instead of one. Each token is processed by k of
them. A router, which is a matrix, chooses them: with p = softmax(router(x)) and S the k largest
of p,

    y = Σ_{e in S} p_e expert_e(x)

So the parameters grow with E, but the arithmetic grows only with k. The experts are divided over K
ranks:

    rank 0: tokens 0 1 2 ─┐ all_to_all ┌─► experts 0 1 ─┐ all_to_all ┌─► Σ p_e …, tokens 0 1 2
    rank 1: tokens 3 4 5 ─┴────────────┴─► experts 2 3 ─┴────────────┴─► Σ p_e …, tokens 3 4 5

Backward takes the same way in the other direction. With T tokens of n bytes on a rank and evenly
spread routes, a rank sends about kTn (K-1)/K bytes in each of the four all-to-alls of a step. As
routers do not spread tokens evenly, it first sends E numbers: how many tokens go to each expert.

A router left alone prefers some experts, and their rank sets the pace. Three remedies are here: a
`balance_loss`, a bias that only chooses, and a capacity. `on_few_nodes` limits where a token goes,
for a network in which messages between nodes are slow.

N. Shazeer et al., "Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts
Layer", ICLR 2017; D. Lepikhin et al., "GShard", ICLR 2021; W. Fedus et al., "Switch Transformers",
JMLR 2022; L. Wang et al., "Auxiliary-Loss-Free Load Balancing", 2024 (arXiv:2408.15664);
DeepSeek-AI, "DeepSeek-V3", 2024 (arXiv:2412.19437).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from course_lib.collectives import Group, exchange, place_in, ring_all_reduce
from course_lib.gradient_sync import sync_per_parameter
from course_lib.parts import mark_apart
from course_lib.sharding import shard_bounds


class Routes(NamedTuple):
    """The routes of tokens to experts, sorted by expert, then by token; one row per route."""

    tokens: Tensor
    """Positions in x, (R,)."""
    weights: Tensor
    """p_e, (R,); gradients pass through them to the router."""
    counts: Tensor
    """How many tokens go to each expert, (E,) integers."""


Routing = Callable[[Tensor, int], Routes]
"""From scores, (T, E), and k to routes: `route`, or a `functools.partial` of it."""


def route(
    scores: Tensor, top_k: int, *, bias: Tensor | None = None, capacity: int | None = None
) -> Routes:
    """Return the routes of the tokens for which a router gave `scores`, of shape (T, E).

    The p_e of the k chosen experts are not scaled to add up to 1.

    Args:
        scores: of T tokens for E experts; -inf forbids an expert.
        top_k: k, how many experts process a token.
        bias: b, (E,). The k experts with the largest p_e + b_e are chosen; b is in no weight.
        capacity: each expert takes only its first so many of these tokens; the others lose this
            route.

    """
    p = scores.softmax(-1)
    chosen = (p if bias is None else p + bias).topk(top_k).indices
    weights = p.gather(1, chosen).flatten()
    chosen, order = chosen.flatten().sort(stable=True)
    counts = torch.bincount(chosen, minlength=scores.shape[1])
    if capacity is not None:
        place = (
            torch.arange(len(chosen), device=chosen.device) - (counts.cumsum(0) - counts)[chosen]
        )
        order, counts = order[place < capacity], counts.clamp(max=capacity)
    return Routes(order // top_k, weights[order], counts)


def balance_loss(scores: Tensor, top_k: int) -> Tensor:
    """Return E Σ_e f_e P_e, which is 1 if both are even (Switch Transformers, equation 4).

    f_e is the share of the routes that go to expert e, and has no gradient; P_e is the mean of p_e
    over the tokens. `scores` has the shape (T, E).
    """
    counts = route(scores, top_k).counts
    mean = scores.softmax(-1).mean(0)
    return scores.shape[1] * (counts / counts.sum() * mean).sum()


def on_few_nodes(scores: Tensor, nodes: int, most: int) -> Tensor:
    """Return `scores`, (T, E), with -inf for experts outside each token's best `most` nodes.

    Node n holds the experts n E/N to (n + 1) E/N - 1. A node is as good as its best expert. N, the
    number of `nodes`, divides E.
    """
    of_nodes = scores.view(len(scores), nodes, -1)
    best = of_nodes.amax(-1).topk(most).indices
    is_allowed = torch.zeros_like(of_nodes[..., 0], dtype=torch.bool).scatter(1, best, True)
    return of_nodes.where(is_allowed[..., None], -torch.inf).flatten(1)


def mixture_of_experts(
    x: Tensor,
    router: nn.Module,
    experts: Sequence[nn.Module],
    top_k: int = 1,
    routing: Routing = route,
) -> Tensor:
    """Return y, of the shape of `x`, (T, width): the layer in one process, expert by expert."""
    routes = routing(router(x), top_k)
    parts = torch.split(x[routes.tokens], routes.counts.tolist())
    answers = [expert(part) for expert, part in zip(experts, parts, strict=True)]
    return _weighted_sum(torch.cat(answers), routes, len(x))


def _weighted_sum(answers: Tensor, routes: Routes, tokens: int) -> Tensor:
    """Return Σ p_e answer for each token."""
    weighted = answers * routes.weights[:, None]
    return weighted.new_zeros(tokens, answers.shape[1]).index_add(0, routes.tokens, weighted)


def uneven_all_to_all(
    rows: Tensor, sent: list[int], received: list[int], group: Group = None
) -> Tensor:
    """Send sent[r] of `rows` to each rank r, and return the rows that all ranks send to this one.

    `rows` starts with the rows for rank 0, then come the rows for rank 1, …. The result is ordered
    in the same way, with received[r] rows from rank r. In backward the gradient of a row goes back
    to the rank that sent the row. Every rank takes part, even if its own rows need no gradient: the
    rows that it received may need one.
    """
    anchor = rows.new_zeros((), requires_grad=torch.is_grad_enabled())
    result: Tensor = _UnevenAllToAll.apply(rows, anchor, sent, received, group)  # type: ignore[no-untyped-call]
    return result


class _UnevenAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, anchor: Tensor, sent: list[int], received: list[int], group: Group
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _swap_rows(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        back = _swap_rows(gradient, ctx.received, ctx.sent, ctx.group)
        return back, None, None, None, None


def _swap_rows(rows: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
    rank, world_size = place_in(group)
    rows = rows.contiguous()
    result = rows.new_empty(sum(received), *rows.shape[1:])
    outgoing, incoming = torch.split(rows, sent), torch.split(result, received)
    incoming[rank].copy_(outgoing[rank])
    for step in range(1, world_size):
        to, source = (rank + step) % world_size, (rank - step) % world_size
        exchange(outgoing[to], to, incoming[source], source, group)
    return result


class ExpertParallel(nn.Module):
    """`mixture_of_experts` with the experts divided over the ranks of `group`.

    Args:
        router: from (T, width) to scores (T, E); the same on all ranks.
        experts: all E experts, from (R, width) to (R, width), also for R = 0. Rank r keeps those of
            `shard_bounds(E, K, r)`, named by their index in the list; others may be on ``meta``.
        top_k: k, how many experts process a token.
        group: the ranks that share the experts. Each has different tokens, maybe more or fewer.
        routing: chooses the experts of this rank's tokens.

    Every rank must call forward and backward, even without tokens or experts: the others wait for
    it. Clip with `clip_grad_norm_` of `parts`, which adds up over all experts; PyTorch's raises an
    error.

    """

    def __init__(
        self,
        router: nn.Module,
        experts: Sequence[nn.Module],
        *,
        top_k: int = 1,
        group: Group = None,
        routing: Routing = route,
    ) -> None:
        super().__init__()
        rank, self.world_size = place_in(group)
        self._bounds = [
            shard_bounds(len(experts), self.world_size, r) for r in range(self.world_size)
        ]
        self.router = router
        self.experts = nn.ModuleDict({str(e): experts[e] for e in range(*self._bounds[rank])})
        self.rank, self.group, self.top_k, self.routing = rank, group, top_k, routing
        mark_apart(self.experts.named_parameters(), group, inner=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return y for `x`, this rank's tokens; both have the shape (…, width)."""
        tokens = x.reshape(-1, x.shape[-1])
        routes = self.routing(self.router(tokens), self.top_k)
        sent = [int(routes.counts[start:stop].sum()) for start, stop in self._bounds]
        arriving_counts = self._counts_for_me(routes.counts)
        received = [sum(counts) for counts in arriving_counts]
        arrived = uneven_all_to_all(tokens[routes.tokens], sent, received, self.group)
        answers = self._ask(arrived, arriving_counts)
        if answers.requires_grad:
            # Between these two, backward computes for the mean of the ranks' losses.
            answers.register_hook(lambda gradient: gradient / self.world_size)  # type: ignore[no-untyped-call]
            arrived.register_hook(lambda gradient: gradient * self.world_size)  # type: ignore[no-untyped-call]
        answers = uneven_all_to_all(answers, received, sent, self.group)
        return _weighted_sum(answers, routes, len(tokens)).view(x.shape)

    def _counts_for_me(self, counts: Tensor) -> list[list[int]]:
        """Return how many tokens each rank sends to each of this rank's experts: [rank][expert]."""
        held = [stop - start for start, stop in self._bounds]
        own_experts = held[self.rank]
        arrived = _swap_rows(counts, held, [own_experts] * self.world_size, self.group)
        result: list[list[int]] = arrived.view(self.world_size, own_experts).tolist()
        return result

    def _ask(self, arrived: Tensor, arriving_counts: list[list[int]]) -> Tensor:
        """Return the experts' answers, in the order in which the tokens arrived."""
        parts = torch.split(arrived, [count for counts in arriving_counts for count in counts])
        own_experts = len(self.experts)
        answers: list[Tensor] = [arrived] * len(parts)
        for place, expert in enumerate(self.experts.values()):
            # The tokens for one expert, from every rank.
            answer = expert(torch.cat(parts[place::own_experts]))
            answers[place::own_experts] = torch.split(
                answer, [counts[place] for counts in arriving_counts]
            )
        return torch.cat(answers) if answers else arrived  # no expert here: no token either

    def sync_gradients(self) -> None:
        """Make all gradients those of the mean of the ranks' losses.

        Call it before the optimizer's step, after the last backward or after each. The router's
        gradient comes from this rank's tokens only, so it is averaged over the ranks. That of an
        expert is ready after backward: it comes from the tokens of all ranks, divided by K.
        """
        sync_per_parameter(self.router.parameters(), self.group, ring_all_reduce)
