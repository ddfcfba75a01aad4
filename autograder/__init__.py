"""The autograder: what nbgrader calls, and what it takes to grade ranks that nobody trusts.

The path of one submission through ``nbgrader autograde``:

1. `passes.vet`: what no student needs to hand in is set aside; `passes.rebuild`: the released
   notebook, with the student's sources and nothing else of theirs
2. nbgrader's own sanitizing passes
3. `passes.examine`: runs the cells and each check, writes points and report into the notebook;
   first `passes.canary`: does this machine give the points that solutions of ours must get?

   - `examination`: a `submission` with its notebook process and its `budget`, a `check` of it, a
     `case` with its ranks and their network, the `verdict`
   - `inside`: the other side of both, in the sandbox, where nothing is trusted
   - `sandbox`: bubblewrap, and what can be seen from there

4. nbgrader's `SaveAutoGrades`: reads the points, as from any notebook

A class goes through the same passes in two phases: `pool` examines it in many processes, without a
gradebook, and `passes.book` then puts what came of it in the place of step 3.

Around it: `collection` takes in what was handed in, `exporting` writes grades for other systems,
`similarity` finds solutions that look alike, `inquiries` keeps questions about grades, and
`leaderboard` ranks the entries of the capstone by the time they take on the grader's clock.

`commands` is what people type: `grade`, `regrade`, `replay` and `status` are for a class, `demo`
shows it all on a class of six, `release` makes what students get from what instructors write.
`course` finds the course folder and reads its configuration; `gradebook` says whether nbgrader's
can be used; `files` writes files whole or not at all, and `foreign_text` makes harmless what
somebody else wrote.
"""

from course_lib.later import without

without("rfc3987_syntax")
