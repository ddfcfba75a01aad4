"""Cases that are never handed out and never enter a sandbox."""

from course_lib.checking import in_many_forms

from .checks import accumulating, batches, measuring, rising, stepping

HIDDEN = {
    "minibatches": (
        batches("11 rows in batches of 5", 11, 5, True),
        batches("15 rows in batches of 5", 15, 5, True),
        batches("fewer than one batch", 3, 5, True),
        batches("5 rows in batches of 2", 5, 2),
        batches("5 rows in batches of 2, drop_last", 5, 2, True),
    ),
    "sgd_step": in_many_forms(
        stepping("a rate of 0.6", 0.6, (2, 5), (3, 3)),
        stepping("the first one frozen", 0.7, (2,), (4, 2), frozen=[0]),
        dtypes=("float64", "bfloat16"),
    ),
    "accumulate_gradients": in_many_forms(
        accumulating("11 and 9 rows by 5", [11, 9], 5, "mse_loss"),
        accumulating("6 rows by 6", [6, 6], 6, "multi_margin_loss"),
        accumulating("9 rows by 2", [9, 4], 2, "mse_loss", fresh=True),
        dtypes=("float64", "float32"),
    ),
    "learning_rate": (
        rising("10 of 1000 steps", 0.05, 10, 1000),
        rising("7 of 8 steps", 0.02, 7, 8),
    ),
    "gradient_variance": in_many_forms(
        measuring(5, 4, 2, 80, "l1_loss"),
        measuring(5, 3, 2, 120, "cross_entropy"),
        measuring(3, 1, 25, 12, "mse_loss"),
        measuring(4, 3, 3, 40, "cross_entropy"),
        dtypes=("float64", "float32"),
    ),
}

# Modules with the answers to this assignment: they cannot be imported while it is graded.
MASKED = ("course_lib.sgd",)
