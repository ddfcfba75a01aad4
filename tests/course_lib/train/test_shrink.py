"""Three of four go on: a rank is killed by SIGKILL, and the others train on as if it had left."""

import copy
import os
import signal

import pytest
import torch

from course_lib.train.shrink import Outcome, Training, off, supervise


def killing(victims: dict[int, int]) -> tuple[list[int], object]:
    pids: list[int] = []

    def on_step(rank: int, pid: int, step: int) -> None:
        if victims.get(rank) == step:
            os.kill(pid, signal.SIGKILL)
            pids.append(pid)

    return pids, on_step


def check(outcome: Outcome, world_size: int, victims: dict[int, int], steps: int) -> None:
    left = [rank for rank in range(world_size) if rank not in victims]
    assert sorted(outcome.died) == sorted(victims)
    assert sorted(outcome.weights) == left
    for rank in left:
        taken = [step for step, _ in outcome.steps[rank]]
        # None is taken twice; one that others had taken already is taken over from them.
        assert taken == sorted(set(taken)) and taken[-1] == steps
        assert len(taken) >= steps - len(victims)
        counts = [members for _, members in outcome.steps[rank]]
        assert counts == sorted(counts, reverse=True) and counts[-1] == len(left)
        first = max(step for step, members in outcome.steps[rank] if members == world_size)
        assert first >= min(victims.values())
    together = {step for rank in left for step, _ in outcome.steps[rank]}
    assert together == set(range(1, steps + 1))
    for rank in left[1:]:  # to the last bit: all took the same steps with the same sums
        for name, value in outcome.weights[left[0]].items():
            assert torch.equal(outcome.weights[rank][name], value)
    assert off(outcome, seed=5) < 1e-12


def test_one_of_four_is_killed_and_three_go_on() -> None:
    pids, on_step = killing({2: 4})
    outcome = supervise(4, steps=9, seed=5, on_step=on_step)  # type: ignore[arg-type]
    assert len(pids) == 1
    check(outcome, 4, {2: 4}, 9)


@pytest.mark.large
@pytest.mark.parametrize("victims", [{0: 1}, {3: 2, 0: 6}, {0: 5, 1: 5}])
def test_whoever_is_killed_the_others_go_on(victims: dict[int, int]) -> None:
    """Also rank 0, two after one another, and two at once."""
    _, on_step = killing(victims)
    outcome = supervise(4, steps=12, seed=5, on_step=on_step)  # type: ignore[arg-type]
    check(outcome, 4, victims, 12)


@pytest.mark.large
def test_the_last_one_trains_alone() -> None:
    _, on_step = killing({0: 3})
    outcome = supervise(2, steps=6, seed=5, on_step=on_step)  # type: ignore[arg-type]
    check(outcome, 2, {0: 3}, 6)


@pytest.mark.large
def test_when_all_have_died_it_says_so() -> None:
    _, on_step = killing({0: 1, 1: 1})
    with pytest.raises(RuntimeError, match="all 2 ranks died"):
        supervise(2, steps=1000, seed=5, on_step=on_step)  # type: ignore[arg-type]


@pytest.mark.parametrize("parts", [1, 3, 4, 7])
def test_parts_of_a_batch_add_up_to_its_gradient(
    parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradients of the parts add up to the gradient of one process."""
    monkeypatch.setattr("course_lib.train.shrink.dist.all_reduce", lambda _: None)
    whole = Training(3)
    whole.step()
    total: list[torch.Tensor] = []
    for part in range(parts):
        one = Training(3)
        one.step(part, parts)
        grads = [param.grad for param in one.model.parameters()]
        total = [a + b for a, b in zip(total, grads, strict=True)] if total else grads
    for mine, param in zip(total, whole.model.parameters(), strict=True):
        torch.testing.assert_close(mine, param.grad)


def test_a_state_that_is_taken_over_goes_on_as_the_other_would() -> None:
    one, other = Training(1), Training(2)
    one.step()
    one.step()
    other.take_over(copy.deepcopy(one.state()))  # as over the wire
    other.seed = one.seed
    other.inputs, other.targets = one.inputs, one.targets
    one.step()
    other.step()
    assert other.steps == one.steps == 3
    for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b)
