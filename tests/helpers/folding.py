"""Many cases of one fact as one test: `@over` loops where `parametrize` would make tests."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any


def over(names: str, cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call the test once for each of the `cases`, as values of `names`: "k" or "on, k".

    A failure carries the case that failed. Like `parametrize`, several may be stacked.
    """
    words = [word.strip() for word in names.split(",")]
    values = [case if len(words) > 1 else (case,) for case in cases]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def in_turn(**fixtures: Any) -> None:
            for each in values:
                case = dict(zip(words, each, strict=True))
                try:
                    test(**fixtures, **case)
                except BaseException as error:
                    error.add_note(f"in the case {case}")
                    raise

        parameters = inspect.signature(test).parameters.values()
        rest = [each for each in parameters if each.name not in words]
        in_turn.__signature__ = inspect.Signature(rest)  # type: ignore[attr-defined]
        return in_turn

    return decorate
