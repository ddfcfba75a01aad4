"""A tape that is played on the draw it was written on gives the same weights, to the last bit.

The ranks use PyTorch and the course's own modules in many ways. An operation that is missing on the
tape would change the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from course_lib.capstone import DEVICE, LAUNCH, Job, Race, TapeError, draw, write_tape
from course_lib.capstone.constants import Constants
from course_lib.capstone.operators import check_bounds, operator_called
from course_lib.capstone.player import Played, Player
from course_lib.capstone.tape import Tape
from course_lib.compression import (
    QSGD,
    ErrorFeedback,
    OneBit,
    PowerSGD,
    RandomK,
    TopK,
    Uniform8Bit,
    compressed_all_reduce,
)
from course_lib.ddp import DistributedDataParallel
from course_lib.local_sgd import DiLoCo, LocalSGD
from course_lib.ranks import Ranks, RanksError, compute, per_rank
from course_lib.sharded_optimizer import ShardedOptimizer

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]

RACE = Race(world_size=2, rows=32, features=16, hidden=24, classes=4)
STEPS = 3


def rows(job: Job, step: int) -> tuple[Tensor, Tensor]:
    at = 8 * step % len(job.x)
    return job.x[at : at + 8], job.y[at : at + 8]


def sgd(job: Job, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(job.model.parameters(), lr=0.05, momentum=0.9, **options)


def plain(job: Job, optimizer: Any = None, model: Any = None, after: Any = None) -> None:
    """Train; `after` is called between backward and step."""
    optimizer = optimizer or sgd(job)
    for step in range(STEPS):
        x, y = rows(job, step)
        for param in job.model.parameters():
            param.grad = None
        F.cross_entropy((model or job.model)(x), y).backward()
        if after is not None:
            after()
        optimizer.step()


def compressed(make: Callable[[], Any]) -> Callable[[Job], None]:
    def train(job: Job) -> None:
        compressor = make()

        def exchange() -> None:
            for key, param in enumerate(job.model.parameters()):
                assert param.grad is not None
                compressed_all_reduce(param.grad, compressor, key=key)

        plain(job, after=exchange)

    return train


def adam_and_clipping(job: Job) -> None:
    norm = lambda: nn.utils.clip_grad_norm_(job.model.parameters(), 0.5)
    plain(job, torch.optim.AdamW(job.model.parameters(), lr=0.01), after=norm)


def random_rows_and_dropout(job: Job) -> None:
    torch.manual_seed(7 + dist.get_rank())
    own = torch.Generator().manual_seed(3)
    optimizer = sgd(job)
    for step in range(STEPS):
        which = torch.randperm(len(job.x), generator=own if step else None)[:8]
        hidden = F.dropout(job.model[1](job.model[0](job.x[which])), 0.3)
        optimizer.zero_grad()
        F.cross_entropy(job.model[2](hidden), job.y[which]).backward()
        optimizer.step()
        if step == 1:
            torch.manual_seed(5)  # the same generator from another start


def messages_and_overlap(job: Job) -> None:
    rank, k = dist.get_rank(), dist.get_world_size()
    params = list(job.model.parameters())
    for step in range(STEPS):
        x, y = rows(job, step)
        grads = torch.autograd.grad(F.cross_entropy(job.model(x), y), params)
        theirs = [torch.empty_like(g) for g in grads]
        handles = []
        for mine, other in zip(grads, theirs, strict=True):
            handles.append(dist.isend(mine, (rank + 1) % k))
            handles.append(dist.irecv(other, (rank - 1) % k))
        doubled = [2 * p.detach() for p in params]
        for handle in handles:
            handle.wait()
        with torch.no_grad():
            for p, twice, mine, other in zip(params, doubled, grads, theirs, strict=True):
                p.copy_(twice / 2 - 0.05 * (mine + other))


def fused_optimizers(job: Job) -> None:
    plain(job, sgd(job, fused=True))
    plain(job, torch.optim.AdamW(job.model.parameters(), lr=0.01, fused=True))


def one_group_of_its_own(job: Job) -> None:
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    plain(job, after=lambda: dist.all_reduce(job.model[0].weight.grad, group=group))


def other_collectives(job: Job) -> None:
    weight = job.model[0].weight.data
    part = torch.empty(weight.numel() // 2)
    dist.reduce_scatter(part, list((weight.flatten() + dist.get_rank()).chunk(2)))
    whole = [torch.empty_like(part) for _ in range(2)]
    dist.all_gather(whole, part / 2)
    weight.copy_(torch.cat(whole).view_as(weight))
    dist.broadcast(job.model[2].weight.data, 1)
    dist.barrier()
    pieces = [torch.full((3,), float(dist.get_rank())) for _ in range(2)]
    got = [torch.empty(3) for _ in range(2)]
    dist.all_to_all(got, pieces)
    job.model[0].bias.data[:6] += torch.cat(got)


def evaluation(job: Job) -> None:
    plain(job)
    with torch.inference_mode():
        print(F.cross_entropy(job.model(job.x), job.y).item())
    assert F.one_hot(job.y, 4).shape == (32, 4)


def traced_and_scripted(job: Job) -> None:
    plain(job, model=torch.jit.trace(job.model, (job.x[:8],)))  # type: ignore[no-untyped-call]
    plain(job, model=torch.jit.script(job.model))
    plain(job, model=torch.fx.symbolic_trace(job.model))


def half_precision(job: Job) -> None:
    optimizer = sgd(job)
    for step in range(STEPS):
        x, y = rows(job, step)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(job.model(x), y)
        loss.backward()
        optimizer.step()


def ours(job: Job) -> None:
    model = DistributedDataParallel(job.model, bucket_cap_mb=0.001)
    optimizer = sgd(job)
    for step in range(STEPS):
        x, y = rows(job, step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        model.finish_gradient_synchronization()
        optimizer.step()


def diloco(job: Job) -> None:
    outer = DiLoCo(torch.optim.AdamW(job.model.parameters(), lr=0.01), every=2, fragments=1)
    for step in range(4):
        x, y = rows(job, step)
        job.model.zero_grad()
        F.cross_entropy(job.model(x), y).backward()
        outer.step()


TRAININGS: dict[str, Callable[[Job], Any]] = {
    "plain": plain,
    "Adam and clipping": adam_and_clipping,
    "random rows and dropout": random_rows_and_dropout,
    "messages that overlap": messages_and_overlap,
    "fused optimizers": fused_optimizers,
    "a group of its own": one_group_of_its_own,
    "other collectives": other_collectives,
    "evaluation in between": evaluation,
    "traced and scripted": traced_and_scripted,
    "bfloat16": half_precision,
    "our DDP": ours,
    "PyTorch's DDP": lambda job: plain(job, model=nn.parallel.DistributedDataParallel(job.model)),
    "local SGD": lambda job: plain(job, LocalSGD(sgd(job), 2)),
    "DiLoCo": diloco,
    "a sharded optimizer": lambda job: plain(
        job, ShardedOptimizer(job.model.parameters(), torch.optim.SGD, lr=0.05)
    ),
    **{
        make().__class__.__name__: compressed(lambda make=make: ErrorFeedback(make()))  # type: ignore[misc]
        for make in (
            *(lambda: TopK(0.1), lambda: RandomK(0.2), Uniform8Bit),
            *(lambda: QSGD(4), OneBit, lambda: PowerSGD(2)),
        )
    },
}


def written(train: Callable[[Job], Any], race: Race = RACE) -> list[tuple[Tensor, list[Tensor]]]:
    """Return tape and trained weights of every rank, on simulated ranks."""

    def on_rank(mine: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
        seen: list[nn.Module] = []

        def watched(job: Job) -> Any:
            seen.append(job.model)
            return train(job)

        tape = write_tape(watched, race, mine)
        return tape, [each.detach().clone() for each in seen[0].parameters()]

    with Ranks(race.world_size, on="simulated", network=race.network, misuse="ignore") as ranks:
        return ranks.run(on_rank, per_rank(draw(race, "a").inputs()))


def played(tapes: list[Tensor], race: Race = RACE, seed: str = "a") -> list[Played]:
    drawn = draw(race, seed)
    given = [[x, y, *drawn.weights] for x, y in zip(drawn.x, drawn.y, strict=True)]

    def on_rank(tape: Tensor, given: list[Tensor]) -> Played:
        with torch.no_grad():
            return Player(Tape.decode(tape), [each.clone() for each in given], DEVICE).play()

    with Ranks(race.world_size, on="simulated", network=race.network, misuse="ignore") as ranks:
        return ranks.run(on_rank, per_rank(tapes), per_rank(given))


@pytest.mark.parametrize("train", TRAININGS.values(), ids=TRAININGS.keys())
def test_the_same_draw_gives_the_same_weights(train: Callable[[Job], Any]) -> None:
    ranks = written(train)
    again = played([tape for tape, _ in ranks])
    for (_, weights), rank in zip(ranks, again, strict=True):
        before = draw(RACE, "a").weights
        assert any(not torch.equal(w, b) for w, b in zip(weights, before, strict=True))
        for one, other in zip(weights, rank.weights, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("train", [fused_optimizers, ours, adam_and_clipping, compressed(OneBit)])
def test_what_people_train_with_names_few_numbers(train: Callable[[Job], Any]) -> None:
    """No optimizer eats up the constants, however many steps it makes."""
    (tape, _), *_ = written(train)
    constants = Constants()
    for kind, *rest in Tape.decode(tape).lines:
        if kind == "o":
            constants.take_line(*rest[:3])
    assert constants.nbytes == 0


def test_another_draw_is_trained_on_its_own_rows() -> None:
    """The result is that of the same function there, and not the result from here."""
    ranks = written(plain)
    (rank, *_) = played([tape for tape, _ in ranks], seed="b")
    drawn = draw(RACE, "b")
    model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 4))
    for param, value in zip(model.parameters(), drawn.weights, strict=True):
        param.data.copy_(value)
    plain(Job(model, drawn.x[0], drawn.y[0], 0.0, RACE.network, DEVICE))
    for one, other in zip(model.parameters(), rank.weights, strict=True):
        assert torch.equal(one, other)
    assert rank.gradients == STEPS


# Forgeries in place of a tape ------------------------------------------------------------------

HERE = ["t", 0, 0, [32, 16], [16, 1], 0]
FORGED = {
    "memory that is not there": ["o", "aten::neg", [["t", 99, 0, [1], [1], 0]], {}, []],
    "beyond its end": ["o", "aten::neg", [["t", 0, 500, [32], [1], 0]], {}, []],
    "before its beginning": ["o", "aten::neg", [["t", 0, -1, [1], [1], 0]], {}, []],
    "backwards": ["o", "aten::neg", [["t", 0, 5, [2], [-1], 0]], {}, []],
    "wider than it is": ["o", "aten::neg", [["t", 0, 0, [64], [8], 1]], {}, []],
    "no operator": ["o", "aten::no_such", [HERE], {}, []],
    "no price": ["o", "aten::linalg_svd", [HERE], {}, []],
    "another namespace": ["o", "os::system", ["true"], {}, []],
    "an attribute of an operator": ["o", "aten::neg.__class__", [HERE], {}, []],
    "a change of an operator": ["o", "aten::neg.__setattr__", ["__name__", "empty"], {}, []],
    "an attribute": ["o", "aten::__class__", [HERE], {}, []],
    "memory of its own choice": ["o", "aten::set_.source_Storage", [HERE, 1], {}, []],
    "a resize": ["o", "aten::resize_", [HERE, ["l", 10**6]], {}, []],
    "no end of memory": ["o", "aten::zeros", [["l", 10**12]], {}, [["t", 50, 0, [1], [1], 0]]],
    "another shape": ["o", "aten::neg", [HERE], {}, [["t", 50, 0, [3], [1], 0]]],
    "no such line": ["x", 1],
    "nothing": [],
    "a number": 3,
    "a constant that is longer": ["k", 60, 8, "AAAA", ""],
    "a constant too large": ["k", 60, 10**6, "AAAA", ""],
    "an operation of the fabric's own": ["c", 1, "new_group", [], [], [0, 1], "g", None, "", 0, ""],
    "no such reduction": ["c", 1, "all_reduce", [HERE], [HERE], [0, 1], "0", None, "magic", 0, ""],
    "a group of others": ["c", 1, "barrier", [], [], [7, 8], "0", None, "", 0, ""],
    "a wait for nothing": ["w", 12],
    "freed twice": ["f", 70],
}


@pytest.mark.parametrize("line", FORGED.values(), ids=FORGED.keys())
def test_a_forged_line_is_refused(line: Any) -> None:
    tape = Tape([line], [HERE]).encode()
    with pytest.raises(RanksError) as caught:
        played([tape, tape])
    assert "TapeError" in str(caught.value)


@pytest.mark.parametrize("junk", [b"", b"[]", b"[1, 2, 3]", b"[" * 10**5, b"\xff\xfe", b"{}"])
def test_junk_is_no_tape(junk: bytes) -> None:
    data = torch.frombuffer(bytearray(junk), dtype=torch.uint8) if junk else torch.empty(0)
    with pytest.raises(TapeError, match="not a tape"):
        Tape.decode(data)


def test_an_export_ends_in_a_sentence() -> None:
    """It asks for a device from C++, where an exception ends the process."""
    with pytest.raises(RanksError, match="FakeTensor has no memory of its own"):
        written(lambda job: torch.export.export(job.model, (job.x,)))


# How somebody may bring numbers along: 2,000 of them, where there may be some 1,000 ------------

MANY = [1e-3 * number for number in range(2_000)]
ORDER = [7 * number % 255 for number in range(2_000)]


def in_a_list_of_scalars(x: Tensor) -> None:
    torch._foreach_add([x[:1, :1].clone() for _ in MANY], MANY)


def in_lists_that_are_short(x: Tensor) -> None:
    for begin in range(0, 2_000, 100):
        torch._foreach_add_([x[:1, :1]] * 100, MANY[begin : begin + 100])


def in_the_order_of_views(x: Tensor) -> None:
    table = torch.linspace(-1, 1, 256)
    torch.cat([table[each : each + 1] for each in ORDER])


def in_sizes_and_strides(x: Tensor) -> None:
    table = torch.linspace(-1, 1, 256)
    for begin in range(0, 2_000, 10):
        steps = ORDER[begin : begin + 10]
        torch.stack([table.as_strided([1] * 20, [*steps, *steps]) for _ in range(5)])


def in_a_tensor(x: Tensor) -> None:
    x.flatten()[:500] + torch.tensor(MANY[:500], dtype=torch.float64)
    torch.tensor(MANY) + 1


def in_indices(x: Tensor) -> None:
    x.flatten()[[each % 100 for each in ORDER]]


def in_masks(x: Tensor) -> None:
    for bit in range(5):
        torch.where(torch.tensor([bool(each >> bit & 1) for each in ORDER]), 1.0, 0.0)


WAYS = [
    *(in_a_list_of_scalars, in_lists_that_are_short, in_the_order_of_views, in_sizes_and_strides),
    *(in_a_tensor, in_indices, in_masks),
]


@pytest.mark.parametrize("way", WAYS)
def test_numbers_from_home_are_counted_however_they_come(way: Callable[[Tensor], None]) -> None:
    with pytest.raises((RanksError, TapeError), match="come from nowhere"):
        played([tape for tape, _ in written(lambda job: way(job.x.detach()))])


@pytest.mark.parametrize(
    "args",
    [
        [["l", *[HERE] * 2_000], ["l", *MANY]],
        [["l", *[["t", 1, each, [1], [1], 8] for each in [3, 1, 2] * 500]]],
        [["t", 0, 0, [1] * 2_000, [1] * 2_000, 0]],
        [HERE, ["l", *[["l", 1, 2]] * 600]],
    ],
)
def test_a_forged_line_has_no_more_of_them(args: list[Any]) -> None:
    with pytest.raises(TapeError, match="come from nowhere"):
        Constants().take_line("aten::any", args, {})


# PyTorch's kernels leave these checks to their callers: they would read or write beyond tensors.

X, Y, WIDE = torch.rand(6, 4), torch.tensor([0, 1, 2, 3, 0, 1]), torch.rand(6, 8)
LOSS = torch.ones(6), X, Y, None, 0, -100, torch.tensor(1.0)
FUSED = {"weight_decay": 0.0, "lr": 0.1, "maximize": False}
SGD = {**FUSED, "momentum": 0.9, "dampening": 0.0, "nesterov": False, "is_first_step": False}
ADAM = {**FUSED, "beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "amsgrad": False}
STEP = torch.ones(1)
BEYOND: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "a label above": ("nll_loss_backward", (*LOSS[:2], Y + 2**40, *LOSS[3:]), {}),
    "a label below": ("nll_loss_backward", (*LOSS[:2], Y - 1, *LOSS[3:]), {}),
    "a gradient": ("_log_softmax_backward_data", (WIDE, X, 1, torch.float32), {}),
    "sgd, a scale": ("_fused_sgd_", ([X], [X], [X]), {**SGD, "grad_scale": STEP}),
    "sgd, no momentum": ("_fused_sgd_", ([X], [X], []), SGD),
    "adam, no largest": ("_fused_adam_", ([X], *[[X]] * 3, [], [STEP]), {**ADAM, "amsgrad": True}),
    "sgd, size": ("_fused_sgd_", ([WIDE], [WIDE], [X]), SGD),
    "sgd, no memory of its own": ("_fused_sgd_", ([STEP.expand(99)],) * 3, SGD),
    "sgd, by name": ("_fused_sgd_", ([WIDE], [X]), {**SGD, "momentum_buffer_list": [X]}),
    "adam, size": ("_fused_adam_", ([WIDE], [WIDE], [WIDE], [X], [], [STEP]), ADAM),
    "adam, steps": ("_fused_adamw_", ([X], [X], [X], [X], [], []), ADAM),
    "adam, a step": ("_fused_adamw_", ([X], [X], [X], [X], [], [STEP[:0]]), ADAM),
    "adam, dtype": ("_fused_adam_", ([X], [X], [X.half()], [X], [], [STEP]), ADAM),
}


@pytest.mark.parametrize("name", BEYOND)
def test_no_operator_leaves_its_memory(name: str) -> None:
    operator, args, kwargs = BEYOND[name]
    with pytest.raises(ValueError, match=r"class|softmax|fused"):
        check_bounds(operator, args, kwargs)


def test_what_stays_in_its_memory_may_run() -> None:
    check_bounds("nll_loss_backward", (*LOSS[:2], torch.full((6,), -100), *LOSS[3:]), {})
    check_bounds("_log_softmax_backward_data", (X, X, 1, torch.float32), {})
    check_bounds("_fused_sgd_", ([X, WIDE], [X, WIDE], []), {**SGD, "momentum": 0.0})
    check_bounds("_fused_adam_", ([X, WIDE], *[[X, WIDE]] * 3, [], [STEP, STEP]), ADAM)


@pytest.mark.parametrize("name", ["embedding_dense_backward", "native_batch_norm", "_foreach_copy"])
def test_operators_that_cannot_be_checked_have_no_price(name: str) -> None:
    with pytest.raises(LookupError, match="not an operator on the price list"):
        operator_called(f"aten::{name}")


# The clock: nobody is ahead of it ---------------------------------------------------------------


def halfway(wait: str) -> Callable[[Job], None]:
    """Sum weights over the ranks, and use the sum before it is there, or never wait for it."""

    def train(job: Job) -> None:
        weight = job.model[0].weight.data
        weight += dist.get_rank()
        total = weight.clone()
        handle = dist.all_reduce(total, async_op=True)
        assert handle is not None
        if wait == "first":
            handle.wait()
        dist.barrier()
        weight.copy_(total)
        if wait == "late":
            handle.wait()

    return train


def test_a_sum_arrives_with_its_wait() -> None:
    """Used before it, it is what the rank put in, whatever the run at home saw."""
    before = draw(RACE, "a").weights[0]
    right = played([tape for tape, _ in written(halfway("first"))])
    assert all(torch.allclose(rank.weights[0], 2 * before + 1) for rank in right)
    late = played([tape for tape, _ in written(halfway("late"))])
    for number, rank in enumerate(late):
        assert torch.equal(rank.weights[0], before + number)


def until_completed(handle: Any) -> None:
    while not handle.is_completed():
        compute(1e-6)


@pytest.mark.parametrize(
    "wait",
    [
        until_completed,
        lambda handle: handle.synchronize(),
        lambda handle: handle.get_future().wait(),
    ],
)
def test_whoever_knows_that_it_is_there_has_waited(wait: Callable[[Any], Any]) -> None:
    def train(job: Job) -> None:
        weight = job.model[0].weight.data
        weight += dist.get_rank()
        handle = dist.all_reduce(weight, async_op=True)
        wait(handle)

    before = draw(RACE, "a").weights[0]
    for rank in played([tape for tape, _ in written(train)]):
        assert torch.allclose(rank.weights[0], 2 * before + 1)


def test_who_asks_too_early_has_not_waited() -> None:
    def train(job: Job) -> None:
        handle = dist.all_reduce(job.model[0].weight.data, async_op=True)
        assert not handle.is_completed()

    with pytest.raises(RanksError, match="never waits for the handle of all_reduce"):
        played([tape for tape, _ in written(train)])


def test_a_sum_that_is_never_waited_for_is_refused() -> None:
    tapes = [tape for tape, _ in written(halfway("never"))]
    with pytest.raises(RanksError, match="never waits for the handle of all_reduce"):
        played(tapes)


def test_a_message_holds_what_its_tensor_held_when_it_was_sent() -> None:
    def train(job: Job) -> None:
        weight = job.model[0].weight.data
        weight.fill_(1.0)
        got = torch.empty_like(weight)
        if dist.get_rank() == 0:
            handle = dist.isend(weight, 1)
            weight.fill_(2.0)
            handle.wait()
        else:
            dist.recv(got, 0)
            weight.copy_(got)

    first, second = played([tape for tape, _ in written(train)])
    assert bool((first.weights[0] == 2).all() and (second.weights[0] == 1).all())


def test_a_root_keeps_what_it_writes_while_it_sends() -> None:
    def train(job: Job) -> None:
        weight = job.model[0].weight.data
        weight.fill_(float(dist.get_rank() + 1))
        handle = dist.broadcast(weight, 0, async_op=True)
        assert handle is not None
        if dist.get_rank() == 0:
            weight.fill_(5.0)
        handle.wait()

    first, second = played([tape for tape, _ in written(train)])
    assert bool((first.weights[0] == 5).all() and (second.weights[0] == 1).all())


def test_what_a_rank_sends_to_itself_costs_a_copy() -> None:
    """Else a group of one would copy for nothing."""

    def train(job: Job) -> None:
        group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        dist.all_gather([torch.empty_like(job.x)], job.x, group=group)

    for rank in played([tape for tape, _ in written(train)]):
        assert rank.computed == pytest.approx(LAUNCH + 2 * 32 * 16 * 4 / 20e9)
