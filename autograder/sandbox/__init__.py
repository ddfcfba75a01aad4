"""Where student code runs: bubblewrap, and what can be seen from there.

- `bubblewrap`: the sandbox itself and its hard limits, made of these:

  - `binary`: which bubblewrap program, and the system's tools
  - `user`: the user of the command
  - `_tree`, `mounts`: the files that it sees
  - `memory`: holds the sum over its processes to a limit, which is in `autograder.settings`
  - `cores`: their time on the machine's cores
  - `seccomp`: the calls to the kernel that are refused
  - `first_process`: the process whose end ends all others
  - `unavailable`: the message where there can be no sandbox

- `place`: a sandbox that holds Python and the course's package, and a cell per process in it; says
  whether a student's code or the machine ended a process
- `look`: before anything is graded, tests that a cell has what it needs
"""
