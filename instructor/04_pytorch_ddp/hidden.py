"""Cases that are never handed out and never enter a sandbox."""

from course_lib.checking import Case, in_many_forms

EXACT = {"dtypes": ("float64", "float32")}


def epochs(name, k, **parameters):
    usual = {"length": 10, "batch_size": 2, "accumulate": 1, "epochs": [0, 1], "lr": 0.2}
    return Case(name, k, {**usual, "seed": 0, **parameters})


def museum(kind, modes=(True, False)):
    return in_many_forms(
        Case("5 ranks", 5, {"kind": kind, "steps": 2, "rows": 3, "lr": 0.25}),
        Case("6 ranks, in two groups", 6, {"kind": kind, "steps": 3, "rows": 4, "lr": 0.15}),
        modes=modes,
        **EXACT,
    )


def tokens(name, k, *tokens, **more):
    return Case(name, k, {"tokens": tokens, **more})


HIDDEN = {
    "my_batches": in_many_forms(
        Case("5 ranks", 5, {"length": 33, "batch_size": 3, "seed": 11, "epochs": [2, 4]}),
        Case("6 ranks in two groups", 6, {"length": 8, "batch_size": 5, "seed": 2, "epochs": [1]}),
    ),
    "train": in_many_forms(
        epochs("5 ranks", 5, length=37, accumulate=3, lr=0.15, seed=4, frozen=[2]),
        epochs(
            "3 ranks, one long window", 3, length=17, accumulate=50, epochs=[4, 1], loss="mse_loss"
        ),
        epochs("6 ranks, in two groups", 6, length=25, accumulate=2, batch_size=4),
        **EXACT,
    ),
    "evaluate": in_many_forms(
        Case("5 ranks, 23 rows", 5, {"length": 23, "batch_size": 2}),
        Case("5 ranks, 1 row", 5, {"length": 1, "batch_size": 1, "loss": "multi_margin_loss"}),
        Case("6 ranks, 40 rows, in two groups", 6, {"length": 40, "batch_size": 5}),
        **EXACT,
    ),
    "save_checkpoint": in_many_forms(
        Case("5 ranks", 5, {"epoch": 9, "lr": 0.4, "optimizer": "AdamW"}),
        Case("3 ranks, in two groups, epoch 0", 3, {"epoch": 0, "lr": 0.6, "optimizer": "AdamW"}),
        Case("6 ranks, in two groups", 6, {"epoch": 3, "lr": 0.6, "optimizer": "SGD"}),
    ),
    "load_checkpoint": in_many_forms(
        Case("5 ranks", 5, {"epoch": 9, "lr": 0.4, "optimizer": "AdamW", "loads": True}),
        Case(
            "3 ranks, in two groups, epoch 0",
            3,
            {"epoch": 0, "lr": 0.6, "optimizer": "AdamW", "loads": True},
        ),
    ),
    "token_mean_step": in_many_forms(
        tokens("5 ranks", 5, [(7, 3)], [(2, 2), (9, 8)], [(4, 0)], [(1, 1)], [(6, 6), (0, 0)]),
        tokens(
            "6 ranks, in two groups, large gradients",
            *(6, [(7, 3)], [(2, 2), (9, 8)], [(4, 0)], [(1, 1)], [(6, 6)], [(3, 2), (3, 3)]),
            size=20,
        ),
        iterables=("list", "tuple"),
        **EXACT,
    ),
    "exhibit_1": museum("plain"),
    "exhibit_2": museum("experts"),
    "exhibit_3": museum("norm", modes=(True,)),
    "exhibit_4": museum("plain"),
    "diagnoses": (Case("your answers, once more", 1, {"again": True}),),
}

# Modules with the course's own solutions: they cannot be imported while this is graded.
MASKED = ("course_lib.sharding", "course_lib.replicas", "course_lib.train")
