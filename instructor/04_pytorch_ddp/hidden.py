"""Cases that are never handed out and never enter a sandbox."""

from course_lib.checking import in_many_forms

from .checks import epochs_case, script_case, tokens_case

EXACT = {"dtypes": ("float64", "float32")}


def museum(kind, modes=(True, False)):
    return in_many_forms(
        script_case("5 ranks", 5, kind, 2, 8, 0.25),
        script_case("6 ranks, in two groups", 6, kind, 3, 9, 0.15),
        modes=modes,
        **EXACT,
    )


HIDDEN = {
    "train": in_many_forms(
        epochs_case("5 ranks", 5, length=37, accumulate=3, lr=0.15, seed=4, frozen=[2]),
        epochs_case(
            "3 ranks, one long window", 3, length=17, accumulate=50, epochs=[4, 1], loss="mse_loss"
        ),
        epochs_case("6 ranks, in two groups", 6, length=25, accumulate=2, batch_size=4),
        **EXACT,
    ),
    "token_mean_step": in_many_forms(
        tokens_case("5 ranks", 5, [(7, 3)], [(2, 2), (9, 8)], [(4, 0)], [(1, 1)], [(6, 6), (0, 0)]),
        tokens_case(
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
}

# Modules with the course's own solutions: they cannot be imported while this is graded.
MASKED = ("course_lib.sharding", "course_lib.replicas", "course_lib.train")
