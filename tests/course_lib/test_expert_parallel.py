"""Experts on several ranks do what they do in one process, forward and backward."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_lib import expert_parallel

WIDTH, EXPERTS = 3, 5  # no K but 1 divides the experts
FEW = 2  # a rank may have none
WORLDS = [("simulated", k) for k in (1, 2, 3, 4)] + [("cpu", k) for k in (2, 3)]


def parts(count: int = EXPERTS) -> tuple[nn.Module, list[nn.Module]]:
    torch.manual_seed(0)
    experts: list[nn.Module] = [
        nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, WIDTH)).double()
        for _ in range(count)
    ]
    return nn.Linear(WIDTH, count).double(), experts


def tokens_of(rank: int) -> torch.Tensor:
    """Other tokens, and another number of them, on every rank; none on the last of four."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn((9, 14, 4, 0)[rank], WIDTH, generator=generator).double()


def on_a_rank(top_k: int, count: int) -> tuple:
    layer = expert_parallel.ExpertParallel(*parts(count), top_k=top_k)
    x = tokens_of(dist.get_rank()).requires_grad_()
    for factor in (0.25, 0.75):  # two backwards
        y = layer(x)
        (factor * y.square().sum()).backward()
        layer.sync_gradients()
    return y.detach(), x.grad, {name: p.grad for name, p in layer.named_parameters()}


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("count", [EXPERTS, FEW])
@pytest.mark.parametrize(("on", "k"), WORLDS)
def test_results_and_gradients_are_those_of_one_process(ranks_of, on, k, count, top_k):
    router, experts = parts(count)
    xs = [tokens_of(rank).requires_grad_() for rank in range(k)]
    output = expert_parallel.mixture_of_experts(torch.cat(xs), router, experts, top_k)
    ys = output.split([len(x) for x in xs])
    (sum(y.square().sum() for y in ys) / k).backward()
    expected = {f"router.{name}": p.grad for name, p in router.named_parameters()}
    for e, expert in enumerate(experts):
        expected |= {f"experts.{e}.{name}": p.grad for name, p in expert.named_parameters()}
    names = set()
    for rank, (y, dx, gradients) in enumerate(ranks_of(on, k).run(on_a_rank, top_k, count)):
        torch.testing.assert_close(y, ys[rank].detach())
        torch.testing.assert_close(dx, k * xs[rank].grad)  # of the rank's own loss
        for name, gradient in gradients.items():
            right = torch.zeros_like(gradient) if expected[name] is None else expected[name]
            torch.testing.assert_close(gradient, right)
        names |= gradients.keys()
    assert names == expected.keys()


def test_bytes_are_those_of_the_tokens_that_travel(ranks_of):
    """There and back, forward and backward; and of E counts, what is for others."""
    k = 3
    ranks = ranks_of("simulated", k)

    def without_sync() -> None:
        layer = expert_parallel.ExpertParallel(*parts(), top_k=2)
        layer(tokens_of(dist.get_rank()).requires_grad_()).sum().backward()

    ranks.run(without_sync)
    router, _ = parts()
    bounds = [(0, 2), (2, 4), (4, 5)]
    counts = [expert_parallel.route(router(tokens_of(r)), 2).counts for r in range(k)]
    to = [[int(counts[r][a:b].sum()) for a, b in bounds] for r in range(k)]
    for rank, (start, stop) in enumerate(bounds):
        leaving = sum(to[rank]) - to[rank][rank]
        back = sum(to[r][rank] for r in range(k)) - to[rank][rank]
        rows = 2 * (leaving + back)
        assert ranks.trace.bytes_sent(rank) == rows * WIDTH * 8 + (EXPERTS - (stop - start)) * 8


def chosen_by(scores, top_k, **options):
    """Return {expert: [(token, weight)]} of the routes."""
    tokens, weights, counts = expert_parallel.route(scores, top_k, **options)
    pairs = zip(tokens.tolist(), weights.tolist(), strict=True)
    return [[next(pairs) for _ in range(count)] for count in counts.tolist()]


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("capacity", [None, 0, 2, 100])
def test_routes_are_those_of_a_loop_over_the_tokens(top_k, capacity):
    torch.manual_seed(top_k)
    scores, bias = torch.randn(13, EXPERTS), torch.randn(EXPERTS)
    expected = [[] for _ in range(EXPERTS)]
    for token, p in enumerate(scores.softmax(-1)):
        for e in sorted(range(EXPERTS), key=lambda e: -(p[e] + bias[e]))[:top_k]:
            expected[e].append((token, float(p[e])))
    expected = [routes[:capacity] for routes in expected]
    for routes, right in zip(
        chosen_by(scores, top_k, bias=bias, capacity=capacity), expected, strict=True
    ):
        assert routes == [(token, pytest.approx(weight)) for token, weight in right]


def test_the_balance_loss_is_1_when_even_and_pushes_down_the_busiest():
    even = 9 * torch.eye(EXPERTS)
    assert float(expert_parallel.balance_loss(even, 1)) == pytest.approx(1)
    scores = torch.zeros(8, EXPERTS) + torch.arange(float(EXPERTS))
    scores.requires_grad_()
    loss = expert_parallel.balance_loss(scores, 1)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(EXPERTS * float(scores[0].detach().softmax(0)[-1]))
    assert (scores.grad[:, -1] > 0).all() and (scores.grad[:, :-1] < 0).all()


@pytest.mark.parametrize("most", [1, 2, 3])
def test_a_token_stays_on_its_best_nodes(most):
    torch.manual_seed(most)
    scores = torch.randn(20, 6)
    for token, limited in zip(scores, expert_parallel.on_few_nodes(scores, 3, most), strict=True):
        order = sorted(range(3), key=lambda n: -float(token[2 * n : 2 * n + 2].max()))
        allowed = {e for n in order[:most] for e in (2 * n, 2 * n + 1)}
        for e in range(6):
            assert limited[e] == (token[e] if e in allowed else -torch.inf)
