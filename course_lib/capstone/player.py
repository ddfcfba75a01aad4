"""Play a tape on a simulated rank: the referee's run, without the student's code.

No line is trusted. Names must be on the price list, and memory accesses must be within bounds. The
cost of a line is computed here, from the operator that really ran.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from course_lib.capstone.constants import Constants
from course_lib.capstone.operators import (
    FREE,
    GRADIENT,
    LAUNCH,
    RANDOM,
    base_name,
    check_bounds,
    operator_called,
    price,
)
from course_lib.capstone.tape import DTYPES, Tape, TapeError
from course_lib.ranks import Device, compute
from course_lib.ranks.for_graders import KINDS, Operation, check_tensors, here, why_not

_MAX_BYTES = 1 << 30
_NONSENSE = "a line of the tape is not valid"


@dataclass
class Played:
    """The result of playing a rank's tape.

    Attributes:
        weights: the tensors that the tape names as the trained weights.
        flops: floating-point operations.
        gradients: how often the gradient of a cross-entropy was computed.
        operators: the number of operators that ran.
        computed: seconds of computation.

    """

    weights: list[Tensor] = field(default_factory=list)
    flops: int = 0
    gradients: int = 0
    operators: int = 0
    computed: float = 0.0


class Player:
    """One rank's tape while it is played.

    Args:
        tape: the tape.
        given: the buffers 0, 1, …, with the shapes of the recording but with different numbers.
        device: the device, which sets the cost of computation.

    """

    def __init__(self, tape: Tape, given: Sequence[Tensor], device: Device) -> None:
        self._tape = tape
        self._device = device
        self._memory = {number: each.untyped_storage() for number, each in enumerate(given)}
        self._views: dict[tuple[Any, ...], Tensor] = {}
        self._generators: dict[int, torch.Generator] = {0: torch.default_generator}
        self._operators: dict[str, Callable[..., Any]] = {}
        self._operations: dict[int, tuple[Operation, list[Tensor]]] = {}
        self._constants = Constants()
        self._unspent = 0.0
        self._played = Played()
        self._kinds: dict[str, Callable[..., None]] = {
            "o": self._operator,
            "c": self._begin,
            "w": self._wait,
            "k": self._constant,
            "s": self._seed,
            "f": self._free,
        }

    def play(self) -> Played:
        """Execute the tape.

        Raises:
            TapeError: a line cannot be executed, or is not allowed.

        """
        for number, line in enumerate(self._tape.lines, 1):
            try:
                kind, *rest = line
                self._kinds[kind](*rest)
            except TapeError:
                raise
            except Exception as error:
                words = str(error).partition("\n")[0][:200]
                raise TapeError(
                    f"{_called(line)}, line {number} of the tape, cannot be repeated on another "
                    f"draw: {words}"
                ) from None
        self._spend()
        for operation, targets in self._operations.values():
            if targets:
                raise TapeError(
                    f"rank {operation.rank} never waits for the handle of {operation.kind} "
                    f"({operation.where}), so its data never arrive. Keep the handle, and "
                    "call .wait() before you use the tensors"
                )
        try:
            self._played.weights = [self._tensor(each).clone() for each in self._tape.weights]
        except Exception:
            raise TapeError(
                "the tape names no tensors as the trained weights. Train job.model itself"
            ) from None
        return self._played

    # Values ------------------------------------------------------------------------------------

    def _value(self, told: Any) -> Any:
        if not isinstance(told, list):
            return told
        match told:
            case ["t", *_]:
                return self._tensor(told)
            case ["l", *items]:
                return [self._value(each) for each in items]
            case ["d", int(which)]:
                return DTYPES[which]
            case ["v"]:
                return torch.device("cpu")
            case ["y"]:
                return torch.strided
            case ["m", "contiguous_format" | "preserve_format" | "channels_last" as name]:
                return getattr(torch, name)
            case ["g", int(which)]:
                return self._generators[which]
        raise TapeError(_NONSENSE)

    def _tensor(self, told: Any) -> Tensor:
        _, buffer, offset, size, stride, which = told
        key = (buffer, offset, *size, -1, *stride, which)
        known = self._views.get(key)
        if known is not None:
            return known
        dtype, storage = DTYPES[which], self._memory[buffer]
        numbers = [offset, which, *size, *stride]
        if any(type(n) is not int or n < 0 for n in numbers) or len(size) != len(stride):
            raise TapeError(_NONSENSE)
        last = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        if math.prod(size) and (last + 1) * dtype.itemsize > storage.nbytes():
            raise TapeError("the tape names memory that does not exist: do not resize a tensor")
        tensor = torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)
        self._views[key] = tensor
        return tensor

    # Lines -------------------------------------------------------------------------------------

    def _operator(
        self, name: str, args: list[Any], kwargs: dict[str, Any], outs: list[Any]
    ) -> None:
        operator = self._operators.get(name)
        if operator is None:
            try:
                operator = self._operators[name] = operator_called(name)
            except LookupError as error:
                raise TapeError(str(error)) from None
        self._constants.take_line(name, args, kwargs)
        values = [self._value(each) for each in args]
        named = {key: self._value(each) for key, each in kwargs.items()}
        check_bounds(base_name(name), values, named)
        out = operator(*values, **named)
        seconds, flops = price(operator, values, named, out, self._device)
        base = base_name(name)
        self._unspent += seconds
        self._played.flops += flops
        self._played.operators += 1
        self._played.gradients += base == GRADIENT
        got = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        for tensor, told in zip(got, outs, strict=True):
            if base in FREE and base not in RANDOM:
                tensor.zero_()  # memory that was never written must not carry numbers
            self._bind(tensor, told, name)

    def _bind(self, tensor: Tensor, told: Any, name: str) -> None:
        _, buffer, offset, size, stride, which = told
        if buffer in self._memory:
            return
        found = tensor.storage_offset(), list(tensor.shape), list(tensor.stride())
        if found != (offset, size, stride) or tensor.dtype is not DTYPES[which]:
            raise TapeError(
                f"{name} gives a tensor of a different shape when the data are drawn again. A tape "
                "cannot hold a shape that depends on the numbers, as in x[mask]: multiply by "
                "weights of 0 and 1 instead"
            )
        if sum(each.nbytes() for each in (tensor.untyped_storage(),)) > _MAX_BYTES:
            raise TapeError("a tensor is larger than a gigabyte")
        self._memory[buffer] = tensor.untyped_storage()

    def _constant(self, buffer: int, nbytes: int, data: str | None, where: str) -> None:
        self._constants.take_memory(nbytes, where)
        if data is None:
            raise TapeError(_NONSENSE)
        raw = bytearray(base64.b64decode(data))
        if len(raw) != nbytes or buffer in self._memory:
            raise TapeError(_NONSENSE)
        flat = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0)
        self._memory[buffer] = flat.clone().untyped_storage()

    def _seed(self, number: int, seed: int) -> None:
        self._generators.setdefault(number, torch.Generator()).manual_seed(seed)

    def _free(self, *buffers: int) -> None:
        gone = set(buffers)
        for buffer in gone:
            del self._memory[buffer]
        self._views = {key: view for key, view in self._views.items() if key[0] not in gone}

    # Messages ----------------------------------------------------------------------------------

    def _begin(
        self,
        number: int,
        kind: str,
        puts: list[Any],
        gets: list[Any],
        members: list[int],
        group: str,
        peer: int | None,
        op: str,
        tag: int,
        where: str,
    ) -> None:
        self._spend()
        context = here()
        if context.rank not in members or not set(members) <= set(range(context.world_size)):
            raise TapeError(_NONSENSE)
        # The message carries what the tensors hold now. Received data stay in other memory until
        # the wait, so using a tensor before that gains no time.
        inputs = [self._tensor(each).clone() for each in puts]
        targets = [self._tensor(each) for each in gets]
        outputs = inputs if gets == puts else [torch.empty_like(each) for each in targets]
        operation = Operation(
            *(context.rank, str(kind), str(group), tuple(members), inputs, outputs),
            peer=peer,
            op=str(op),
            tag=int(tag),
            where=str(where)[:200],
        )
        wrong = number in self._operations or kind not in KINDS
        if wrong or (KINDS[kind].reduces and why_not(operation.op, inputs[0].dtype)):
            raise TapeError(_NONSENSE)
        check_tensors(operation)
        if set(members) == {context.rank} or (peer == context.rank and kind in ("send", "recv")):
            moved = sum(each.nbytes for each in (*inputs, *outputs))  # no message: a copy
            self._unspent += LAUNCH + self._device.time(0, moved)
            self._spend()
        context.endpoint.post(operation)
        self._operations[number] = operation, targets if _gets(operation) else []

    def _wait(self, number: int) -> None:
        self._spend()
        operation, targets = self._operations.pop(number)
        operation.waited = True
        here().endpoint.wait(operation)
        for target, got in zip(targets, operation.outputs, strict=False):
            target.copy_(got)

    def _spend(self) -> None:
        """Advance the clock by the computation since the last message."""
        if self._unspent:
            compute(self._unspent)
            self._played.computed += self._unspent
            self._unspent = 0.0


def _gets(operation: Operation) -> bool:
    """Return whether the operation writes this rank's tensors; a broadcast at its root does not."""
    here = operation.peer == operation.rank
    return not {"broadcast": here, "reduce": not here}.get(operation.kind, False)


def _called(line: Any) -> str:
    """Return the name of the operation in a line of a tape; the line may be anything."""
    match line:
        case ["o", str(name), *_]:
            return name[:60]
        case ["c", _, str(kind), *_]:
            return kind[:60]
    return "an entry"
