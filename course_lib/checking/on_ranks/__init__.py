"""The part of a check that runs on the ranks, in the same process as the student's code.

The sandbox shows this folder and no other part of `course_lib.checking`. So this package imports no
other part: no case, no judge, no oracle.

- `given`: what a check's program gets on a rank, and the forms of a function's arguments
- `effects`: what a call leaves behind; its second half compares, where the verdict is made
- `held`: the tensors that an object holds
- `leaves`: the places and the tensors in a plain value
"""
