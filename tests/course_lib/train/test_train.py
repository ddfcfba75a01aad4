"""Training: the same numbers on any number of ranks, through restarts, and with PyTorch's DDP.

The oracle is a plain loop on one process with the whole batch. In float64 it must be met to 1e-9,
which leaves room for sums in another order and for nothing else.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore
from torch.nn.functional import cross_entropy
from torch.utils.data.distributed import DistributedSampler

from course_lib.ranks import RankError
from course_lib.sharding import ShardedSampler
from course_lib.train import ConfigError, TrainConfig, TrainResult, train
from course_lib.train import __main__ as command_line
from course_lib.train.checkpoint import checkpoints, load_checkpoint, save_checkpoint, step_of
from course_lib.train.datasets import documentation_text, load_dataset, pieces
from course_lib.train.meeting import agree_on_name
from course_lib.train.models import build_model
from course_lib.train.precision import Precision
from course_lib.train.progress import Progress, duration
from tests.helpers import ROOT

pytestmark = pytest.mark.timeout(120)

CPU = torch.device("cpu")
EXACT = {"rtol": 1e-9, "atol": 1e-11}
# Digits: 2 steps per epoch, so that 5 steps need three orders.
DIGITS = TrainConfig(width=8, batch_size=480, steps=5, log_every=0)
TEXT = TrainConfig(
    model="transformer",
    **{"width": 16, "layers": 1, "heads": 2, "context": 32},
    **{"batch_size": 24, "steps": 5, "log_every": 0},
)
CONFIGS = {"mlp": DIGITS, "cnn": replace(DIGITS, model="cnn"), "transformer": TEXT}


def in_double(config: TrainConfig) -> TrainResult:
    torch.set_default_dtype(torch.float64)
    try:
        return train(config)
    finally:
        torch.set_default_dtype(torch.float32)


def same_everywhere(results: list[TrainResult]) -> TrainResult:
    """Check that the replicas have the same bits; return the first one's result."""
    for result in results:
        assert result.digest() == results[0].digest()
        assert result.losses == results[0].losses
        assert result.test_loss == results[0].test_loss
    return results[0]


def assert_same_training(result: TrainResult, expected: TrainResult, **tolerance: float) -> None:
    torch.testing.assert_close(result.losses, expected.losses, **tolerance)
    torch.testing.assert_close(result.weights, expected.weights, **tolerance)
    torch.testing.assert_close(result.test_loss, expected.test_loss, **tolerance)
    assert result.test_accuracy == pytest.approx(expected.test_accuracy, abs=1e-3)


def refusal(config: TrainConfig) -> str:
    with pytest.raises((ConfigError, FloatingPointError)) as error:
        train(config)
    return str(error.value)


def one_machine(config: TrainConfig) -> TrainResult:
    """The oracle: no ranks, no wrapper, the whole batch, the plain AdamW, in float64."""
    before = torch.random.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(config.seed)
        model, data = build_model(config), load_dataset(config, CPU)
        optimizer = torch.optim.AdamW(
            model.parameters(), config.lr, weight_decay=config.weight_decay, foreach=False
        )
        (inputs, targets), losses = data.train, []
        per_epoch = len(inputs) // config.batch_size
        sampler = DistributedSampler(range(len(inputs)), 1, 0, seed=config.seed)
        for step in range(config.steps or 0):
            if step % per_epoch == 0:
                sampler.set_epoch(step // per_epoch)
                order = list(sampler)
            start = step % per_epoch * config.batch_size
            batch = order[start : start + config.batch_size]
            optimizer.zero_grad()
            logits = model(inputs[batch])
            loss = cross_entropy(logits.flatten(0, -2), targets[batch].flatten().long())
            loss.backward()
            if config.clip_norm is not None:
                norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
                assert norm > config.clip_norm, "otherwise clipping would not be tested"
                for param in model.parameters():
                    param.grad *= config.clip_norm / (norm + 1e-6)  # as PyTorch has it
            optimizer.step()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            logits = model(data.test[0])
            test_loss = cross_entropy(logits.flatten(0, -2), data.test[1].flatten().long()).item()
            right = (logits.argmax(-1) == data.test[1]).double().mean().item()
        weights = {name: param.detach() for name, param in model.named_parameters()}
        return TrainResult(losses, test_loss, right, 0, weights)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.random.set_rng_state(before)


# --- the same numbers -----------------------------------------------------------------------------


@pytest.mark.parametrize("model", CONFIGS)
def test_any_number_of_ranks_trains_as_one_machine_with_the_whole_batch(ranks_of, model):
    config = CONFIGS[model]
    expected = one_machine(config)
    for world_size in (1, 2, 3, 4):
        result = same_everywhere(ranks_of("simulated", world_size).run(in_double, config))
        assert_same_training(result, expected, **EXACT)


def test_gloo_ranks_train_as_one_machine(ranks_of):
    result = same_everywhere(ranks_of("cpu", 3).run(in_double, TEXT))
    assert_same_training(result, one_machine(TEXT), **EXACT)


@pytest.mark.parametrize("ddp", ["ours", "torch"])
def test_four_micro_batches_are_one_big_batch_and_average_once(ranks_of, ddp):
    config = replace(TEXT, accumulate=4, clip_norm=0.5, ddp=ddp)
    ranks = ranks_of("simulated", 3)
    assert_same_training(
        same_everywhere(ranks.run(in_double, config)), one_machine(config), **EXACT
    )
    accumulating = ranks.trace.calls(0)
    ranks.run(in_double, replace(config, accumulate=1))
    assert accumulating == ranks.trace.calls(0)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ours_and_pytorch_s_ddp_have_the_same_losses(ranks_of, world_size):
    ranks = ranks_of("simulated", world_size)
    ours = same_everywhere(ranks.run(train, TEXT))
    theirs = same_everywhere(ranks.run(train, replace(TEXT, ddp="torch")))
    if world_size != 3:  # dividing by 2 or 4 rounds nothing, before the sum or after it
        assert ours.digest() == theirs.digest()
        assert ours.losses == theirs.losses
    assert_same_training(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_transformer_learns_and_the_caller_s_random_numbers_stay(ranks_of):
    config = replace(TEXT, width=32, context=32, lr=3e-3, steps=60, dropout=0.1)

    def run() -> tuple[TrainResult, bool]:
        before = torch.random.get_rng_state()
        return train(config), torch.equal(before, torch.random.get_rng_state())

    ((result, untouched),) = ranks_of("simulated", 1).run(run)
    assert untouched
    assert result.losses[0] == pytest.approx(5.545, abs=0.1)  # ln 256: it knows nothing
    assert sum(result.losses[-10:]) / 10 < 3.2
    assert result.test_loss < 3.3  # on text it has not seen
    assert result.test_accuracy > 0.2  # one byte in six or so is a space


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    # Of K = 2 numbers the sum is the same in any order. Of more it depends on the buckets.
    ("on", "world_size", "ddp"),
    [("simulated", 2, "ours"), ("cpu", 3, "torch"), ("cpu", 4, "ours")],
)
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(
    ranks_of, tmp_path, on, world_size, ddp
):
    """Also what dropout drops is the same, though every rank drops something else."""
    config = replace(TEXT, width=32, dropout=0.2, steps=9, ddp=ddp)
    ranks = ranks_of(on, world_size)
    uninterrupted = same_everywhere(ranks.run(train, config))
    kept = replace(config, checkpoint=str(tmp_path / "runs" / "text"), checkpoint_every=2)
    ranks.run(train, replace(kept, steps=5))
    resumed = same_everywhere(ranks.run(train, kept))
    assert (uninterrupted.resumed_at, resumed.resumed_at) == (0, 5)
    assert resumed.digest() == uninterrupted.digest()
    assert resumed.losses == uninterrupted.losses
    assert resumed.test_loss == uninterrupted.test_loss

    again = same_everywhere(ranks.run(train, kept))  # nothing is left to be done
    assert again.resumed_at == 9
    assert again.losses == uninterrupted.losses


def test_another_number_of_ranks_goes_on_in_the_middle_of_an_epoch(ranks_of, tmp_path):
    config = replace(DIGITS, batch_size=120, steps=19, checkpoint=str(tmp_path))  # 11 per epoch
    ranks_of("simulated", 2).run(in_double, replace(config, steps=13, accumulate=3))
    result = same_everywhere(ranks_of("simulated", 3).run(in_double, config))
    assert result.resumed_at == 13
    assert_same_training(result, one_machine(config), **EXACT)


def test_only_the_newest_checkpoints_stay_and_a_damaged_one_is_passed_over(
    ranks_of, tmp_path, capsys
):
    config = replace(TEXT, steps=6, checkpoint=str(tmp_path), checkpoint_every=2)
    ranks = ranks_of("simulated", 2)
    expected = ranks.run(train, config)[0]
    assert [step_of(path) for path in checkpoints(tmp_path)] == [4, 6]

    newest = tmp_path / "step-00000006.pt"
    newest.write_bytes(newest.read_bytes()[:-1000])  # as if the machine had stopped
    (tmp_path / "step-00000008.tmp").write_bytes(b"half a checkpoint")
    again = same_everywhere(ranks.run(train, config))
    assert again.resumed_at == 4
    assert again.digest() == expected.digest()
    assert f"{newest} is damaged" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-00000004.pt",
        "step-00000006.pt",
    ]


def test_files_of_other_names_are_left_alone(tmp_path):
    kept = save_checkpoint(tmp_path, 3, {"step": 3})
    other = tmp_path / "step-final.pt"
    other.write_text("somebody's own")
    assert checkpoints(tmp_path) == [kept]
    newer = [save_checkpoint(tmp_path, step, {"step": step}) for step in (4, 5)]
    assert checkpoints(tmp_path) == newer
    assert other.exists()


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
    config = replace(TEXT, steps=1, checkpoint=str(tmp_path))
    first, second = ranks_of("simulated", 2).run(refusal, config)
    assert first == second
    assert f"none of the 2 checkpoints in {tmp_path} can be read" in first
    assert set(tmp_path.iterdir()) == files
    said = capsys.readouterr().out
    assert all(f"{path} is damaged (" in said for path in files)
    assert "weights_only" not in said  # PyTorch's advice to switch it off


def test_a_damaged_file_that_nobody_hears_of_does_not_make_the_folder_unusable(ranks_of, tmp_path):
    save_checkpoint(tmp_path, 1, {"step": 1})
    (tmp_path / "step-00000002.pt").write_bytes(b"damaged")

    def say(text: str) -> None:
        raise BrokenPipeError(text)

    def load() -> None:
        with pytest.raises(BrokenPipeError, match="is damaged"):
            load_checkpoint(tmp_path, say)

    ranks_of("simulated", 1).run(load)


def test_what_was_just_written_stays_next_to_damaged_ones_of_later_steps(tmp_path):
    damaged = [tmp_path / f"step-{step:08d}.pt" for step in (900, 901)]
    for path in damaged:
        path.write_bytes(b"damaged")
    written = [save_checkpoint(tmp_path, step, {"step": step}) for step in (1, 2, 3)]
    assert checkpoints(tmp_path) == written[-2:] + damaged


def test_a_checkpoint_that_the_system_does_not_let_read_is_not_taken_for_damaged(
    ranks_of, tmp_path
):
    config = replace(TEXT, steps=1, checkpoint=str(tmp_path))
    ranks = ranks_of("simulated", 2)
    ranks.run(train, config)
    newest = tmp_path / "step-00000002.pt"
    newest.mkdir()  # an OSError for root too, whom no permission stops
    messages = ranks.run(refusal, config)
    assert messages[0] == messages[1]
    assert f"Is a directory: '{newest}'. Name another folder" in messages[0]


def test_a_write_that_fails_leaves_the_old_checkpoint(tmp_path):
    old = save_checkpoint(tmp_path, 3, {"step": 3})
    content = old.read_bytes()
    with pytest.raises(Exception, match="pickle"):
        save_checkpoint(tmp_path, 3, {"step": lambda: 0})
    assert checkpoints(tmp_path) == [old]
    assert old.read_bytes() == content


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lr": 0.5}, r"--lr 0\.001, and this one has 0\.5"),
        ({"batch_size": 48}, "--batch-size 24, and this one has 48"),
        ({"model": "mlp"}, "--model transformer, and this one has mlp"),
        ({"seed": 1}, "--seed 0, and this one has 1"),
    ],
)
def test_a_checkpoint_of_another_configuration_is_refused(ranks_of, tmp_path, change, words):
    config = replace(TEXT, steps=1, checkpoint=str(tmp_path))
    ranks = ranks_of("simulated", 2)
    ranks.run(train, config)
    with pytest.raises(RankError, match=words) as error:
        ranks.run(train, replace(config, **change))
    assert "name another folder with --checkpoint" in str(error.value)


def test_options_that_do_not_decide_what_comes_out_may_change(ranks_of, tmp_path):
    config = replace(TEXT, steps=1, checkpoint=str(tmp_path))
    ranks = ranks_of("simulated", 2)
    ranks.run(train, config)
    change = {"ddp": "torch", "accumulate": 2, "steps": 2, "epochs": 9, "checkpoint_every": 1}
    assert ranks.run(train, replace(config, **change))[0].resumed_at == 1


def test_a_checkpoint_of_other_data_is_refused(ranks_of, tmp_path, monkeypatch):
    config = replace(TEXT, steps=1, checkpoint=str(tmp_path))
    ranks = ranks_of("simulated", 2)
    ranks.run(train, config)
    text = documentation_text()
    text[100] ^= 1
    monkeypatch.setattr("course_lib.train.datasets.documentation_text", lambda: text)
    with pytest.raises(RankError, match="on other data"):
        ranks.run(train, config)


def test_a_folder_that_cannot_be_made_is_refused_on_all_ranks(ranks_of, tmp_path):
    (tmp_path / "file").write_text("")
    config = replace(TEXT, checkpoint=str(tmp_path / "file" / "runs"))
    with pytest.raises(RankError, match="Name another folder"):
        ranks_of("simulated", 2).run(train, config)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("model", "rnn"), ("ddp", "horovod"), ("precision", "fp8"), ("width", 0), ("steps", 0)),
        *(("epochs", 0), ("lr", 0.0), ("lr", float("nan")), ("dropout", 1.0), ("clip_norm", 0.0)),
        *(("batch_size", 0), ("accumulate", 0), ("log_every", -1), ("checkpoint_every", 0)),
        *(("seed", -1), ("seed", 2**63), ("checkpoint", "")),
    ],
)
def test_an_option_that_makes_no_sense_is_named(option, value):
    with pytest.raises(ConfigError, match=f"--{option.replace('_', '-')} is "):
        TrainConfig(**{option: value})


@pytest.mark.parametrize("length", [{"epochs": 40}, {"steps": 40}])
def test_a_seed_leaves_room_for_that_of_the_last_epoch(length):
    largest = 2**63 - 40
    config = TrainConfig(seed=largest, **length)
    sampler = ShardedSampler(range(9), 1, 0, seed=config.seed)
    sampler.set_epoch(39)
    assert sorted(sampler) == list(range(9))
    with pytest.raises(ConfigError, match=rf"--seed is {largest + 1}: .* 0 … {largest}, .* 40 epo"):
        TrainConfig(seed=largest + 1, **length)


def test_heads_have_to_divide_the_width():
    with pytest.raises(ConfigError, match="multiple of heads=3"):
        TrainConfig(model="transformer", heads=3)
    TrainConfig(model="mlp", heads=3)  # which has none


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch_size": 50}, r"2 ranks × accumulate=2 .* multiple of 4\. Use --batch-size 48 or 5"),
        ({"batch_size": 2}, r"multiple of 4\. Use --batch-size 4\."),
        ({"batch_size": 4000}, "more than the 1438 examples"),
        ({"model": "transformer", "context": 10**6}, "--context is 1000000"),
        ({"precision": "fp16"}, "--precision fp16 needs a GPU"),
        ({"lr": 1e30, "steps": 9}, "the loss is (nan|inf) at step .* smaller --lr than 1e"),
    ],
)
def test_a_run_that_cannot_be_is_refused_with_advice(ranks_of, change, words):
    config = replace(DIGITS, accumulate=2, **change)
    with pytest.raises(RankError, match=words):
        ranks_of("simulated", 2).run(train, config)


def test_a_last_step_that_ruins_the_weights_is_no_finished_run(ranks_of):
    messages = ranks_of("simulated", 2).run(refusal, replace(DIGITS, lr=1e38, steps=1))
    assert messages[0] == messages[1]
    assert re.match("the test loss is (nan|inf) after step 1. .* smaller --lr than 1e", messages[0])


def test_without_ranks_it_says_how_to_get_them():
    with pytest.raises(ValueError, match="torchrun"):
        train(DIGITS)


# --- models, precision, data, progress ------------------------------------------------------------


def test_bf16_computes_products_in_bf16_and_keeps_weights_in_fp32(ranks_of):
    config = replace(TEXT, width=32)
    full, mixed = (
        same_everywhere(ranks_of("simulated", 2).run(train, replace(config, precision=precision)))
        for precision in ("fp32", "bf16")
    )
    assert full.losses != mixed.losses
    torch.testing.assert_close(mixed.losses, full.losses, rtol=0.01, atol=0)
    assert {weight.dtype for weight in mixed.weights.values()} == {torch.float32}
    with Precision("bf16", CPU).autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


def test_no_position_of_the_transformer_sees_a_later_one_and_each_sees_all_before():
    torch.manual_seed(0)
    model = build_model(replace(TEXT, layers=2))
    text = torch.randint(0, 256, (1, 32), generator=torch.Generator().manual_seed(1)).byte()
    logits = model(text)
    assert logits.shape == (1, 32, 256)
    for changed in (0, 7, 31):
        other = text.clone()
        other[0, changed] ^= 1
        differs = (model(other) != logits).any(-1)[0]
        assert differs.tolist() == [position >= changed for position in range(32)]
    assert model.output.weight is model.embedding.weight


def test_targets_are_the_bytes_that_follow_and_no_test_text_is_trained_on():
    inputs, targets = pieces(torch.arange(100, dtype=torch.uint8), 7)
    assert inputs.shape == targets.shape == (14, 7)
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(inputs.flatten(), torch.arange(98, dtype=torch.uint8))

    data = load_dataset(TEXT, CPU)
    text = bytes(documentation_text().tolist())
    train_text, test_text = (bytes(part[0].flatten().tolist()) for part in (data.train, data.test))
    assert text.startswith(train_text)
    assert len(test_text) > 0.09 * len(text)
    start = text.index(test_text)  # the end of the text, after all that is trained on
    assert start >= len(train_text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (9.96, "0:10"), (61, "1:01"), (3600, "1:00:00")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_progress_is_lines_in_a_file_and_one_line_on_a_terminal(capsys, monkeypatch):
    def run() -> str:
        clock = iter([0.0, 2.0, 12.0])
        monkeypatch.setattr("time.perf_counter", lambda: next(clock))
        progress = Progress(
            start=100, total=200, steps_per_epoch=40, unit="tokens", units_per_step=50
        )
        progress.report(101, 5.5)
        progress.report(120, 4.25)
        progress.close()
        monkeypatch.undo()
        return capsys.readouterr().out

    first = "step 101/200 · epoch 3 · loss 5.5000 · 25 tokens/s · 3:18 left"
    second = "step 120/200 · epoch 3 · loss 4.2500 · 95 tokens/s · 0:48 left"
    assert run() == f"{first}\n{second}\n"
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert run() == f"\r\033[K{first[:39]}\r\033[K{second[:39]}\n"


def test_rank_0_alone_reports_and_only_when_asked(ranks_of, capsys):
    ranks = ranks_of("simulated", 2)
    config = replace(TEXT, steps=5, log_every=2)
    losses = ranks.run(train, config)[0].losses
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("[rank 0] ") for line in lines)
    assert "2 ranks × 12 examples" in lines[0]
    told = [re.findall(r"step (\d)/5 .* loss ([\d.]+) .* tokens/s", line) for line in lines[1:-1]]
    assert told == [[(str(step), f"{losses[step - 1]:.4f}")] for step in (1, 2, 4, 5)]
    assert re.search(r"5 steps in .* test loss [\d.]+, [\d.]+ % right", lines[-1])
    ranks.run(train, replace(config, log_every=0))
    assert capsys.readouterr().out == ""


# --- meeting after a restart ----------------------------------------------------------------------


def test_ranks_agree_on_a_new_name_whatever_an_earlier_start_has_left():
    store = HashStore()
    seen: set[str] = set()
    for late in (0, 1, 2, 0):  # who comes last sees the others' keys, or they the old ones
        names: list[str] = [""] * 3

        def come(rank: int, late: int = late, names: list[str] = names) -> None:
            time.sleep(0.05 * (rank == late))
            names[rank] = agree_on_name(store, rank, 3, timeout=10)

        threads = [threading.Thread(target=come, args=(rank,), daemon=True) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=20)
        assert len(set(names)) == 1
        assert names[0] not in seen | {""}
        seen.add(names[0])
    # One that was killed between two of its steps has left a token that nobody will answer for.
    store.set("token of rank 1", "abandoned")
    with pytest.raises(TimeoutError, match=r"\[1, 2\] did not come within 0.1 s"):
        agree_on_name(store, 0, 3, timeout=0.1)


# --- the command line -----------------------------------------------------------------------------

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


@contextmanager
def started(*command: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=folder,
        # torchrun never removes the folder it makes for its logs.
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun then ends its ranks, which a kill would leave behind
            try:
                process.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def test_a_killed_rank_leads_to_a_restart_and_the_loss_of_an_uninterrupted_run(ranks_of, tmp_path):
    (tmp_path / "killed.py").write_text(KILLED)
    options = [*SMALL, "--steps", "12", "--checkpoint", "kept", "--checkpoint-every", "3"]
    command = (*TORCHRUN, "--max-restarts", "1", "killed.py", *options)
    with started(*command, folder=tmp_path) as process:
        output, errors = process.communicate(timeout=90)
    assert process.returncode == 0, errors
    assert (tmp_path / "rank 1 was killed").exists()
    assert "Traceback" not in errors  # rank 0, which lost its peer, says so in a line
    assert "going on from kept at step 6 of 12" in output

    config = TrainConfig(**vars_of(SMALL), steps=12, log_every=0)
    expected = same_everywhere(ranks_of("cpu", 2).run(train, config))
    kept = torch.load(tmp_path / "kept" / "step-00000012.pt", weights_only=True)
    assert kept["losses"].tolist() == expected.losses
    for name, weight in expected.weights.items():
        assert torch.equal(kept["model"][name], weight), name
    assert f"test loss {expected.test_loss:.4f}" in output


def vars_of(options: list[str]) -> dict[str, Any]:
    parsed = vars(command_line.parser().parse_args(options))
    names = {option.removeprefix("--").replace("-", "_") for option in options[::2]}
    return {name: parsed[name] for name in names}


def test_ctrl_c_ends_all_ranks_at_once_and_without_tracebacks_of_ours(tmp_path):
    options = [*SMALL, "--steps", "1000000", "--checkpoint", "kept", "--checkpoint-every", "5"]
    with started(*TORCHRUN, "-m", "course_lib.train", *options, folder=tmp_path) as process:
        assert process.stdout is not None
        assert any("step      10/1000000" in line for line in process.stdout)
        process.send_signal(signal.SIGINT)  # torchrun passes it on to the ranks
        output, errors = process.communicate(timeout=45)
    assert process.returncode != 0
    assert re.search(r"interrupted\. kept has step \d+: the same command goes on", errors)
    assert errors.count("interrupted") == 1
    assert "course_lib/train" not in errors  # torchrun's own traceback is all there is
    assert "KeyboardInterrupt" not in errors + output
    assert "terminate called" not in errors


def test_ctrl_c_ends_the_process_also_if_its_last_words_fail(tmp_path):
    (tmp_path / "speechless.py").write_text(
        "import os, signal, time\n"
        "from course_lib.train.interrupt import leave_on_interrupt\n"
        "leave_on_interrupt(lambda: str(1 / 0))\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "time.sleep(10)\n"
    )
    with started("speechless", folder=tmp_path) as process:
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (128 + signal.SIGINT, "")


def test_when_nobody_reads_its_output_any_more_it_ends_quietly(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # what is left would be flushed at exit
    options = [*SMALL, "--steps", "1000000", "--log-every", "1"]
    with started("course_lib.train", *options, folder=tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("transformer")
        process.stdout.close()  # | head -1
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (128 + signal.SIGPIPE, "")


def test_it_trains_without_standard_output(tmp_path):
    (tmp_path / "silent.py").write_text(
        "import sys\n"
        "from course_lib.train.__main__ import leave, main\n"
        "sys.stdout = None  # what Python makes of >&-\n"
        "leave(main())\n"
    )
    options = [*SMALL, "--steps", "1", "--checkpoint", "kept"]
    with started("silent", *options, folder=tmp_path) as process:
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors) == (0, "", "")
    assert (tmp_path / "kept" / "step-00000001.pt").exists()


def test_it_runs_without_torchrun_as_one_rank(tmp_path):
    with started("course_lib.train", *SMALL, "--steps", "3", folder=tmp_path) as process:
        output, errors = process.communicate(timeout=90)
    assert (process.returncode, errors) == (0, "")
    assert "1 rank × 24 examples" in output
    assert "step 3/3" in output


def test_the_command_line_has_every_option_and_its_default():
    parsed = vars(command_line.parser().parse_args([]))
    assert parsed.pop("device") == "auto"
    assert parsed == asdict(TrainConfig())
    shown = command_line.parser().format_help()
    assert all(f"--{field.name.replace('_', '-')}" in shown for field in fields(TrainConfig))


@pytest.mark.parametrize(
    ("rank", "words"), [("0", "--lr is -1.0: it has to be above 0"), ("1", "")]
)
def test_a_wrong_option_is_reported_by_one_rank(capsys, monkeypatch, rank, words):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr("sys.argv", ["train", "--lr", "-1"])
    assert command_line.main() == 2
    assert words in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["train", "--no-such-option"])
    assert command_line.main() == 2
    assert ("no-such-option" in capsys.readouterr().err) == (rank == "0")
    monkeypatch.setattr("sys.argv", ["train", "--help"])
    assert command_line.main() == 0
    assert ("--checkpoint DIR" in capsys.readouterr().out) == (rank == "0")


def test_a_wrong_option_is_reported_also_if_rank_0_comes_last(tmp_path):
    """As soon as one rank has failed, torchrun ends the others."""
    (tmp_path / "late.py").write_text(
        "import os, time\n"
        "from course_lib.train.__main__ import leave, main\n"
        "time.sleep(os.environ['RANK'] == '0')\n"
        "leave(main())\n"
    )
    with started(*TORCHRUN, "late.py", "--lr", "-1", folder=tmp_path) as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    assert errors.count("course_lib.train: --lr is -1.0: it has to be above 0") == 1


def test_more_ranks_than_gpus_cannot_ask_for_gpus(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
    with pytest.raises(ConfigError, match="a GPU for each of the 64 ranks"):
        command_line.join("cuda")
