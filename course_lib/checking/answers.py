"""Compare what a rank returned with the form of the right value, then with the value itself."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from course_lib.checking.cases import Wrong
from course_lib.checking.on_ranks.leaves import ARRAY, leaves, numbered

# Forms ------------------------------------------------------------------------------------------

_LARGEST = 2**63
"""A judge may calculate with integers whose absolute value is below this."""
_MOST = 10_000
"""A judge sees lists of at most so many items."""
_MANY = {Tensor: "tensors", list: "lists", tuple: "lists", int: "whole numbers", str: "texts"}


def expect_form(value: Any, right: Any, owner: str, *, kinds: bool = False) -> None:
    """Raise `Wrong` if `right` has a dict or a list at a place where the value has something else.

    `expect_equal` compares what is in them, and their number, because it also recognises known
    mistakes. A judge that compares by itself needs `kinds`: then the value has the same keys, and
    everywhere a tensor of the same dtype and number of dimensions, a number, an integer, a text, or
    None, as the right value has. Lists may have other lengths. Where the right one is empty, each
    item is like something in the right value.

    Args:
        value: what a rank returned; anything.
        right: what the rank should have returned. The message uses the keys of its dicts as words.
        owner: whose value it is: ``rank 2``; empty if there is only one rank.
        kinds: whether the keys of dicts and the kinds of values must be the same, too.

    """
    examples = {_kind_of(leaf): leaf for _, leaf in leaves(right)}
    _expect_like(value, right, owner, "", list(examples.values()) if kinds else None)


def _kind_of(leaf: Any) -> Any:
    return (leaf.dtype, leaf.dim()) if isinstance(leaf, Tensor) else type(leaf)


def _expect_like(
    value: Any, right: Any, owner: str, place: str, examples: Sequence[Any] | None
) -> None:
    name = f"the answer{place}" if place[:1] in ("", "[") else place.replace(" {}", "")
    name = f"{owner}: {name}" if owner else name
    if not _is_like(value, right, examples):
        raise Wrong(f"{name} is {describe(value)}, expected {_words(right)}")
    if isinstance(right, dict):
        if examples is not None and value.keys() != right.keys():
            raise Wrong(f"{name} has the keys {str(list(value))[:60]}, expected {list(right)}")
        # In the order of the right value, so that the same place is told each time.
        for key in (key for key in right if key in value):
            _expect_like(value[key], right[key], owner, f"{place} {key}".strip(), examples)
    elif isinstance(right, list | tuple) and right:
        for i, item in enumerate(value[: len(right)] if examples is None else value):
            like = right[min(i, len(right) - 1)]
            _expect_like(item, like, owner, numbered(place, i), examples)


def _is_like(value: Any, right: Any, examples: Sequence[Any] | None) -> bool:
    """Return whether a value is a dict or a list like the right one, or with examples like it."""
    if isinstance(right, dict):
        return isinstance(value, dict)
    if isinstance(right, list | tuple):
        short = isinstance(value, list | tuple) and (examples is None or len(value) <= _MOST)
        return short and (bool(right) or examples is None or _is_made_of(value, examples))
    if examples is None:
        return True
    if isinstance(right, float):
        return is_number(value)
    return _kind_of(value) == _kind_of(right) and (type(right) is not int or is_number(value))


def _is_made_of(value: Any, examples: Sequence[Any]) -> bool:
    inner = [leaf for _, leaf in islice(leaves(value), _MOST + 1)]
    return len(inner) <= _MOST and all(
        any(_is_like(leaf, example, examples) for example in examples) for leaf in inner
    )


def is_number(value: Any) -> bool:
    """Return whether a judge may calculate with a value, which may be a tensor of one element."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex() and value.dtype != torch.bool
    return type(value) is float or (type(value) is int and abs(value) < _LARGEST)


def _words(right: Any) -> str:
    """Return a description of a right value's form, for a message."""
    match right:
        case Tensor():
            return describe(right)
        case dict():
            return f"a dict with {', '.join(map(str, right))}" if right else "an empty dict"
        case list() | tuple():
            kinds = {_MANY.get(type(item), "values") for item in right}
            plural = kinds.pop() if len(kinds) == 1 else "values"
            return f"a list of {len(right)} {plural}" if right else "an empty list"
    names = {bool: "True or False", int: "a whole number", str: "text", type(None): "None"}
    return names.get(type(right), "a number")


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
    if not is_number(got):
        raise Wrong(f"{name} is {describe(got)}, expected the number {expected:.6g}")
    as_tensor = partial(torch.tensor, dtype=torch.float64)
    _expect_close(as_tensor(float(got)), as_tensor(expected), name, rtol, atol)


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
            finding.mistakes = {**mistakes, **finding.mistakes}
            raise finding from None
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
    # After a wrong number, others are wrong too: those of a later step, for example.
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
