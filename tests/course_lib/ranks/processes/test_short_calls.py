"""Calls that are written by `marshal`: what arrives is what cloudpickle would have brought."""

import copyreg
import enum
import math
import os
import os.path
import pickle
import types
import xml.dom.minidom
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from course_lib.ranks.calls import per_rank
from course_lib.ranks.processes.short_calls import read, short

IN_THE_CELL: dict[str, Any] = {
    "torch": torch, "math": math, "xml": xml, "path": os.path, "lr": 0.1, "steps": 3, "name": "α",
    "nothing": None, "on": True, "__package__": None, "__file__": "cell.py",
}  # fmt: skip
SHORT = {
    "a lambda": "lambda: 1",
    "a module": "lambda: math.pi",
    "a module of a package": "lambda: xml.dom.minidom.parseString('<a/>').documentElement.tagName",
    "a module by another name": "lambda: path.sep",
    "plain values": "lambda: (lr, steps, name, nothing, on)",
    "its own globals": "lambda: (__name__, __file__, __package__)",
    "a name that is nowhere": "lambda: 1 if on else nowhere",
    "a function inside": "lambda: (lambda: lr)() + sum(steps for _ in range(2))",
    "built-in functions": "lambda: len(str(abs(-3.5)))",
    "constants": "lambda: (1, 'a', b'b', (2.5, None), 1j, ..., {3, 4} & {4})",
    "defaults": "lambda a=1, b='x', c=None: (a, b, c)",
}
DEFINED = '''
def defined(a: int = 2, **more: "anything") -> float:
    """Say what it does."""
    global steps
    steps += a
    return steps * lr
'''


def in_a_cell(source: str, **more: Any) -> Any:
    """Return a function as a cell defines it."""
    names = {**IN_THE_CELL, **more, "__name__": "__main__"}
    if source.startswith("\n"):
        exec(compile(source, "cell", "exec"), names)
        return names["defined"]
    return eval(compile(source, "cell", "eval"), names)


def described(fn: Callable[..., Any]) -> dict[str, Any]:
    """Return all that one can see of a function."""
    slots = ("__name__", "__qualname__", "__module__", "__doc__", "__defaults__", "__kwdefaults__",
             "__annotations__", "__dict__", "__closure__", "__code__")  # fmt: skip
    visible = {name: getattr(fn, name) for name in slots}
    return visible | {"globals": {k: v for k, v in fn.__globals__.items() if k != "__builtins__"}}


@pytest.mark.parametrize("source", [*SHORT.values(), DEFINED], ids=[*SHORT, "defined"])
def test_what_arrives_is_what_cloudpickle_brings(source: str) -> None:
    fn = in_a_cell(source)
    data = short(fn, (), {})
    assert data is not None
    arrived, args, kwargs = read(data)
    expected = pickle.loads(cloudpickle.dumps(fn))
    assert described(arrived) == described(expected)
    assert arrived.__globals__["__builtins__"] is expected.__globals__["__builtins__"]
    assert ([*args], kwargs) == ([], {})
    assert arrived() == expected() == fn()


def test_every_call_begins_with_what_the_cell_says() -> None:
    fn = in_a_cell(DEFINED)
    data = short(fn, (1,), {})
    assert data is not None
    for _ in range(3):
        arrived, args, _ = read(data)
        assert arrived(*args) == pytest.approx(0.4)
    fn.__globals__["steps"] = 5
    assert read(short(fn, (1,), {}) or b"")[0](1) == pytest.approx(0.6)


plain_values = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None))
)


@given(st.lists(plain_values), st.dictionaries(st.text(), plain_values), plain_values)
def test_plain_values_arrive_as_they_are(
    args: list[Any], kwargs: dict[str, Any], value: Any
) -> None:
    fn = in_a_cell("lambda *args, **kwargs: (value, args, kwargs)", value=value)
    data = short(fn, args, kwargs)
    assert data is not None
    arrived, args_there, kwargs_there = read(data)
    # By its text: a NaN is not equal to itself, and 1 is equal to True.
    assert repr(arrived(*args_there, **kwargs_there)) == repr(fn(*args, **kwargs))


class Level(enum.IntEnum):
    LOW = 1


def by_a_closure() -> Any:
    made: Any = types.FunctionType(
        (lambda x: lambda: x)(1).__code__, {"__name__": "__main__"}, "f", None, (types.CellType(1),)
    )
    return made


def with_an_attribute() -> Any:
    fn = in_a_cell("lambda: 1")
    fn.seen = 3
    return fn


def with_an_array_among_its_constants() -> Any:
    fn = in_a_cell("lambda: 'replaced'")
    constants: Any = (*fn.__code__.co_consts, copyreg)
    fn.__code__ = fn.__code__.replace(co_consts=constants)
    return fn


class OfACell:
    __module__ = "__main__"


LONG: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "of a module": (os.path.join, ("a",)),
    "no function": (len, ((),)),
    "a class": (OfACell, ()),
    "a closure": (by_a_closure(), ()),
    "an attribute": (with_an_attribute(), ()),
    "a strange constant": (with_an_array_among_its_constants(), ()),
    "a keyword default": (in_a_cell("lambda *, a=1: a"), ()),
    "a list as default": (in_a_cell("lambda a=[]: a"), ()),
    "another function": (in_a_cell("lambda: other()", other=in_a_cell("lambda: 2")), ()),
    "a class of the cell": (in_a_cell("lambda: other()", other=OfACell), ()),
    "a list": (in_a_cell("lambda: other", other=[1]), ()),
    "an array": (in_a_cell("lambda: other", other=numpy.ones(2)), ()),
    "bytes that change": (in_a_cell("lambda: other", other=bytearray(b"ab")), ()),
    "a kind of int": (in_a_cell("lambda: other", other=Level.LOW), ()),
    "a module of no file": (in_a_cell("lambda: other", other=types.ModuleType("nowhere")), ()),
    "annotated by a tensor": (in_a_cell(DEFINED.replace("int", "torch.Tensor")), ()),
    "a tensor": (in_a_cell("lambda x: x"), (torch.ones(2),)),
    "an array as argument": (in_a_cell("lambda x: x"), (numpy.ones(2),)),
    "one value per rank": (in_a_cell("lambda x: x"), (per_rank([1, 2]),)),
    "a number of numpy": (in_a_cell("lambda x: x"), (numpy.float64(1.5),)),
}


@pytest.mark.parametrize("name", LONG)
def test_what_is_more_than_code_and_plain_values_goes_the_long_way(name: str) -> None:
    fn, args = LONG[name]
    assert short(fn, args, {}) is None
    named = {f"argument{i}": value for i, value in enumerate(args)}
    assert not named or short(fn, (), named) is None


def test_a_module_that_is_sent_by_value_goes_the_long_way() -> None:
    fn = in_a_cell("lambda: xml.__name__")
    assert short(fn, (), {}) is not None
    cloudpickle.register_pickle_by_value(xml)
    try:
        assert short(fn, (), {}) is None
    finally:
        cloudpickle.unregister_pickle_by_value(xml)
