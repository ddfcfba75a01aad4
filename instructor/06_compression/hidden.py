"""Cases that are never handed out and never enter a sandbox."""

from course_lib.checking import Case, in_many_forms

from .checks import drawn, turns

DTYPES = ("bfloat16", "float32", "float64")


def formed(*cases):
    return in_many_forms(*cases, dtypes=DTYPES)


HIDDEN = {
    "quantize": formed(
        Case("21 numbers", 1, {"shape": (3, 7), "exponent": 5, "sign": 1}),
        Case("64 numbers, tiny ones", 1, {"shape": (8, 8), "exponent": -20, "sign": -1}),
        Case("three zeros", 1, {"shape": (3,), "exponent": 0, "sign": 0}),
        Case("no numbers in two dimensions", 1, {"shape": (0, 3), "exponent": 1, "sign": 1}),
    ),
    "dequantize": formed(
        Case("21 numbers, behind 2 bytes", 1, {"shape": (3, 7), "offset": 2}),
        Case("8 numbers", 1, {"shape": (2, 2, 2), "offset": 0}),
        Case("no numbers, behind 5 bytes", 1, {"shape": (0,), "offset": 5}),
    ),
    "encode_top_k": formed(
        Case("1 of 8", 1, {"shape": (2, 4), "k": 1}),
        Case("7 of 96", 1, {"shape": (8, 12), "k": 7, "exponent": 10}),
        Case("9 of 700", 1, {"shape": (700,), "k": 9}),
        Case("3 of 95", 1, {"shape": (5, 19), "k": 3}),
        Case("4 of 129", 1, {"shape": (3, 43), "k": 4}),
        Case("5 of 129", 1, {"shape": (129,), "k": 5}),
    ),
    "with_feedback": formed(
        Case("3 ranks, two keys", 3, turns(7, "only_largest", "x", "y")),
        Case("one key, signs", 1, turns(8, "signs", "w") | {"exponent": 7}),
        Case("4 keys", 2, turns(4, "signs", "w", "b", "v", "c")),
    ),
    "compressed_all_reduce": formed(
        Case("3 ranks, 100 numbers", 3, {"shape": (4, 25), "codec": "8 bits", "calls": 2}),
        Case("6 ranks in two groups, 55 numbers", 6, {"shape": (5, 11), "codec": "1 bit"}),
        Case("7 ranks, 64 numbers", 7, {"shape": (64,), "codec": "8 bits"}),
        Case("8 ranks in two groups, 9 numbers", 8, {"shape": (3, 3), "codec": "8 bits"}),
        Case("2 ranks, one number", 2, {"shape": (1,), "codec": "1 bit"}),
    ),
    "random_k_mean": formed(
        Case("2 ranks, 4 of 15", 2, drawn(4, (3, 5), 5, 6, 5)),
        Case("3 ranks, 2 of 8", 3, drawn(2, (8,), 77, 78) | {"zeros": [2]}),
        Case("2 ranks, 17 of 40", 2, drawn(17, (40,), 3, 2**31 + 3, 2, 5003)),
        Case("7 ranks in two groups, 6 of 21", 7, drawn(6, (3, 7), 1, 0)),
        Case("2 ranks, 2 of 5, 1500 seeds", 2, drawn(2, (5,), *range(10_000, 11_500))),
    ),
}

# Modules with the answers to this assignment: they cannot be imported while it is graded.
MASKED = ("course_lib.compression",)
