"""Replace `course_lib.checking` in the sandbox: the names that notebooks import, but no judges."""

from typing import Any


def check(name: str, *_: Any, **__: Any) -> None:
    """Do nothing, because the grader itself runs the check."""
    print(f"{name}: the grader runs this check")


def defend(*_: Any, **__: Any) -> None:
    """Print no questions, because the grader draws them itself."""


class Question:
    """A question whose answer is not kept."""

    def score(self, *_: Any, **__: Any) -> "Question":
        """Do nothing."""
        return self


def ask(*_: Any, **__: Any) -> Question:
    """Return a question whose answer is not kept, because it matters only in the notebook."""
    return Question()


def __getattr__(name: str) -> Any:
    raise ImportError(f"course_lib.checking.{name} is not available while grading", name=name)
