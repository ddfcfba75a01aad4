"""The part of a check that runs beside the student's code, on the ranks.

The sandbox shows this folder and nothing else of `course_lib.checking`, so it imports nothing else
of it: no case, no judge, no oracle.

- `given`: what a check's program is given on a rank, and the forms of a function's arguments
- `effects`, `held`: what a call left behind, and how much memory is held
- `wire`, `frames`: plain values, as bytes, to and from ranks that nobody trusts
"""
