"""Count on the rank, operation by operation, how many bytes of tensors it holds at once.

Only the rank itself can count this, because these tensors are smaller than the pages of memory that
the system counts. The examiner knows one lower bound: all values that the rank returns were held at
once.

The count contains the memory of every tensor that an operation has read or written since the count
began, no matter who made the tensor, for as long as the memory exists. Views share their memory.
Tensors that a rank has but never uses are not counted, and neither are lists of numbers. In a
value that a program returns, every tensor counts as if it had its own memory.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_SHOWN = 4


def held_by(value: Any) -> Iterator[Tensor]:
    """Yield each tensor that a value holds, once, at any depth.

    The search goes into containers, the attributes of objects, and functions: their closures, their
    defaults, and the objects that methods are bound to. It ignores global names, because they
    belong to the notebook, and objects of PyTorch's own classes, except for modules.
    """
    seen: dict[int, Any] = {}  # keeps the objects alive, so that no id is used twice
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen[id(each)] = each
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, dict):
            waiting += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple | set | frozenset):
            waiting += each
        elif isinstance(each, types.FunctionType):
            waiting += [_content(cell) for cell in each.__closure__ or ()]
            waiting += [each.__defaults__, each.__kwdefaults__, vars(each)]
        elif isinstance(each, types.MethodType | classmethod | staticmethod):
            waiting += [each.__func__, getattr(each, "__self__", None)]
        elif isinstance(each, functools.partial):
            waiting += [each.func, each.args, each.keywords]
        elif isinstance(each, property):
            waiting += [each.fget, each.fset]
        elif isinstance(each, nn.Module) or _is_own(each):
            # The __dict__ of a class is a view, not a dict.
            waiting.append(dict(getattr(each, "__dict__", {})))
            waiting += each.__mro__ if isinstance(each, type) else type(each).__mro__


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that is not bound yet
        return None


def _is_own(each: Any) -> bool:
    """Return whether a class, or the class of an object, is the student's own."""
    module = (each if isinstance(each, type) else type(each)).__module__
    return module.partition(".")[0] not in ("torch", "course_lib", *sys.stdlib_module_names)


class HeldMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts bytes of tensors while it is active, on the thread that has entered it.

    Attributes:
        most: the largest number of bytes held at once.
        largest: shapes and dtypes of the largest tensors at that moment.

    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0
        self.largest: list[str] = []
        self._held: dict[int, tuple[weakref.ref[Any], str]] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation; count the tensors before and after it."""
        kwargs = kwargs or {}
        self._look(args, kwargs)
        output = func(*args, **kwargs)
        self._look(output)
        return output

    def _look(self, *values: Any) -> None:
        for tensor in tree_leaves(values):
            if isinstance(tensor, Tensor):
                memory = tensor.untyped_storage()
                known = self._held.get(memory._cdata)
                if known is None or known[0]() is None:
                    name = f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
                    self._held[memory._cdata] = weakref.ref(memory), name
        # Read all sizes again each time: a storage may be resized without an operation.
        sizes = []
        for key, (ref, name) in list(self._held.items()):
            if (storage := ref()) is None:
                del self._held[key]
            else:
                sizes.append((storage.nbytes(), name))
        if (total := sum(size for size, _ in sizes)) > self.most:
            self.most = total
            self.largest = [name for _, name in sorted(sizes, reverse=True)[:_SHOWN]]

    def add_whole(self, value: Any) -> None:
        """Count the tensors of a plain value as if each had memory of its own."""
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        self.most = max(self.most, sum(t.numel() * t.element_size() for t in tensors))

    @property
    def counts(self) -> dict[str, Any]:
        """The counts, as a plain value."""
        return {"most": self.most, "largest": self.largest}
