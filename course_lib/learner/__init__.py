"""The program ``course``: what one needs to work through the course, alone or in a class.

- `start`: a copy of an assignment, on the desk
- `check`: all checks of one's copy, in a fresh process; `notebook_process` is that process
- `progress`: points, predictions and time so far
- `solution`: the solution, after a question
- `lab`: JupyterLab on the desk
- `doctor`: whether this machine has what the course needs, and what to do where it has not

`assignments` reads what the commands share: which assignments there are, and their tasks. Nothing
here asks for nbgrader.
"""

from course_lib.later import without

without("rfc3987_syntax")
