"""The form of an answer, as data: a judge sees only what has it.

A form is written like the answer itself. A dict stands for a dict with these keys, a list for one
of this length, and ``None`` for None; in place of values stand:

    a tensor                 a tensor of its shape and dtype
    NUMBER, WHOLE, TEXT      any number, any integer, any text
    NAMED                    a dict whose keys are text, whatever is in it
    VECTOR                   a vector of integers (int64)
    ListOf(form)             a list of any length, up to 1000
    ANYTHING                 anything: for a judge that compares what ranks have
    Kind(words, test)        whatever passes the test

A form may also be a function ``form(case, inputs, rank)`` that returns one. A judge says which form
it sees: ``@sees(form)``. `equals` and what is made of it sees anything, since it compares with the
oracle's value place by place, and says where something has another form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from course_lib.checking.cases import Case, Wrong
from course_lib.checking.compare import describe, expect_tensor

_LARGEST = 2**63
"""A judge may count with integers below it."""


@dataclass(frozen=True)
class Kind:
    """Values that pass a test: ``words`` says what they are, ``many`` what several of them are."""

    words: str
    test: Callable[[Any], bool]
    many: str = "values"


@dataclass(frozen=True)
class ListOf:
    """A list or tuple of any length up to ``most``, whose items have this form."""

    form: Any
    most: int = 1000


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex() and value.dtype != torch.bool
    return _is_whole(value) or type(value) is float


def _is_whole(value: Any) -> bool:
    return type(value) is int and abs(value) < _LARGEST


def _is_vector(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1 and value.dtype == torch.int64


NUMBER = Kind("a number", _is_number, "numbers")
WHOLE = Kind("a whole number", _is_whole, "whole numbers")
TEXT = Kind("text", lambda value: isinstance(value, str), "texts")
VECTOR = Kind("a vector of whole numbers (int64)", _is_vector, "vectors of whole numbers")
ANYTHING = Kind("anything", lambda value: True)
NAMED = Kind(
    "a dict of results",
    lambda value: isinstance(value, dict) and all(isinstance(key, str) for key in value),
)
_TRUTH = Kind("True or False", lambda value: isinstance(value, bool), "truth values")

J = TypeVar("J", bound=Callable[..., Any])


def sees(form: Any) -> Callable[[J], J]:
    """Mark a judge with the form of the answers that it can judge."""

    def mark(judge: J) -> J:
        judge.__dict__["sees"] = form
        return judge

    return mark


def form_seen_by(judge: Any, case: Case, inputs: Sequence[Any], rank: int) -> Any:
    """Return the form that a rank's answer must have for this judge; one that does not say: any."""
    form = getattr(judge, "sees", ANYTHING)
    return form(case, inputs, rank) if callable(form) else form


def expect_containers(value: Any, right: Any, name: str) -> None:
    """Raise `Wrong` where `right` has a dict or a list and the value has something else.

    What is in them, and how much, `expect_equal` says: it knows what it looks like.
    """
    if isinstance(right, dict) and right:
        if not isinstance(value, dict):
            raise _unlike(value, _form_like(right), name if ": " in name else f"{name}: the answer")
        for key in right.keys() & value.keys():
            below = f"{name} {key}" if ": " in name else f"{name}: {key}"
            expect_containers(value[key], right[key], below)
    elif isinstance(right, list | tuple) and right:
        if not isinstance(value, list | tuple):
            raise _unlike(value, _form_like(right), name if ": " in name else f"{name}: the answer")
        for i, (item, wanted) in enumerate(zip(value, right, strict=False)):
            expect_containers(item, wanted, _numbered(name, i))


def _form_like(right: Any) -> Any:
    if isinstance(right, dict):
        return {key: _form_like(value) for key, value in right.items()}
    if isinstance(right, list | tuple):
        return [_form_like(value) for value in right]
    if right is None or isinstance(right, Tensor):
        return right
    return {bool: _TRUTH, int: WHOLE, str: TEXT}.get(type(right), NUMBER)


def expect_form(value: Any, form: Any, name: str) -> None:
    """Raise `Wrong` unless the value has the form.

    Args:
        value: what a rank returned; anything.
        form: what it must be like. Keys of its dict are words of the message; ``{}`` in one stands
            for the position in the list, or the key in the dict, behind it.
        name: whose it is: ``rank 2``; empty where there is one rank only.

    """
    whose = f"{name}: " if name else ""
    if not isinstance(form, Mapping):
        _expect_items(value, form, f"{whose}the answer")
        return
    if not isinstance(value, dict):
        raise _unlike(value, form, f"{whose}the answer")
    for key, below in form.items():
        if key not in value:
            raise Wrong(f"{whose}{key} is missing, expected {form_words(below)}")
        _expect_items(value[key], below, f"{whose}{key}")
    if extra := value.keys() - form.keys():
        raise Wrong(f"{whose}{min(extra)} was not asked for")


def _expect_items(value: Any, form: Any, name: str) -> None:
    """Raise `Wrong` unless the value has the form; the next ``{}`` in `name` is its number."""
    if isinstance(form, Mapping):
        if not isinstance(value, dict) or value.keys() != form.keys():
            raise _unlike(value, form, name)
        for key, below in form.items():
            place = name.replace("{}", key, 1) if "{}" in name else f"{name}[{key!r}]"
            _expect_items(value[key], below, place)
    elif isinstance(form, ListOf):
        if not isinstance(value, list | tuple):
            raise _unlike(value, form, name)
        if len(value) > form.most:
            raise Wrong(f"{_plain(name)} has {len(value)} items, more than {form.most}")
        for i, item in enumerate(value):
            _expect_items(item, form.form, _numbered(name, i))
    elif isinstance(form, list | tuple):
        if not isinstance(value, list | tuple) or len(value) != len(form):
            raise _unlike(value, form, name)
        for i, (item, below) in enumerate(zip(value, form, strict=True)):
            _expect_items(item, below, _numbered(name, i))
    elif isinstance(form, Tensor):
        expect_tensor(value, form, name)
    elif not (value is None if form is None else form.test(value)):
        raise _unlike(value, form, name)


def _numbered(name: str, number: int) -> str:
    return name.replace("{}", str(number), 1) if "{}" in name else f"{name}[{number}]"


def _plain(name: str) -> str:
    return name.replace(" {}", "")


def _unlike(value: Any, form: Any, name: str) -> Wrong:
    return Wrong(f"{_plain(name)} is {describe(value)}, expected {form_words(form)}")


def form_words(form: Any) -> str:
    """Return what a form asks for, in words."""
    match form:
        case None:
            return "None"
        case Kind():
            return form.words
        case Tensor():
            return f"a tensor of shape {list(form.shape)}"
        case ListOf():
            return f"a list of {_many([form.form])}"
        case Mapping():
            return f"a dict with {', '.join(map(str, form))}" if form else "an empty dict"
    return f"a list of {len(form)} {_many(form)}" if form else "an empty list"


def _many(forms: Sequence[Any]) -> str:
    kinds = {
        "tensors"
        if isinstance(form, Tensor)
        else "lists"
        if isinstance(form, list | tuple | ListOf)
        else getattr(form, "many", "values")
        for form in forms
    }
    return kinds.pop() if len(kinds) == 1 else "values"
