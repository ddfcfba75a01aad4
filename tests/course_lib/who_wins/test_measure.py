"""Derived seconds are those of the training executed to its end."""

from dataclasses import replace

import pytest
import torch

from course_lib.ranks import Network
from course_lib.who_wins.algorithms import ALGORITHMS, EVERY, setting_of
from course_lib.who_wins.measure import Lumps, lumps_of, run_server, run_steps, time_steps
from course_lib.who_wins.problem import Problem, gradient_bytes, network_of
from course_lib.who_wins.settings import Setting

SMALL = Problem(workers=3, rows=4)
GENTLE = Setting("SGD", 0.1)
SLOW, FAST = (5e-3, 1e5), (20e-6, 10e6)
OTHERS = [("flat", FAST), ("1-bit", SLOW), ("decentralized", FAST)]
IN_STEP = [name for name, algorithm in ALGORITHMS.items() if algorithm.prepare is not None]


def end_of(problem: Problem, name: str, steps: int, network: Network) -> float:
    """Execute all steps, with each all-reduce that the algorithm may take; the fastest counts."""
    networks = [replace(network, all_reduce=way) for way in ALGORITHMS[name].all_reduce]
    return min(run_steps(problem, name, setting_of(name), 7, steps, n)[0][-1] for n in networks)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        *(("flat", SLOW), ("decentralized", SLOW)),
        *(pytest.param(*case, marks=pytest.mark.large) for case in [("1-bit", FAST), *OTHERS]),
    ],
)
def test_a_whole_training_takes_what_a_few_steps_foretell(name, place):
    network = network_of(*place)
    pace = time_steps(SMALL, name, network)
    assert pace.exact and len(pace.times) < 25
    assert pace.after(25) == pytest.approx(end_of(SMALL, name, 25, network), rel=1e-9)


@pytest.mark.parametrize("name", IN_STEP)
def test_weights_do_not_depend_on_the_network(name: str) -> None:
    """Else they could not be trained once for all networks."""
    adam = Setting("AdamW", 0.01)
    steps = EVERY if ALGORITHMS[name].period > 1 or name == "1-bit Adam" else 2
    _, free = run_steps(SMALL, name, adam, 0, steps, None)
    _, slow = run_steps(SMALL, name, adam, 0, steps, network_of(1e-3, 1e5))
    torch.testing.assert_close(free[-1], slow[-1], rtol=0, atol=0)


@pytest.mark.parametrize("name", [n for n in IN_STEP if ALGORITHMS[n].same_as])
def test_what_trains_the_same_has_the_same_weights(name: str) -> None:
    _, looks = run_steps(SMALL, name, GENTLE, 3, 5, None)
    _, expected = run_steps(SMALL, ALGORITHMS[name].same_as or "", GENTLE, 3, 5, None)
    torch.testing.assert_close(looks[-1], expected[-1], rtol=1e-4, atol=1e-6)


def test_the_fastest_all_reduce_counts() -> None:
    """Far away one-shot waits for one latency, a ring of four for six. Narrow, a ring is enough."""
    four = Problem(workers=4, rows=4)
    far, narrow = network_of(1.0, 1e9), network_of(0.0, 1e3)
    paces = [time_steps(four, name, far).seconds for name in ("flat", "flat, ring")]
    assert paces == pytest.approx([1.0, 6.0], rel=0.03)
    paces = [time_steps(four, name, narrow).seconds for name in ("flat", "flat, ring")]
    assert paces == pytest.approx(2 * [6 / 4 * gradient_bytes() / 1e3], rel=0.01)


@pytest.mark.parametrize("place", [(1e-3, 1e6), (20e-3, 1e5)])
def test_with_a_server_lumps_take_what_operators_take(place: tuple[float, float]) -> None:
    network, lumps = network_of(*place), lumps_of(SMALL, "SGD")
    lumped, a = run_server(SMALL, "asynchronous", GENTLE, 0, 9, network, lumps)
    counted, b = run_server(SMALL, "asynchronous", GENTLE, 0, 9, network, Lumps(0, 0), counted=True)
    assert lumped[-1] == pytest.approx(counted[-1], rel=0.02)
    torch.testing.assert_close(a[-1], b[-1])
