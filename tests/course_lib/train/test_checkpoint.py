"""Checkpoints: a resumed run is an uninterrupted one, and no damage loses what can be kept."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from course_lib.ranks import RankError
from course_lib.train import train
from course_lib.train.checkpoint import checkpoints, save_checkpoint, step_of
from tests.helpers import train_runs


@pytest.mark.parametrize(
    # The sum of K = 2 numbers is the same in any order. With more it depends on the buckets.
    ("on", "world_size", "ddp"),
    [("simulated", 2, "ours"), pytest.param("cpu", 3, "torch", marks=pytest.mark.large)],
)
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(
    ranks_of, tmp_path, on, world_size, ddp
):
    config = replace(train_runs.TEXT, width=32, steps=9, ddp=ddp)
    ranks = ranks_of(on, world_size)
    uninterrupted = train_runs.same_everywhere(ranks.run(train, config))
    saving = replace(config, checkpoint=str(tmp_path / "runs" / "text"), checkpoint_every=2)
    ranks.run(train, replace(saving, steps=5))
    resumed = train_runs.same_everywhere(ranks.run(train, saving))
    assert (uninterrupted.resumed_at, resumed.resumed_at) == (0, 5)
    assert train_runs.bits(resumed) == train_runs.bits(uninterrupted)
    assert resumed.losses == uninterrupted.losses
    assert resumed.test_loss == uninterrupted.test_loss

    again = train_runs.same_everywhere(ranks.run(train, saving))  # nothing is left to be done
    assert again.resumed_at == 9
    assert again.losses == uninterrupted.losses


@pytest.mark.large
def test_another_number_of_ranks_goes_on_in_the_middle_of_an_epoch(ranks_of, tmp_path):
    config = replace(
        train_runs.DIGITS, batch_size=120, steps=19, checkpoint=str(tmp_path)
    )  # 11 per epoch
    ranks_of("simulated", 2).run(train_runs.in_double, replace(config, steps=13, accumulate=3))
    result = train_runs.same_everywhere(ranks_of("simulated", 3).run(train_runs.in_double, config))
    assert result.resumed_at == 13
    train_runs.assert_same_training(result, train_runs.one_machine(config), **train_runs.EXACT)


def test_only_the_newest_checkpoints_stay_and_a_damaged_one_is_passed_over(
    ranks_of, tmp_path, capsys
):
    config = replace(train_runs.TEXT, steps=6, checkpoint=str(tmp_path), checkpoint_every=2)
    ranks = ranks_of("simulated", 2)
    expected = ranks.run(train, config)[0]
    assert [step_of(path) for path in checkpoints(tmp_path)] == [4, 6]

    newest = tmp_path / "step-00000006.pt"
    newest.write_bytes(newest.read_bytes()[:-1000])  # as if the machine had stopped
    (tmp_path / "step-00000008.tmp").write_bytes(b"half a checkpoint")
    again = train_runs.same_everywhere(ranks.run(train, config))
    assert again.resumed_at == 4
    assert train_runs.bits(again) == train_runs.bits(expected)
    assert f"{newest} cannot be used" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-00000004.pt",
        "step-00000006.pt",
    ]


@pytest.mark.parametrize("damage", [b"", b"not a checkpoint", Path("code"), [1, 2]])
def test_if_no_checkpoint_can_be_read_all_ranks_refuse_and_none_is_lost(
    ranks_of, tmp_path, capsys, damage
):
    files = {tmp_path / f"step-{step:08d}.pt" for step in (900, 901)}
    for path in files:
        if isinstance(damage, bytes):
            path.write_bytes(damage)
        else:  # a Path cannot be loaded without running its code
            torch.save(damage, path)
    config = replace(train_runs.TEXT, steps=1, checkpoint=str(tmp_path))
    first, second = ranks_of("simulated", 2).run(train_runs.refusal, config)
    assert first == second
    assert f"none of the 2 checkpoints in {tmp_path} can be read" in first
    assert set(tmp_path.iterdir()) == files
    output = capsys.readouterr().out
    assert all(f"{path} cannot be used (" in output for path in files)
    assert "weights_only" not in output  # PyTorch's advice to switch it off


def test_a_write_that_fails_leaves_the_old_checkpoint(tmp_path):
    old = save_checkpoint(tmp_path, 3, {"step": 3})
    content = old.read_bytes()
    with pytest.raises(Exception, match=r"pickle|local object"):
        save_checkpoint(tmp_path, 3, {"step": lambda: 0})
    assert checkpoints(tmp_path) == [old]
    assert old.read_bytes() == content


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": 0.5}, r"--lr 0\.001, but this run has 0\.5"),
        ({"batch_size": 48}, "--batch-size 24, but this run has 48"),
    ],
)
def test_a_checkpoint_of_another_configuration_is_refused(ranks_of, tmp_path, change, message):
    config = replace(train_runs.TEXT, steps=1, checkpoint=str(tmp_path))
    ranks = ranks_of("simulated", 2)
    ranks.run(train, config)
    with pytest.raises(RankError, match=message) as error:
        ranks.run(train, replace(config, **change))
    assert "choose another folder with --checkpoint" in str(error.value)
