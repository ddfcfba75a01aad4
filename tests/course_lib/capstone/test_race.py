"""The race: what a gradient is, what it costs, and what a run has cost."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from course_lib.capstone import DEVICE, OVERHEAD, Race, answer, draw, inputs, rehearse

SMALL = Race(world_size=2, rows=48, features=8, hidden=6, classes=4, clusters=2)


def weights_of(member):
    return [weight.clone() for weight in member["weights"]]


@pytest.mark.parametrize("rows", [[0], [5, 3, 3], list(range(48))])
def test_the_answer_is_the_gradient_of_the_rows(rows: list[int]) -> None:
    member = inputs(SMALL, "seed")[1]
    w1, b1, w2, b2 = (weight.requires_grad_() for weight in weights_of(member))
    x, y = draw(SMALL, "seed").x[1][rows], draw(SMALL, "seed").y[1][rows]
    loss = F.cross_entropy(torch.relu(x @ w1.T + b1) @ w2.T + b2, y)
    right = torch.autograd.grad(loss, [w1, b1, w2, b2])
    reply, seconds = answer(member, {"weights": weights_of(member), "rows": torch.tensor(rows)})
    assert reply["loss"] == pytest.approx(float(loss.detach()))
    torch.testing.assert_close(reply["gradients"], list(right))
    # Two products forward; backward, two more of each, without the gradient of x.
    flops = 2 * len(rows) * (2 * 8 * 6 + 3 * 6 * 4)
    assert seconds == pytest.approx(OVERHEAD + flops / DEVICE.flops)


WRONG = [
    {"rows": torch.tensor([-1])},
    {"rows": torch.tensor([], dtype=torch.int64)},
    {"rows": torch.zeros(49, dtype=torch.int64)},
    {"rows": torch.tensor([0.0])},
    {"rows": 0},
    {"weights": [torch.zeros(1)] * 4},
    {"weights": ["weight"] * 4},
    {"rank": 1},
]


@pytest.mark.parametrize("changed", WRONG)
def test_other_questions_have_no_answer(changed) -> None:
    member = inputs(SMALL, "seed")[0]
    with pytest.raises(ValueError, match=r"rows|weights"):
        answer(member, {"weights": weights_of(member), "rows": torch.arange(4), **changed})
    wide = [weight.double() for weight in weights_of(member)]
    with pytest.raises(ValueError, match="weights"):
        answer(member, {"weights": wide, "rows": torch.arange(4)})


def one_step(job) -> int:
    job.backward(slice(0, 16))
    flat = torch.cat([param.grad.flatten() for param in job.model.parameters()])
    handle = dist.all_reduce(flat, async_op=True)
    job.backward([0])
    handle.wait()
    return 2 * (dist.get_world_size() - 1) * flat.nbytes // dist.get_world_size()


def test_messages_and_gradients_overlap() -> None:
    race = replace(SMALL, latency=1e-3)
    score, trace, curve = rehearse(one_step, race)
    n = 4 * (8 * 6 + 6 + 6 * 4 + 4)
    ring = 2 * (race.latency + n / 2 / race.bandwidth)
    assert score.seconds == trace.makespan == pytest.approx(race.seconds(16) + ring)
    assert score.computed == pytest.approx(race.seconds(16) + race.seconds(1))
    assert score.sent == (n, n) and score.rounds == 1
    assert score.light == pytest.approx(max(score.computed, n / race.bandwidth))
    assert [time for time, _ in curve] == pytest.approx(
        [race.seconds(16), score.computed, score.seconds]
    )


def test_a_curve_goes_down_and_ends_with_the_loss_that_counts() -> None:
    def train(job) -> None:
        optimizer = torch.optim.SGD(job.model.parameters(), lr=0.5)
        for _ in range(60):
            job.backward(range(job.rows))
            for param in job.model.parameters():
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
            optimizer.step()

    _, _, curve = rehearse(train, SMALL)
    assert curve[-2][1] < 0.5 * curve[0][1]
    assert len(curve) == 61 and curve[-1][1] < curve[0][1]
