"""The sandbox in which student code runs: bubblewrap, and the files that are visible in it.

- `bubblewrap`: the sandbox itself and its hard limits. It uses these modules:

  - `binary`: chooses the bubblewrap program, and finds the system's tools
  - `user`: the user of the command
  - `_tree`, `mounts`: the files that the command sees
  - `memory`: limits the memory of all its processes together; the limit is in `autograder.settings`
  - `cores`: measures the processes' time on the machine's cores
  - `seccomp`: the calls to the kernel that are refused
  - `first_process`: the process whose end ends all others
  - `unavailable`: the error if there can be no sandbox

- `place`: a sandbox with Python and the course's package, and with a cell for each process. It
  decides whether a student's code or the machine ended a process.
- `look`: tests that a cell has everything that it needs, before anything is graded
"""
