"""A rank is killed by SIGKILL; the others train on, and a new process takes its place."""

import copy
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, combinations
from pathlib import Path
from threading import Timer

import pytest
import torch
from torch.distributed import HashStore

from course_lib.ranks import Ranks
from course_lib.train import ConfigError, TrainConfig, train
from course_lib.train.elastic import Outcome, Roll, Training, alone, off, shares, supervise
from tests.helpers import ROOT

CONFIG = TrainConfig(width=16, layers=1, batch_size=50, steps=16, seed=5)  # 50: uneven parts
ROUNDING = 1e-12
PLACE = re.compile(r"Process (\d+) will take its place")


def killing(victims: dict[int, int], how: int = signal.SIGKILL) -> Callable[[int, int, int], None]:
    """Return a function that kills the first process of these ranks, after this step of theirs."""
    left = dict(victims)

    def on_step(rank: int, pid: int, step: int) -> None:
        if left.get(rank) == step:
            del left[rank]
            os.kill(pid, how)

    return on_step


def check(outcome: Outcome, world_size: int, died: Sequence[int]) -> None:
    """All are there at the end, the survivors never started anew, the result is one process's."""
    assert sorted(outcome.died) == sorted(died)
    assert sorted(outcome.weights) == list(range(world_size))
    for rank, steps in outcome.steps.items():
        assert len(set(outcome.pids[rank])) == 1 + died.count(rank)
        numbers = [step.step for step in steps]
        assert numbers == sorted(set(numbers)) or rank in died  # none is taken twice
        assert steps[-1].step == CONFIG.steps and steps[-1].members == world_size
    expected = Training(CONFIG)
    for number in range(1, expected.total + 1):
        rows = expected.rows()
        taken = [step for steps in outcome.steps.values() for step in steps if step.step == number]
        assert taken
        for members in {step.members for step in taken}:
            parts = [step.rows for step in taken if step.members == members]
            if len(parts) == members:  # of a process that was killed, a report may be missing
                assert sorted(chain(*parts)) == sorted(rows)
        expected.step(rows, len(rows))
    for rank in range(1, world_size):  # to the last bit: the same steps with the same sums
        for name, value in outcome.weights[0].items():
            assert torch.equal(outcome.weights[rank][name], value)
    assert off(outcome, expected) < ROUNDING
    assert outcome.losses == pytest.approx(expected.losses, rel=ROUNDING)


def test_one_of_three_is_killed_and_comes_back() -> None:
    said: list[str] = []
    outcome = supervise(3, CONFIG, whole_at=[12], on_step=killing({1: 4}), say=said.append)
    check(outcome, 3, [1])
    by_two = [step.step for step in outcome.steps[0] if step.members == 2]
    assert by_two == list(range(by_two[0], by_two[-1] + 1)) and by_two[0] >= 5 and by_two[-1] <= 12
    assert said[0] == "From step 1 on: ranks 0, 1, 2."
    assert re.match(r"Rank 1 has ended after its step \d+ \(SIGKILL\). Process \d+ will", said[1])
    last = rf"From step {by_two[-1] + 1} on: ranks 0, 1, 2, with the weights of rank [02]\."
    assert re.fullmatch(last, said[-1])


@pytest.mark.large
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(
    "victims", [{0: 1}, {1: 5}, {0: 4, 1: 4}, {0: 4, 1: 8}, {0: 4, 2: 4, 3: 4}]
)
def test_whoever_is_killed_comes_back(world_size: int, victims: dict[int, int]) -> None:
    """Also rank 0, two at once, one after the other, and all but the last one."""
    if max(victims) >= world_size or (world_size == 2 and victims == {0: 4, 1: 4}):
        pytest.skip("there is no such rank, or nobody would be left")
    outcome = supervise(world_size, CONFIG, whole_at=[6, 12], on_step=killing(victims))
    check(outcome, world_size, list(victims))


@pytest.mark.large
@pytest.mark.parametrize("delay", [0.0, 0.03, 0.1, 0.3, 1.0])
def test_a_new_process_is_killed_while_it_joins(delay: float) -> None:
    """It is killed while it starts, announces itself or meets the others, or right after."""
    timers: list[Timer] = []
    done: list[bool] = []

    def say(text: str) -> None:
        found = PLACE.search(text)
        if found and not timers:
            timers.append(Timer(delay, kill, [int(found[1])]))
            timers[0].start()

    def kill(pid: int) -> None:
        if not done:
            os.kill(pid, signal.SIGKILL)

    outcome = supervise(3, CONFIG, whole_at=[12, 15], on_step=killing({2: 4}), say=say)
    done.append(True)
    timers[0].cancel()
    if outcome.died == [2, 2]:
        check(outcome, 3, [2, 2])
    else:  # it was faster than the signal: training was over
        assert outcome.died == [2] and off(outcome, alone(CONFIG)) < ROUNDING
    assert [len(outcome.pids[rank]) for rank in (0, 1)] == [1, 1]


@pytest.mark.large
def test_a_new_process_is_killed_in_its_first_step() -> None:
    pids: list[int] = []

    def on_step(rank: int, pid: int, step: int) -> None:
        if rank == 2 and pid not in pids and len(pids) < 2 and step >= 4:
            pids.append(pid)
            os.kill(pid, signal.SIGKILL)

    check(supervise(3, CONFIG, whole_at=[10, 15], on_step=on_step), 3, [2, 2])


@pytest.mark.large
def test_a_rank_that_is_stopped_counts_as_dead_after_the_limit() -> None:
    said: list[str] = []
    on_step = killing({1: 4}, signal.SIGSTOP)
    outcome = supervise(3, CONFIG, whole_at=[12], limit=10, on_step=on_step, say=said.append)
    assert outcome.died.count(1) >= 1 and len(outcome.pids[1]) >= 2, said
    assert off(outcome, alone(CONFIG)) < ROUNDING


@pytest.mark.large
def test_without_replacement_the_others_go_on() -> None:
    outcome = supervise(4, CONFIG, replace=False, on_step=killing({2: 4}))
    assert outcome.died == [2] and sorted(outcome.weights) == [0, 1, 3]
    assert [len(pids) for pids in outcome.pids.values()] == [1] * 4
    assert outcome.steps[0][-1].members == 3
    assert off(outcome, alone(CONFIG)) < ROUNDING


@pytest.mark.large
def test_if_nobody_takes_the_rows_it_is_another_run() -> None:
    """The steps without the rank have a smaller batch: not the same weights, and not far away."""
    outcome = supervise(3, CONFIG, take_over=False, whole_at=[12], on_step=killing({1: 4}))
    undisturbed = alone(CONFIG)
    assert sorted(outcome.weights) == [0, 1, 2]
    assert outcome.losses[:4] == pytest.approx(undisturbed.losses[:4], rel=ROUNDING)
    assert 1e-6 < off(outcome, undisturbed) < 0.1
    rows = [sum(len(s.rows) for s in outcome.steps[r] if s.step == 11) for r in (0, 2)]
    assert sum(rows) in (33, 34)  # of 50


@pytest.mark.large
@pytest.mark.parametrize("again", [True, False])
def test_when_all_have_died_it_says_so(again: bool) -> None:
    with pytest.raises(RuntimeError, match="all 2 ranks died"):
        supervise(2, CONFIG, replace=again, on_step=killing({0: 1, 1: 1}))


@pytest.mark.large
def test_under_torchrun_torchrun_sees_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, *["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"],
         *["-m", "course_lib.train.elastic", "--kill", "1", "--batch-size", "50"]],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    out = done.stdout
    assert done.returncode == 0, done.stderr
    assert re.search(r"Rank 1 has ended after its step \d+ \(SIGKILL\)", out)
    counts = {m[1]: m[2].count(",") for m in re.finditer(r"rank (\d): processes ([\d, ]+);", out)}
    assert counts == {"0": 0, "1": 1, "2": 0}
    differences = re.findall(r"largest difference of a weight (\S+)", out)
    assert len(differences) == 3 and max(map(float, differences)) < ROUNDING


def test_it_is_the_training_of_course_lib_train() -> None:
    config = TrainConfig(width=16, layers=1, steps=40, log_every=0)  # more than an epoch
    with Ranks(2, on="simulated") as ranks:
        result = ranks.run(train, config)[0]
    mine = alone(config)
    assert mine.losses == pytest.approx(result.losses, rel=1e-4)  # float64 beside float32
    for name, weight in mine.model.named_parameters():
        torch.testing.assert_close(weight.float(), result.weights[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["dropout", "accumulate", "clip_norm", "checkpoint"])
def test_an_option_that_it_lacks_is_refused(name: str) -> None:
    value = {"dropout": 0.1, "accumulate": 2, "clip_norm": 1.0, "checkpoint": "x"}[name]
    with pytest.raises(ConfigError, match=f"not support --{name.replace('_', '-')}"):
        supervise(2, replace(CONFIG, **{name: value}))


@pytest.mark.parametrize("world_size", [0, 51])
def test_each_rank_needs_a_row(world_size: int) -> None:
    with pytest.raises(ConfigError, match="at least 1, and at most --batch-size 50"):
        supervise(world_size, CONFIG)


def test_members_share_the_batch_in_the_order_of_their_ranks() -> None:
    rows = list(range(50))
    assert shares(rows, [0, 1, 3], 4) == {0: rows[:17], 1: rows[17:34], 3: rows[34:]}
    left = shares(rows, [0, 1, 3], 4, take_over=False)
    assert left == {0: rows[:13], 1: rows[13:26], 3: rows[38:]}
    for count in range(1, 5):
        for members in combinations(range(4), count):
            assert sorted(chain(*shares(rows, members, 4).values())) == rows


@pytest.mark.parametrize("parts", [1, 3, 4, 7])
def test_parts_of_a_batch_add_up_to_its_gradient(
    parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradients of the parts add up to the gradient of one process, and so do the losses."""
    monkeypatch.setattr("course_lib.train.elastic.dist.all_reduce", lambda _: None)
    whole = Training(CONFIG)
    rows = whole.rows()
    whole.step(rows, len(rows))
    total: list[torch.Tensor] = []
    losses = []
    for mine in shares(rows, range(parts), parts).values():
        one = Training(CONFIG)
        one.step(mine, len(rows))
        losses += one.losses
        grads = [param.grad for param in one.model.parameters()]
        total = [a + b for a, b in zip(total, grads, strict=True)] if total else grads
    assert sum(losses) == pytest.approx(whole.losses[0])
    for mine_, param in zip(total, whole.model.parameters(), strict=True):
        torch.testing.assert_close(mine_, param.grad)


def test_a_state_that_is_taken_over_goes_on_as_the_other_would() -> None:
    """With buffers and AdamW's moments."""
    one, other = Training(CONFIG), Training(replace(CONFIG))
    for training in (one, other):
        training.model.register_buffer("count", torch.zeros(1))
    for _ in range(2):
        one.step(one.rows(), 50)
    one.model.get_buffer("count").fill_(7)
    other.take_over(copy.deepcopy(one.state()))  # as over the wire
    for training in (one, other):
        training.step(training.rows(), 50)
    assert other.losses == one.losses and other.steps == 3
    for a, b in zip(one.model.state_dict().items(), other.model.state_dict().items(), strict=True):
        assert a[0] == b[0] and torch.equal(a[1], b[1])


def test_the_events_decide_the_members() -> None:
    roll = Roll(HashStore(), 3)
    for event in ("gone 1.0", "gone 1.0", "join 1.1", "gone 0.0", "gone 1.0"):
        roll.write(event)  # what is known is not written again
    roll.again(0)  # too late
    roll.again(3)
    assert roll.events(roll.count()) == ["gone 1.0", "join 1.1", "gone 0.0", "again"]
    expected = ["0.0 1.0 2.0", "0.0 2.0", "0.0 1.1 2.0", "1.1 2.0", "1.1 2.0"]
    assert [" ".join(roll.members(n).values()) for n in range(5)] == expected


def test_those_who_meet_leave_with_the_same_members() -> None:
    roll = Roll(HashStore(), 3, limit=60)
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(roll.meet, name, 0) for name in ("0.0", "2.0")]
        roll.write("gone 1.0")
        assert [each.result() for each in waiting] == [(1, {0: "0.0", 2: "2.0"})] * 2


def test_who_does_not_come_to_a_meeting_is_no_member() -> None:
    roll = Roll(HashStore(), 2, limit=0.2)
    roll.again(0)
    assert roll.meet("0.0", 1) == (2, {0: "0.0"})
    with pytest.raises(RuntimeError, match=r"process 1\.0 .* did not hear of it"):
        roll.meet("1.0", 0)


def test_who_comes_after_the_end_is_told() -> None:
    roll = Roll(HashStore(), 2)
    roll.end("done")
    roll.end("something else")
    roll.write("join 1.1")
    assert roll.meet("1.1", 0) is None and roll.ended() == "done"
