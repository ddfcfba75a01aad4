"""The error of a command that cannot do what it was asked."""


class CommandFailed(RuntimeError):
    """The message says why, and what to do; `autograder.__main__` prints it, and no traceback."""
