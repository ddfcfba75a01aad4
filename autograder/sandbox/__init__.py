"""Where student code runs: bubblewrap, and what can be seen from there.

- `bubblewrap`: the sandbox itself, made of these:

  - `binary`: which bubblewrap program, and the system's tools
  - `user`: who the command runs as
  - `tree`, `mounts`: what it sees
  - `limits`: what it may use up; `memory`: the sum over its processes; `cores`: what they have had
    of the machine's cores
  - `seccomp`: which calls to the kernel are refused
  - `first_process`: with which all of it ends
  - `unavailable`: what is said where there can be none

- `place`: a sandbox that holds Python and the course's package, and a cell per process in it
- `look`: before anything is graded: whether a cell of it has what it needs
"""
