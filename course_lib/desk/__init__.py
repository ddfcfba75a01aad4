"""The student's desk: copies of lectures and assignments to work in, apart from the course's own.

`make lab` brings the desk, ``work/``, up to date and opens JupyterLab on it. What a student wrote
is never overwritten, no prediction is spoiled by an output that came with the lecture, and nothing
that git tracks is touched. The folder is git-ignored and holds nothing but copies and the student's
work.

Read `notebooks` first (what of a notebook is the student's), then `handouts` (what the desk gets),
`records` (what it got so far) and `refresh` (what happens to each file); `lab` starts JupyterLab.
`places` finds the course and the desk; `diary` keeps what a student did there.
"""
