"""Simulated ranks are threads, and share with one another and the notebook as little as can be."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from course_lib.ranks.costs.network import Network
from course_lib.ranks.explain.errors import RankError
from course_lib.ranks.ranks import Ranks
from course_lib.ranks.simulated.shared import SharedStateWarning

# Cells run in __main__, where classes are pickled by value; this is a notebook without IPython.
NOTEBOOK = """
import pickle, torch, torch.distributed as dist
from course_lib.ranks import RankError, Ranks

class Counter:
    count = 0
    def __init__(self): Counter.count += 1

class Broken(ValueError):
    pass

seen = []
ranks = Ranks(3, on="simulated")
"""


def run_notebook(cells: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NOTEBOOK + cells], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_classes_and_globals_are_the_rank_s_own() -> None:
    run_notebook("""
def fn():
    for _ in range(3):
        Counter()
        seen.append(dist.get_rank())
        dist.barrier()
    return Counter.count, seen

for _ in range(2):
    assert ranks.run(fn) == [(3, [r] * 3) for r in range(3)]
assert Counter.count == 0 and seen == []
""")


def test_instances_come_back_as_the_notebook_s_and_travel_between_ranks() -> None:
    run_notebook("""
def fn(given):
    assert type(given) is Counter
    mine = Counter()
    mine.rank = dist.get_rank()
    objects = [None] * 3
    dist.all_gather_object(objects, mine)
    assert all(type(each) is Counter for each in objects)
    assert type(pickle.loads(pickle.dumps(mine))) is Counter
    return objects

given = Counter()
for objects in ranks.run(fn, given):
    assert [each.rank for each in objects] == [0, 1, 2]
    assert all(type(each) is Counter for each in objects)
assert Counter.count == 1
assert __import__("sys").modules["__main__"].Counter is Counter
""")


def test_an_exception_of_a_notebook_class_is_the_notebook_s() -> None:
    run_notebook("""
def fn():
    raise Broken("as planned")

try:
    ranks.run(fn)
except RankError as error:
    assert type(error.original) is Broken and error.original.args == ("as planned",)
    assert "line" in str(error)
else:
    raise AssertionError
""")


def test_arguments_and_results_are_copies() -> None:
    given = torch.arange(200_000.0)
    views = [given[:5], given[3:]]

    def fn(whole: torch.Tensor, views: list[torch.Tensor], kept: Any) -> Any:
        whole += 1 + dist.get_rank()
        dist.barrier()
        assert whole[0] == views[0][0] == 1 + dist.get_rank()
        assert views[1].untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        sys.modules["result_of_rank"] = kept if dist.get_rank() else whole  # type: ignore[assignment]
        return whole, views[1]

    for rank, (whole, view) in enumerate(Ranks(3, on="simulated").run(fn, given, views, None)):
        assert torch.equal(whole, torch.arange(200_000.0) + 1 + rank)
        whole.zero_()
        assert view[0] == 0
    sys.modules.pop("result_of_rank")
    assert torch.equal(given, torch.arange(200_000.0))


def test_a_result_that_cannot_travel_is_refused_as_on_other_ranks() -> None:
    with pytest.raises(RankError, match="cannot be sent back"):
        Ranks(2, on="simulated").run(threading.Lock)


def test_surroundings_are_the_rank_s_own(tmp_path: Path) -> None:
    def fn(folder: Path) -> Any:
        rank = dist.get_rank()
        assert os.environ["RANK"] == os.environ["LOCAL_RANK"] == str(rank)
        assert os.environ["WORLD_SIZE"] == "3"
        assert "ONLY_RANK_1" not in os.environ
        place = folder / str(rank)
        place.mkdir()
        os.chdir(place)
        os.environ["WHO"] = str(rank)
        if rank == 1:
            os.environ["ONLY_RANK_1"] = "x"
            del os.environ["HOME"]
        torch.set_printoptions(precision=rank + 1)
        text = io.StringIO()
        with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(text):
            warnings.simplefilter("error" if rank == 0 else "always")
            dist.barrier()
            print("rank", rank)
            if rank == 0:
                with pytest.raises(UserWarning):
                    warnings.warn("here", stacklevel=1)
            else:
                warnings.warn("here", stacklevel=1)
            dist.barrier()
            assert len(caught) == (rank != 0)
        dist.barrier()
        assert text.getvalue() == f"rank {rank}\n"
        shown = f"{torch.tensor(1 / 3):}", repr(torch.tensor([1 / 3]))
        return Path.cwd() == place, os.environ["WHO"], "HOME" in os.environ, shown[1]

    def state() -> Any:
        printed = repr(torch.ones(1))
        return Path.cwd(), dict(os.environ), list(warnings.filters), sys.stdout, printed

    before = state()
    found = Ranks(3, on="simulated").run(fn, tmp_path)
    assert state() == before
    assert [each[:3] for each in found] == [
        (True, "0", True),
        (True, "1", False),
        (True, "2", True),
    ]
    assert [each[3] for each in found] == ["tensor([0.3])", "tensor([0.33])", "tensor([0.333])"]


def test_a_rank_that_has_ended_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    """Ranks that never wait run one after the other, each to its end."""

    def fn(folder: Path) -> Any:
        numbers = random.random(), float(torch.rand(1))
        found = Path.cwd(), os.environ.get("WHO"), torch.get_default_dtype(), *numbers
        os.chdir(folder)
        os.environ["WHO"] = "somebody"
        torch.set_default_dtype(torch.float64)
        return found

    before = Path.cwd()
    found = Ranks(3, on="simulated").run(fn, tmp_path)
    assert found == [(before, None, torch.float32, *found[0][3:])] * 3
    assert Path.cwd() == before and "WHO" not in os.environ


def test_sleep_and_clocks_are_virtual() -> None:
    def fn() -> tuple[float, float, float]:
        started, at = time.perf_counter(), time.time()
        ns = time.monotonic_ns()
        if dist.get_rank() == 1:
            time.sleep(3600)  # a straggler
        dist.barrier()
        assert time.monotonic_ns() - ns >= 3600 * 10**9
        return time.perf_counter() - started, time.monotonic(), time.time() - at

    ranks = Ranks(3, on="simulated", network=Network(latency=0, bandwidth=1e9), timeout=30)
    for measured, monotonic, wall in ranks.run(fn):
        assert measured == monotonic == 3600
        assert wall == pytest.approx(3600)
    (sleeping,) = [event for event in ranks.trace.events if event.kind == "compute"]
    assert sleeping[:1] + sleeping[7:9] == (1, 0.0, 3600.0)
    assert "test_isolation.py" in sleeping.where


def test_a_rank_that_polls_while_it_sleeps_lets_others_run() -> None:
    def fn() -> float:
        if dist.get_rank() == 0:
            work = dist.irecv(x := torch.zeros(1), 1)
            assert work is not None
            while not work.is_completed():
                time.sleep(0.25)
            return x.item()
        time.sleep(2)
        dist.send(torch.ones(1), 0)
        return time.perf_counter()

    one, two = Ranks(2, on="simulated", timeout=30).run(fn)
    assert one == 1 and two == pytest.approx(2, rel=1e-3)


def test_an_interrupt_during_an_import_lets_it_finish(tmp_path: Path) -> None:
    (tmp_path / "slow_to_import.py").write_text(
        "import threading\nfor _ in range(15):\n    threading.Event().wait(0.05)\nready = 1\n"
    )

    def fn() -> int:
        import slow_to_import  # type: ignore[import-not-found]

        dist.barrier()
        return int(slow_to_import.ready)

    ranks = Ranks(2, on="simulated")
    before = threading.active_count()
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path.insert(0, str(tmp_path))
    try:
        threading.Timer(0.3, lambda: signal.raise_signal(signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            ranks.run(fn)
        assert sys.modules["slow_to_import"].ready == 1
        assert threading.active_count() == before
        assert ranks.run(fn) == [1, 1]
    finally:
        signal.signal(signal.SIGINT, ignored)
        sys.path.remove(str(tmp_path))
        sys.modules.pop("slow_to_import", None)
        assert pickle.loads(pickle.dumps(1)) == 1


def test_what_a_call_changes_for_all_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Item 10: warn where it can be detected."""
    (tmp_path / "shared_helper.py").write_text("COUNT = 0\nclass Config:\n    steps = 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    import shared_helper  # type: ignore[import-not-found]

    def changes() -> int:
        shared_helper.COUNT += 1
        shared_helper.Config.steps += 1
        sys.setrecursionlimit(sys.getrecursionlimit() + 1)
        return int(shared_helper.COUNT)

    limit = sys.getrecursionlimit()
    ranks = Ranks(3, on="simulated")
    try:
        ranks.run(lambda: shared_helper.COUNT)  # who only reads is told nothing
        with pytest.warns(SharedStateWarning) as told:
            assert ranks.run(changes) == [1, 2, 3]
        (warning,) = told
        for name in ("shared_helper.COUNT", "shared_helper.Config.steps", "getrecursionlimit()"):
            assert name in str(warning.message)
        assert "isolated=True" in str(warning.message)
        ranks.run(changes)  # not again: a warning would fail this test
    finally:
        sys.setrecursionlimit(limit)
        sys.modules.pop("shared_helper")
