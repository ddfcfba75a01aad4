"""Values on their way to a rank and back. What cloudpickle does by itself is not tested here."""

import asyncio
import functools
import math
import sys
import threading

import cloudpickle
import numpy as np
import pytest
import torch
import torch.distributed as dist
from IPython.core.autocall import ExitAutocall, ZMQExitAutocall

from course_lib.ranks import RankError, Ranks

# As the classes and functions of a notebook, those of this file travel by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

K = 2
# Lengths in bytes: what is longer than 8,192 goes through memory and not through the socket.
AROUND_A_SOCKET = [0, 1, 8_191, 8_192, 8_193, 65_536, 1 << 20]


@pytest.fixture(scope="module", params=["cpu", "simulated"])
def ranks(request: pytest.FixtureRequest):
    with Ranks(K, on=request.param, timeout=60) as ranks:
        yield ranks


DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float16]
LAYOUTS = {
    "as it is": lambda x: x,
    "transposed": lambda x: x.t(),
    "with gaps": lambda x: x[:, ::2],
    "an end": lambda x: x[1:],
    "one of many": lambda x: x.flatten()[::2][:1],
    "expanded": lambda x: x.sum().expand(2, 3),
    "channels last": lambda x: x.reshape(1, 2, 1, -1).to(memory_format=torch.channels_last),
    "empty": lambda x: x[:0],
    "a number": lambda x: x.sum(),
    "conjugate": lambda x: x.to(torch.complex64).conj(),
    "sparse": lambda x: x.to(torch.float32).to_sparse(),
    "a parameter": lambda x: torch.nn.Parameter(x.to(torch.float32)),
    "with a gradient to come": lambda x: x.to(torch.float32).requires_grad_(),
}


def seen(x: torch.Tensor):
    """Return what one can see of a tensor; its strides are those of a copy, without gaps."""
    dense = x.detach().to_dense() if x.is_sparse else x.detach()
    copied = zip(dense.clone().stride(), dense.shape, strict=True)
    strides = [step for step, n in copied if n > 1] if dense.numel() else []
    packed = dense.resolve_conj().clone(memory_format=torch.contiguous_format).reshape(-1)
    values = packed.view(torch.uint8).numpy().tobytes()
    return type(x), x.dtype, x.layout, x.shape, x.requires_grad, x.is_conj(), strides, values


def seen_and_returned(x):
    return seen(x), x


@pytest.mark.every_case
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("size", [0, 4, 1 << 14])
def test_tensors_of_every_layout_arrive(ranks: Ranks, layout: str, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    for dtype in DTYPES:
        values = (torch.randn(2, size // 4, generator=generator) * 10).to(dtype)
        if dtype.is_complex and layout in ("sparse", "a parameter", "with a gradient to come"):
            values = values.real
        x = LAYOUTS[layout](values)
        for seen_there, returned in ranks.run(seen_and_returned, x):
            assert seen_there == seen(x)
            assert seen(returned) == seen(x)


def same(value):
    return value


@pytest.mark.parametrize("size", AROUND_A_SOCKET)
def test_values_of_any_length_arrive(ranks: Ranks, size: int) -> None:
    def with_docstring(value):
        return value

    with_docstring.__doc__ = "d" * size
    assert ranks.run(with_docstring, ["x" * size, b"y" * size]) == [["x" * size, b"y" * size]] * K
    for array in ranks.run(same, np.arange(size, dtype="i2").reshape(1, -1).T):
        assert (np.arange(size, dtype="i2") == array.T).all() and array.shape == (size, 1)


@pytest.mark.parametrize("size", [4, 1 << 20])
def test_arguments_that_share_memory_arrive_with_their_values(ranks: Ranks, size: int) -> None:
    x = torch.arange(float(size))
    views = [x, x[1:], x.view(2, -1).t(), x[:0]]
    torch.testing.assert_close(ranks.run(same, views), [views] * K, rtol=0, atol=0)


def test_every_call_begins_with_what_the_cell_says(ranks: Ranks) -> None:
    names = {"__name__": "__main__"}
    exec("steps = 3\ndef step(a):\n    global steps\n    steps += a\n    return steps", names)
    assert [ranks.run(names["step"], 1) for _ in range(2)] == [[4] * K] * 2
    names["steps"] = 5
    assert ranks.run(names["step"], 1) == [6] * K


# What goes wrong ------------------------------------------------------------------------------


class MessageAlone(Exception):
    """Its arguments are not those of its ``__init__``."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")
        self.one = first


class TravelsWrongly(Exception):
    def __reduce__(self):
        return int, ("no number",)


class Locked(Exception):
    """Nothing can send what it holds."""

    def __init__(self) -> None:
        super().__init__("locked")
        self.lock = threading.Lock()


EXCEPTIONS = [lambda: MessageAlone(1, 2), lambda: TravelsWrongly("away"), Locked]


@pytest.mark.parametrize("make", EXCEPTIONS)
def test_an_exception_with_arguments_of_its_own_is_told_whole(ranks, make):
    def fails() -> None:
        raise make()

    with pytest.raises(RankError) as caught:
        ranks.run(fails)
    expected, error = make(), caught.value
    assert f"raised {type(expected).__name__}: {expected}" in error.summary
    assert "test_handing_over.py, line" in error.summary
    if isinstance(expected, MessageAlone):
        original = error.original
        assert type(original) is MessageAlone and original.one == 1
        assert (str(original), original.args) == ("1 and 2", ("1 and 2",))


def test_a_handle_that_is_returned_is_refused_in_words(ranks: Ranks) -> None:
    def starts():
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
def total(x):
    return x


@total.register
def _(x: list):
    return sum(total(item) for item in x)


class Cached:
    @functools.cached_property
    def ten_times_the_rank(self) -> int:
        return 10 * dist.get_rank()


def test_functions_that_functools_made_run(ranks: Ranks) -> None:
    def program():
        return [
            fibonacci(50),
            fibonacci.cache_parameters()["maxsize"],
            total([1, [2, 3]]),
            Cached().ten_times_the_rank,
        ]

    assert ranks.run(program) == [[12586269025, None, 6, 10 * r] for r in range(K)]
    assert ranks.run(fibonacci, 10) == [55, 55]
    assert ranks.run(lambda: torch.backends.cudnn.benchmark) == [False] * K  # a module of a class
    assert ranks.run(functools.partial(total, [4, 5])) == [9, 9]


LOCK = threading.Lock()
GENERATOR = (i for i in range(3))


def test_the_variable_that_cannot_be_sent_is_named(ranks: Ranks) -> None:
    held = {"a": [1, GENERATOR]}

    class Holder:
        lock = LOCK

    def deep():
        return [Holder.lock for _ in held]

    for function, message in (
        (lambda: LOCK.locked(), r"it uses LOCK \(lock\)"),
        (lambda: next(GENERATOR), r"it uses GENERATOR \(generator\)"),
        (lambda: held, r"it uses held \(dict\)"),
        (functools.partial(deep), r"it uses Holder \(type\)"),
    ):
        with pytest.raises(TypeError, match=f"the function cannot be sent.* {message}"):
            ranks.run(function)


@pytest.mark.parametrize("make", [ExitAutocall, ZMQExitAutocall])
def test_exit_of_a_notebook_ends_the_function(ranks: Ranks, make) -> None:
    """It would end the kernel; it has a reference to all of IPython, which cannot be sent."""
    leave = make(ip=LOCK)
    with pytest.raises(RankError, match=r"raised SystemExit: 3"):
        ranks.run(lambda: leave(3))


def test_an_async_function_is_refused_in_words(ranks: Ranks) -> None:
    async def later() -> int:
        return 1

    with pytest.raises(TypeError, match=r"later is async.*lambda: asyncio\.run\(later\(\)\)"):
        ranks.run(later)
    assert ranks.run(lambda: asyncio.run(later())) == [1] * K


@pytest.mark.parametrize("on", ["cpu", "simulated"])
@pytest.mark.parametrize("timeout", ["5", 0, math.nan, True])
def test_a_timeout_that_is_no_time_is_refused(on, timeout) -> None:
    with pytest.raises(ValueError, match="timeout must be above 0 seconds, or None"):
        Ranks(K, on=on, timeout=timeout)
