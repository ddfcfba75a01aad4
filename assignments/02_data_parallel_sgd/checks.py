"""The checks of this assignment. They are handed out: read them if a message is not enough.

What a rank's program does, and what is right, stands in `course_lib.checking`: in `shards`,
`averaging` and `training`. A program gets only its rank's input.
"""

from course_lib.checking import (
    Case,
    Form,
    calls_at_most,
    in_many_forms,
    only_calls,
    receives_at_least,
    same_on_all_ranks,
    sends_at_most,
    task,
)
from course_lib.checking.averaging import (
    equals_mean,
    gradient_bytes,
    gradient_count,
    gradient_inputs,
    gradient_program,
    unless_alone,
)
from course_lib.checking.shards import balanced_shards, bounds_program
from course_lib.checking.training import NUMEL, SHAPES, equals_sgd, step_inputs, step_program

QUESTIONS = {
    "lengths that divide": [(12, 1), (12, 2), (12, 3), (12, 4)],
    "lengths that do not divide": [(10, 3), (10, 4), (7, 2)],
    "fewer elements than ranks": [(2, 4), (0, 3), (1, 1)],
}

ONE_ALONE = Form(((0, 2), (1,)), "float64")
THREE = {"shapes": [(3, 2), (5,), ()]}
EXTRA = 512  # bytes that a rank may send in a step for counts and losses

CHECKS = {
    "shard_bounds": task(
        "shard_bounds",
        inputs=lambda case, generator: [dict(case.parameters)],
        program=bounds_program,
        judges=[balanced_shards],
        cases=[Case(name, 1, {"questions": asked}) for name, asked in QUESTIONS.items()],
    ),
    "average_gradients": task(
        "average_gradients",
        inputs=gradient_inputs,
        program=gradient_program,
        may_change=["gradients"],
        judges=[equals_mean("gradients", "gradient of parameter {}"), same_on_all_ranks],
        expects=[
            only_calls("all_reduce"),
            sends_at_most(gradient_bytes, hint="Every gradient is summed once."),
            receives_at_least(unless_alone(gradient_bytes)),
            calls_at_most("One call sums a whole tensor.", all_reduce=gradient_count),
        ],
        worth={"values": 3, "communication": 1},
        cases=in_many_forms(
            Case("1 rank", 1, THREE),
            Case("2 ranks", 2, THREE),
            Case("3 ranks", 3, THREE),
            Case("4 ranks, in two groups", 4, THREE),
            Case("2 ranks, a frozen parameter", 2, {**THREE, "frozen": [1]}),
            Case("3 ranks, one alone", 3, {"shapes": [(4,), (2, 3)]}, ONE_ALONE),
        ),
        in_turn=[(1, 1), (2, 5)],
    ),
    "data_parallel_step": task(
        "data_parallel_step",
        inputs=step_inputs,
        program=step_program,
        judges=[
            equals_sgd("parameter", tolerance={"float64": 1e-9}),
            equals_sgd("loss", tolerance={"float64": 1e-6}),
            same_on_all_ranks,
        ],
        expects=[
            sends_at_most(lambda case, rank: 2 * (NUMEL * case.itemsize + EXTRA)),
            sends_at_most(2 * EXTRA, besides=["all_reduce"], hint="Use all_reduce for gradients."),
            calls_at_most(all_reduce=2 * (len(SHAPES) + 2)),
            receives_at_least(unless_alone(lambda case, rank: 2 * NUMEL * case.itemsize)),
        ],
        worth={"values": 4, "communication": 1},
        cases=in_many_forms(
            Case("1 rank, 6 rows", 1, {"rows": [6]}),
            Case(
                "2 ranks, 4 rows each, squared error",
                *(2, {"rows": [4, 4], "lr": 0.1, "loss": "mse_loss"}),
            ),
            Case("3 ranks, 4, 3 and 3 rows", 3, {"rows": [4, 3, 3]}),
            Case("4 ranks, 5, 1, 2 and 8 rows, in two groups", 4, {"rows": [5, 1, 2, 8]}),
            Case("3 ranks, smooth error", 3, {"rows": [2, 5, 3], "loss": "smooth_l1_loss"}),
            Case(
                "3 ranks, one alone",
                3,
                {"rows": [3, 2, 4], "lr": 0.3, "loss": "nll_loss"},
                ONE_ALONE,
            ),
        ),
        in_turn=[(2, 5)],
    ),
}
