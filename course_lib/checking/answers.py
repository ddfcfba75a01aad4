"""What a rank returned: compared with its form and with the right value, and explained.

A judge sees only answers that have the right form. A form is written like the answer itself. A dict
stands for a dict with these keys, a list for a list of this length, and ``None`` for None. In place
of values, a form has:

    a tensor                 a tensor of its shape and dtype
    NUMBER, WHOLE, TEXT      any number, any integer, any text
    TRUTH                    True or False
    VECTOR                   a vector of integers (int64)
    ListOf(form)             a list of any length, up to 1000
    ANYTHING                 anything: for a judge that compares the values of ranks
    Kind(words, test)        any value that passes the test

A form may also be a function ``form(case, inputs, rank)`` that returns a form. A judge declares
which form it sees with ``@sees(form)``, which makes a `Judge`; a plain function sees anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from course_lib.checking.cases import Case, Wrong
from course_lib.checking.on_ranks.leaves import ARRAY, leaves, numbered

# Forms ------------------------------------------------------------------------------------------

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
TRUTH = Kind("True or False", lambda value: isinstance(value, bool), "truth values")

Test = Callable[..., None]
"""``test(case, inputs, values)`` raises `Wrong`; both lists are in rank order. In a task with a
reference, it is ``test(case, inputs, expected, values)``."""


@dataclass(frozen=True)
class Judge:
    """A test of the values of all ranks, with the form of the values that it can look at.

    Attributes:
        test: raises `Wrong` for the first finding.
        form: the form that the value of each rank must have. If it is not declared, an odd answer
            may break the test, and is then wrong.

    """

    test: Test
    form: Any = ANYTHING

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
    if not isinstance(right, dict | list | tuple) or not right:
        return
    if not isinstance(value, dict if isinstance(right, dict) else list | tuple):
        raise _unlike(value, _form_like(right), name if ": " in name else f"{name}: the answer")
    if isinstance(right, dict):
        for key in right.keys() & set(value):
            below = f"{name} {key}" if ": " in name else f"{name}: {key}"
            expect_containers(value[key], right[key], below)
    else:
        for i, (item, right_item) in enumerate(zip(value, right, strict=False)):
            expect_containers(item, right_item, numbered(name, i))


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
    prefix = f"{name}: " if name else ""
    if not isinstance(form, Mapping):
        _expect_items(value, form, f"{prefix}the answer")
        return
    if not isinstance(value, dict):
        raise _unlike(value, form, f"{prefix}the answer")
    for key, below in form.items():
        if key not in value:
            raise Wrong(f"{prefix}{key} is missing, expected {form_words(below)}")
        _expect_items(value[key], below, f"{prefix}{key}")
    if extra := value.keys() - form.keys():
        raise Wrong(f"{prefix}{min(extra)} was not asked for")


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
            _expect_items(item, form.form, numbered(name, i))
    elif isinstance(form, list | tuple):
        if not isinstance(value, list | tuple) or len(value) != len(form):
            raise _unlike(value, form, name)
        for i, (item, below) in enumerate(zip(value, form, strict=True)):
            _expect_items(item, below, numbered(name, i))
    elif isinstance(form, Tensor):
        expect_tensor(value, form, name)
    elif not (value is None if form is None else form.test(value)):
        raise _unlike(value, form, name)


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


# Values -----------------------------------------------------------------------------------------


def expect_tensor(value: Any, like: Tensor, name: str) -> Tensor:
    """Return `value` if it is a tensor of the shape and dtype of `like`, else raise `Wrong`."""
    if _is_array(value):
        raise Wrong(f"{name}: you returned a NumPy array; return a torch.Tensor", _AS_TENSOR)
    if not isinstance(value, Tensor):
        raise Wrong(f"{name} is {describe(value)}, expected a tensor of shape {list(like.shape)}")
    if value.shape != like.shape:
        raise Wrong(f"{name} has shape {list(value.shape)}, expected {list(like.shape)}")
    if value.dtype != like.dtype:
        raise Wrong(f"{name} has dtype {value.dtype}, expected {like.dtype}")
    return value


_AS_TENSOR = "torch.from_numpy(array) converts the array."


def _is_array(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {ARRAY} and isinstance(value[ARRAY], Tensor)


def _expect_close(got: Any, expected: Tensor, name: str, rtol: float, atol: float) -> None:
    """Raise `Wrong` unless ``|got − expected| ≤ atol + rtol·|expected|`` everywhere."""
    tensor = expect_tensor(got, expected, name)
    apart = ~torch.isclose(tensor, expected, rtol=rtol, atol=atol, equal_nan=True)
    if not apart.any():
        return
    error = (tensor.double() - expected.double()).abs()
    error = torch.where(error.isnan(), torch.inf, error)
    # Show the element that exceeds its allowed error the most. Two different large integers may be
    # equal in float64.
    beyond = (error - atol - rtol * expected.double().abs()).masked_fill(~apart, -torch.inf)
    index = [int(i) for i in np.unravel_index(int(beyond.argmax()), error.shape)]
    count = int(apart.sum())
    position = tuple(index)
    right, actual = numbers_apart(expected[position].item(), tensor[position].item())
    message = f"{name}{index if index else ''}: expected {right}, got {actual}"
    if expected.dim():
        message += f" ({count} of {expected.numel()} elements differ)"
    hint = _never_written(tensor[position], expected[position])
    mistakes = {} if hint else {_ROUNDED: _rounded(tensor, expected)}
    raise Wrong(message, hint, mistakes=mistakes)


def _never_written(got: Tensor, expected: Tensor) -> str:
    """Return a hint if a wrong number is the number that `torch.empty` gives on the ranks."""
    if got.is_floating_point():
        is_unwritten = bool(got.isnan() & ~expected.isnan())
        largest = f"{torch.finfo(got.dtype).max:.5g}"
        causes = (
            "In a check, memory of torch.empty holds nan until something is written into it; 0/0 "
            f"and inf - inf are nan, too, and {_name(got.dtype)} becomes inf beyond {largest}."
        )
        return causes if is_unwritten else ""
    is_integer = not got.is_complex() and got.dtype != torch.bool
    is_unwritten = is_integer and int(got) == torch.iinfo(got.dtype).max
    hint = "In a check, memory of torch.empty holds this number until something is written into it."
    return hint if is_unwritten else ""


_ROUNDED = "a number that was rounded on the way"
"""This is also a known mistake: a function that rounds is nearly right in every case."""
_NARROWER = {
    torch.float64: (torch.bfloat16, torch.float16, torch.float32),
    torch.float32: (torch.bfloat16, torch.float16),
}


_NEARLY = {torch.float64: 1e-6, torch.float32: 2e-3, torch.bfloat16: 0.05}
"""A relative error that rounding in some narrower dtype, or too often, explains."""


def _rounded(got: Tensor, expected: Tensor) -> str:
    """Return a hint if the numbers are nearly right and rounding explains the difference."""
    got, exact = got.detach().double(), expected.double()
    scale = float(exact.abs().max())
    error = float((got - exact).abs().max())
    if not expected.is_floating_point():
        nearly = scale > 2**16 and error < 1e-2 * scale
        return (
            "This is nearly right, but the numbers were converted to a dtype that cannot hold such "
            f"large integers. Keep {_name(expected.dtype)}."
            if nearly
            else ""
        )
    for narrow in _NARROWER.get(expected.dtype, ()):
        fits = torch.equal(got, got.to(narrow).double())
        if fits and not torch.equal(exact, exact.to(narrow).double()) and error < 0.1 * scale:
            return (
                f"This is nearly right, but the numbers were rounded to {_name(narrow)} on the "
                f"way. Keep {_name(expected.dtype)}."
            )
    if error < _NEARLY.get(expected.dtype, 0.0) * scale:
        wide = _name(torch.promote_types(expected.dtype, torch.float32))
        return (
            "This is nearly right. If your formula is right, the numbers were rounded on the way: "
            f"calculate in {wide}, and convert the result once."
        )
    return ""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _expect_number(got: Any, expected: float, name: str, rtol: float, atol: float) -> None:
    """Raise `Wrong` unless `got` is a number (or a tensor of one element) close to `expected`."""
    if isinstance(got, Tensor) and got.numel() == 1:
        got = got.item()
    if isinstance(got, bool) or not isinstance(got, int | float):
        raise Wrong(f"{name} is {describe(got)}, expected the number {expected:.6g}")
    try:
        got = float(got)
    except OverflowError:
        got = math.inf
    as_tensor = partial(torch.tensor, dtype=torch.float64)
    _expect_close(as_tensor(got), as_tensor(expected), name, rtol, atol)


def expect_equal(
    got: Any,
    right: Any,
    owner: str,
    *,
    rtol: float = 1e-4,
    atol: float = 1e-6,
    errors: Mapping[str, float] | None = None,
    lookalikes: Iterable[tuple[str, Any]] = (),
) -> None:
    """Raise `Wrong` unless `got` has the structure and the values of `right`.

    `right` consists of tensors, numbers, text, None, lists, tuples and dicts. The message uses the
    keys of its dicts as words; ``{}`` in a key stands for the position in the list that follows.

    Args:
        got: what a rank returned; anything.
        right: what the rank should have returned.
        owner: whose value it is: ``rank 2``.
        rtol: allowed relative error.
        atol: allowed absolute error.
        errors: place → an absolute error that is allowed there in addition; see `rounding`.
        lookalikes: mistakes and their results, which have the structure of `right` or a part of
            it. A mistake is named if it explains every wrong value.

    """
    expected, values = dict(leaves(right)), dict(leaves(got, like=right))
    errors = {} if errors is None else errors
    tolerances = {place: (rtol, atol + errors.get(place, 0.0)) for place in expected}
    for place, right_leaf in expected.items():
        name = f"{owner}: {place}" if place else owner
        if place not in values:
            number = isinstance(right_leaf, float)
            like = f"the number {right_leaf:.6g}" if number else describe(right_leaf)
            raise Wrong(f"{name} is missing, expected {like}")
        try:
            _expect_leaf(values[place], right_leaf, name, *tolerances[place])
        except Wrong as finding:
            mistakes = _known_mistakes(values, expected, place, lookalikes, tolerances)
            raise finding.besides(mistakes=mistakes) from None
    if extra := values.keys() - expected.keys():
        raise Wrong(f"{owner}: {min(extra)} was not asked for")


def _expect_leaf(value: Any, right: Any, name: str, rtol: float, atol: float) -> None:
    """Raise `Wrong` unless a value equals the wanted tensor, number, text or None."""
    if isinstance(right, Tensor):
        _expect_close(value, right, name, rtol, atol)
    elif isinstance(right, float):
        _expect_number(value, right, name, rtol, atol)
    elif right is None:
        if value is not None:
            raise Wrong(f"{name} is {describe(value)}, expected None")
    elif type(value) is not type(right) or value != right:
        got = repr(value)[:60] if type(value) is type(right) else describe(value)
        raise Wrong(f"{name}: expected {right!r}, got {got}")


def _known_mistakes(
    values: Mapping[str, Any],
    expected: Mapping[str, Any],
    first: str,
    lookalikes: Iterable[tuple[str, Any]],
    tolerances: Mapping[str, tuple[float, float]],
) -> dict[str, str]:
    """Return known mistake → a hint if the mistake explains all wrong values, else nothing.

    A single value may equal a mistake's value by chance, so all wrong values must. A mistake may
    give only some of the values: it must give the `first` wrong value, and the values that it does
    not give are not compared. Mistakes that equal the wrong values as a whole come before mistakes
    that equal only their wrong elements.
    """

    def equals(place: str, mistaken: Any) -> bool:
        return _passes(values[place], mistaken, *tolerances[place])

    def equals_partly(place: str, mistaken: Any) -> bool:
        alike = values[place], mistaken, expected[place], *tolerances[place]
        return equals(place, mistaken) or _equals_where_wrong(*alike)

    apart = [p for p, right in expected.items() if p in values and not equals(p, right)]
    mistakes = [(mistake, dict(leaves(value))) for mistake, value in lookalikes]
    mistakes = [pair for pair in mistakes if pair[1].get(first) is not None]
    hints: dict[str, str] = {}
    for begin, test in (("This", equals), ("The part that is wrong", equals_partly)):
        for mistake, mistaken in mistakes:
            if all(test(place, mistaken[place]) for place in apart if place in mistaken):
                hints.setdefault(mistake, f"{begin} equals {mistake.rstrip()}.")
    # What follows a wrong number is wrong, too: a later step, for example.
    for mistake, mistaken in mistakes:
        begin = "The first value that is wrong"
        if _has_fractions(mistaken[first]) and equals(first, mistaken[first]):
            hints.setdefault(mistake, f"{begin} equals {mistake.rstrip()}.")
    return {**hints, **{mistake: "" for mistake, _ in mistakes if mistake not in hints}}


def _has_fractions(value: Any) -> bool:
    """Return whether nobody can hit a value by chance, as one can hit a zero or a count."""
    if isinstance(value, float):
        return value != round(value) if math.isfinite(value) else False
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return False
    return bool((value != value.round()).any())


def _equals_where_wrong(value: Any, mistake: Any, right: Any, rtol: float, atol: float) -> bool:
    """Return whether some elements are right, and all others, more than one, equal a mistake's."""
    tensors = [tensor for tensor in (value, mistake, right) if isinstance(tensor, Tensor)]
    if len(tensors) < 3 or len({(tensor.shape, tensor.dtype) for tensor in tensors}) > 1:
        return False
    apart = ~torch.isclose(value, right, rtol, atol)
    others_equal = torch.allclose(value[apart], mistake[apart], rtol, atol)
    return 1 < int(apart.sum()) < apart.numel() and others_equal


def _passes(value: Any, right: Any, rtol: float, atol: float) -> bool:
    try:
        _expect_leaf(value, right, "", rtol, atol)
    except Wrong:
        return False
    return True


def numbers_apart(a: float, b: float, digits: int = 6) -> tuple[str, str]:
    """Return two numbers with `digits` digits, or with more if they look equal otherwise."""
    while digits < 17 and f"{a:.{digits}g}" == f"{b:.{digits}g}":
        digits += 1
    return f"{a:.{digits}g}", f"{b:.{digits}g}"


def describe(value: Any) -> str:
    """Return a description of a value, in a few words."""
    if value is None:
        return "None (is a return missing, or was it never set?)"
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}, {_name(value.dtype)}"
    if _is_array(value):
        return describe(value[ARRAY]).replace("a tensor", ARRAY, 1)
    if isinstance(value, dict):
        return f"a dict with the keys {str(list(value))[:60]}" if value else "an empty dict"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}: {_short(value)}" if value else "empty"
    return f"{type(value).__name__} {_short(value)!r}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:39]}…"
