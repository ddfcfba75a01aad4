"""Schedules, on paper: complete, without deadlock, with the papers' bubbles and memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from course_lib.pipeline_parallel import (
    Schedule,
    ScheduleError,
    Step,
    bubble_fraction,
    check_schedule,
    gpipe,
    interleaved,
    one_forward_one_backward,
    peak_activations,
    pipeline_schedule,
    simulate,
    zero_bubble,
    zero_bubble_fraction,
)

RANKS = st.integers(1, 8)
MICRO_BATCHES = st.integers(1, 24)
SECONDS = st.floats(0.1, 10)


def same(bubble: float, fraction: float) -> None:
    assert bubble == pytest.approx(fraction, abs=1e-9)


@given(RANKS, MICRO_BATCHES, SECONDS, SECONDS)
def test_gpipe_and_1f1b_have_the_same_bubble_and_not_the_same_memory(p, m, forward, backward):
    for make in (gpipe, one_forward_one_backward):
        check_schedule(make(p, m))
        same(simulate(make(p, m), forward, backward).bubble, bubble_fraction(p, m))
    assert peak_activations(gpipe(p, m)) == [m] * p
    assert peak_activations(one_forward_one_backward(p, m)) == [min(m, p - r) for r in range(p)]


@given(RANKS, MICRO_BATCHES, st.sampled_from([1.0, 1 + 1e-9, 1.01]))
def test_a_pipeline_schedule_has_the_fewest_micro_batches_that_a_bubble_allows(p, m, above):
    """The bubble is that of m micro-batches, or above it and below that of m - 1."""
    m = 1 if p == 1 else m
    ranks = pipeline_schedule(p, (p - 1) / (m + p - 1) * above)
    steps = tuple(tuple(Step(action, i) for action, i in steps) for steps in ranks)
    plan = Schedule("as it was asked for", m, steps)
    check_schedule(plan)
    assert peak_activations(plan) == [min(m, p - rank) for rank in range(p)]
    assert simulate(plan).makespan == 3 * (m + p - 1)


@given(RANKS, st.integers(1, 3), st.integers(1, 4), SECONDS, SECONDS)
def test_interleaved_has_a_vth_of_the_bubble(p, turns, v, forward, backward):
    """B is about 2 F in practice; the formula holds for all."""
    plan = interleaved(p, turns * p, v)
    check_schedule(plan)
    if 1 <= backward / forward <= 3:
        same(simulate(plan, forward, backward).bubble, bubble_fraction(p, turns * p, v))
    assert peak_activations(plan) == [
        min(2 * (p - r - 1) + (v - 1) * p + 1, turns * p * v) for r in range(p)
    ]


@given(RANKS, MICRO_BATCHES)
def test_zero_bubble_h1_has_a_third_of_it_in_the_same_memory(p, m):
    plan = zero_bubble(p, m)
    check_schedule(plan)
    assert max(peak_activations(plan)) <= p
    if m >= p:
        same(simulate(plan).bubble, zero_bubble_fraction(p, m, 1.0, 2.0, 1.0))
        assert simulate(plan).makespan == pytest.approx(3 * m + p - 1)  # and not 3 (m + p - 1)


@given(RANKS, st.integers(0, 10))
def test_zero_bubble_h2_never_waits_in_twice_the_memory(p, extra):
    m = 2 * p - 1 + extra
    plan = zero_bubble(p, m, 2)
    check_schedule(plan)
    assert max(peak_activations(plan)) <= 2 * p - 1
    same(simulate(plan).steady_bubble, 0.0)


def test_what_interleaving_cannot_divide_is_refused():
    with pytest.raises(ValueError, match="multiple of 3; got 7"):
        interleaved(3, 7)


def changed(rank, steps):
    plan = one_forward_one_backward(2, 2)
    return plan._replace(steps=(*plan.steps[:rank], tuple(steps), *plan.steps[rank + 1 :]))


F0, F1, B0, B1 = Step("F", 0), Step("F", 1), Step("B", 0), Step("B", 1)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (changed(0, [F0, F1, B0]), "rank 0 lacks B1 of chunk 0"),
        (changed(1, [F0, B0, F1, B1, B1]), "rank 1 repeats B1"),
        (changed(1, [F0, B0, F1, B1, Step("F", 2)]), "rank 1 has the unknown steps F2"),
        (changed(1, [F0, B0, F1, Step("W", 1), B1]), "rank 0 lacks I0 of chunk 0"),
        (
            # One forward at a time in front, all forwards first behind: they wait for each other.
            changed(0, [F0, B0, F1, B1])._replace(
                steps=((F0, B0, F1, B1), (F0, F1, B0, B1)), name="mine"
            ),
            r"mine: a deadlock. Rank 0 cannot begin B0 before B0 of rank 1 is over. "
            r"Rank 1 cannot begin F1 before F1 of rank 0 is over",
        ),
        (
            changed(1, [B0, F0, F1, B1]),
            r"B0 before F0 of rank 1 is over, but F0 comes later in its schedule",
        ),
    ],
)
def test_a_schedule_that_cannot_work_is_explained(plan, message):
    with pytest.raises(ScheduleError, match=message):
        check_schedule(plan)
