"""Play the capstone's tapes in a cell of the sandbox; see `inside.booth`."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from autograder.examination._channel import Channel
from autograder.examination.budget import Budget, Limits
from autograder.sandbox.place import SandboxedPlace
from course_lib.capstone.referee import SECONDS, played_by
from course_lib.capstone.tape import TapeError
from course_lib.checking.on_ranks.frames import Frame
from course_lib.checking.on_ranks.wire import WireError, decode, encode

_NUMBERS = {"seconds": float, "computed": float, "light": float, "flops": int, "gradients": int}
_LISTS = {"losses": float, "sent": int, "received": int, "claimed": int}
_MAX_TOLD = 300


@contextmanager
def tapes_played_in(place: SandboxedPlace) -> Iterator[None]:
    """Make `course_lib.capstone.referee` play tapes in this sandbox; it then returns no events."""
    with played_by(partial(_play, place)):
        yield


def _play(
    place: SandboxedPlace, parameters: dict[str, Any], tapes: list[Tensor], seeds: list[str]
) -> dict[str, Any]:
    budget = Budget(Limits(submission=SECONDS), place.cores)
    ours, theirs = socket.socketpair()
    with closing(Channel(ours)) as channel:
        with theirs:
            cell = place.cell("autograder.inside.booth:serve", {}, [theirs.fileno()])
        with cell:
            given = {"parameters": parameters, "tapes": tapes, "seeds": seeds}
            channel.queue(Frame.INPUT, encode(given))
            if not channel.wait_until_ready():
                raise place.broken("The process that plays tapes did not start")
            try:
                with budget:
                    _, payload = channel.ask(budget.of(SECONDS), lambda: None)
                return _checked(decode(payload))
            except TimeoutError:
                place.make_sure()
                raise TapeError(f"playing the tape takes more than {SECONDS:g} s") from None
            except WireError:
                raise TapeError(
                    "the tape cannot be played: the process that plays it gave no valid answer"
                ) from None
            except EOFError:
                why = place.why_ended(cell)
                raise TapeError(
                    f"the tape cannot be played, because the process that plays it ended: {why}"
                ) from None


def _checked(told: Any) -> dict[str, Any]:
    """Return the cell's answer, if it has the form of an answer.

    Raises:
        WireError: it has a different form. A tape may have done anything to the cell.

    """
    match told:
        case {"error": str(error)}:
            return {"error": error[:_MAX_TOLD]}
        case {"score": {"equal": bool(), **numbers} as score} if len(score) == 10:
            if (
                all(type(numbers.get(name)) is kind for name, kind in _NUMBERS.items())
                and all(_is_tuple(numbers.get(name), kind) for name, kind in _LISTS.items())
                and all(math.isfinite(score[name]) for name in _NUMBERS)
            ):
                return {"score": score, "events": []}
    raise WireError("this is not a score")


def _is_tuple(value: Any, kind: type) -> bool:
    return isinstance(value, tuple) and all(type(each) is kind for each in value)
