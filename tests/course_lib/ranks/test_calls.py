"""Calls on the ranks when all goes well."""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_lib.ranks import Ranks, RanksError

# Fresh ranks would otherwise import this file, and pytest with it, after every failure.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_modules_folder_and_environment_are_the_notebooks(ranks, tmp_path, monkeypatch):
    ranks.run(os.getpid)
    (tmp_path / "beside_the_notebook.py").write_text("ANSWER = 42\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COURSE_SETTING", "on")

    def program():
        import beside_the_notebook

        return beside_the_notebook.ANSWER, Path.cwd(), os.environ["COURSE_SETTING"]

    assert ranks.run(program) == [(42, tmp_path, "on")] * 3


def test_one_call_at_a_time(ranks: Ranks, tmp_path: Path) -> None:
    begun = tmp_path / "begun"

    def waits() -> None:
        if dist.get_rank() == 0:
            begun.touch()
            while begun.exists():
                time.sleep(0.01)

    with ThreadPoolExecutor() as pool:
        first = pool.submit(ranks.run, waits)
        while not begun.exists():
            time.sleep(0.01)
        with pytest.raises(RanksError, match="are running another call"):
            ranks.run(os.getpid)
        begun.unlink()
    first.result()


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


@pytest.mark.parametrize("k", [0, -1, 65, 2.0, "4"])
def test_world_sizes_that_do_not_exist(k) -> None:
    with pytest.raises(ValueError, match="world_size must be 1 to 64"):
        Ranks(k, on="cpu")


def test_places_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match='on must be "auto"'):
        Ranks(2, on="tpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match='on="gpu" needs a GPU'):
            Ranks(2, on="gpu")


def test_what_a_function_returned_is_refused_with_what_was_meant(ranks: Ranks) -> None:
    with pytest.raises(TypeError, match=r"ranks\.run\(f, x\), not ranks\.run\(f\(x\)\).*a list"):
        ranks.run([1, 2])
    with pytest.raises(TypeError, match="it got None"):
        ranks.run(None)
