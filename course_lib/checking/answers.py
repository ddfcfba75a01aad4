"""The form of an answer, as data: a judge sees only answers that have the right form.

A form is written like the answer itself. A dict stands for a dict with these keys, a list for a
list of this length, and ``None`` for None. In place of values, a form has:

    a tensor                 a tensor of its shape and dtype
    NUMBER, WHOLE, TEXT      any number, any integer, any text
    TRUTH                    True or False
    NAMED                    a dict whose keys are text, with any values
    VECTOR                   a vector of integers (int64)
    ListOf(form)             a list of any length, up to 1000
    ANYTHING                 anything: for a judge that compares the values of ranks
    Kind(words, test)        any value that passes the test

A form may also be a function ``form(case, inputs, rank)`` that returns a form. A judge declares
which form it sees with ``@sees(form)``, which makes a `Judge`. `equals`, and every judge built from
it, sees anything: it compares the answer with the oracle's value element by element, and says where
the form differs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from course_lib.checking.cases import Case, Wrong
from course_lib.checking.compare import describe, expect_tensor

_LARGEST = 2**63
"""A judge may calculate with integers whose absolute value is below this."""


@dataclass(frozen=True)
class Kind:
    """Values that pass a test; ``words`` names one of them, ``many`` names several."""

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
UNDECLARED = Kind("anything", lambda value: True)
"""The form of a judge that is a plain function: an odd answer may break it, and is then wrong."""
NAMED = Kind(
    "a dict of results",
    lambda value: isinstance(value, dict) and all(isinstance(key, str) for key in value),
)
TRUTH = Kind("True or False", lambda value: isinstance(value, bool), "truth values")

Test = Callable[[Case, Sequence[Any], Sequence[Any]], None]
"""``test(case, inputs, values)`` raises `Wrong`; both lists are in rank order."""


@dataclass(frozen=True)
class Judge:
    """A test of the values of all ranks, with the form of the values that it can look at.

    Attributes:
        test: raises `Wrong` for the first finding.
        form: the form that the value of each rank must have.
        refutes: ``refutes(case, inputs, causes)`` returns those of the known mistakes, as
            `causes.cause_of` writes them, that would have given a wrong answer in this case. If
            the answer is right, it is not because of these mistakes that other cases fail.

    """

    test: Test
    form: Any = UNDECLARED
    refutes: Callable[[Case, Sequence[Any], Collection[str]], set[str]] = lambda *_: set()

    def __call__(self, case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> None:
        """Raise `Wrong` for the first finding."""
        self.test(case, inputs, values)

    def form_of(self, case: Case, inputs: Sequence[Any], rank: int) -> Any:
        """Return the form that a rank's answer must have."""
        return self.form(case, inputs, rank) if callable(self.form) else self.form


def sees(form: Any) -> Callable[[Test], Judge]:
    """Make a judge of a test that can look at answers of this form."""
    return lambda test: Judge(test, form)


def expect_containers(value: Any, right: Any, name: str) -> None:
    """Raise `Wrong` if `right` has a dict or a list at a place where the value has something else.

    This compares only the kinds of containers. `expect_equal` compares the values in them and their
    number, because it also recognises known mistakes.
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
    return {bool: TRUTH, int: WHOLE, str: TEXT}.get(type(right), NUMBER)


def expect_form(value: Any, form: Any, name: str) -> None:
    """Raise `Wrong` unless the value has the form.

    Args:
        value: what a rank returned; anything.
        form: the form that the value must have. The message uses the keys of its dict as words;
            ``{}`` in a key stands for the position in the list, or the key in the dict, that
            follows.
        name: whose value it is: ``rank 2``; empty if there is only one rank.

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
    """Raise `Wrong` unless the value has the form; its items replace ``{}`` by number or key."""
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
    """Return a description of a form, for a message."""
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
