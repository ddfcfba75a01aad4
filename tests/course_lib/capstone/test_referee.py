"""The score is the price list's and the network's, and nobody's machine is in it."""

from __future__ import annotations

import itertools
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from course_lib.capstone import DEVICE, LAUNCH, Job, Race, TapeError, draw, rehearse, speed_of_light
from course_lib.capstone.operators import KNOWN, operator_called, price
from course_lib.cost_model import ring_all_reduce_time
from course_lib.ranks import Device, Ranks, RankTimeout

RACE = Race(world_size=2, rows=64, features=16, hidden=24, classes=4)
NUMEL = 16 * 24 + 24 + 24 * 4 + 4


def train(job: Job) -> int:
    optimizer = torch.optim.SGD(job.model.parameters(), lr=0.05, momentum=0.9)
    params = list(job.model.parameters())
    for step in range(4):
        optimizer.zero_grad()
        F.cross_entropy(job.model(job.x[8 * step :]), job.y[8 * step :]).backward()
        optimizer.step()
    flat = torch.cat([p.detach().flatten() for p in params]) / 2
    dist.all_reduce(flat)
    for p, mean in zip(params, flat.split([p.numel() for p in params]), strict=True):
        p.data.copy_(mean.view_as(p))
    return 4 * flat.numel()


@contextmanager
def burners(count: int) -> Iterator[None]:
    burn = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for each in burn:
            each.kill()
            each.wait()


@pytest.mark.parametrize("stuck", ["sleeps", "is stopped"])
def test_a_play_that_hangs_ends_at_its_limit_and_says_where(
    monkeypatch: pytest.MonkeyPatch, stuck: str
) -> None:
    def hangs(*_: object) -> None:
        if stuck == "sleeps":
            time.sleep(1000)
        os.kill(os.getpid(), signal.SIGSTOP)

    module = sys.modules["course_lib.capstone.referee"]  # the package's attribute is the function
    monkeypatch.setattr(module, "SECONDS", 2.0)
    monkeypatch.setattr(module, "play", hangs)
    with pytest.raises(TapeError, match=r"playing the tapes takes more than 2 s") as caught:
        rehearse(train, RACE)
    cause = caught.value.__cause__
    assert isinstance(cause, RankTimeout)
    assert stuck != "sleeps" or "test_referee.py" in f"{cause.states} {cause.detail}"
    monkeypatch.undo()
    rehearse(train, RACE)  # and nothing is left that the next one would meet


def test_a_play_that_does_not_start_is_not_the_tapes_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(self: Ranks) -> None:
        raise RankTimeout("The start took longer than its limit of 60 s.", [])

    monkeypatch.setattr(Ranks, "start", late)
    with pytest.raises(TapeError, match=r"did not start: .* not the tape's fault: try again"):
        rehearse(train, RACE)


def test_a_busy_machine_gives_the_same_score() -> None:
    idle, idle_trace = rehearse(train, RACE, plays=2)
    with burners(4):
        busy, busy_trace = rehearse(train, RACE, plays=2)
    assert idle == busy  # all of it, to the last bit
    assert idle_trace.events == busy_trace.events


def test_the_seconds_are_those_of_the_price_list_and_the_network() -> None:
    def one_product(job: Job) -> int:
        torch.mm(job.x, job.model[0].weight.detach().T)
        dist.all_reduce(torch.zeros(1000))
        return 0

    score, trace = rehearse(one_product, RACE)
    product = max(2 * 64 * 16 * 24 / DEVICE.flops, 4 * (64 * 16 + 16 * 24 + 64 * 24) / 20e9)
    fill = 4000 / 20e9
    assert score.computed == pytest.approx(2 * LAUNCH + product + fill, rel=1e-12)
    ring = ring_all_reduce_time(4000, 2, RACE.network)
    assert score.seconds == pytest.approx(score.computed + ring, rel=1e-12)
    assert score.flops == 2 * 64 * 16 * 24
    assert score.sent == score.received == (4000, 4000)
    assert trace.makespan == score.seconds


@pytest.mark.parametrize("multiply", ["mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_"])
def test_every_matrix_product_has_its_price(multiply: str) -> None:
    """2 m n k operations each, in place as well: φ is slow enough to show them."""
    a, b, c = torch.ones(3, 40, 50), torch.ones(3, 50, 60), torch.ones(3, 40, 60)
    if "b" not in multiply.replace("addmm", "").removesuffix("_"):
        a, b, c = a[0], b[0], c[0]
    args = (c, a, b) if "add" in multiply else (a, b)
    operator = operator_called(f"aten::{multiply}")
    out = operator(*args)
    seconds, flops = price(operator, args, {}, out, Device(flops=1e3, memory_bandwidth=1e12))
    assert flops == 2 * 40 * 50 * 60 * (3 if a.dim() == 3 else 1)
    assert seconds == pytest.approx(flops / 1e3, rel=1e-4)


def test_a_batch_of_decompositions_costs_what_each_costs() -> None:
    operator = operator_called("aten::linalg_qr")
    one, many = (
        price(operator, (each,), {}, operator(each), DEVICE)[1]
        for each in (torch.rand(30, 20), torch.rand(7, 30, 20))
    )
    assert many == 7 * one > 0


def test_the_mean_of_a_label_says_nothing() -> None:
    """A network is to be trained: one all-reduce of ten means must not win the race."""
    race = Race()
    drawn = draw(race, "any")
    x, y = drawn.held
    for label in range(race.classes):
        rows = x[y == label]
        spread = rows.std(0).norm() / len(rows) ** 0.5
        assert rows.mean(0).norm() < 2 * spread


def test_the_speed_of_light_is_below_every_run() -> None:
    score, _ = rehearse(train, RACE)
    assert 0 < score.light < score.seconds
    assert speed_of_light([100, 200], [0, 0], [0, 0], RACE) == 200 / DEVICE.flops
    assert speed_of_light([0, 0], [1000, 0], [0, 3000], RACE) == 3000 / RACE.bandwidth


def test_what_is_computed_off_the_tape_costs_the_run() -> None:
    def by_numpy(job: Job) -> int:
        for param in job.model.parameters():
            param.data.copy_(torch.from_numpy(param.detach().numpy() * 0.5))
        job.x.copy_(torch.from_numpy(job.x.numpy() * 2.0))
        job.x.copy_(torch.from_numpy(job.x.numpy() * 2.0))
        return 0

    with pytest.raises(TapeError, match="come from nowhere"):
        rehearse(by_numpy, RACE)


def test_memory_that_is_written_behind_the_tape_stays_as_it_was() -> None:
    """There is nothing to catch: the referee's run never heard of it."""

    def in_place(job: Job) -> int:
        job.model[0].weight.detach().numpy()[:] = 0
        return train(job)

    behind, _ = rehearse(in_place, RACE)
    honest, _ = rehearse(train, RACE)
    assert behind == honest


def test_the_draw_that_is_scored_is_not_the_one_that_is_seen() -> None:
    seen = [draw(RACE, f"{seed} written").x[0] for seed in ("rehearsal", "another")]
    scored = [draw(RACE, f"rehearsal {play}").x[0] for play in range(2)]
    for a, b in itertools.combinations((*seen, *scored), 2):
        assert not torch.equal(a, b)
    score, _ = rehearse(train, RACE)
    again, _ = rehearse(train, RACE, seed="another")
    assert again.seconds == score.seconds  # a tape costs what it costs
    assert again.losses != score.losses and math.isfinite(again.worst)


def test_work_that_nobody_did_gives_nothing() -> None:
    """Values that a function returns, its sleeps and its declarations are not on the tape."""

    def idle(job: Job) -> int:
        from course_lib.ranks import compute

        compute(-0.0)
        return 10**9

    score, _ = rehearse(idle, RACE)
    assert score.flops == score.gradients == 0
    assert score.worst > 1.0  # of four labels


def test_time_does_not_depend_on_the_numbers() -> None:
    def by_value(job: Job) -> int:
        return len(job.x[job.x[:, 0] > 0])

    with pytest.raises(TapeError, match="depends on the numbers"):
        rehearse(by_value, RACE)


@pytest.mark.parametrize("name", ["set_", "resize_", "linalg_svd", "_cdist_forward", "lstsq"])
def test_what_has_no_price_is_refused(name: str) -> None:
    assert name not in KNOWN
    with pytest.raises(LookupError):
        operator_called(f"aten::{name}")


def test_every_known_counted_operator_is_counted() -> None:
    """A product of matrices under any of its names has floating-point operations."""
    products = [
        lambda a: a @ a,
        lambda a: torch.addmm(a, a, a),
        lambda a: torch.bmm(a[None], a[None])[0],
        lambda a: torch.baddbmm(a[None], a[None], a[None])[0],
        lambda a: torch.einsum("ij,jk->ik", a, a),
        lambda a: F.linear(a, a),
        lambda a: torch.mm(a, a, out=torch.empty_like(a)),
        lambda a: F.conv1d(a[None], a[:, :, None])[0],
        lambda a: torch.matmul(a[None, None], a),
    ]
    for product in products:

        def run(job: Job, product=product) -> int:  # type: ignore[no-untyped-def]
            with torch.inference_mode():
                product(job.x[:16])
            return 0

        score, _ = rehearse(run, RACE)
        assert score.flops == 2 * 16**3


def test_a_draw_is_the_same_under_any_default_dtype() -> None:
    """A check draws its inputs in float64 and its referee does not: they must agree."""
    before = torch.get_default_dtype()
    plain = draw(Race(), "seed")
    try:
        torch.set_default_dtype(torch.float64)
        wide = draw(Race(), "seed")
    finally:
        torch.set_default_dtype(before)
    for ours, theirs in zip([*plain.weights, *plain.x], [*wide.weights, *wide.x], strict=True):
        assert ours.dtype == theirs.dtype == torch.float32 and torch.equal(ours, theirs)
