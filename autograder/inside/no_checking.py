"""In the sandbox it stands for `course_lib.checking`: names that notebooks import, and no judge."""

from typing import Any


def check(name: str, *_: Any, **__: Any) -> None:
    """Do nothing: while grading, the grader runs the check."""
    print(f"{name}: the grader runs this check")


def predict(*_: Any, **__: Any) -> None:
    """Do nothing: a prediction is for the notebook."""


def __getattr__(name: str) -> Any:
    raise ImportError(f"course_lib.checking.{name} is not available while grading", name=name)
