"""The student's desk: copies of lectures and assignments, apart from the course's own files.

`make lab` brings the desk, ``work/``, up to date and opens JupyterLab on it. It never overwrites a
student's work. It removes the outputs from lectures, so that none gives away a prediction. It
touches no file that git tracks: git ignores the folder, which holds only copies and the student's
work.

Read `notebooks` first (which parts of a notebook are the student's), then `handouts` (what the desk
gets), `records` (what it has got so far) and `refresh` (what happens to each file). `lab` starts
JupyterLab, `places` finds the course and the desk, `diary` records what a student did.
"""
