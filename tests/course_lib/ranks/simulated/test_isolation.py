"""Simulated ranks are threads: what each has for itself, and what they share."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import io
import multiprocessing
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from course_lib.ranks.costs.network import Network
from course_lib.ranks.explain.errors import RankError
from course_lib.ranks.ranks import Ranks


def test_output_is_the_rank_s_own_also_where_it_is_redirected() -> None:
    def fn() -> str:
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            dist.barrier()
            print("rank", dist.get_rank())
            dist.barrier()
        dist.barrier()
        return text.getvalue()

    before = sys.stdout
    assert Ranks(3, on="simulated").run(fn) == [f"rank {rank}\n" for rank in range(3)]
    assert sys.stdout is before


def test_what_a_process_has_once_is_shared_by_ranks_and_not_with_the_notebook(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The paragraph of `README.md` is true: of the environment, the folder, a module's globals."""
    monkeypatch.setenv("SET_BY_A_RANK", "nobody")
    folder = Path.cwd()

    def fn(folder: Path) -> Any:
        mine = str(dist.get_rank())
        (folder / mine).mkdir()
        os.environ["SET_BY_A_RANK"] = torch.set_by_a_rank = mine  # type: ignore[attr-defined]
        os.chdir(folder / mine)
        dist.barrier()  # every rank has set its own by now
        return os.environ["SET_BY_A_RANK"], torch.set_by_a_rank, Path.cwd().name  # type: ignore[attr-defined]

    ranks = Ranks(3, on="simulated")
    (shared,) = set(ranks.run(fn, tmp_path))
    assert len(set(shared)) == 1
    assert os.environ["SET_BY_A_RANK"] == "nobody" and not hasattr(torch, "set_by_a_rank")
    monkeypatch.setenv("SET_BY_A_RANK", "again")  # so the host enters the notebook's folder again
    assert Path.cwd() == folder and ranks.run(os.getcwd) == [str(folder)] * 3


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


def test_a_loop_until_a_time_ends_and_takes_that_time() -> None:
    """It never ended, for the clock stood still; the report looked for an endless loop."""

    def fn() -> float:
        until = time.perf_counter() + 0.5
        while dist.get_rank() == 1 and time.perf_counter() < until:
            pass
        dist.barrier()
        return time.perf_counter()

    network = Network(latency=0, bandwidth=1e9)
    for now in Ranks(2, on="simulated", network=network, timeout=60).run(fn):
        assert now == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("caught", [False, True])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_a_rank_starts_cannot_communicate_and_the_call_says_so(
    named: bool, caught: bool
) -> None:
    """A thread ends by an exception without anybody noticing: the call went on, and was wrong."""

    def program() -> float:
        group, x = dist.new_group([0, 1]), torch.ones(1)

        def communicate() -> None:
            with suppress(*[RuntimeError] * caught):
                dist.all_reduce(x, group=group if named else None)

        thread = threading.Thread(target=communicate)
        thread.start()
        thread.join()
        return x.item()

    said = r"rank [01] calls torch\.distributed on a thread that it has started"
    with Ranks(2, on="simulated") as ranks, pytest.raises(RankError, match=said):
        ranks.run(program)


def test_what_waits_for_the_system_waits_in_real_time() -> None:
    """Their deadlines never came, for the rank's clock stood still."""

    def program() -> list[object]:
        ours, theirs = multiprocessing.Pipe()
        before = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor() as pool:
            waits = pool.submit(threading.Event().wait, 0.2)
            pool.submit(time.sleep, 0.01)
            undone = concurrent.futures.wait([waits], timeout=0.01).not_done
        asyncio.run(asyncio.sleep(0.01))
        found = [ours.poll(), theirs.poll(0.01), len(undone)]
        return [*found, time.perf_counter() - before]

    with Ranks(2, on="simulated", timeout=30) as ranks:
        assert ranks.run(program) == [[False, False, 1, 0.0]] * 2
