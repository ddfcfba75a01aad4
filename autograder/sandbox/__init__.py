"""The sandbox in which student code runs: bubblewrap, and the files that are visible in it.

- `sandbox`: a sandbox with Python and the course's package, and with a cell for each process. It
  tests that a cell has everything that it needs, before anything is graded, and decides whether a
  student's code or the machine ended a process.
- `bubblewrap`: the program, our process in the sandbox, and the hard limits of cells
- `user`: the users of the cells
- `mounts`: the files that can be seen
- `memory`: limits the memory of all processes together; the limit is in `autograder.course`
- `cores`: measures the processes' time on the machine's cores
- `seccomp`: the calls to the kernel that are refused; their table is `calls.csv`
"""
