"""The definitions and edits of a notebook, as its ranks see them."""

import os
import sys

import pytest

from course_lib.ranks import Ranks, per_rank
from course_lib.ranks.processes import fork_client
from tests.helpers import ROOT

K = 2
CELL = """
import io, multiprocessing
import torch
import torch.distributed as dist

class Config:
    def __init__(self, rate):
        self.rate = rate

def double(x):
    return 2 * x

def gather():
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, Config(dist.get_rank()))
    assert all(type(each) is Config for each in everyone)
    return [each.rate for each in everyone]

def save():
    file = io.BytesIO()
    torch.save(Config(3), file)
    file.seek(0)
    return type(torch.load(file, weights_only=False)) is Config

def pool():
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(double, [1, 2])

SENT = []

class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return Config(double(i) + SENT[0])

def note(worker):
    SENT.append(100)

def spawn():
    loader = torch.utils.data.DataLoader(
        Squares(), batch_size=2, num_workers=1, persistent_workers=True,
        multiprocessing_context="spawn", worker_init_fn=note, collate_fn=lambda batch: batch,
    )
    seen = [each for _ in range(2) for batch in loader for each in batch]
    assert all(type(each) is Config for each in seen)
    return [each.rate for each in seen]
"""


@pytest.mark.parametrize("on", ["cpu", "simulated"])
def test_classes_of_the_notebook_can_be_pickled_on_ranks(ranks_of, on: str) -> None:
    ranks = ranks_of(on, K)
    cell = {"__name__": "__main__"}
    exec(CELL, cell)
    for _ in range(2):
        assert ranks.run(cell["gather"]) == [[0, 1]] * 2
        assert ranks.run(cell["save"]) == [True, True]
        assert ranks.run(cell["pool"]) == [[2, 4], [2, 4]]


@pytest.mark.large
def test_spawned_workers_know_the_classes_of_the_notebook(ranks: Ranks) -> None:
    """And its functions see the same variables there: one notes what another reads."""
    cell = {"__name__": "__main__"}
    exec(CELL, cell)
    assert ranks.run(cell["spawn"]) == [[100, 102, 104, 106] * 2] * 2


def test_an_edited_module_is_imported_anew(ranks, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "edited_helper.py"

    def answer() -> int:
        import edited_helper

        return int(edited_helper.ANSWER)

    file.write_text("ANSWER = 1\n")
    assert ranks.run(answer) == ranks.run(answer) == [1, 1]
    assert "again" not in capsys.readouterr().out
    write(file, "ANSWER = 42  # longer\n", 1)
    assert ranks.run(answer) == [42, 42]
    assert "changed modules again: edited_helper" in capsys.readouterr().out


def write(file, text: str, seconds: int) -> None:
    file.write_text(text)
    os.utime(file, ns=(1, file.stat().st_mtime_ns + seconds * 10**9))


def test_ranks_start_with_preloaded_modules_and_see_them_change(own_server, tmp_path, monkeypatch):
    def answer():
        return getattr(sys.modules.get("preloaded_helper"), "ANSWER", None)

    file = tmp_path / "preloaded_helper.py"
    write(file, "ANSWER = 1", 0)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    with Ranks(1, on="cpu", timeout=30) as ranks:
        assert ranks.run(answer) == [None]
    fork_client.preload(["preloaded_helper", "no_such_module"])
    with Ranks(1, on="cpu", timeout=30) as ranks:
        assert ranks.run(answer) == [1]
    write(file, "ANSWER = 42", 1)
    with Ranks(1, on="cpu", timeout=30) as ranks:
        assert ranks.run(answer) == [42]


@pytest.mark.parametrize("on", ["cpu", "simulated"])
def test_per_rank_at_any_depth(on) -> None:
    def same(value, *, keyword):
        return value, keyword

    with Ranks(2, on=on) as ranks:
        shards = per_rank(["a", "b"])
        deep = {"data": [shards, {"again": shards}], "lr": 0.1}
        assert ranks.run(same, deep, keyword=[per_rank([1, 2])]) == [
            ({"data": [x, {"again": x}], "lr": 0.1}, [i]) for x, i in (("a", 1), ("b", 2))
        ]
        with pytest.raises(ValueError, match="per_rank with 3 values, but it needs 2 values"):
            ranks.run(same, {"data": per_rank([1, 2, 3])}, keyword=0)
