"""Tapes of the capstone, played in a cell of the sandbox."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from autograder.examination import booth
from autograder.sandbox.place import SandboxedPlace
from course_lib.capstone import Job, Race, TapeError, draw, referee, write_tape
from course_lib.checking.on_ranks.wire import WireError
from course_lib.ranks import Ranks, per_rank

RACE = Race(world_size=2, rows=32, features=8, hidden=8, classes=4)


def train(job: Job) -> int:
    F.cross_entropy(job.model(job.x), job.y).backward()
    for p in job.model.parameters():
        dist.all_reduce(p.grad)
        p.data.sub_(p.grad)
    return 4 * sum(p.numel() for p in job.model.parameters())


@pytest.fixture(scope="module")
def tapes() -> list[torch.Tensor]:
    given = draw(RACE, "written").inputs()
    with Ranks(2, on="simulated", network=RACE.network) as ranks:
        return ranks.run(lambda mine: write_tape(train, RACE, mine), per_rank(given))


def test_the_score_is_the_same_in_a_cell(tapes: list[torch.Tensor]) -> None:
    here, _ = referee(RACE, tapes, ["one", "two"])
    with SandboxedPlace() as place, booth.tapes_played_in(place):
        there, _ = referee(RACE, tapes, ["one", "two"])
        assert there == here  # to the last bit
        with pytest.raises(TapeError, match="is not a tape"):
            referee(RACE, [torch.zeros(3)] * 2, ["one"])
        ended = "cannot be played, because the process that plays it ended"
        with pytest.raises(TapeError, match=ended):
            booth._play(place, {"no": "race"}, tapes, ["one"])
        assert referee(RACE, tapes, ["one", "two"])[0] == here
    assert referee(RACE, tapes, ["one"])[1].events  # outside again, with a trace


RIGHT: dict[str, Any] = {
    **{"seconds": 1.0, "computed": 0.5, "light": 0.1, "flops": 3, "gradients": 2, "equal": True},
    **{"losses": (0.5, math.inf), "sent": (1, 2), "received": (1, 2), "claimed": (1, -1)},
}


def test_an_answer_has_the_form_of_a_score() -> None:
    assert booth._checked({"score": RIGHT}) == {"score": RIGHT, "events": []}
    assert booth._checked({"error": "x" * 1000}) == {"error": "x" * 300}


@pytest.mark.parametrize(
    "wrong",
    [
        *({**RIGHT, "seconds": bad} for bad in (math.nan, -math.inf, 1, "1", None)),
        *({**RIGHT, "losses": bad} for bad in ([0.5], (1,), 0.5, ("a",))),
        *({**RIGHT, "equal": bad} for bad in (1, "yes")),
        {**RIGHT, "sent": (1.0, 2)},
        {**RIGHT, "one more": 1},
        {name: value for name, value in RIGHT.items() if name != "claimed"},
        *([], {}, None),
    ],
    ids=lambda wrong: str(wrong)[:40] if isinstance(wrong, dict) else str(wrong),
)
def test_any_other_answer_is_refused(wrong: Any) -> None:
    with pytest.raises(WireError, match="not a score"):
        booth._checked({"score": wrong})
    with pytest.raises(WireError, match="not a score"):
        booth._checked(wrong)
