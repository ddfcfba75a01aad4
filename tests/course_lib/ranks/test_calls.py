"""Calls on the ranks when all goes well."""

import inspect
import linecache
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_lib.ranks import RankError, Ranks, RanksError, per_rank

# Fresh ranks would otherwise import this file, and pytest with it, after every failure.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(3, on="cpu", timeout=60) as ranks:
        yield ranks


_cells = 0


def run_as_cell(source: str, namespace: dict[str, Any] | None = None) -> dict[str, Any]:
    """Execute `source` as a notebook does: in no file, but with its lines in ``linecache``."""
    global _cells
    _cells += 1
    name = f"<cell {_cells}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    namespace = {"__name__": "__main__"} if namespace is None else namespace
    exec(compile(source, name, "exec"), namespace)
    return namespace


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_results_come_in_rank_order(k: int) -> None:
    with Ranks(k, on="cpu") as ranks:
        assert ranks.run(lambda: (dist.get_rank(), dist.get_world_size())) == [
            (rank, k) for rank in range(k)
        ]


def test_ranks_are_their_own_processes_and_stay(ranks: Ranks) -> None:
    pids = ranks.run(os.getpid)
    assert len({os.getpid(), *pids}) == 4
    assert ranks.run(os.getpid) == pids == ranks.processes()


def test_arguments(ranks: Ranks) -> None:
    def program(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return args, kwargs

    results = ranks.run(program, 1, per_rank("abc"), lr=0.1, seed=per_rank([5, 6, 7]))
    assert results == [
        ((1, "a"), {"lr": 0.1, "seed": 5}),
        ((1, "b"), {"lr": 0.1, "seed": 6}),
        ((1, "c"), {"lr": 0.1, "seed": 7}),
    ]


def test_per_rank_needs_one_value_per_rank(ranks: Ranks) -> None:
    with pytest.raises(ValueError, match=r"argument 2 is per_rank with 2 values, but it needs 3"):
        ranks.run(print, 1, per_rank([1, 2]))


def test_a_rank_cannot_change_what_another_gets(ranks: Ranks) -> None:
    """Large arguments travel through shared memory; every rank still has its own."""
    shared = torch.zeros(100_000)

    def program(x: torch.Tensor) -> float:
        x += dist.get_rank() + 1
        dist.barrier()
        return x.sum().item()

    assert ranks.run(program, shared) == [1e5, 2e5, 3e5]
    assert shared.sum() == 0


@pytest.mark.parametrize("elements", [0, 1, 100_000])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
)
def test_tensors_come_back_as_they_were(ranks: Ranks, elements: int, dtype: torch.dtype) -> None:
    def make(elements: int, dtype: torch.dtype) -> list[torch.Tensor]:
        torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
        x = (torch.randn(2, elements) * 10).to(dtype)
        return [x, x.t(), x[:, : elements // 2]]

    for rank, got in enumerate(ranks.run(make, elements, dtype)):
        torch.manual_seed(rank)
        x = (torch.randn(2, elements) * 10).to(dtype)
        for mine, theirs in zip(got, [x, x.t(), x[:, : elements // 2]], strict=True):
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine, theirs)
        got[0].zero_()  # a result is writable


def test_other_values_come_back(ranks: Ranks) -> None:
    def program() -> dict[str, Any]:
        model = nn.Linear(3, 300)
        return {
            "array": np.arange(50_000.0),
            "parameter": model.weight,
            "state": model.state_dict(),
            "text": "x" * 100_000,
            "conjugate": torch.tensor([1 + 2j]).conj(),
        }

    for got in ranks.run(program):
        assert np.array_equal(got["array"], np.arange(50_000.0))
        assert isinstance(got["parameter"], nn.Parameter)
        assert got["parameter"].requires_grad
        assert torch.equal(got["parameter"], got["state"]["weight"])
        assert got["text"] == "x" * 100_000
        assert got["conjugate"] == torch.tensor([1 - 2j])


def test_functions_classes_and_closures_of_cells(ranks: Ranks) -> None:
    namespace = run_as_cell(
        "import torch.distributed as dist\n"
        "class Shard:\n"
        "    def __init__(self, start): self.start = start\n"
        "    def moved(self): return Shard(self.start + dist.get_rank())\n"
        "def outer(shard):\n"
        "    step = 100\n"
        "    return (lambda: shard.moved().start + step)()\n"
    )
    assert ranks.run(namespace["outer"], namespace["Shard"](7)) == [107, 108, 109]
    returned = ranks.run(lambda shard: shard.moved(), namespace["Shard"](1))
    assert all(isinstance(each, namespace["Shard"]) for each in returned)


def test_a_redefined_function_is_the_new_one(ranks: Ranks) -> None:
    namespace = run_as_cell("def scale(): return 1\ndef call(): return scale()")
    assert ranks.run(namespace["call"]) == [1, 1, 1]
    run_as_cell("def scale(): return 2", namespace)
    assert ranks.run(namespace["call"]) == [2, 2, 2]


def test_source_lines_are_known_on_the_ranks(ranks: Ranks) -> None:
    namespace = run_as_cell("def loss():\n    return 1 / 0  # the culprit\n")
    assert (
        ranks.run(inspect.getsource, namespace["loss"])
        == ["def loss():\n    return 1 / 0  # the culprit\n"] * 3
    )
    with pytest.raises(RankError) as caught:
        ranks.run(namespace["loss"])
    assert "return 1 / 0  # the culprit" in str(caught.value)
    assert "line 2" in caught.value.states[0].where
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_modules_folder_and_environment_are_the_notebooks(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks.run(os.getpid)
    (tmp_path / "beside_the_notebook.py").write_text("ANSWER = 42\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COURSE_SETTING", "on")

    def program() -> tuple[Any, ...]:
        import beside_the_notebook

        return beside_the_notebook.ANSWER, Path.cwd(), os.environ["COURSE_SETTING"]

    assert ranks.run(program) == [(42, tmp_path, "on")] * 3


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_ddp_averages_the_gradients_of_different_data(k: int) -> None:
    def batch(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(rank)
        return torch.randn(8, 5, generator=generator), torch.randn(8, 1, generator=generator)

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))

    def program() -> list[torch.Tensor]:
        ddp = nn.parallel.DistributedDataParallel(model())
        x, y = batch(dist.get_rank())
        nn.functional.mse_loss(ddp(x), y).backward()
        return [p.grad for p in ddp.module.parameters()]

    expected = model()
    x, y = (torch.cat(parts) for parts in zip(*map(batch, range(k)), strict=True))
    nn.functional.mse_loss(expected(x), y).backward()
    with Ranks(k, on="cpu") as ranks:
        for gradients in ranks.run(program):
            for got, parameter in zip(gradients, expected.parameters(), strict=True):
                torch.testing.assert_close(got, parameter.grad)


def test_every_collective_works(ranks: Ranks) -> None:
    def program() -> dict[str, Any]:
        rank, k = dist.get_rank(), dist.get_world_size()
        mine = torch.arange(4.0) + 10 * rank
        out: dict[str, Any] = {}
        out["broadcast"] = mine.clone()
        dist.broadcast(out["broadcast"], src=1)
        out["reduce"] = mine.clone()
        dist.reduce(out["reduce"], dst=2)
        out["all_gather"] = [torch.empty(4) for _ in range(k)]
        dist.all_gather(out["all_gather"], mine)
        out["gather"] = [torch.empty(4) for _ in range(k)] if rank == 0 else None
        dist.gather(mine, out["gather"], dst=0)
        out["scatter"] = torch.empty(1)
        dist.scatter(out["scatter"], list(mine[:k].split(1)) if rank == 0 else None, src=0)
        out["reduce_scatter"] = torch.empty(1)
        dist.reduce_scatter(out["reduce_scatter"], list(mine[:k].split(1)))
        out["all_to_all"] = torch.empty(k)
        dist.all_to_all_single(out["all_to_all"], mine[:k].clone())
        pair = dist.new_group([0, 2])
        out["pair"] = mine.clone()
        if rank != 1:
            dist.all_reduce(out["pair"], op=dist.ReduceOp.MAX, group=pair)
        objects = [None] * k
        dist.all_gather_object(objects, {"rank": rank})
        out["objects"] = objects
        reply = torch.empty(4)
        requests = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, mine, (rank + 1) % k),
                dist.P2POp(dist.irecv, reply, (rank - 1) % k),
            ]
        )
        for request in requests:
            request.wait()
        out["ring"] = reply
        dist.barrier()
        return out

    mine = [torch.arange(4.0) + 10 * rank for rank in range(3)]
    for rank, got in enumerate(ranks.run(program)):
        assert torch.equal(got["broadcast"], mine[1])
        assert rank != 2 or torch.equal(got["reduce"], sum(mine))
        assert torch.equal(torch.stack(got["all_gather"]), torch.stack(mine))
        assert rank != 0 or torch.equal(torch.stack(got["gather"]), torch.stack(mine))
        assert got["scatter"] == mine[0][rank]
        assert got["reduce_scatter"] == sum(mine)[rank]
        assert torch.equal(got["all_to_all"], torch.stack(mine)[:, rank])
        assert torch.equal(got["pair"], mine[1] if rank == 1 else mine[2])
        assert got["objects"] == [{"rank": r} for r in range(3)]
        assert torch.equal(got["ring"], mine[(rank - 1) % 3])


def test_tags_and_polling(ranks: Ranks) -> None:
    def program() -> list[float] | None:
        if dist.get_rank() == 0:
            for tag in (1, 2):
                dist.isend(torch.tensor([float(tag)]), dst=1, tag=tag)
        if dist.get_rank() != 1:
            return None
        first, second = torch.empty(1), torch.empty(1)
        work = dist.irecv(second, src=0, tag=2)
        dist.recv(first, src=0, tag=1)
        while not work.is_completed():  # plain gloo would never say so
            time.sleep(0.001)
        return [first.item(), second.item()]

    assert ranks.run(program) == [None, [1.0, 2.0], None]


def test_without_metering(ranks: Ranks) -> None:
    with Ranks(2, on="cpu", metered=False) as bare:

        def program() -> tuple[str, float]:
            x = torch.ones(1)
            dist.all_reduce(x)
            return dist.get_backend(), x.item()

        assert bare.run(program) == [("gloo", 2.0)] * 2
        assert bare.trace.events == [] or not bare.trace.operations


def test_one_call_at_a_time(ranks: Ranks) -> None:
    started, errors = threading.Event(), []

    def second() -> None:
        started.wait(300)
        try:
            ranks.run(os.getpid)
        except RanksError as error:
            errors.append(str(error))

    other = threading.Thread(target=second)
    other.start()
    ranks._busy.acquire()
    started.set()
    other.join()
    ranks._busy.release()
    assert "are running another call" in errors[0]


@pytest.mark.parametrize("on", ["cpu", "simulated"])
def test_ranks_may_start_before_their_first_call(on: str) -> None:
    with Ranks(3, on=on, timeout=60) as ranks:
        assert ranks.processes() == []
        ranks.start()
        ranks.start()
        started = ranks.processes()
        assert len(set(started)) == (3 if on == "cpu" else 0)
        assert ranks.run(dist.get_rank) == [0, 1, 2]
        assert ranks.processes() == started
    with pytest.raises(RanksError, match="closed"):
        ranks.start()


def test_closed_ranks_say_so() -> None:
    ranks = Ranks(2, on="cpu")
    assert "start with the first call" in repr(ranks)
    ranks.run(os.getpid)
    assert all(str(pid) in repr(ranks) for pid in ranks.processes())
    table = ranks._repr_html_()
    assert table.count("<tr>") == 3
    assert "MiB" in table
    ranks.close()
    ranks.close()
    assert "closed" in repr(ranks)
    with pytest.raises(RanksError, match=r"closed; make new ones"):
        ranks.run(os.getpid)


@pytest.mark.parametrize("k", [0, -1, 65, 2.0, "4"])
def test_world_sizes_that_do_not_exist(k: Any) -> None:
    with pytest.raises(ValueError, match="world_size must be 1 to 64"):
        Ranks(k, on="cpu")


def test_places_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match='on must be "auto"'):
        Ranks(2, on="tpu")  # type: ignore[arg-type]
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match='on="gpu" needs a GPU'):
            Ranks(2, on="gpu")


def test_what_a_function_returned_is_refused_with_what_was_meant(ranks: Ranks) -> None:
    with pytest.raises(TypeError, match=r"ranks\.run\(f, x\), not ranks\.run\(f\(x\)\).*a list"):
        ranks.run([1, 2])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="it got None"):
        ranks.run(None)  # type: ignore[arg-type]
