"""The grader's network is that of simulated ranks; no rank that breaks the rules can harm it."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from autograder.examination.fabric import ExaminersFabric, ProtocolError
from course_lib import collectives
from course_lib.ranks import Ranks
from course_lib.ranks.costs.network import Network
from course_lib.ranks.explain.errors import RankError
from tests.helpers.carried_ranks import CarriedRanks
from tests.helpers.carriers import ranks_on

NETWORK = Network(1.3e-3, 7e6)
X = torch.arange(4, dtype=torch.float32)


def post(number: int, kind: str = "send", **changes: Any) -> tuple[str, Any]:
    described: dict[str, Any] = {
        "number": number,
        "kind": kind,
        "group": "0",
        "members": [0, 1, 2],
        "peer": 0,
        "op": "",
        "tag": 0,
        "where": "here",
        "lines": [["f", 3]],
        "inputs": [X] if kind == "send" else [],
        "outputs": [] if kind == "send" else [4],
        "dtype": "float32",
    }
    return "post", {**described, **changes}


WRONG = {
    "unknown kind of message": [("shout", 1)],
    "a message of the grader": [("done", {"number": 1, "peer": None, "outputs": []})],
    "no operation": [("post", {"number": 1})],
    "unknown operation": [post(1, "dance", inputs=[], outputs=[])],
    "peer outside": [post(1, peer=7)],
    "to nobody": [post(1, peer=None)],
    "unknown reduction": [post(1, "all_reduce", peer=None, outputs=None, inputs=[X], op="magic")],
    "two dtypes": [post(1, "all_gather", inputs=[X], outputs=[4] * 3, dtype="int8", peer=None)],
    "no tensor": [post(1, inputs=[[1.0]])],
    "result too large": [post(1, "recv", outputs=[1 << 26])],
    "wait for nothing": [("wait", 5)],
    "twice the same number": [post(1), post(1)],
    "a message while it waits": [post(1), ("wait", 1), ("test", 1)],
    "group of nobody": [post(1, members=[0, 2, 9])],
    "a new group of others": [("new_group", {"made": "x", **post(1, members=[0, 1])[1]})],
    "a function without a name": [post(1, lines=[[b"f", 3]])],
    "too many lines": [post(1, lines=[["f", 1]] * 21)],
}


@pytest.mark.every_case
@pytest.mark.parametrize("messages", WRONG.values(), ids=WRONG.keys())
def test_a_message_against_the_rules_is_refused(messages: list[Any]) -> None:
    fabric = ExaminersFabric(3, NETWORK, lambda *_: None)
    *first, last = messages
    for message in first:
        fabric.handle(2, *message)
    with pytest.raises(ProtocolError):
        fabric.handle(2, *last)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), 7])
def test_time_that_was_not_declared_does_not_pass(seconds: float) -> None:
    fabric = ExaminersFabric(1, NETWORK, lambda *_: None, computes=[{1.0: 1}])
    for length in (seconds, 1.0, 1.0):
        fabric.handle(0, "compute", length)
    assert fabric.fabric.clock == [1.0]


def test_those_who_wait_for_a_broken_rank_cannot_go_on() -> None:
    fabric = ExaminersFabric(3, NETWORK, lambda *_: None)
    fabric.handle(0, *post(1, "recv", peer=2))
    fabric.handle(0, "wait", 1)
    fabric.end(1)
    fabric.end(2, "it broke the rules")
    with pytest.raises(RankError, match="Rank 2 ended: it broke the rules"):
        fabric.settle()


def test_a_question_whether_it_is_over_is_answered_before_it_is() -> None:
    answers: list[Any] = []
    fabric = ExaminersFabric(3, NETWORK, lambda *answer: answers.append(answer))
    fabric.handle(1, *post(1, "recv"))
    fabric.handle(1, "test", 1)
    for rank in (0, 2):
        fabric.end(rank)
    fabric.settle()
    assert answers == [(1, "later", 1)]


def test_no_memory_of_the_grader_reaches_a_rank() -> None:
    """The result of an operation is zeros until it is written, also after other use of memory."""
    dirty = [torch.full((n,), 7.0) for n in (3, 100, 10_000)]
    del dirty
    fabric = ExaminersFabric(3, NETWORK, lambda *_: None)
    for number, n in enumerate((3, 100, 10_000)):
        fabric.handle(2, *post(number, "recv", outputs=[n]))
    operations = fabric.fabric.unserved()
    assert not any(output.any() for operation in operations for output in operation.outputs)


plain = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.just(X)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner)),
    max_leaves=6,
)


@given(field=st.sampled_from(sorted(post(1)[1])), value=plain)
def test_no_value_makes_the_fabric_fail_otherwise(field: str, value: Any) -> None:
    """A message with one damaged field gives a `ProtocolError` or is done, and nothing else."""
    fabric = ExaminersFabric(3, NETWORK, lambda *_: None)
    for kind, message in (post(1), post(2, "recv")):
        with contextlib.suppress(ProtocolError):
            fabric.handle(2, kind, {**message, field: value})
    for kind in ("wait", "test", "compute", "new_group", "post"):
        with contextlib.suppress(ProtocolError):
            fabric.handle(2, kind, value)
    fabric.settle()


def _on_tensor(all_reduce: Any, n: int) -> torch.Tensor:
    x = torch.arange(n, dtype=torch.float32) + dist.get_rank()
    all_reduce(x)
    return x


@pytest.mark.parametrize("k", [2, 3, 4])
def test_ranks_that_are_processes_do_in_the_same_time_what_threads_do(k: int) -> None:
    carried, simulated = ranks_on("sockets", k), Ranks(k, on="simulated", network=NETWORK)
    assert isinstance(carried, CarriedRanks)
    carried.network = NETWORK
    for n, name in enumerate(("central", "tree", "ring", "halving_doubling"), 100):
        call = _on_tensor, getattr(collectives, f"{name}_all_reduce"), n
        torch.testing.assert_close(carried.run(*call), simulated.run(*call), rtol=0, atol=0)
        # Behind sockets, the call that carries the function is a line more.
        events, simulated_events = (
            [event._replace(lines=event.lines[-1:]) for event in ranks.trace.events]
            for ranks in (carried, simulated)
        )
        assert events == simulated_events
