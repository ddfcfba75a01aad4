"""Values on their way to a rank and back: cloudpickle is the oracle."""

import asyncio
import copyreg
import functools
import hashlib
import math
import pickle
import random
import struct
import subprocess
import sys
import threading
import types
import xml.dom.minidom
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from course_lib.ranks import RankError, Ranks, per_rank
from course_lib.ranks.memory import pack

# As the classes and functions of a notebook, those of this file travel by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

K = 2
SIZES = [0, 1, 8_191, 8_192, 8_193, 65_535, 65_536, 1 << 20]


# Values that are handed over -----------------------------------------------------------------


class Plain:
    """Stands for a class of a notebook."""

    factor = 3

    def __init__(self, value: Any) -> None:
        self.value = value

    def scaled(self, by: int = 2) -> Any:
        return [self.value, by * self.factor]


@dataclass
class Settings:
    name: str
    values: list[Any] = field(default_factory=list)


class TwoArguments(Exception):
    """An exception that its message alone does not make."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{text} ({code})")
        self.code, self.text = code, text

    def __reduce__(self) -> Any:
        return TwoArguments, (self.code, self.text)


def adder(n: int) -> Callable[[int], int]:
    """Return a closure."""

    def add(x: int, *, twice: bool = False) -> int:
        return (1 + twice) * (x + n)

    return add


def factorial(n: int) -> int:
    return 1 if n < 2 else n * factorial(n - 1)


def with_docstring(size: int) -> Callable[..., Any]:
    """Return a function of a cell whose docstring is so long."""
    names: dict[str, Any] = {"__name__": "__main__", "math": math, "rate": 0.1}
    exec("def defined(a: int = 2, *more: 'any') -> float:\n    return a * rate * math.pi", names)
    names["defined"].__doc__ = "d" * size
    defined: Callable[..., Any] = names["defined"]
    return defined


def with_constant(size: int) -> Callable[..., Any]:
    """Return a function of a cell whose code is so long."""
    made: Callable[..., Any] = eval(f"lambda x: (x, {'c' * size!r})", {"__name__": "__main__"})
    return made


def with_odd_constants() -> Callable[..., Any]:
    """Return a function with constants that no compiler makes."""

    def odd() -> int:
        return 0

    constants: Any = (*odd.__code__.co_consts, range(3), copyreg)
    odd.__code__ = odd.__code__.replace(co_consts=constants)
    return odd


def family() -> Callable[..., Any]:
    """Return one of two functions that call each other and share a list."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(
        "count = [0]\n"
        "def even(n): count[0] += 1; return n == 0 or odd(n - 1)\n"
        "def odd(n): count[0] += 1; return n != 0 and even(n - 1)\n"
        "even.calls = count\n",
        names,
    )
    even: Callable[..., Any] = names["even"]
    return even


def endless() -> list[Any]:
    """Return a list that contains itself."""
    value: list[Any] = [1]
    value.append(value)
    return value


def same_twice() -> list[Any]:
    x = torch.arange(3.0)
    pair = [x, {"again": x}]
    return [pair, pair]


def real(x: torch.Tensor) -> torch.Tensor:
    return (x.real if x.is_complex() else x).to(torch.float32)


DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float16]
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it is": lambda x: x,
    "transposed": lambda x: x.t(),
    "with gaps": lambda x: x[:, ::2],
    "transposed with gaps": lambda x: x.t()[::2],
    "an end": lambda x: x[1:],
    "expanded": lambda x: x.sum().expand(2, 3),
    "channels last": lambda x: x.reshape(1, 2, 1, -1).to(memory_format=torch.channels_last),
    "empty": lambda x: x[:0],
    "a number": lambda x: x.sum(),
    "conjugate": lambda x: x.to(torch.complex64).conj(),
    "sparse": lambda x: real(x).to_sparse(),
    "a parameter": lambda x: torch.nn.Parameter(real(x)),
    "with a gradient to come": lambda x: real(x).requires_grad_(),
}


def tensor(size: int, dtype: torch.dtype, layout: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size)
    x = (torch.randn(2, size // 4, generator=generator) * 10).to(dtype)
    return LAYOUTS[layout](x)


def array(size: int, dtype: str, order: Any) -> Any:
    bits = np.random.default_rng(size).integers(0, 2, (2, size // 4))
    return np.asarray(bits, dtype=dtype, order=order)


sizes = st.sampled_from(SIZES)
text = st.builds(lambda size, end: "ü" * (size // 2) + end, sizes, st.text(max_size=5))
raw = st.builds(lambda size: random.Random(size).randbytes(size), sizes)
numbers = st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers()
huge = st.builds(lambda size, sign: sign << 8 * size, sizes, st.sampled_from([-1, 1]))
tensors = st.builds(tensor, sizes, st.sampled_from(DTYPES), st.sampled_from(sorted(LAYOUTS)))
arrays = st.builds(
    array, sizes, st.sampled_from(["f4", "f8", "i2", "?", "c8", "U3"]), st.sampled_from("CF")
)
functions = (
    st.builds(with_docstring, sizes)
    | st.builds(with_constant, sizes)
    | st.builds(adder, st.integers())
    | st.sampled_from([factorial, len, torch.relu, math.sin, Plain.scaled, lambda x=1: (x, Plain)])
    | st.builds(with_odd_constants)
    | st.builds(family)
)
few = numbers | text | raw | tensors | functions
errors = (
    st.builds(ValueError, text)
    | st.builds(KeyError, st.integers())
    | st.builds(OSError, st.just(2), text)
    | st.builds(TwoArguments, st.integers(), text)
)
instances = (
    st.builds(Plain, few)
    | st.builds(Settings, text, st.lists(few, max_size=3))
    | st.sampled_from([Plain, Settings, TwoArguments, dict, torch.float32, types.SimpleNamespace])
    | st.builds(endless)
    | st.builds(same_twice)
)
values = st.recursive(
    few | raw.map(bytearray) | huge | arrays | errors | instances,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
        | st.frozensets(st.integers(), max_size=3)
    ),
    max_leaves=4,
)


# How a value looks ---------------------------------------------------------------------------


def described(value: Any, seen: dict[int, tuple[int, Any]] | None = None) -> Any:
    """Return all that one can see of a value, in plain ones; long bytes by their digest.

    Left out is that gaps in the memory of tensors may be gone.
    """
    seen = {} if seen is None else seen
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if value is None or isinstance(value, bool):
        return kind, repr(value)
    if type(value) is int:  # quicker than its decimal digits
        return kind, digest(value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))
    if isinstance(value, float):  # a NaN is not equal to itself, and -0.0 is equal to 0.0
        return kind, struct.pack("d", value)
    if isinstance(value, complex):
        return kind, struct.pack("dd", value.real, value.imag)
    if isinstance(value, str):
        return kind, len(value), digest(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, bytes):
        return kind, len(value), digest(value)
    if isinstance(value, types.ModuleType | types.BuiltinFunctionType):
        return kind, value.__name__
    if isinstance(value, torch.dtype):
        return kind, str(value)
    if id(value) in seen:  # also: which of the parts are one object
        return "seen", seen[id(value)][0]
    seen[id(value)] = len(seen), value  # kept, or something else could get its id

    def inside(*parts: Any) -> Any:
        return [described(part, seen) for part in parts]

    if isinstance(value, list | tuple):
        return kind, inside(*value)
    if isinstance(value, dict):
        return kind, [inside(*item) for item in value.items()]
    if isinstance(value, frozenset):
        return kind, inside(*sorted(value))
    if isinstance(value, bytearray):
        return kind, inside(bytes(value))
    if isinstance(value, np.ndarray):
        order = value.flags.c_contiguous, value.flags.f_contiguous
        return kind, value.dtype.str, value.shape, order, digest(value.tobytes())
    if isinstance(value, torch.Tensor):
        return kind, described_tensor(value)
    if isinstance(value, types.FunctionType):
        return kind, inside(*parts_of_function(value))
    if isinstance(value, type):
        if value.__module__ not in ("__main__", Plain.__module__):
            return kind, value.__module__, value.__qualname__
        shown = {k: v for k, v in sorted(vars(value).items()) if not k.startswith("_")}
        return kind, value.__qualname__, inside(value.__bases__, shown, value.__init__)
    if isinstance(value, BaseException):
        return kind, str(value), inside(type(value), value.args, vars(value))
    if not hasattr(value, "__dict__"):  # a part of Python, such as a slot's wrapper
        return kind, getattr(value, "__name__", "")
    return kind, inside(type(value), vars(value))


def described_tensor(x: torch.Tensor) -> Any:
    """Return what one can see of a tensor; its strides, as those of a copy of it."""
    shown = str(x.dtype), str(x.layout), tuple(x.shape), x.requires_grad, x.is_conj()
    x = x.detach().coalesce().to_dense() if x.is_sparse else x.detach()
    strides = [s for s, n in zip(x.clone().stride(), x.shape, strict=True) if n > 1]
    data = x.clone().resolve_conj().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return *shown, strides if x.numel() else [], digest(data)


def parts_of_function(f: types.FunctionType) -> list[Any]:
    """Return what a function consists of, and the globals that it names."""
    slots = ("__name__", "__qualname__", "__module__", "__doc__", "__defaults__", "__kwdefaults__",
             "__annotations__", "__dict__")  # fmt: skip
    code = f.__code__
    named = {name: f.__globals__[name] for name in code.co_names if name in f.__globals__}
    constants = [each for each in code.co_consts if not isinstance(each, types.CodeType | range)]
    cells = [cell.cell_contents for cell in f.__closure__ or ()]
    # Not the file's name, which cloudpickle may leave out and a rank knows: test_object_pipe.py.
    places = str(list(code.co_positions())), code.co_firstlineno
    return [
        *(getattr(f, slot) for slot in slots),
        *(code.co_code, code.co_exceptiontable, places, code.co_varnames, constants, cells, named),
    ]


def digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


# The ranks ------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["cpu", "simulated"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(K, on=request.param, timeout=60) as ranks:
        yield ranks


def look_and_return(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Return what this rank sees of its arguments, and the arguments."""
    return described((args, kwargs)), (args, kwargs)


def brought(value: Any) -> Any:
    """Return what cloudpickle brings."""
    return pickle.loads(cloudpickle.dumps(value))


quickly = settings(
    deadline=None, database=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow,
                           HealthCheck.data_too_large],
)  # fmt: skip


@settings(quickly, max_examples=150)
@given(value=values, other=values, named=st.booleans(), each=st.booleans())
@example(value="x" * 8_000, other=None, named=False, each=False)
def test_what_arrives_and_what_comes_back_is_what_cloudpickle_brings(
    ranks: Ranks, value: Any, other: Any, named: bool, each: bool
) -> None:
    kwargs = {"other": other} if named else {}
    # One after the other: values of one rank alone are no longer the same object as others.
    args = [value] if named else [other, value]
    first, rest = (per_rank([args[0]] * K), args[1:]) if each else (args[0], args[1:])
    answers = ranks.run(look_and_return, first, *rest, **kwargs)
    if each:
        there = (brought(args[0]), *brought(rest)), brought(kwargs)
    else:
        there = brought((tuple(args), kwargs))
    back = brought(there)
    for seen_there, returned in answers:
        assert seen_there == described(there)
        assert described(returned) == described(back)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("size", [0, 4, 1 << 18])
def test_tensors_of_every_layout_arrive(ranks: Ranks, layout: str, size: int) -> None:
    for dtype in DTYPES:
        x = tensor(size, dtype, layout)
        for seen_there, ((returned,), _) in ranks.run(look_and_return, x):
            assert seen_there == described(((brought(x),), {}))
            assert described(returned) == described(brought(x))


@pytest.mark.parametrize("size", [4, 1 << 20])
def test_arguments_that_share_memory_arrive_with_their_values(ranks: Ranks, size: int) -> None:
    x = torch.arange(float(size))
    views = (x, x[1:], x.view(2, -1).t(), x[:0])
    for seen_there, (returned, _) in ranks.run(look_and_return, *views):
        assert seen_there == described((brought(views), {}))
        assert described(returned) == described(brought(views))


@pytest.mark.parametrize("size", SIZES)
def test_functions_of_any_length_run(ranks: Ranks, size: int) -> None:
    def same(value: Any) -> Any:
        return value

    same.__doc__ = "d" * size
    assert ranks.run(same, "x" * size) == ["x" * size] * K
    assert ranks.run(with_constant(size), 1) == [(1, "c" * size)] * K
    assert ranks.run(with_docstring(size), 3) == [3 * 0.1 * math.pi] * K


def test_functions_with_one_another_or_themselves_run(ranks: Ranks) -> None:
    even = family()

    def both() -> Any:
        return [even(10), even(7)], even.calls == [19]  # type: ignore[attr-defined]

    assert ranks.run(both) == [([True, False], True)] * K
    assert even.__globals__["count"] == [0]
    assert ranks.run(adder(3), 4, twice=True) == [14] * K
    assert ranks.run(factorial, 20) == [math.factorial(20)] * K


def test_every_call_begins_with_what_the_cell_says(ranks: Ranks) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec("steps = 3\ndef step(a):\n    global steps\n    steps += a\n    return steps", names)
    assert [ranks.run(names["step"], 1) for _ in range(2)] == [[4] * K] * 2
    names["steps"] = 5
    assert ranks.run(names["step"], 1) == [6] * K


# What goes wrong ------------------------------------------------------------------------------


class MessageAlone(Exception):
    """Its arguments are not those of its ``__init__``."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")
        self.one = one


class ByName(OSError):
    def __init__(self, *, code: int) -> None:
        super().__init__(code, "by name")
        self.code = code


class Anew(ValueError):
    """Python would not even make its object."""

    def __new__(cls, one: int, two: int) -> "Anew":
        return super().__new__(cls, one)

    def __init__(self, one: int, two: int) -> None:
        super().__init__("anew")
        self.one = one


class TravelsWrongly(Exception):
    def __reduce__(self) -> Any:
        return int, ("no number",)


class Locked(Exception):
    """Nothing can send what it holds."""

    def __init__(self) -> None:
        super().__init__("locked")
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("make", "message", "seen"),
    [
        (lambda: MessageAlone(1, 2), "1 and 2", {"one": 1}),
        (lambda: ByName(code=7), "[Errno 7] by name", {"code": 7, "errno": 7}),
        (lambda: Anew(1, 2), "anew", {"one": 1}),
        (lambda: TwoArguments(3, "told"), "told (3)", {"code": 3, "text": "told"}),
        (lambda: TravelsWrongly("told"), "told", None),
        (Locked, "locked", None),
    ],
)
def test_an_exception_with_arguments_of_its_own_is_told_whole(
    ranks: Ranks, make: Callable[[], Exception], message: str, seen: dict[str, Any] | None
) -> None:
    def fails() -> None:
        raise make()

    with pytest.raises(RankError) as caught:
        ranks.run(fails)
    expected, error = make(), caught.value
    assert f"raised {type(expected).__name__}: {message}" in error.summary
    assert "test_handing_over.py, line" in error.summary
    if seen is not None:
        original: Any = error.original
        assert type(original) is type(expected)
        assert (str(original), original.args) == (str(expected), expected.args)
        assert {name: getattr(original, name) for name in seen} == seen


def test_exceptions_with_arguments_of_their_own_can_be_results(ranks: Ranks) -> None:
    def returns(error: Exception) -> Exception:
        return error

    for error in ranks.run(returns, MessageAlone(1, 2)):
        assert (type(error), str(error), error.one) == (MessageAlone, "1 and 2", 1)


def test_a_handle_that_is_returned_is_refused_in_words(ranks: Ranks) -> None:
    def starts() -> Any:
        return {"handles": [dist.all_reduce(torch.ones(2), async_op=True)]}

    with pytest.raises(RankError, match=r"must stay on its rank: call wait\(\) on it there"):
        ranks.run(starts)


def test_ranks_inside_ranks_are_refused_in_words(ranks: Ranks) -> None:
    with pytest.raises(TypeError, match=r"the function .*: a Ranks object cannot be sent"):
        ranks.run(lambda: ranks.run(len, "a"))
    with pytest.raises(TypeError, match=r"argument 1 .*: a Ranks object cannot be sent"):
        ranks.run(print, ranks)


@functools.cache
def fibonacci(n: int) -> int:
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)


@functools.singledispatch
def total(x: Any) -> Any:
    return x


@total.register
def _(x: list) -> Any:  # type: ignore[type-arg]
    return sum(total(each) for each in x)


class Cached:
    @functools.cached_property
    def ten_times_the_rank(self) -> int:
        return 10 * dist.get_rank()

    @functools.lru_cache(maxsize=3)  # noqa: B019
    def method(self, x: int) -> int:
        return x + 1

    @functools.singledispatchmethod
    def kind(self, x: Any) -> str:
        return "other"

    @kind.register
    def _(self, x: int) -> str:
        return "int"


def test_functions_that_functools_made_run(ranks: Ranks) -> None:
    def program() -> Any:
        made = Cached()
        return [
            fibonacci(50),
            fibonacci.cache_parameters()["maxsize"],
            total([1, [2, 3]]),
            (made.ten_times_the_rank, made.ten_times_the_rank),
            (made.method(1), Cached.method.cache_parameters()["maxsize"]),
            (made.kind(1), made.kind("1")),
        ]

    expected = [12586269025, None, 6, (0, 0), (2, 3), ("int", "other")]
    other = [*expected[:3], (10, 10), *expected[4:]]
    assert ranks.run(program) == [expected, other]
    assert ranks.run(fibonacci, 10) == [55, 55]
    assert ranks.run(functools.partial(total, [4, 5])) == [9, 9]


LOCK = threading.Lock()
GENERATOR = (i for i in range(3))


def test_the_variable_that_cannot_be_sent_is_named(ranks: Ranks) -> None:
    held = {"a": [1, GENERATOR]}

    class Holder:
        lock = LOCK

    def deep() -> Any:
        return [Holder.lock for _ in held]

    @torch.compile(backend="eager")
    def compiled(x: torch.Tensor) -> torch.Tensor:
        return x

    for function, words in (
        (lambda: LOCK.locked(), r"it uses LOCK \(lock\)"),
        (lambda: next(GENERATOR), r"it uses GENERATOR \(generator\)"),
        (lambda: held, r"it uses held\['a'\]\[1\] \(generator\)"),
        (functools.partial(deep), r"it uses Holder\.lock \(lock\)"),
        (lambda: compiled(torch.ones(1)), "it uses compiled .*call torch.compile in the function"),
    ):
        with pytest.raises(TypeError, match=f"the function cannot be sent.* {words}"):
            ranks.run(function)


def test_an_async_function_is_refused_in_words(ranks: Ranks) -> None:
    async def later() -> int:
        return 1

    with pytest.raises(TypeError, match=r"later is async.*lambda: asyncio\.run\(later\(\)\)"):
        ranks.run(later)
    assert ranks.run(lambda: asyncio.run(later())) == [1] * K


@pytest.mark.parametrize("on", ["cpu", "simulated"])
@pytest.mark.parametrize("timeout", ["5", -1, 0, math.nan, True])
def test_a_timeout_that_is_no_time_is_refused(on: Any, timeout: Any) -> None:
    with pytest.raises(ValueError, match="timeout must be above 0 seconds, or None"):
        Ranks(K, on=on, timeout=timeout)


def test_modules_that_a_function_reaches_are_imported_where_it_arrives() -> None:
    read = "import pickle, sys; print(pickle.load(sys.stdin.buffer)())"
    package = xml
    for function in (
        lambda: xml.dom.minidom.parseString("<a/>").nodeType,
        lambda: package.dom.minidom.parseString("<a/>").documentElement.tagName,
    ):
        done = subprocess.run(
            [sys.executable, "-c", read],
            input=pack(function).inline,
            capture_output=True,
            timeout=300,
        )
        assert done.stdout.split() == [str(function()).encode()], done.stderr.decode()
