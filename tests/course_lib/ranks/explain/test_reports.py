"""Reports stay short and keep to the user's own lines, with many ranks and deep libraries too."""

import json
import runpy

import pytest
import torch

from course_lib.ranks import RankState
from course_lib.ranks.explain.failure import describe
from course_lib.ranks.explain.mismatch import unfinished
from course_lib.ranks.explain.waiting import Unmatched, Waiting, deadlock
from course_lib.ranks.explain.words import in_short, names


def caught(fn, *args) -> Exception:
    try:
        fn(*args)
    except Exception as error:
        return error
    raise AssertionError("it did not raise")


def ring_of(k: int):
    """Return the report on a ring of `k` receives whose messages went to the other neighbour."""
    waiting = {r: Waiting(r, "recv", ((r - 1) % k,)) for r in range(k)}
    astray = [Unmatched(r, True, (r - 1) % k, where="Cell In[1], line 2") for r in range(k)]
    states = [RankState(r, f"waits in recv from rank {(r - 1) % k}") for r in range(k)]
    return deadlock(waiting, states, astray)


def test_many_ranks_are_told_of_in_short() -> None:
    assert names([0, 1, 2]) == "Ranks 0, 1, 2"
    assert names([*range(3), *range(4, 64)]) == "Ranks 0-2, 4-63"
    assert in_short(range(0, 1024, 2)) == "0, 2, 4, 6, 8, 10, 12, 14, … (512 ranks)"
    of_three, of_sixty_four = ring_of(3).detail, ring_of(64).detail
    assert len(of_three.splitlines()) == 4
    assert "Rank 1 did send, but to rank 0, not rank 2" in of_three
    assert len(of_sixty_four.splitlines()) == 10 and "… and 56 more like these." in of_sixty_four
    assert len(of_sixty_four.splitlines()[0]) < 120
    left = [Unmatched(r, True, 0) for r in range(1, 64)]
    assert len(str(unfinished(left, [], [], over=True)).splitlines()) < 15


def test_calls_inside_libraries_are_told_in_short() -> None:
    """The last line after the innermost line of the user's own says what was wrong."""

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.Sequential(torch.nn.Linear(3, 4))(x)

    trace = describe(caught(Model(), torch.ones(2, 5)), {}).trace
    assert "calls inside packages" in trace
    assert trace.count("site-packages") == 1 and "linear.py" in trace
    assert "return torch.nn.Sequential(torch.nn.Linear(3, 4))(x)" in trace
    assert "shapes cannot be multiplied" in trace
    short = describe(caught(json.loads, "{"), {}).trace
    assert "JSONDecodeError" in short and "decoder.py" in short


def itself(n: int):
    return itself(n)


class Nested(torch.nn.Module):
    def forward(self, x: torch.Tensor):
        return self(x)


@pytest.mark.parametrize("function", [itself, Nested()])
def test_a_recursion_without_an_end_is_told_in_short(function) -> None:
    trace = describe(caught(function, torch.ones(1)), {}).trace
    assert len(trace.splitlines()) < 75
    assert "RecursionError" in trace.splitlines()[-1]
    assert ("[Previous line repeated" in trace) == (function is itself)


@pytest.mark.parametrize("on", ["simulated", pytest.param("cpu", marks=pytest.mark.large)])
def test_a_script_is_told_its_own_line(tmp_path, on, capsys):
    """The lines of the course that it calls help nobody, wherever the course is installed."""
    script = tmp_path / "script.py"
    script.write_text(f"""
import torch, torch.distributed as dist
from course_lib.collectives import ring_all_reduce
from course_lib.ddp import DistributedDataParallel
from course_lib.ranks import Ranks, RanksError

def waits():
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    if dist.get_rank() == 0:
        model(torch.ones(2, 4)).sum().backward()  # line 10: it starts what the rank waits for
        model.finish_gradient_synchronization()

def sends():
    if dist.get_rank() == 0:
        ring_all_reduce(torch.ones(9))  # line 15

def raises():
    ring_all_reduce("x")  # line 18

if __name__ == "__main__":
    with Ranks(2, on="{on}") as ranks:
        for fn in (waits, sends, raises):
            try:
                ranks.run(fn)
            except RanksError as error:
                print(error.states[0].where)
""")
    runpy.run_path(str(script), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"script.py, line {number}" for number in (10, 15, 18)]
