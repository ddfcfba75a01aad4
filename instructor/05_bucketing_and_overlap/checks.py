"""The checks of this assignment. They are handed out: read them if a message is not enough.

The gradients come from the chain of layers in `course_lib.checking.chain`, whose backward costs
time on the virtual clock.
"""

import torch

from course_lib.checking import (
    Case,
    Expectation,
    Wrong,
    calls_at_most,
    in_many_forms,
    only_calls,
    overlaps,
    same_on_all_ranks,
    sends_at_most,
    task,
    time_within,
)
from course_lib.checking.buckets import asked, assign_program, every_parameter_once, well_cut
from course_lib.checking.chain import (
    GRADIENTS,
    backward_time,
    bucket_bytes,
    called,
    chain_backward,
    chain_inputs,
    chain_params,
    cleared_gradients,
    equals_chain,
    within_the_group,
)
from course_lib.checking.traffic import operations, told
from course_lib.cost_model import ring_all_reduce_time
from course_lib.ranks import compute

FACTOR = 3  # times faster than one all-reduce per parameter that is waited for in its hook

# --- task 2: one bucket on its way ----------------------------------------------------------------


def send_program(send_bucket, mine, given):
    params = chain_params(mine)
    finish = called(
        send_bucket(given.iterable(params), group=given.group), "what send_bucket returns"
    )
    compute(1e-3)
    finish()
    return {"gradient of parameter {}": [param.grad for param in params]}


def gradient_bytes(case, rank):
    return case.itemsize * sum(torch.Size(shape).numel() for shape in case.parameters["shapes"])


def waiting(*shapes, **options):
    """Return what a case of task 2 has: gradients that are there already."""
    return {"shapes": shapes, "steps": [[()]], "before": True, **options}


# --- tasks 3 and 4: hooks -------------------------------------------------------------------------


def hooks_program(hook_buckets, mine, given):
    params = chain_params(mine)
    buckets = [[params[i] for i in bucket] for bucket in mine["buckets"]]
    if mine["in_place"]:
        buckets = tuple(buckets)
    finish = called(hook_buckets(buckets, group=given.group), "what hook_buckets returns")
    found = []
    for uses, xs in zip(mine["uses"], mine["x"], strict=True):
        chain_backward(params, uses[0], xs[0], mine["seconds"])
        finish()
        found.append(cleared_gradients(params, mine["in_place"]))
    return {GRADIENTS: found}


def parallel_program(data_parallel, mine, given):
    params = chain_params(mine)
    for param in params if mine["in_place"] else ():
        param.grad = torch.zeros_like(param) if param.requires_grad else None
    tied = given.iterable([*params, *(params[i] for i in mine["again"])])
    made = data_parallel(tied, mine["cap"], mine["first_cap"], group=given.group)
    if not isinstance(made, tuple) or len(made) != 2:
        raise TypeError(f"data_parallel returns {type(made).__name__}, expected (finish, no_sync)")
    finish, no_sync = called(made[0], "finish"), called(made[1], "no_sync")
    found = []
    for uses, xs in zip(mine["uses"], mine["x"], strict=True):
        *local, last = zip(uses, xs, strict=True)
        for use, x in local:
            with no_sync():
                chain_backward(params, use, x, mine["seconds"])
        chain_backward(params, *last, mine["seconds"])
        finish()
        found.append(cleared_gradients(params, mine["in_place"]))
    return {GRADIENTS: found}


def launches(case, rank):
    return len(bucket_bytes(case, rank))


def keep_the_cap(case, observed, trace):
    for rank in range(case.world_size):
        largest = max(bucket_bytes(case, rank))
        for event in operations(trace, rank, ["all_reduce"]):
            if event.bytes > largest:
                raise Wrong(
                    f"rank {rank} sends a bucket of {event.bytes} B, where cap and dtypes allow "
                    f"{largest} B: {told([event])}"
                )


def one_order(case, observed, trace):
    for rank in range(case.world_size):
        launched = [event.bytes for event in operations(trace, rank, ["all_reduce"])]
        expected = bucket_bytes(case, rank)
        if launched != expected and len(case.members(rank)) > 1:  # alone, nothing need be sent
            raise Wrong(f"rank {rank} launches {launched}, expected the order {expected}", ORDER)


def hinted(hint, expectation, where=lambda case: True):
    """Return the expectation with a hint, for the cases that `where` chooses."""

    def test(case, observed, trace):
        if where(case):
            try:
                expectation.test(case, observed, trace)
            except Wrong as wrong:
                raise Wrong(wrong.message, hint) from None

    return Expectation(test)


def timed(hint, expectation):
    return hinted(hint, expectation, lambda case: case.parameters.get("timed", False))


def overlapped_time(case, network):
    """Return the time in which the last bucket alone is left when backward is over."""
    last, steps = bucket_bytes(case, 0)[-1], len(case.parameters["steps"])
    left = ring_all_reduce_time(last, len(case.members(0)), network)
    return 1.01 * (backward_time(case) + steps * left)


def fast_enough(case, network):
    """Return a `FACTOR`-th of the time that one all-reduce per parameter takes."""
    each = [torch.Size(shape).numel() * case.itemsize for shape in case.parameters["shapes"]]
    once = sum(ring_all_reduce_time(n, len(case.members(0)), network) for n in each)
    return (backward_time(case) + len(case.parameters["steps"]) * once) / FACTOR


EARLY = "Launch a bucket in the hook that completes it, with async_op=True; wait in finish."
IN_TIME = "Launch each bucket as soon as it is complete, go on, and wait in finish only."
FASTER = f"Expected: {FACTOR} times faster than one all-reduce per parameter, waited for."
ONCE = (
    "Each bucket leaves once per step, a tied parameter is in it once, and no_sync sends nothing."
)
ORDER = "These are the bytes of each all-reduce. Buckets leave in one order, complete or not."


def chain(layers, buckets, *steps, **options):
    """Return what a case has: layers of 2 x (i + 1) elements, unless it has ``shapes``."""
    shapes = [(i + 1, 2) for i in range(layers)]
    return {"shapes": shapes, "buckets": buckets, "steps": steps, "before": False, **options}


TWELVE = list(range(12))
BY_THREE = [[11], [10, 9, 8], [7, 6, 5, 4], [3, 2, 1, 0]]
LONG = {"shapes": [(64,)] * 12, "timed": True, "seconds": 100e-6}
WIDE = list(range(24))
WIDE_BUCKETS = [[23, 22], WIDE[21:13:-1], WIDE[13:5:-1], WIDE[5::-1]]
DEEP = {"shapes": [(64,)] * 24, "timed": True, "seconds": 50e-6, "cap": 8 * 64, "first_cap": 128}
PAIRS = [[3, 2], [1, 0]]

CHECKS = {
    "assign_buckets": task(
        "assign_buckets",
        inputs=lambda case, generator: [dict(case.parameters)],
        program=assign_program,
        judges=[every_parameter_once, well_cut],
        cases=in_many_forms(
            Case("six of one size", 1, asked(32, 16, 4, 4, 4, 4, 4, 4)),
            Case("other sizes", 1, asked(40, 8, 3, 5, 1, 9, 2, 1)),
            Case("one larger than the cap", 1, asked(24, 12, 2, 30, 2, 1)),
            Case("two are frozen", 1, asked(24, 24, 2, 3, 2, 3, frozen=(1, 3))),
            Case("the last is the first", 1, asked(24, 8, 2, 3, 2, same=[(0, 2)])),
            Case(
                "two dtypes", 1, asked(16, 8, 2, 2, 1, 1, 1, 1, dtypes=["float32", "float64"] * 3)
            ),
            Case("first_cap above cap", 1, asked(8, 64, 1, 1, 1, 1)),
        ),
    ),
    "send_bucket": task(
        "send_bucket",
        inputs=chain_inputs,
        program=send_program,
        may_change=["before"],
        judges=[within_the_group, equals_chain("gradient of parameter {}"), same_on_all_ranks],
        expects=[
            only_calls("all_reduce"),
            calls_at_most("A bucket is one tensor.", all_reduce=1),
            sends_at_most(gradient_bytes, hint="Every gradient is summed once."),
            timed("send_bucket starts the sum; finish waits for it.", overlaps("all_reduce", 1)),
        ],
        worth={"values": 2, "communication": 1},
        cases=in_many_forms(
            Case("1 rank", 1, waiting((3, 2), (5,))),
            Case("2 ranks", 2, waiting((3, 2), (5,), timed=True)),
            Case("3 ranks", 3, waiting((2, 3), (4,), (), timed=True)),
            Case("4 ranks, in two groups", 4, waiting((4, 2), (3,))),
            Case("2 ranks, one without a gradient", 2, waiting((3, 2), (5,), missing=[1])),
            Case("3 ranks, one without gradients", 3, waiting((2,), (3, 2), missing=[0, 1])),
        ),
    ),
    "hook_buckets": task(
        "hook_buckets",
        inputs=chain_inputs,
        program=hooks_program,
        judges=[within_the_group, equals_chain(), same_on_all_ranks],
        expects=[
            only_calls("all_reduce"),
            calls_at_most(ONCE, all_reduce=launches),
            Expectation(one_order),
            timed(EARLY, overlaps("all_reduce", 0.7)),
            timed(IN_TIME, time_within(overlapped_time)),
        ],
        worth={"values": 3, "communication": 2},
        cases=in_many_forms(
            Case("1 rank, two steps", 1, chain(3, [[2], [1, 0]], [[0, 1, 2]], [[0, 1, 2]])),
            Case(
                "2 ranks, two steps",
                2,
                chain(4, PAIRS, [[0, 1, 2, 3]], [[0, 1, 2, 3]]),
            ),
            Case(
                "3 ranks, each its own order",
                3,
                chain(4, [[3], [2, 1], [0]], [[(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)]]),
            ),
            Case(
                "4 ranks, in two groups, .grad is not empty",
                4,
                chain(3, [[2, 1], [0]], [[0, 1, 2]], before=True),
            ),
            Case(
                "2 ranks, rank 1 leaves one out",
                2,
                chain(
                    4,
                    PAIRS,
                    [[(0, 1, 2, 3), (0, 1, 3)]],
                    [[(0, 2, 3), (0, 1, 2, 3)]],
                    in_place=True,
                ),
            ),
            Case("3 ranks, nobody uses one", 3, chain(4, PAIRS, [[0, 1, 3]], [[0, 1, 3]])),
            Case(
                "3 ranks, in two groups, a tied layer", 3, chain(3, [[2, 1], [0]], [[0, 1, 2, 0]])
            ),
            Case(
                "4 ranks, 12 layers that take time",
                4,
                chain(12, BY_THREE, [TWELVE], [TWELVE], **LONG),
            ),
        ),
    ),
    "data_parallel": task(
        "data_parallel",
        inputs=chain_inputs,
        program=parallel_program,
        judges=[within_the_group, equals_chain(), same_on_all_ranks],
        expects=[
            only_calls("all_reduce"),
            calls_at_most(ONCE, all_reduce=launches),
            Expectation(keep_the_cap),
            Expectation(one_order),
            timed(EARLY, overlaps("all_reduce", 0.6)),
            timed(FASTER, time_within(fast_enough)),
        ],
        worth={"values": 3, "communication": 2},
        cases=in_many_forms(
            Case(
                "1 rank, two steps",
                1,
                chain(3, [[2], [1, 0]], [[0, 1, 2]], [[0, 1, 2]], cap=6, first_cap=6),
            ),
            Case(
                "2 ranks, one larger than the cap",
                2,
                chain(4, [[3], [2], [1], [0]], [[0, 1, 2, 3]], cap=5, first_cap=5),
            ),
            Case(
                "3 ranks, no_sync for two of three",
                3,
                chain(
                    4,
                    [[3], [2, 1], [0]],
                    [[0, 1, 2, 3]] * 3,
                    cap=10,
                    first_cap=2,
                    in_place=True,
                ),
            ),
            Case(
                "4 ranks, in two groups, two steps with no_sync",
                4,
                chain(4, [[3], [2, 1], [0]], *[[[0, 1, 2, 3]] * 2] * 2, cap=10, first_cap=2),
            ),
            Case(
                "3 ranks, frozen, unused and tied",
                3,
                chain(
                    4,
                    [[3], [2], [0]],
                    [[0, 1, 2, 0], [0, 1, 3]],
                    frozen=[1],
                    again=[0],
                    cap=7,
                    first_cap=7,
                ),
            ),
            Case(
                "3 ranks, in two groups, two dtypes",
                3,
                chain(4, [[3], [1], [2, 0]], [[0, 1, 2, 3]], doubles=[1, 3], cap=8, first_cap=8),
            ),
            Case(
                "4 ranks, 24 layers that take time",
                4,
                chain(24, WIDE_BUCKETS, [WIDE], [WIDE], **DEEP),
            ),
        ),
    ),
}
