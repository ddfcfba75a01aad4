"""The command line, alone and under torchrun: restarts, interrupts, mistakes."""

import os
import signal
import subprocess
import sys

import pytest
import torch

from course_lib.train import ConfigError, TrainConfig, train
from course_lib.train import __main__ as command_line
from tests.helpers import ROOT
from tests.helpers.torchrun import finish, start
from tests.helpers.train_runs import same_everywhere

SMALL = [
    *("--model", "transformer", "--width", "16", "--layers", "1", "--heads", "2"),
    *("--context", "16", "--batch-size", "24"),
]
# The product has no switch for dying: this script ends rank 1 in its eighth step. After the restart
# rank 0 comes late, so that what its predecessor left in the store is there to be found.
KILLED = """
import os, signal, time, torch
from course_lib.train.__main__ import leave, main

step, taken = torch.optim.AdamW.step, 0
start = (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"])

def step_or_die(self, *args, **kwargs):
    global taken
    taken += 1
    if start == ("1", "0") and taken == 8:
        open("rank 1 was killed", "x").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, *args, **kwargs)

torch.optim.AdamW.step = step_or_die
if start == ("0", "1"):
    time.sleep(0.5)
leave(main())
"""


@pytest.mark.large
def test_a_killed_rank_leads_to_a_restart_and_the_loss_of_an_uninterrupted_run(ranks_of, tmp_path):
    (tmp_path / "killed.py").write_text(KILLED)
    options = [*SMALL, "--steps", "12", "--checkpoint", "kept", "--checkpoint-every", "3"]
    job = start(tmp_path, "--max-restarts", "1", "killed.py", *options)
    output = finish(job)[0].decode()
    assert job.returncode == 0, output
    assert (tmp_path / "rank 1 was killed").exists()
    assert "continuing from kept at step 6 of 12" in output

    config = TrainConfig(**vars_of(SMALL), steps=12, log_every=0)
    expected = same_everywhere(ranks_of("cpu", 2).run(train, config))
    checkpoint = torch.load(tmp_path / "kept" / "step-00000012.pt", weights_only=True)
    assert checkpoint["losses"].tolist() == expected.losses
    for name, weight in expected.weights.items():
        assert torch.equal(checkpoint["model"][name], weight), name
    assert f"test loss {expected.test_loss:.4f}" in output


def vars_of(options: list[str]):
    parsed = vars(command_line.parser().parse_args(options))
    names = {option.removeprefix("--").replace("-", "_") for option in options[::2]}
    return {name: parsed[name] for name in names}


@pytest.mark.large
def test_ctrl_c_ends_all_ranks_at_once_and_without_tracebacks_of_ours(tmp_path):
    options = [*SMALL, "--steps", "1000000", "--checkpoint", "kept", "--checkpoint-every", "5"]
    job = start(tmp_path, "-m", "course_lib.train", *options)
    assert any(b"step      10/1000000" in line for line in job.stdout)
    job.send_signal(signal.SIGINT)  # torchrun passes it on to the ranks
    printed = finish(job)[0].decode()
    assert job.returncode != 0
    assert "course_lib/train" not in printed  # torchrun's own traceback is all there is
    assert "KeyboardInterrupt" not in printed and "terminate called" not in printed


@pytest.mark.large
def test_it_runs_without_torchrun_as_one_rank(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "course_lib.train", *SMALL, "--steps", "3"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "batch 24 = 1 × 1 × 24 (ranks" in done.stdout and "step 3/3" in done.stdout


@pytest.mark.parametrize(
    ("rank", "message"), [("0", "--lr is -1.0: it must be above 0"), ("1", "")]
)
def test_a_wrong_option_is_reported_by_one_rank(capsys, monkeypatch, rank, message):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr("sys.argv", ["train", "--lr", "-1"])
    assert command_line.main() == 2
    assert message in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["train", "--no-such-option"])
    assert command_line.main() == 2
    assert ("no-such-option" in capsys.readouterr().err) == (rank == "0")
    monkeypatch.setattr("sys.argv", ["train", "--help"])
    assert command_line.main() == 0
    assert ("--checkpoint CHECKPOINT" in capsys.readouterr().out) == (rank == "0")


def test_more_ranks_than_gpus_cannot_ask_for_gpus(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
    with pytest.raises(ConfigError, match="a GPU for each of the 64 ranks"):
        command_line.join("cuda")
