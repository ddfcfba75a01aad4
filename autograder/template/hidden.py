"""Cases that are never handed out and never enter a sandbox."""

from course_lib.checking import Case, in_many_forms

HIDDEN = {
    "rotate": in_many_forms(
        Case("6 ranks, length 2", 6, {"length": 2}),
        Case("3 ranks, length 4, in two groups", 3, {"length": 4}),
    ),
}

# Modules with the answer: they cannot be imported while this is graded.
MASKED = ()
