"""Write a rank's tape while its function runs: every operator, message and wait."""

from __future__ import annotations

import base64
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef as _WeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course_lib.capstone.constants import Constants
from course_lib.capstone.handle import TapedWork
from course_lib.capstone.operators import KNOWN, base_name
from course_lib.capstone.tape import DTYPES, Tape, TapeError
from course_lib.ranks.explain.lines import locator
from course_lib.ranks.for_graders import KINDS, Collective, PythonGroup, current, reduction_of

weak_reference: Callable[[Any], Any] = _WeakRef
"""A weak reference to a storage; `expired()` tells whether the storage is gone."""
_NOT_COMPUTING = ("profiler", "prim")
"""Namespaces of queries, such as the query for a device. They are made in C++, where an exception
would end the process."""
_SWEEP = 512
"""The number of lines between two searches for memory that has been freed."""


class Recorder(TorchDispatchMode):
    """Write the rank's work on a tape while the mode is active on this thread.

    Args:
        given: the buffers 0, 1, … of the tape, each a tensor with memory of its own.

    Attributes:
        tape: the tape so far.

    """

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = Tape()
        self._known: dict[int, tuple[Any, int]] = {}
        self._buffers = 0
        self._constants = Constants()
        self._operations = 0
        self._paused = False
        self._swept = 0
        self._generators: dict[int, tuple[int, torch.Generator]] = {}
        self._states: dict[int, Tensor] = {}
        context = current()
        self._locate = locator({}) if context is None else context.locate
        for tensor in given:
            self._new_buffer(tensor)

    def tensors(self, tensors: Sequence[Tensor]) -> list[list[Any]]:
        """Return the names of these tensors on the tape."""
        return [self._tensor(each) for each in tensors]

    # Operators ---------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused or func.namespace in _NOT_COMPUTING:
            return func(*args, **kwargs)
        if _is_composite(func):  # inference mode does not decompose it; only its parts have prices
            with self:
                return func.decompose(*args, **kwargs)
        if func.is_view or func._overloadpacket is torch.ops.aten.set_:
            for leaf in tree_leaves(args):
                if isinstance(leaf, Tensor):
                    self._tensor(leaf)
            return func(*args, **kwargs)
        written = [self._argument(each) for each in args], self._named(kwargs)
        generator = self._before_random(func, kwargs)
        out = func(*args, **kwargs)
        if generator is not None:
            self._states[id(generator)] = generator.get_state()
        self._write(func, *written, out)
        return out

    def _write(self, func: Any, args: list[Any], kwargs: dict[str, Any], out: Any) -> None:
        outs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        made = [each for each in outs if self._buffer_of(each) is None]
        if outs and not made and not func._schema.is_mutable:
            return  # the operator only returned a view
        if base_name(func.name()) == "resize_":
            raise TapeError(
                "resize_ is not on the price list, so you cannot use it here. Nor can you use "
                "all_gather_object, broadcast_object_list and similar functions, which use resize_ "
                "internally. Send tensors of a size that all ranks know"
            )
        if base_name(func.name()) not in KNOWN:
            raise TapeError(
                f"{func.name()} is not on the price list, so you cannot use it here. Use matrix "
                "products and element-wise operations instead"
            )
        self._constants.take_line(func.name(), args, kwargs)
        for each in made:
            if self._buffer_of(each) is None:
                self._new_buffer(each)
        self._line("o", func.name(), args, kwargs, [self._tensor(each) for each in outs])

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, list | tuple):
            return ["l", *(self._argument(each) for each in value)]
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, torch.dtype):
            return ["d", _dtype(value)]
        if isinstance(value, torch.device):
            return ["v"]
        if isinstance(value, torch.layout):
            return ["y"]
        if isinstance(value, torch.memory_format):
            return ["m", str(value).removeprefix("torch.")]
        if isinstance(value, torch.Generator):
            return ["g", self._generator(value)]
        raise TapeError(
            f"an operation got an argument of type {type(value).__name__}, which a tape cannot "
            "hold. Give operations only tensors, numbers, text, and lists of them"
        )

    def _named(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {name: self._argument(value) for name, value in kwargs.items()}

    # Memory ------------------------------------------------------------------------------------

    def _tensor(self, tensor: Tensor) -> list[Any]:
        if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
            raise TapeError(
                f"a tape cannot hold a tensor of {tensor.dtype} with the layout {tensor.layout}"
            )
        if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            raise TapeError(
                f"a {type(tensor).__name__} has no memory of its own. A tape cannot record tools "
                "that trace or rewrite code (torch.export, make_fx, …): call the module itself"
            )
        buffer = self._buffer_of(tensor)
        if buffer is None:
            buffer = self._constant(tensor)
        size, stride = list(tensor.shape), list(tensor.stride())
        return ["t", buffer, tensor.storage_offset(), size, stride, _dtype(tensor.dtype)]

    def _buffer_of(self, tensor: Tensor) -> int | None:
        known = self._known.get(tensor.untyped_storage()._cdata)
        return None if known is None else known[1]

    def _new_buffer(self, tensor: Tensor) -> int:
        # The weak reference prevents reuse of the address, but does not keep the memory alive.
        storage = tensor.untyped_storage()
        self._known[storage._cdata] = weak_reference(storage), self._buffers
        self._buffers += 1
        return self._buffers - 1

    def _constant(self, tensor: Tensor) -> int:
        """Write a constant, made by no operator, on the tape: a Python number or NumPy's result."""
        storage = tensor.untyped_storage()
        data = None
        if self._constants.take(storage.nbytes()):
            with self._pause():
                flat = torch.empty(0, dtype=torch.uint8).set_(storage)
                data = base64.b64encode(bytes(flat.numpy().data)).decode()
        buffer = self._new_buffer(tensor)
        where = "" if data is not None else self._locate()
        self._line("k", buffer, storage.nbytes(), data, where)
        return buffer

    def _line(self, *line: Any) -> None:
        self.tape.lines.append(list(line))
        if len(self.tape.lines) - self._swept > _SWEEP:
            gone = [key for key, (seen, _) in self._known.items() if seen.expired()]
            free = [self._known.pop(key)[1] for key in gone]
            if free:
                self.tape.lines.append(["f", *free])
            self._swept = len(self.tape.lines)

    # Random numbers ----------------------------------------------------------------------------

    def _before_random(self, func: Any, kwargs: dict[str, Any]) -> torch.Generator | None:
        """Write the generator's seed on the tape if it was seeded since its last use."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return None
        generator = kwargs.get("generator") or torch.default_generator
        number = self._generator(generator)
        last = self._states.get(id(generator))
        if last is None or not torch.equal(last, generator.get_state()):
            self._line("s", number, generator.initial_seed())
        return generator

    def _generator(self, generator: torch.Generator) -> int:
        if generator is torch.default_generator:
            return 0
        return self._generators.setdefault(id(generator), (len(self._generators) + 1, generator))[0]

    # Messages ----------------------------------------------------------------------------------

    def collective(
        self,
        group: PythonGroup,
        collective: Collective,
        arguments: tuple[Any, ...],
        options: Any,
        launch: Callable[[], dist.Work],
    ) -> dist.Work:
        """Write a collective on the tape, and launch it."""
        if self._paused:
            return launch()
        kind = KINDS[collective.kind]
        root = group.members[options.rootRank] if kind.to_one else None
        op = reduction_of(options.reduceOp) if kind.reduces else ""
        numbers = [
            self._begin(kind.name, puts, gets, group, root, op, 0)
            for puts, gets in collective.operations(arguments, group.size())
        ]
        return self._launch(launch, numbers)

    def message(
        self,
        group: PythonGroup,
        kind: str,
        tensors: Any,
        peer: int | None,
        tag: int,
        launch: Callable[[], dist.Work],
    ) -> dist.Work:
        """Write a send or a recv on the tape, and launch it."""
        if self._paused:
            return launch()
        puts, gets = (tensors, []) if kind == "send" else ([], tensors)
        return self._launch(launch, [self._begin(kind, puts, gets, group, peer, "", tag)])

    def _begin(
        self,
        kind: str,
        puts: Sequence[Tensor],
        gets: Sequence[Tensor],
        group: PythonGroup,
        peer: int | None,
        op: str,
        tag: int,
    ) -> int:
        self._operations += 1
        refs = [[self._tensor(each) for each in tensors] for tensors in (puts, gets)]
        name = group.getGroupName()
        rest = (list(group.members), name, peer, op, tag, self._locate())
        self._line("c", self._operations, kind, *refs, *rest)
        return self._operations

    def _launch(self, launch: Callable[[], dist.Work], numbers: list[int]) -> dist.Work:
        with self._pause():
            work = launch()
        return TapedWork(work, self.unseen, lambda: self.waited(numbers))

    def waited(self, numbers: list[int]) -> None:
        """Write the waits for these operations on the tape."""
        for number in numbers:
            self._line("w", number)
        numbers.clear()

    @contextmanager
    def _pause(self) -> Iterator[None]:
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    unseen = _pause


@functools.cache
def _is_composite(func: Any) -> bool:
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key))


def _dtype(dtype: torch.dtype) -> int:
    if dtype not in DTYPES:
        raise TapeError(f"a tape cannot hold tensors of {dtype}")
    return DTYPES.index(dtype)
