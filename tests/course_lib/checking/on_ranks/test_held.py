"""Memory that is held: counted exactly, judged like the rest."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_lib.checking import (
    Case,
    Check,
    CheckReport,
    Observed,
    equals,
    holds_at_most,
    run_check,
    task,
)
from course_lib.checking.on_ranks.held import HeldMemory, held_by
from course_lib.checking.runners import LocalRunner, Place

N = 1000  # float32 numbers of every rank: 4000 B


def counted(fn: Callable[[], Any]) -> HeldMemory:
    gc.collect()
    with HeldMemory() as held:
        fn()
    return held


def one_after_the_other() -> None:
    for _ in range(5):
        torch.ones(N)


def all_at_once() -> None:
    [torch.ones(N) for _ in range(5)]


def views() -> None:
    x = torch.ones(N)
    [x.view(10, 100), x[:5], x.t(), x.detach()]


def freed_storage() -> None:
    x = torch.ones(N)
    x.untyped_storage().resize_(0)
    torch.ones(N)


def grown_storage() -> None:
    x = torch.ones(N)
    x.untyped_storage().resize_(8 * N)
    torch.ones(1)


def a_new_shape() -> None:
    torch.ones(2).resize_(N)


def backward() -> None:
    x = nn.Parameter(torch.ones(N))
    # x, x * x, then its gradient's factors and sum: 2x makes one more before it is .grad.
    (x * x).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize(
    ("fn", "most"),
    [
        (one_after_the_other, 4 * N),
        (all_at_once, 20 * N),
        (views, 4 * N),
        (freed_storage, 4 * N),
        (grown_storage, 8 * N + 4),
        (a_new_shape, 4 * N),
        (lambda: torch.ones(N).numpy() + 1, 4 * N),
        (lambda: [], 0),
    ],
)
def test_what_is_held_at_once_is_counted(fn: Callable[[], Any], most: int) -> None:
    assert counted(fn).most == most


def test_gradients_count() -> None:
    assert counted(backward).most >= 12 * N
    x = nn.Parameter(torch.ones(N))
    assert counted(lambda: x.sum().backward()).most >= 8 * N  # not made here, but used here


# As an expectation of a task: the sum of all ranks' tensors, of which a rank keeps its chunk -----


def inputs(case: Case, generator: torch.Generator) -> list[dict[str, Any]]:
    return [{"x": torch.randn(N, generator=generator)} for _ in range(case.world_size)]


def program(function: Callable[..., Any], mine: Any, given: Any) -> Any:
    unused = torch.ones(100 * N)  # before the first call: nobody's concern
    answer = {"chunk": function(mine["x"], group=given.group)}
    del unused
    return answer


def right(case: Case, theirs: Any, me: int) -> Any:
    total = torch.stack([each["x"] for each in theirs]).double().sum(0).float()
    return {"chunk": total.tensor_split(len(theirs))[me]}


def limit(case: Case, rank: int) -> int:
    """Its input, and twice its chunk: one that arrives, one that is kept."""
    return 4 * (N + 2 * -(-N // case.world_size))


def reduce_scatter_check(*expects: Any) -> Check:
    return task(
        "chunk_of_sum",
        inputs=inputs,
        program=program,
        judges=[equals(right)],
        expects=expects or [holds_at_most(limit, hint="Never make the whole sum.")],
        worth={"values": 1, "communication": 1},
        cases=[Case(f"{k} ranks", k) for k in (1, 2, 4)],
    )


def by_chunks(x: torch.Tensor, group: Any = None) -> torch.Tensor:
    k, me = dist.get_world_size(group), dist.get_rank(group)
    chunks = x.tensor_split(k)
    total = chunks[me].clone()
    arrived = torch.empty_like(total)
    for distance in range(1, k):
        send, receive = (me + distance) % k, (me - distance) % k
        handle = dist.isend(chunks[send].contiguous(), send, group=group)
        dist.recv(arrived, receive, group=group)
        handle.wait()
        total += arrived
    return total


def of_the_whole(x: torch.Tensor, group: Any = None) -> torch.Tensor:
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x.tensor_split(dist.get_world_size(group))[dist.get_rank(group)].clone()


def run(function: Any, on: Place = "simulated", check: Check | None = None) -> CheckReport:
    with LocalRunner(function, on) as runner:
        return run_check("t/chunk", check or reduce_scatter_check(), runner, seed="1")


@pytest.mark.parametrize("on", ["simulated", "cpu"])
def test_it_holds_and_fails(on: Place) -> None:
    assert run(by_chunks, on).passed
    report = run(of_the_whole, on)
    assert [result.name for result in report.results if result.passed] == ["1 ranks"]
    assert report.parts == {"values": True, "communication": False}
    assert report.reason == (
        "rank 0 holds 9.8 KiB of tensors at once, expected at most 7.8 KiB. The largest are "
        f"[{N}] float32; [{N}] float32; [{N // 2}] float32. Never make the whole sum."
    )


def test_memory_is_counted_only_where_it_is_asked_for() -> None:
    seen: list[Any] = []

    def look(check: Check, case: Case, inputs: Any) -> Observed:
        with LocalRunner(by_chunks) as runner:
            observed = runner(check, case, inputs)
        seen.extend(observed.outputs)
        return observed

    run_check("t/chunk", reduce_scatter_check(holds_at_most(10**9)), look, seed="1")
    assert all("held" in each for each in seen)
    seen.clear()
    check = task("c", inputs=inputs, program=program, judges=[equals(right)], cases=[Case("1", 1)])
    run_check("t/chunk", check, look, seed="1")
    assert "held" not in seen[0]


@pytest.mark.parametrize("forged", [None, {}, {"most": "0", "largest": []}, {"most": -1}])
def test_a_forged_count_costs_its_case(forged: Any) -> None:
    def forger(check: Check, case: Case, inputs: Any) -> Observed:
        with LocalRunner(by_chunks) as runner:
            observed = runner(check, case, inputs)
        for output in observed.outputs:
            output["held"] = forged
        return observed

    report = run_check("t/chunk", reduce_scatter_check(), forger, seed="1")
    assert "does not say how many bytes it holds" in report.reason
    assert not any(result.trouble for result in report.results)


# What something holds ----------------------------------------------------------------------------


def in_a_closure(x: torch.Tensor) -> Any:
    return lambda: x


def in_an_attribute(x: torch.Tensor) -> Any:
    class Holder:
        def __init__(self) -> None:
            self.inner = {"x": [x.view(-1)]}

    return Holder()


def in_a_method_of_its_class(x: torch.Tensor) -> Any:
    class Layer(nn.Module):
        def forward(self) -> torch.Tensor:
            return x

    return Layer()


def in_a_class(x: torch.Tensor) -> Any:
    class Layer(nn.Module):
        whole = x

    return Layer()


def in_a_submodule(x: torch.Tensor) -> Any:
    linear = nn.Linear(1, 1)
    linear.weight = nn.Parameter(x)
    return [nn.Sequential(linear)]


def in_arguments_kept_for_later(x: torch.Tensor) -> Any:
    return functools.partial(print, x), in_an_attribute(x).__init__


def in_a_circle(x: torch.Tensor) -> Any:
    found: list[Any] = [x]
    found.append(found)
    return found


HOLDERS = [
    in_a_closure,
    in_an_attribute,
    in_a_method_of_its_class,
    in_a_class,
    in_a_submodule,
    in_arguments_kept_for_later,
    in_a_circle,
]


@pytest.mark.parametrize("holder", HOLDERS)
def test_what_something_holds_is_found(holder: Callable[[torch.Tensor], Any]) -> None:
    x = torch.ones(N)
    found = {t.untyped_storage().data_ptr() for t in held_by(holder(x))}
    assert x.untyped_storage().data_ptr() in found


def test_what_it_does_not_hold_is_not() -> None:
    x = torch.ones(N)

    class Layer(nn.Module):
        def __init__(self, part: torch.Tensor) -> None:
            super().__init__()
            self.part, self.group = nn.Parameter(part.clone()), dist.group

    layer = Layer(x[:3])
    assert [t.numel() for t in held_by(layer)] == [3]
    assert list(held_by([nn.Module, torch, 3, "x", None, print])) == []
