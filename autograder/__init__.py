"""The autograder: nbgrader's passes, and everything that grading untrusted ranks needs.

A submission's path through ``nbgrader autograde``:

1. `collection.repair` sets aside files that no student needs to submit. `passes.examine` makes the
   notebook that counts: the released one with the student's sources, by the rule that
   ``course check`` has too (`course_lib.learner.what_counts`).
2. nbgrader's own sanitizing passes
3. `passes.examine` runs the cells and each check, and writes points and report into the notebook.
   Before that, `passes.self_test` tests that this machine gives known solutions the right points.

   - `examination`: a `submission` with its notebook process, its checks and its `budget`, a
     `case` with its ranks and their network, the `verdict`
   - `inside`: the programs that run in the sandbox, where nothing is trusted
   - `sandbox`: bubblewrap, and what student code can see there

4. nbgrader's `SaveAutoGrades`: reads the points, as from any notebook

A class goes through the same passes in two phases. First, `pool` examines all submissions in many
processes, without a gradebook. Then `pool.book` replaces step 3: it uses these results.

The other packages and modules: `collection` takes in submissions. `late_policy` is a policy for
nbgrader. `exporting` writes grades for other systems.

`commands` has the commands. `grade`, `regrade` and `status` are for a class; `report` says how it
did. `demo` shows the whole process with a class of six. `release` makes the students' notebooks
from the instructors'. `course` finds the course folder and reads its configuration, with the
options of an examination. `errors` are those that the program prints. `gradebook` checks
that nbgrader's gradebook can be used. `files` writes files completely or not at all. `tables` shows
what others wrote in a terminal, a page or a spreadsheet, where it can do no harm.
"""

from course_lib._later import without

without("rfc3987_syntax")
