"""Cases that are never handed out and never enter a sandbox."""

from course_lib.checking import Case, in_many_forms

HIDDEN = {
    "minibatches": (
        Case("11 rows in batches of 5", 1, {"n": 11, "batch_size": 5, "drop_last": True}),
        Case("15 rows in batches of 5", 1, {"n": 15, "batch_size": 5, "drop_last": True}),
        Case("fewer than one batch", 1, {"n": 3, "batch_size": 5, "drop_last": True}),
        Case("10 single rows", 1, {"n": 10, "batch_size": 1, "drop_last": False, "epochs": 3000}),
    ),
    "sgd_step": in_many_forms(
        Case("a rate of 0.6", 1, {"shapes": [(2, 5), (3, 3)], "lr": 0.6}),
        Case("the first one frozen", 1, {"shapes": [(2,), (4, 2)], "lr": 0.7, "frozen": [0]}),
        dtypes=("float64", "bfloat16"),
    ),
    "accumulate_gradients": in_many_forms(
        Case("11 and 9 rows by 5", 1, {"rows": [11, 9], "micro": 5, "loss": "mse_loss"}),
        Case("6 rows by 6", 1, {"rows": [6, 6], "micro": 6, "loss": "multi_margin_loss"}),
        Case("9 rows by 2", 1, {"rows": [9, 4], "micro": 2, "loss": "mse_loss", "fresh": True}),
        dtypes=("float64", "float32"),
    ),
    "learning_rate": (
        Case("10 of 1000 steps", 1, {"peak": 0.05, "warmup": 10, "total": 1000}),
        Case("7 of 8 steps", 1, {"peak": 0.02, "warmup": 7, "total": 8}),
    ),
    "gradient_variance": in_many_forms(
        Case("7 of 20", 1, {"n": 20, "batch_size": 7, "num_batches": 60, "loss": "l1_loss"}),
        Case(
            "2 batches of 3 of 5 rows, 120 times",
            1,
            {"n": 5, "batch_size": 3, "num_batches": 2, "loss": "cross_entropy", "calls": 120},
        ),
        Case(
            "25 single rows of 3, 12 times",
            1,
            {"n": 3, "batch_size": 1, "num_batches": 25, "loss": "mse_loss", "calls": 12},
        ),
        Case(
            "15 of 18", 1, {"n": 18, "batch_size": 15, "num_batches": 40, "loss": "cross_entropy"}
        ),
        dtypes=("float64", "float32"),
    ),
}

# Modules with the answers to this assignment: they cannot be imported while it is graded.
MASKED = ("course_lib.sgd",)
