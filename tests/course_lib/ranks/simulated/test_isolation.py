"""Simulated ranks are threads: what each has for itself, and what they share."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import importlib
import io
import locale
import logging
import multiprocessing
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
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


def test_what_a_module_keeps_is_shared_by_ranks_and_not_with_the_notebook() -> None:
    """As `README.md` says."""

    def fn() -> Any:
        torch.set_by_a_rank = dist.get_rank()  # type: ignore[attr-defined]
        dist.barrier()  # every rank has set its own by now
        return torch.set_by_a_rank  # type: ignore[attr-defined]

    assert len(set(Ranks(3, on="simulated").run(fn))) == 1
    assert not hasattr(torch, "set_by_a_rank")


def set_folder() -> None:
    os.chdir("/")


def set_and_delete_variables() -> None:
    os.environ["SET_BY_A_RANK"] = "1"
    os.environ.pop("WORLD_SIZE")


def set_print_options() -> None:
    torch.set_printoptions(precision=2)


def set_filter() -> None:
    warnings.simplefilter("error")


def warns() -> str:
    with suppress(UserWarning):
        warnings.warn("seen", UserWarning, stacklevel=1)
        return "warned"
    return "raised"


def hook_all_modules() -> None:
    torch.nn.modules.module.register_module_forward_hook(lambda *_: torch.zeros(1))


def open_figure() -> None:
    plt.figure()


def add_handler() -> None:
    logging.basicConfig(level=logging.DEBUG)


SETTINGS: dict[str, tuple[Callable[[], object], Callable[[], Any]]] = {
    "default dtype": (
        lambda: torch.set_default_dtype(torch.float64),
        lambda: str(torch.ones(1).dtype),
    ),
    "folder": (set_folder, os.getcwd),
    "environment": (
        set_and_delete_variables,
        lambda: (os.getenv("SET_BY_A_RANK"), os.getenv("WORLD_SIZE")),
    ),
    "threads": (lambda: torch.set_num_threads(3), torch.get_num_threads),
    "deterministic": (
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
        torch.is_deterministic_algorithms_warn_only_enabled,
    ),
    "anomalies": (lambda: torch.autograd.set_detect_anomaly(True), torch.is_anomaly_enabled),
    "printed digits": (set_print_options, lambda: str(torch.tensor([1.23456]))),
    "precision": (
        lambda: torch.set_float32_matmul_precision("medium"),
        torch.get_float32_matmul_precision,
    ),
    "cuDNN": (
        lambda: setattr(torch.backends.cudnn, "benchmark", True),
        lambda: torch.backends.cudnn.benchmark,
    ),
    "filters": (set_filter, warns),
    "recursion": (lambda: sys.setrecursionlimit(3000), sys.getrecursionlimit),
    "locale": (
        lambda: locale.setlocale(locale.LC_ALL, "C"),
        lambda: locale.setlocale(locale.LC_ALL),
    ),
    "hooks": (hook_all_modules, lambda: torch.nn.Identity()(torch.ones(1)).item()),
    "figures": (open_figure, plt.get_fignums),
    "log": (add_handler, lambda: (logging.root.level, len(logging.root.handlers))),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_of_the_process_is_its_rank_s_own_and_ends_with_the_call(name: str) -> None:
    change, read = SETTINGS[name]

    def fn(changing: int) -> Any:
        before = read()
        dist.barrier()
        if dist.get_rank() == changing:
            change()
        dist.barrier()
        changed = read()
        dist.barrier()
        return before, changed, read()

    ranks = Ranks(3, on="simulated")
    untouched = ranks.run(fn, 9)
    assert untouched == [(untouched[0][0],) * 3] * 3
    for changing in (0, 2):
        results = ranks.run(fn, changing)
        before, changed, after = results.pop(changing)
        assert changed == after != before == untouched[0][0]
        assert results == untouched[:2]
    assert Ranks(3, on="simulated").run(fn, 9) == untouched


def test_a_setting_that_cannot_be_read_any_more_ends_with_the_call(tmp_path: Path) -> None:
    """A folder that is gone has no name."""

    def fn(folder: Path) -> str:
        if dist.get_rank() == 1:
            os.chdir(folder)
            folder.rmdir()
        dist.barrier()
        return Path.cwd().name if dist.get_rank() == 0 else ""

    ranks = Ranks(2, on="simulated")
    (tmp_path / "gone").mkdir()
    assert ranks.run(fn, tmp_path / "gone")[0] == Path.cwd().name
    assert ranks.run(os.getcwd) == [str(Path.cwd())] * 2


@pytest.mark.parametrize("named", [False, True])
def test_a_library_that_keeps_the_rank_is_named_in_each_call_that_imports_it(
    named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)

    def uses() -> None:
        if named:
            from accelerate import __name__  # type: ignore[import-not-found] # noqa: F401
        else:
            importlib.import_module("accelerate")

    ranks = Ranks(2, on="simulated")
    for _ in range(1 + named):
        with pytest.warns(UserWarning, match=r"accelerate.*simulated ranks are threads"):
            ranks.run(uses)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ranks.run(dist.barrier)
        Ranks(2, on="cpu").run(uses)


def profiled_by_schedule() -> None:
    with torch.profiler.profile(schedule=torch.profiler.schedule(wait=1, warmup=1, active=1)) as p:
        for _ in range(4):
            dist.all_reduce(torch.ones(1))
            p.step()


def profiled_by_autograd() -> None:
    with torch.autograd.profiler.profile():
        dist.all_reduce(torch.ones(1))


def profiled_in_turn() -> None:
    for rank in range(2):
        if rank == dist.get_rank():
            torch.profiler.profile().start()
        dist.barrier()


def profiled_by_a_thread() -> None:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        pool.submit(profiled_by_autograd).result()


@pytest.mark.parametrize(
    "profiled",
    [profiled_by_schedule, profiled_by_autograd, profiled_in_turn, profiled_by_a_thread],
)
def test_pytorch_s_profiler_is_refused_before_it_ends_the_process(
    profiled: Callable[[], None],
) -> None:
    ranks = Ranks(2, on="simulated")
    ranks.push(kept=1)
    with pytest.raises(RankError, match=r"profiler.*ranks\.trace.*on=\"cpu\""):
        ranks.run(profiled)
    assert ranks.pull("kept") == [1, 1]
    started = torch.profiler.profile()
    started.start()  # here, not on the ranks
    try:
        with pytest.raises(RankError, match="profiler"):
            ranks.run(started.stop)
    finally:
        started.stop()

    def marked() -> None:
        with torch.profiler.record_function("mark"):
            dist.barrier()

    ranks.run(marked)


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
