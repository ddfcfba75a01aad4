"""A tape that is played on the draw it was written on gives the same weights, to the last bit.

Whatever a rank does with PyTorch and the course's own modules: what is missing on the tape would
show there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from course_lib.capstone import DEVICE, Job, Race, TapeError, draw, write_tape
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
from course_lib.ranks import Ranks, RanksError, per_rank
from course_lib.sharded_optimizer import ShardedOptimizer

pytestmark = pytest.mark.timeout(120)

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
    "a group of its own": one_group_of_its_own,
    "other collectives": other_collectives,
    "evaluation in between": evaluation,
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


def test_another_draw_is_trained_on_its_own_rows() -> None:
    """What comes of it is what the same function gives there, and not what it gave here."""
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


# What a stranger may send in place of a tape ---------------------------------------------------

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
    with pytest.raises(TapeError, match="no tape"):
        Tape.decode(data)
