"""The checks of this assignment. They are handed out: read them if a message is not enough.

`run_judges.py` has the inputs, programs and judges of batches and training runs. `judges.py` has
those of evaluation and checkpoints, `token_judges.py` those of the mean over tokens. A program gets
only its rank's input.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from course_lib.checking import (
    Case,
    Form,
    calls_at_most,
    equals,
    in_many_forms,
    only_calls,
    receives_at_least,
    sends_at_most,
    task,
)
from course_lib.checking.shared.averaging import unless_alone
from course_lib.checking.shared.training import NUMEL, SHAPES

from .judges import (
    checkpoint_inputs,
    evaluate_inputs,
    evaluate_program,
    evaluation,
    load_program,
    loading,
    save_program,
    saving,
)
from .run_judges import (
    SCRIPT_MISTAKES,
    epochs_inputs,
    epochs_program,
    equals_run,
    my_batches_program,
    own_rows_only,
    right_batches,
    script_inputs,
    script_program,
    windows_of,
    with_script,
)
from .token_judges import right_step, token_inputs, token_program

EXACT = {"dtypes": ("float32", "float64")}  # many steps in bfloat16 would hide a wrong one
SMALL = 512  # bytes that a rank may send in addition to its gradients
TWO_NUMBERS = 8  # bytes

# Tasks 1 and 2: batches, training ----------------------------------------------------------


def batches_case(name, k, length, batch_size, seed, epochs):
    return Case(
        name, k, {"length": length, "batch_size": batch_size, "seed": seed, "epochs": epochs}
    )


def epochs_case(name, k, **parameters):
    usual = {"length": 10, "batch_size": 2, "accumulate": 1, "epochs": [0, 1], "lr": 0.2}
    return Case(name, k, {**usual, "seed": 0, **parameters})


MARGIN = {"length": 9, "loss": "multi_margin_loss"}


@epochs_program
def train_program(train, model, loss_fn, mine, given):
    settings = [mine[key] for key in ("lr", "batch_size", "accumulate")]
    epochs = given.iterable(mine["epochs"])
    return train(
        model, loss_fn, mine["x"], mine["y"], *settings, epochs, mine["seed"], group=given.group
    )


def steps(case, rank):
    """Return the number of optimizer steps."""
    return len(windows_of(case.parameters, len(case.members(rank))))


def gradient_bytes(case, rank):
    """Return the bytes that a rank sends if it sends its gradients once per optimizer step."""
    return steps(case, rank) * (NUMEL * case.itemsize + 64) + SMALL


def trained_bytes(case, rank):
    """Return the bytes of the gradients of trained parameters."""
    frozen = case.parameters.get("frozen", ())
    trained = (torch.Size(shape).numel() for i, shape in enumerate(SHAPES) if i not in frozen)
    return sum(trained) * case.itemsize


def gradients_of_others(case, rank):
    """Return the bytes that a rank must receive: the gradients of trained parameters, each step."""
    return steps(case, rank) * trained_bytes(case, rank)


# Task 5: the mean over tokens --------------------------------------------------------------


def tokens_case(name, k, *tokens, **more):
    return Case(name, k, {"tokens": tokens, **more})


# Task 6: the museum ------------------------------------------------------------------------


def script_case(name, k, kind, steps, rows, lr, **more):
    # BatchNorm divides by the deviation of a batch. With three rows it can be so small that
    # rounding shows in the weights, so the cases have eight rows or more.
    return Case(name, k, {"kind": kind, "steps": steps, "rows": rows, "lr": lr, **more})


def mended(name, kind, *more, modes=(True, False)):
    """Return the check of an exhibit whose batches are given, with the cases of all exhibits."""
    return task(
        name,
        inputs=script_inputs,
        program=script_program,
        judges=[equals(with_script(), SCRIPT_MISTAKES)],
        cases=in_many_forms(
            script_case("1 rank", 1, kind, 2, 8, 0.2),
            script_case("2 ranks", 2, kind, 3, 9, 0.1, loss="mse_loss"),
            script_case("3 ranks", 3, kind, 3, 9, 0.3),
            script_case("4 ranks, in two groups", 4, kind, 2, 8, 0.2),
            script_case("2 ranks, very wrong", 2, kind, 2, 8, 1e-4, loss="mse_loss", large=1000),
            *more,
            modes=modes,
            **EXACT,
        ),
    )


CHECKS = {
    "my_batches": task(
        "my_batches",
        inputs=lambda case, generator: [dict(case.parameters) for _ in range(case.world_size)],
        program=my_batches_program,
        judges=[right_batches],
        expects=[only_calls()],
        cases=in_many_forms(
            batches_case("1 rank, 5 rows", 1, 5, 2, 0, [0, 1]),
            batches_case("2 ranks, 12 rows", 2, 12, 3, 7, [0, 1, 2]),
            batches_case("3 ranks, 10 rows", 3, 10, 3, 0, [3, 0]),
            batches_case("4 ranks, 13 rows, in two groups", 4, 13, 2, 1, [0, 5]),
            batches_case("4 ranks, 1 row", 4, 1, 2, 3, [1]),
        ),
        in_turn=[(4, 3)],
    ),
    "train": task(
        "train",
        inputs=epochs_inputs,
        program=train_program,
        judges=[
            equals_run("parameter", "buffer", tolerance={"float64": 1e-9}),
            equals_run("loss", tolerance={"float64": 1e-6}),
            own_rows_only,
        ],
        expects=[
            sends_at_most(
                gradient_bytes,
                kinds=["all_reduce"],
                hint="Send gradients once per optimizer step, not once per micro-batch. Put "
                "forward and backward of each micro-batch but a window's last into no_sync().",
            ),
            sends_at_most(
                lambda case, rank: 5 * (NUMEL * case.itemsize + SMALL) // 2,
                besides=["all_reduce"],
                hint="Wrap the model once, before the first epoch.",
            ),
            calls_at_most(all_reduce=lambda case, rank: (len(SHAPES) + 2) * steps(case, rank)),
            receives_at_least(unless_alone(gradients_of_others), kinds=["all_reduce"]),
        ],
        worth={"values": 4, "communication": 2},
        cases=in_many_forms(
            epochs_case("1 rank, 7 rows", 1, length=7, accumulate=2),
            epochs_case("2 ranks, 16 rows, windows of 2", 2, length=16, accumulate=2, lr=0.1),
            epochs_case(
                "3 ranks, 14 rows, squared error",
                *(3,),
                **{"length": 14, "accumulate": 3, "epochs": [5, 2], "seed": 5, "loss": "mse_loss"},
            ),
            epochs_case(
                "4 ranks, 21 rows, in two groups",
                *(4,),
                **{"length": 21, "batch_size": 3, "accumulate": 3, "loss": "smooth_l1_loss"},
            ),
            epochs_case("2 ranks, a frozen layer", 2, **MARGIN, epochs=[0, 1, 2], frozen=[0, 1]),
            epochs_case(
                "2 ranks, 14 rows, windows of 3",
                *(2,),
                **{"length": 14, "accumulate": 3, "lr": 0.1, "loss": "mse_loss"},
            ),
            epochs_case("2 ranks, .grad is not empty", 2, length=8, accumulate=2, filled=True),
            epochs_case(
                "2 ranks, large gradients", 2, length=8, lr=1e-4, loss="mse_loss", large=1000
            ),
            **EXACT,
        ),
        in_turn=[(1, 4)],
    ),
    "evaluate": task(
        "evaluate",
        inputs=evaluate_inputs,
        program=evaluate_program,
        judges=evaluation,
        expects=[
            sends_at_most(SMALL, hint="Send only three sums: the other ranks need no more."),
            receives_at_least(unless_alone(lambda case, rank: TWO_NUMBERS)),
        ],
        worth={"values": 2, "communication": 1},
        cases=in_many_forms(
            Case("1 rank, 7 rows", 1, {"length": 7, "batch_size": 3}),
            Case("2 ranks, 9 rows", 2, {"length": 9, "batch_size": 2, "labels": "uint8"}),
            Case("3 ranks, 20 rows", 3, {"length": 20, "batch_size": 4}),
            Case(
                "4 ranks, 11 rows, in two groups",
                *(4, {"length": 11, "batch_size": 3, "loss": "multi_margin_loss"}),
            ),
            Case("3 ranks, 2 rows", 3, {"length": 2, "batch_size": 8}),
            **EXACT,
        ),
        in_turn=[(2, 4)],
    ),
    "save_checkpoint": task(
        "save_checkpoint",
        inputs=checkpoint_inputs,
        program=save_program,
        judges=saving,
        cases=in_many_forms(
            Case("1 rank, epoch 1", 1, {"epoch": 1, "lr": 0.5, "optimizer": "SGD"}),
            Case("2 ranks, epoch 4", 2, {"epoch": 4, "lr": 0.1, "optimizer": "AdamW"}),
            Case("3 ranks, epoch 2", 3, {"epoch": 2, "lr": 0.2, "optimizer": "SGD"}),
            Case("4 ranks, in two groups", 4, {"epoch": 7, "lr": 0.3, "optimizer": "AdamW"}),
            **EXACT,
        ),
        in_turn=[(1, 1)],
    ),
    "load_checkpoint": task(
        "load_checkpoint",
        inputs=checkpoint_inputs,
        program=load_program,
        judges=loading,
        cases=in_many_forms(
            *(
                Case(name, k, {"epoch": epoch, "lr": lr, "optimizer": optimizer, "loads": True})
                for name, k, epoch, lr, optimizer in (
                    ("1 rank, epoch 1", 1, 1, 0.5, "SGD"),
                    ("2 ranks, epoch 4", 2, 4, 0.1, "AdamW"),
                    ("3 ranks, epoch 0", 3, 0, 0.2, "SGD"),
                    ("4 ranks, in two groups", 4, 7, 0.3, "AdamW"),
                )
            ),
            **EXACT,
        ),
        in_turn=[(1, 1)],
    ),
    "token_mean_step": task(
        "token_mean_step",
        inputs=token_inputs,
        program=token_program,
        judges=[right_step],
        expects=[
            sends_at_most(
                lambda case, rank: trained_bytes(case, rank) + SMALL,
                besides=["broadcast"],
                hint="Send gradients once. Put forward and backward of each micro-batch but the "
                "last into no_sync().",
            ),
            receives_at_least(unless_alone(trained_bytes)),
        ],
        worth={"values": 4, "communication": 2},
        cases=in_many_forms(
            tokens_case("1 rank, 2 micro-batches", 1, [(6, 4), (3, 3)]),
            tokens_case("2 ranks, 24 labels and 2", 2, [(16, 16), (9, 8)], [(4, 2)]),
            tokens_case("2 ranks, large gradients", 2, [(9, 7), (4, 4)], [(5, 3), (2, 1)], size=9),
            tokens_case("3 ranks, one without labels", 3, [(5, 0)], [(8, 8)], [(7, 3), (2, 1)]),
            tokens_case(
                "4 ranks, in two groups",
                *(4, [(5, 5), (2, 2), (3, 1)], [(4, 4)], [(9, 6), (2, 0)], [(3, 1)]),
            ),
            tokens_case("2 ranks, no rows", 2, [(0, 0)], [(6, 5), (0, 0), (3, 1)]),
            tokens_case(
                "2 ranks, a frozen layer", 2, [(6, 6), (5, 1)], [(9, 3)], frozen=[1, 2], size=3
            ),
            tokens_case("2 ranks, .grad is not empty", 2, [(8, 6)], [(3, 2), (4, 1)], filled=True),
            replace(
                tokens_case("2 ranks, 6000 labels", 2, [(3900, 3800)], [(2300, 2200)], size=800),
                form=Form(dtype="float16"),
            ),
            iterables=("list", "tuple"),
            **EXACT,
        ),
        in_turn=[(1, 2)],
    ),
    "exhibit_1": mended("exhibit_1", "plain"),
    "exhibit_2": mended(
        "exhibit_2",
        "experts",
        script_case("2 ranks, another model", 2, "plain", 2, 3, 0.2),
        script_case("2 ranks, a frozen expert", 2, "experts", 2, 3, 0.2, frozen=[2]),
    ),
    "exhibit_3": mended(
        "exhibit_3",
        "norm",
        Case(
            "2 ranks, in evaluation mode",
            *(2, {"kind": "norm", "steps": 2, "rows": 8, "lr": 0.2}),
            form=Form(training=False),
        ),
        modes=(True,),
    ),
}
