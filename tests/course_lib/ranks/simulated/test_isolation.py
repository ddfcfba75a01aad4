"""Simulated ranks are threads: what each has for itself, and what they share."""

import asyncio
import concurrent.futures
import contextlib
import io
import multiprocessing
import os
import sys
import threading
import time
import warnings
from contextlib import suppress
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


NAMES = """
import concurrent.futures, locale, logging, os, sys, warnings
import matplotlib.pyplot as plt, torch
mkl = torch.backends.mkldnn
def warns():
    try:
        warnings.warn("seen")
    except UserWarning:
        return False
    return True
"""


@pytest.mark.parametrize(
    ("change", "read"),
    [
        ("torch.set_default_dtype(torch.float64)", "torch.ones(1).dtype"),
        ("torch.set_num_threads(3)", "torch.get_num_threads()"),
        ("torch.set_float32_matmul_precision('high')", "torch.get_float32_matmul_precision()"),
        pytest.param(
            "mkl.matmul.fp32_precision = 'bf16'",
            "mkl.matmul.fp32_precision",
            marks=pytest.mark.skipif(not hasattr(torch.backends.mkldnn, "matmul"), reason="2.8"),
        ),
        ("torch.use_deterministic_algorithms(True)", "torch.get_deterministic_debug_mode()"),
        ("torch.autograd.set_detect_anomaly(True, False)", "torch.is_anomaly_check_nan_enabled()"),
        ("torch.set_printoptions(precision=2)", "str(torch.tensor(1.23456))"),
        ("torch.backends.cudnn.benchmark = True", "torch.backends.cudnn.benchmark"),
        (
            "torch.nn.modules.module.register_module_forward_hook(lambda *_: 7)",
            "torch.nn.Identity()(0)",
        ),
        ("plt.figure()", "plt.get_fignums()"),
        ("os.chdir('/')", "os.getcwd()"),
        ("os.environ['NEW'] = '1'; del os.environ['RANK']", "os.getenv('NEW'), os.getenv('RANK')"),
        ("warnings.simplefilter('error')", "warns()"),
        ("logging.basicConfig(level='DEBUG')", "logging.root.level, len(logging.root.handlers)"),
        ("sys.argv = ['train.py']", "sys.argv"),
        ("sys.setrecursionlimit(3000)", "sys.getrecursionlimit()"),
        ("locale.setlocale(locale.LC_ALL, 'C')", "locale.setlocale(locale.LC_ALL)"),
    ],
)
def test_a_setting_is_a_rank_s_own_and_ends_with_the_call(change: str, read: str) -> None:
    def fn(changing: int) -> list[Any]:
        values, names = [], dict[str, Any]()
        exec(NAMES, names)
        for turn in range(3):
            if turn == 1 and dist.get_rank() == changing:
                exec(change, names)
            dist.barrier()
            values.append(eval(read, names))
            dist.barrier()
        return values

    ranks = Ranks(3, on="simulated")
    untouched = ranks.run(fn, 9)
    for changing in (0, 2):
        results = ranks.run(fn, changing)
        before, changed, after = results[changing]
        assert before == untouched[changing][0] != changed == after
        assert results == [*untouched[:changing], results[changing], *untouched[changing + 1 :]]
    assert Ranks(3, on="simulated").run(fn, 9) == untouched


def test_a_folder_that_is_gone_ends_with_the_call(tmp_path) -> None:
    def fn() -> str:
        if dist.get_rank() == 1:
            os.chdir(tmp_path)
            tmp_path.rmdir()
        dist.barrier()
        return os.getcwd() if dist.get_rank() == 0 else ""

    ranks = Ranks(2, on="simulated")
    assert ranks.run(fn) == [os.getcwd(), ""]
    assert ranks.run(os.getcwd) == [os.getcwd()] * 2


def test_a_library_that_keeps_the_rank_is_named_in_each_call_that_imports_it(tmp_path, monkeypatch):
    (tmp_path / "accelerate.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    ranks = Ranks(2, on="simulated")
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"accelerate was imported .* threads of one process"):
            ranks.run(lambda: exec("from accelerate import __name__"))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ranks.run(dist.barrier)


@pytest.mark.parametrize(
    "profiled",
    [
        "torch.profiler.profile(schedule=lambda _: torch.profiler.ProfilerAction.NONE).start",
        "torch.autograd.profiler.profile().__enter__",
        "torch.autograd.profiler.emit_itt().__enter__",
        "concurrent.futures.ThreadPoolExecutor().submit(torch.profiler.profile().start).result",
        "started.stop",
    ],
)
def test_the_profiler_of_pytorch_is_refused_before_it_ends_the_process(profiled: str) -> None:
    """Used by two ranks, it ended by a segmentation fault, and all variables were gone."""

    def fn(started: Any) -> None:
        with torch.profiler.record_function("allowed"):
            dist.barrier()
        names = {"started": started}
        exec(NAMES, names)
        eval(profiled, names)()

    ranks = Ranks(2, on="simulated")
    ranks.push(kept=1)
    refused = pytest.raises(RankError, match=r"profiler.*ranks\.trace.*on=\"cpu\"")
    with torch.profiler.profile() as started, refused:  # started here, not on the ranks
        ranks.run(fn, started)
    assert ranks.pull("kept") == [1, 1]


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


@pytest.mark.parametrize("with_group", [False, True])
@pytest.mark.parametrize("caught", [False, True])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_a_rank_starts_cannot_communicate_and_the_call_says_so(with_group, caught):
    """A thread ends by an exception without anybody noticing: the call went on, and was wrong."""

    def program() -> float:
        group, x = dist.new_group([0, 1]), torch.ones(1)

        def communicate() -> None:
            with suppress(*[RuntimeError] * caught):
                dist.all_reduce(x, group=group if with_group else None)

        thread = threading.Thread(target=communicate)
        thread.start()
        thread.join()
        return x.item()

    message = r"rank [01] calls torch\.distributed on a thread that it has started"
    with Ranks(2, on="simulated") as ranks, pytest.raises(RankError, match=message):
        ranks.run(program)


def test_what_waits_for_the_system_waits_in_real_time() -> None:
    """Their deadlines never came, for the rank's clock stood still."""

    def program() -> list[object]:
        own_end, other_end = multiprocessing.Pipe()
        before = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor() as pool:
            waits = pool.submit(threading.Event().wait, 0.2)
            pool.submit(time.sleep, 0.01)
            undone = concurrent.futures.wait([waits], timeout=0.01).not_done
        asyncio.run(asyncio.sleep(0.01))
        answers = [own_end.poll(), other_end.poll(0.01), len(undone)]
        return [*answers, time.perf_counter() - before]

    with Ranks(2, on="simulated", timeout=30) as ranks:
        assert ranks.run(program) == [[False, False, 1, 0.0]] * 2
