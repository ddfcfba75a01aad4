"""The errors of a command that cannot do what it was asked."""

_HELP = """Student code is never run without a sandbox. To get one:
  Linux:           on x86_64 and aarch64, bubblewrap comes with the course: pip install -e .
                   on other processors, install version 0.8 or later: apt-get install bubblewrap
  macOS, Windows:  grade on a Linux machine, in WSL 2 or in a Linux container
If bubblewrap is installed but is not allowed to start, allow user namespaces:
  sysctl -w kernel.unprivileged_userns_clone=1               (older Debian)
  sysctl -w kernel.apparmor_restrict_unprivileged_userns=0   (Ubuntu 24.04 and later)
  sysctl -w user.max_user_namespaces=10000                   (where it is 0)
  docker run --privileged ...                                (in a container)
AppArmor's profile for bubblewrap (Ubuntu 25.04 and later) does not allow enough, because ranks get
namespaces of their own inside the sandbox.
`autograder doctor` tests whether this machine has all that grading needs."""


class CommandFailed(RuntimeError):
    """The message says why, and what to do; `autograder.__main__` prints it, and no traceback."""


class SandboxUnavailable(CommandFailed):
    """Student code cannot be run safely here; the message says why and what to do."""

    advice = ""

    def __init__(self, reason: str) -> None:
        self.reason = reason.strip()
        super().__init__(f"{self.reason}\n{self.advice}".rstrip())


class BubblewrapUnavailable(SandboxUnavailable):
    """No bubblewrap works here; the message also says how to get a sandbox."""

    advice = _HELP
