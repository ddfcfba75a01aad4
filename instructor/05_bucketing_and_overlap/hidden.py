"""Cases that are never handed out and never enter a sandbox."""

from course_lib.checking import Case, in_many_forms

SIX = [0, 1, 2, 3, 4, 5]
BIT = "float32"


def tensors(*rows):
    return [(name, elements, dtype, trainable) for name, elements, dtype, trainable in rows]


MIXED = tensors(
    *(("a", 3, BIT, True), ("b", 1, "float64", True), ("c", 2, BIT, False), ("a", 3, BIT, True)),
    *(("d", 5, "float64", True), ("e", 2, BIT, True), ("f", 1, BIT, True), ("b", 1, BIT, True)),
)
MATRICES = {"shapes": [(3, 9), (6,), (2, 2), (8, 3), (5, 5), (2, 2), (1, 6)], "beta": 0.6}
LAYERS = {"shapes": [(i + 1, 2) for i in SIX], "before": False}

HIDDEN = {
    "assign_buckets": in_many_forms(
        Case(
            "everything at once",
            1,
            {"tensors": MIXED, "cap": 24, "first_cap": 12, "expected": [[6, 5], [4], [1], [0]]},
        ),
        Case(
            "cap 0",
            1,
            {"tensors": MIXED, "cap": 0, "first_cap": 0, "expected": [[6], [5], [4], [1], [0]]},
        ),
        Case(
            "one parameter",
            1,
            {"tensors": MIXED[:1], "cap": 100, "first_cap": 1, "expected": [[0]]},
        ),
    ),
    "send_bucket": in_many_forms(
        Case("5 ranks", 5, {"shapes": [(3,), (2, 2)], "steps": [[()]], "before": True}),
        Case(
            "4 ranks, in two groups, one without a gradient",
            *(4, {"shapes": [(2, 3), (), (4,)], "steps": [[()]], "before": True, "missing": [2]}),
        ),
    ),
    "hook_buckets": in_many_forms(
        Case(
            "4 ranks, other orders, one left out, a frozen layer",
            4,
            {
                **LAYERS,
                "buckets": [[5, 4], [3], [1, 0]],
                "steps": [[[(0, 1, 2, 3, 4, 5), (5, 3, 1, 0), (4, 5, 3)]], [SIX[::-1]]],
                "frozen": [2],
                "in_place": True,
            },
        ),
        Case(
            "5 ranks, in two groups, tied, .grad is not empty",
            5,
            {
                **LAYERS,
                "buckets": [[5], [4, 3], [2, 1, 0]],
                "steps": [[[0, 1, 2, 3, 4, 5, 5]], [SIX]],
                "before": True,
            },
        ),
        Case(
            "5 ranks, an empty layer, one left out in every second step",
            5,
            {
                **LAYERS,
                "shapes": [(i + 1, 2) if i != 1 else (0,) for i in SIX],
                "buckets": [[5, 4], [3, 2], [1, 0]],
                "steps": [[SIX], [SIX[:2]], [SIX], [SIX[2:]]],
            },
        ),
    ),
    "data_parallel": in_many_forms(
        Case(
            "3 ranks, three steps, no_sync, unused layers differ",
            3,
            {
                **LAYERS,
                "buckets": [[5], [4], [3, 2], [1, 0]],
                "steps": [[[(0, 2), (1, 5)], [(0, 1, 2), (3, 4)]], [SIX], [SIX, SIX]],
                "in_place": True,
                "cap": 14,
                "first_cap": 4,
            },
        ),
        Case(
            "4 ranks, in two groups, a layer only in no_sync",
            4,
            {
                **LAYERS,
                "buckets": [[5], [3], [2, 0]],
                "frozen": [1, 4],
                "steps": [[SIX, [0, 3, 5]], [SIX, SIX]],
                "again": [3, 0],
                "cap": 9,
                "first_cap": 9,
            },
        ),
        Case(
            "5 ranks, an odd cap, an empty layer, no_sync left early",
            5,
            {
                **LAYERS,
                "shapes": [(i + 1, 2) if i not in (1, 2) else (0,) for i in SIX],
                "buckets": [[5], [4], [3, 2, 1, 0]],
                "steps": [[SIX, SIX[2:]], [SIX[:2], SIX[:3]]],
                "interrupted": True,
                "cap": 13,
                "first_cap": 1,
            },
        ),
    ),
    "sync_batch_norm": in_many_forms(
        Case("5 ranks, two without rows", 5, {"rows": [0, 3, 9, 0, 1], "eps": 1e-3}),
        Case(
            "4 ranks, in two groups, images, two calls",
            4,
            {"rows": [1, 4, 2, 0], "eps": 0.3, "channels": 2, "places": (4,), "calls": 2},
        ),
    ),
    "muon_step": in_many_forms(
        Case("5 ranks", 5, {**MATRICES, "owners": [0, None, 4, 2, 1, 4, 3], "lrs": [0.05]}),
        Case(
            "6 ranks, in two groups, three steps",
            6,
            {**MATRICES, "owners": [0, None, 1, 2, 1, 0, 2], "lrs": [0.3, 0.1, 0.2]},
        ),
        dtypes=("float32", "float64"),
    ),
}

# Modules with the answers to this assignment: they cannot be imported while it is graded.
MASKED = ("course_lib.bucketing", "course_lib.ddp", "course_lib.gradient_sync")
