"""FullyShardedDataParallel: the steps of one process, with 1/K of everything on each rank."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from course_lib.fully_sharded import FullyShardedDataParallel
from course_lib.ranks import Network, RankError, Ranks, clock, compute
from course_lib.sharded_optimizer import model_state_bytes
from tests.helpers.ddp_scenarios import WORLDS
from tests.helpers.zero_scenarios import (
    OPTIMIZERS,
    Awkward,
    batches,
    groups_of,
    one_process,
    own,
    run_steps,
)


class Nested(nn.Module):
    """Blocks inside, one of them used twice; a part that is not in a block; tied over blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6))
        self.twice = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.norm = nn.LayerNorm(6)
        self.last = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
        self.last[0].weight = self.first[2].weight
        self.register_buffer("offset", torch.ones(6))
        self.double()

    def forward(self, x):
        x = self.twice(self.norm(self.twice(self.first(x)))) + self.offset
        return self.last(x[:, :5])


MODELS = {
    "a unit for each module": (Awkward, {}),
    "one unit": (Awkward, {"unit_types": (Awkward,)}),
    "nested": (Nested, {"unit_types": (nn.Sequential,)}),
    "without prefetch": (Nested, {"prefetch": False}),
}


def train(model: str, name: str):
    make, options = MODELS[model]
    net = make()
    if dist.get_rank() > 0:
        with torch.no_grad():
            for param in net.parameters():
                param.zero_()  # the first rank's are taken
    wrapped = FullyShardedDataParallel(net, **options)
    cls, hyper = OPTIMIZERS[name]
    optimizer = cls(wrapped.parameters(), **hyper)
    run_steps(wrapped, optimizer, batches())
    wrapped.finish_gradient_synchronization()  # as with DDP
    return wrapped.full_state_dict(), sum(p.numel() for p in wrapped.parameters())


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("on", "k"), WORLDS)
def test_weights_equal_those_of_one_process(ranks_of, on, k, model):
    for name in ("sgd", "adamw, fused"):
        expected = one_process(name, make=MODELS[model][0])[0]
        results = ranks_of(on, k).run(train, model, name)
        for state, _ in results:
            torch.testing.assert_close(state, expected.state_dict(), rtol=1e-10, atol=1e-12)
        count = sum(p.numel() for p in expected.parameters())
        assert sum(held for _, held in results) == count


# --- dtypes -----------------------------------------------------------------------------------


def in_bfloat16():
    net = Awkward(dtype=torch.float32)
    wrapped = FullyShardedDataParallel(net, compute_dtype=torch.bfloat16)
    forwards = []
    net.body.register_forward_hook(lambda m, _, out: forwards.append((m.weight.dtype, out.dtype)))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-4)
    x, y = own(batches(dtype=torch.float32)[0])
    mse_loss(wrapped(x.bfloat16()), y.bfloat16()).backward()
    dtypes = {p.grad.dtype for p in wrapped.parameters() if p.grad is not None}
    optimizer.step()
    return forwards, dtypes, wrapped.full_state_dict()["enter.weight"]


@pytest.mark.parametrize("on", ["simulated", "cpu"])
def test_computes_in_bfloat16_and_steps_in_float32(ranks_of, on):
    net = Awkward(dtype=torch.float32)
    x, y = batches(dtype=torch.float32)[0]
    mse_loss(net(x), y).backward()
    for forwards, dtypes, weight in ranks_of(on, 2).run(in_bfloat16):
        assert forwards == [(torch.bfloat16, torch.bfloat16)]
        assert dtypes == {torch.float32}
        step = (net.enter.weight.detach() - weight) / 1e-4
        # Were the weights bfloat16, a step of 1e-4 would be lost in rounding.
        torch.testing.assert_close(step, net.enter.weight.grad, rtol=0.1, atol=0.02)


# --- what is sent, what is held, and when -----------------------------------------------------

WIDTH, DEPTH = 12, 4


class Slow(nn.Linear):
    def forward(self, x):
        started.append(clock())
        compute(1.0)
        return super().forward(x)


started: list[float] = []


def layers(kind: type[nn.Linear] = nn.Linear) -> nn.Sequential:
    return nn.Sequential(*[kind(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)])


def one_step(dtype: torch.dtype | None) -> None:
    wrapped = FullyShardedDataParallel(layers(), compute_dtype=dtype)
    wrapped(torch.ones(2, WIDTH, dtype=dtype or torch.float32)).sum().backward()


@pytest.mark.parametrize("k", [2, 3, 4])
@pytest.mark.parametrize(("dtype", "size"), [(None, 4), (torch.bfloat16, 2)])
def test_bytes_sent_are_those_of_the_paper(ranks_of, k, dtype, size):
    """3Ψ numbers: gathered for forward, for backward, and gradients; (K-1)/K in a ring."""
    ranks = ranks_of("simulated", k)
    ranks.run(one_step, dtype)
    parameters = DEPTH * WIDTH * WIDTH
    for rank in range(k):
        of_rank = [event for event in ranks.trace.operations if event.rank == rank]
        # Without what compares the ranks' models at the start, and takes the first one's weights.
        floats = [event for event in of_rank if event.kind in ("all_gather", "reduce_scatter")]
        floats = [event for event in floats if event.dtype in ("float32", "bfloat16")]
        sent = sum(map(ranks.trace._sent, floats))
        assert sent == 3 * size * parameters * (k - 1) / k


def held(prefetch: bool):
    net = layers()
    wrapped = FullyShardedDataParallel(net, prefetch=prefetch)
    sizes: list[int] = []
    for layer in net:
        layer.register_forward_hook(lambda *_: sizes.append(wrapped.bytes_held), prepend=True)
        layer.register_full_backward_pre_hook(lambda *_: sizes.append(wrapped.bytes_held))
    for _ in range(2):
        sizes.clear()
        at_rest = wrapped.bytes_held
        wrapped(torch.ones(2, WIDTH, requires_grad=True)).sum().backward()
    gradients = sum(p.grad.numel() * 4 for p in wrapped.parameters() if p.grad is not None)
    return at_rest, max(sizes), wrapped.bytes_held, gradients


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize(("prefetch", "layers_there"), [(False, 1), (True, 2)])
def test_memory_is_that_of_the_formula(ranks_of, k, prefetch, layers_there):
    """Ψ/K at rest, and one layer whole while it runs: two, with the next one being fetched."""
    layer = 4 * WIDTH * WIDTH
    formula = model_state_bytes(DEPTH * WIDTH * WIDTH, k, 3, weight=4, gradient=0, state=0)
    for at_rest, peak, afterwards, gradients in ranks_of("simulated", k).run(held, prefetch):
        assert at_rest == afterwards == formula == gradients
        assert peak == formula + layers_there * layer


def times(prefetch: bool) -> list[float]:
    wrapped = FullyShardedDataParallel(layers(Slow), prefetch=prefetch)
    for _ in range(2):
        started.clear()
        begin = clock()
        wrapped(torch.ones(2, WIDTH))
    return [begin, clock()]


@pytest.mark.parametrize(("prefetch", "waits"), [(False, DEPTH), (True, 1)])
def test_the_network_is_a_layer_ahead(prefetch, waits):
    """A gather takes half as long as a layer: fetched ahead, only the first is waited for."""
    gather = 0.5
    with Ranks(2, on="simulated", network=Network(latency=gather, bandwidth=1e12)) as ranks:
        for begin, end in ranks.run(times, prefetch):
            assert end - begin == pytest.approx(DEPTH * 1.0 + waits * gather, rel=1e-6)


# --- used as other modules are ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.LSTM(3, 3), "TypeError: .*nn.LSTM"),
        (
            lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).double()),
            "ValueError: the parameters of a unit must have one dtype",
        ),
        (lambda: nn.Linear(3, 3 + dist.get_rank()), "different models"),
    ],
)
def test_errors_say_what_is_wrong(ranks_of, make, message):
    def wrap() -> None:
        FullyShardedDataParallel(make(), unit_types=(nn.Sequential,))

    with pytest.raises(RankError, match=message):
        ranks_of("simulated", 2).run(wrap)


def test_an_optimizer_takes_all_pieces_at_once_where_it_would_take_all_parameters(ranks_of):
    from torch.optim.optimizer import _default_to_fused_or_foreach

    def choices() -> tuple[bool, bool]:
        wrapped = FullyShardedDataParallel(layers())
        plain = [nn.Parameter(param.detach().clone()) for param in wrapped.parameters()]
        ours, plain_choice = (
            _default_to_fused_or_foreach(list(params), differentiable=False, use_fused=True)
            for params in (wrapped.parameters(), plain)
        )
        return ours == plain_choice, ours[0]

    assert ranks_of("simulated", 2).run(choices) == [(True, True)] * 2


# --- parameters that stay whole ---------------------------------------------------------------


def keep_whole(model: str, entries, dtype: torch.dtype | None):
    make, options = MODELS[model]
    wrapped = FullyShardedDataParallel(make(), dtype, keep_whole=entries, **options)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    norms = []
    for batch in batches():
        optimizer.zero_grad()
        x, y = own(batch)
        mse_loss(wrapped(x.to(dtype)).double(), y).backward()
        norms.append(wrapped.clip_grad_norm_(0.1))
        optimizer.step()
    shapes = {name: param.shape for name, param in wrapped.module.named_parameters()}
    return wrapped.full_state_dict(), norms, shapes


@pytest.mark.parametrize(
    ("model", "dtype"), [*((model, None) for model in MODELS), ("one unit", torch.float32)]
)
@pytest.mark.parametrize("k", [1, 2, 3])
def test_parameters_that_stay_whole(ranks_of, k, model, dtype):
    entries = (nn.LayerNorm, "bias", "scale" if MODELS[model][0] is Awkward else "first.2.weight")
    net = MODELS[model][0]()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    expected = []
    for x, y in batches():
        optimizer.zero_grad()
        mse_loss(net(x), y).backward()
        expected.append(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1))
        optimizer.step()
    tolerance = 1e-10 if dtype is None else 1e-3
    for state, norms, shapes in ranks_of("simulated", k).run(keep_whole, model, entries, dtype):
        for name, param in net.named_parameters():
            torch.testing.assert_close(state[name], param.detach(), rtol=tolerance, atol=tolerance)
            if name.endswith("bias") or name in ("norm.weight", *entries):
                assert shapes[name] == param.shape
        torch.testing.assert_close(norms, expected, rtol=tolerance, atol=0)


def test_a_name_that_stays_whole_must_be_there(ranks_of):
    with pytest.raises(RankError, match="no parameter or module 'nrom'"):
        ranks_of("simulated", 2).run(keep_whole, "nested", ("nrom",), None)


# --- states -----------------------------------------------------------------------------------


def some_steps(name: str, steps: slice, weights=None, state=None):
    net = Awkward()
    if weights is not None:
        net.load_state_dict(weights)
    wrapped = FullyShardedDataParallel(net, keep_whole=("enter.bias",))
    cls, hyper = OPTIMIZERS[name]
    optimizer = cls(groups_of(wrapped, True), **hyper)
    if state is not None:
        wrapped.load_full_optimizer_state(optimizer, state)
    run_steps(wrapped, optimizer, batches()[steps])
    return wrapped.full_state_dict(), wrapped.full_optimizer_state(optimizer)


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 3), (1, 4)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_on_with_another_number_of_ranks(ranks_of, name, before, after):
    saved = ranks_of("simulated", before).run(some_steps, name, slice(3))[0]
    net, optimizer = one_process(name, groups=True)
    for state, of_optimizer in ranks_of("simulated", after).run(
        some_steps, name, slice(3, 5), *saved
    ):
        torch.testing.assert_close(state, net.state_dict(), rtol=1e-10, atol=1e-12)
        expected = optimizer.state_dict()["state"]
        torch.testing.assert_close(of_optimizer["state"], expected, rtol=1e-10, atol=1e-12)


def load_that_of_rank_0(case: str) -> None:
    wrapped = FullyShardedDataParallel(nn.Linear(4, 4, bias=False))
    optimizer = torch.optim.Adam(wrapped.parameters())
    wrapped(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    box = [wrapped.state_dict(), optimizer.state_dict()]
    dist.broadcast_object_list(box)
    if case == "weights":
        wrapped.load_state_dict({name: tensor.clone() for name, tensor in box[0].items()})
    else:
        wrapped.load_full_optimizer_state(optimizer, box[1])


@pytest.mark.parametrize(
    ("case", "message"),
    [("weights", "of rank 0 of 2, but here is rank 1"), ("Adam's", "of one rank")],
)
def test_the_state_of_another_rank_is_refused(ranks_of, case, message):
    with pytest.raises(RankError, match=message):
        ranks_of("simulated", 2).run(load_that_of_rank_0, case)
