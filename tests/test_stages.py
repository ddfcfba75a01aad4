"""The stages of the program that grows: one training, however many ranks run it, and in any way."""

import ast
import re
import sys
from pathlib import Path

import nbformat
import pytest
import torch

from course_lib.ranks import Ranks
from tests.helpers import ROOT
from tests.helpers.torchrun import torchrun

sys.path.append(str(ROOT / "lectures"))
from scripts import stage_01, stage_02, stage_03, stage_04, stage_05, stage_05_by_hand

SAME_STEP = (stage_02, stage_03, stage_05_by_hand, stage_05)
STEPS = 4  # DDP cuts its buckets anew after the first, and state could be left after each


def mean_losses(stage, world_size: int) -> torch.Tensor:
    results = Ranks(world_size, on="simulated").run(stage.train, STEPS)
    weights = [torch.cat([param.flatten() for param in model.parameters()]) for model, _ in results]
    assert all(torch.equal(replica, weights[0]) for replica in weights)
    return torch.stack([losses for _, losses in results]).mean(0)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("stage", SAME_STEP, ids=lambda stage: stage.__name__)
def test_the_losses_are_those_of_one_process(stage, world_size):
    """Of several steps, so that nothing may be left from the one before."""
    _, alone = stage_01.train(STEPS)
    torch.testing.assert_close(mean_losses(stage, world_size), alone, rtol=0, atol=2e-5)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_sampler_reads_the_rows_of_the_batches(world_size):
    def rows_of(stage, rank_takes):
        return [batch for batch, _ in zip(rank_takes(stage), range(3), strict=False)]

    def on_a_rank():
        rank = torch.distributed.get_rank()
        train_rows, _ = stage_04.texts()
        ours = [
            batch[rank::world_size] for batch in rows_of(stage_02, lambda s: s.batches(train_rows))
        ]
        theirs = rows_of(stage_04, lambda s: s.batches(train_rows))
        return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))

    assert all(Ranks(world_size, on="simulated").run(on_a_rank))


@pytest.mark.large
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", SAME_STEP, ids=lambda stage: stage.__name__)
def test_torchrun_trains_alike(tmp_path, stage, world_size):
    """A hundred steps, as the lectures run them."""
    model, losses = stage_01.train(100)
    alone = [losses[0].item(), losses[-1].item(), stage_01.held_out_loss(model)]
    name = stage.__name__.removeprefix("scripts.")
    printed = torchrun(tmp_path, world_size, f"{name}.py")
    together = [float(number) for number in re.findall(r"\d\.\d+", printed)]
    assert together == pytest.approx(alone, abs=2e-5)


@pytest.mark.large
def test_a_stopped_run_goes_on_with_another_number_of_ranks(tmp_path):
    def train(steps, checkpoint):
        model, losses = stage_04.train(steps, checkpoint)
        return losses, stage_04.held_out_loss(model)

    whole = Ranks(2, on="simulated").run(train, 20, None)
    Ranks(2, on="simulated").run(train, 12, tmp_path / "checkpoint.pt")
    rest_of_run = Ranks(4, on="simulated").run(train, 20, tmp_path / "checkpoint.pt")
    expected = torch.stack([losses for losses, _ in whole]).mean(0)[12:]
    actual = torch.stack([losses for losses, _ in rest_of_run]).mean(0)
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5)
    assert rest_of_run[0][1] == pytest.approx(whole[0][1], abs=2e-5)


def printed_losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"epoch \d+: loss ([\d.]+)", output)]


@pytest.mark.large
def test_the_ddp_script_trains_alike_on_any_number_of_ranks(tmp_path):
    """Also in micro-batches, and in two goes."""
    alone = torchrun(tmp_path, 1, "train_ddp.py", "--epochs", "3")
    assert len(printed_losses(alone)) == 3
    split = torchrun(tmp_path, 3, "train_ddp.py", "--epochs", "3", "--accumulate", "2")
    assert printed_losses(split) == pytest.approx(printed_losses(alone), abs=2e-6)
    assert split.splitlines()[-1] == alone.splitlines()[-1]  # each test row counts once

    kept = ("--checkpoint", "kept.pt", "--epochs")
    first = torchrun(tmp_path, 2, "train_ddp.py", *kept, "2")
    second = torchrun(tmp_path, 2, "train_ddp.py", *kept, "3")
    assert second.startswith("going on after epoch 2")
    assert printed_losses(first) + printed_losses(second) == pytest.approx(
        printed_losses(alone), abs=2e-6
    )
    assert second.splitlines()[-1] == alone.splitlines()[-1]


def definitions(source: str) -> dict[str, str]:
    """Return functions and classes by name, without docstrings and comments."""
    nodes = [
        node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef | ast.ClassDef)
    ]
    for node in (inner for top in nodes for inner in ast.walk(top)):
        body = getattr(node, "body", None)
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
            node.body = body[1:]
    return {node.name: ast.unparse(node) for node in nodes}


@pytest.mark.parametrize(
    ("page", "stage", "names"),
    [
        ("01_minibatch_sgd", stage_01, ["texts", "batches", "train", "held_out_loss"]),
        ("02_data_parallel_sgd", stage_02, ["average", "train"]),
        ("03_collectives", stage_03, ["ring", "average"]),
        ("05_bucketing_and_overlap", stage_05_by_hand, ["Bucket", "buckets_of", "Overlap"]),
    ],
)
def test_the_page_types_the_lines_of_the_file(page, stage, names):
    notebook = nbformat.read(ROOT / "lectures" / f"{page}.ipynb", as_version=4)
    typed: dict[str, str] = {}
    for cell in notebook.cells:
        if cell.cell_type == "code" and re.search(r"^(def|class|@)", cell.source, re.MULTILINE):
            typed |= definitions(re.sub(r"^\s*[%!].*$", "", cell.source, flags=re.MULTILINE))
    in_file = definitions(Path(stage.__file__).read_text(encoding="utf-8"))
    assert {name: typed[name] for name in names} == {name: in_file[name] for name in names}
