"""The program ``course``: the commands for working through the course, alone or in a class.

- `start`: puts a copy of an assignment on the desk
- `check`: runs all checks of the copy in a fresh process; `notebook_process` is that process
- `progress`: shows points, predictions and time so far
- `solution`: shows the solution, after it has asked
- `lab`: opens JupyterLab on the desk
- `doctor`: says whether this machine has what the course needs, and if not, what to do

`assignments` reads what the commands share: the list of assignments, and their tasks. Nothing here
needs nbgrader.
"""

from course_lib._later import without

without("rfc3987_syntax")
