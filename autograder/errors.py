"""The errors of a command that cannot do what it was asked."""

from pathlib import Path


class CommandFailed(RuntimeError):
    """The message says why, and what to do; `autograder.__main__` prints it, and no traceback."""


class SandboxUnavailable(CommandFailed):
    """Student code cannot be run safely here; the message says why and what to do."""

    def __init__(self, reason: str, advice: str = "") -> None:
        self.reason = reason.strip()
        super().__init__(f"{self.reason}\n{advice}".rstrip())


class BubblewrapUnavailable(SandboxUnavailable):
    """No bubblewrap works here; the message also says how to get a sandbox."""

    def __init__(self, reason: str) -> None:
        advice = Path(__file__).with_name("no_sandbox.txt").read_text(encoding="utf-8")
        super().__init__(reason, advice)
