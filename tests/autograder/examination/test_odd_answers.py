"""Submissions with answers that no judge or wire expects, and the score of each.

As in `test_attacks`, an answer costs what it breaks, and nothing else.
"""

from __future__ import annotations

import pytest

from autograder.sandbox.sandbox import Sandbox
from tests.autograder.examination.test_attacks import (
    AVERAGE,
    Attack,
    average,
    bounds,
    honest,
    loses,
)
from tests.autograder.examination.test_attacks import (
    test_it_costs_what_it_breaks as costs_what_it_breaks,
)
from tests.helpers.course_folders import needs_sources

pytestmark = needs_sources

ANSWERS = {
    "nested without end": loses(
        "shard_bounds", bounds("x = []\n    for _ in range(10**5): x = [x]\n    return x")
    ),
    "numbers without end": loses(
        "shard_bounds", bounds("import itertools; return itertools.count()")
    ),
    "a tensor that lies": loses(
        "average_gradients",
        "class Liar(torch.Tensor):\n"
        "    @classmethod\n    def __torch_function__(cls, *a, **k): return True\n"
        + average(
            "for p in params:\n        if p.grad is not None: p.grad = p.grad.as_subclass(Liar)"
        ),
    ),
    "an exception that will not be told": loses(
        "average_gradients",
        "class Mute(Exception):\n    def __str__(self): raise self\n    __repr__ = __str__\n"
        + average("raise Mute"),
    ),
    "an exception of 10 MB": loses("average_gradients", average("raise ValueError('x' * 10**7)")),
    "exits": loses("average_gradients", average("raise SystemExit(0)")),
    # Bytes that no rank would send.
    "noise on all lines": loses(
        "average_gradients",
        average(
            "for fd in range(3, 64):\n"
            "        try: os.write(fd, b'DDPv' + os.urandom(100))\n        except OSError: pass"
        ),
    ),
    "hangs up": loses("average_gradients", average("os.closerange(0, 64)")),
    "a frame of its own": loses(
        "average_gradients",
        "from course_lib.ranks.wire import encode\n"
        + average(
            "answer = encode({'value': {'gradient of parameter {}': 2**1000}, 'left': [[1]]})\n"
            "    for fd in range(3, 64):\n"
            "        try: os.write(fd, encode(('output', answer)))\n        except OSError: pass"
        ),
    ),
    "closes what it has open": honest("import os\nos.closerange(3, 64)"),
    "prints without end": honest(average_gradients=AVERAGE + "    print('x' * 10**7)\n"),
}


# Some by default; the whole table takes a minute.
ALWAYS = {"a tensor that lies", "a frame of its own", "prints without end"}


@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(attack, id=name, marks=() if name in ALWAYS else pytest.mark.large)
        for name, attack in ANSWERS.items()
    ],
)
def test_an_answer_costs_what_it_breaks(assignment_place: Sandbox, attack: Attack) -> None:
    costs_what_it_breaks(assignment_place, attack)
