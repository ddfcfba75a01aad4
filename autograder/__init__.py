"""The autograder: what nbgrader calls, and what it takes to grade ranks that nobody trusts.

The path of one submission through ``nbgrader autograde``:

1. `rebuild`: the released notebook, with the student's sources and nothing else of theirs
2. nbgrader's own sanitizing passes
3. `examine`: runs the cells, examines each check, writes points and report into the notebook

   - `examination`: one submission; its notebook process, and a `team` of ranks for each case
   - `examinee`: the other side of both, inside the sandbox
   - `places`, `sandbox`, `mounts`: where that is, and what can be seen from there

4. nbgrader's `SaveAutoGrades`: reads the points, as from any notebook

`verdict` is what remains for a replay. The command `demo` shows it all on a class of six;
`release` makes what students get from what instructors write.
"""
