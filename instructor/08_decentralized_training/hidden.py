"""Cases that are never handed out and never enter a sandbox."""

from functools import partial

from course_lib.checking import Case, in_many_forms

from .checks import choose, graph, mixing, steps

in_both_forms = partial(in_many_forms, dtypes=("float64", "float32"))

LARGE = {"before": True, "size": 300, "zeros": 1}

HIDDEN = {
    "metropolis_weights": in_both_forms(
        graph("two parts", 5, (0, 1), (4, 3), (3, 2), (2, 4)),
        graph(
            "all with all, both ways", 4, *((i, j) for i in range(4) for j in range(4) if i != j)
        ),
        graph("a tree", 7, (0, 1), (0, 2), (1, 3), (1, 4), (2, 5), (6, 2)),
        graph("no links", 3),
    ),
    "start_mixing": in_both_forms(
        mixing("5 ranks, all with all", 5, "complete", (3, 3), 300, 0),
        mixing("7 ranks, two groups, hops 1 and 3", 7, "hops 0, 1, 3", (2, 5), 300, 0),
        mixing("6 ranks, each takes another's", 6, "turn", (4, 2), 300, 0),
        mixing("4 ranks, two groups, pairs", 4, "pairs", (6,), 300, 0),
        mixing("8 ranks in a star", 8, "star", (2, 2), 300, 0),
    ),
    "decentralized_step": in_both_forms(
        steps(
            *("3 ranks, unused, and .grad is not empty", 3, ["ring"], [(2,), (3, 3)], 0.007),
            unused=0,
            **LARGE,
        ),
        steps(
            "7 ranks, two groups, another matrix in each step",
            *(7, ["hops 0, 1, 3", "alone", "line"], [(2, 2), ()], 0.002),
            **LARGE,
        ),
        steps(
            *("5 ranks, 60 µs of gradient, one way", 5, ["one way"] * 2, [(4, 2)], 0.003),
            seconds=60e-6,
            **LARGE,
        ),
    ),
    "spectral_gap": in_both_forms(
        Case("9 × 9, ring", 1, {"graph": "ring", "k": 9}),
        Case("4 × 4, swap", 1, {"graph": "swap", "k": 4}),
        Case("6 × 6, line * one way", 1, {"graph": "line * one way", "k": 6}),
        Case("5 × 5, turn", 1, {"graph": "turn", "k": 5}),
    ),
    "choose_graph": in_both_forms(
        choose("16 ranks", 16, ["ring", "hops 0, 1, 3", "complete"], 10**3, 5e-3, 1e9, 1e-2),
        choose("the complete one", 5, ["line", "complete"], 10**2, 1e-2, 1e8, 1e-4),
        choose("none agrees", 4, ["swap", "alone"], 10**5, 1e-3, 1e9, 0.5),
        choose("nine ranks", 9, ["line", "star", "ring", "one way"], 10**8, 1e-4, 1e9, 0.5),
    ),
}

# Modules with the answers to this assignment: they cannot be imported while it is graded.
MASKED = ("course_lib.decentralized",)
