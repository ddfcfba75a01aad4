"""Follow the memory of a rank through a training step, and draw it over time.

    >>> with MemoryOverTime(clock, optimizer) as memory:
    ...     step(batch)
    >>> figure = memory_over_time({"DDP": memory.moments})

Each piece of memory that an operator reads or writes is followed until it is freed. What it is for
is known by its use: memory of a trained tensor that the optimizer does not have is gathered
weights, memory of a `.grad` and all that is computed from gradients alone is gradients, and memory
that autograd saves is activations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_KINDS = {
    "optimizer's state": ("#999999", ""),
    "weights": ("#0072B2", ""),
    "gathered weights": ("#56B4E9", "////"),
    "gradients": ("#D55E00", "\\\\\\\\"),
    "activations": ("#009E73", "...."),
    "other": ("#FFFFFF", ""),
}
"""Kinds of memory from the bottom of the figure to its top, with colour and hatch."""


_UNTOUCHED = "gradients of the step before"


class Moment(NamedTuple):
    """The bytes that a rank holds at one time, in ms since the start, by kind."""

    ms: float
    held: Mapping[str, int]


class MemoryOverTime(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, looks at this thread's memory after every operator.

    Args:
        clock: returns the time in seconds.
        optimizer: has the weights, their gradients and its state.

    `moments` is complete when the `with` statement has ended.

    """

    def __init__(self, clock: Callable[[], float], optimizer: Optimizer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moments: list[Moment] = []
        self._clock, self._begin = clock, clock()
        self._number: dict[int, int] = {}  # of a piece of memory that is followed, by its address
        self._kind: dict[int, str] = {}  # of a piece, by its number
        self._looks: list[tuple[float, dict[int, int]]] = []
        self._saved = torch.autograd.graph.saved_tensors_hooks(self._on_save, lambda saved: saved)
        weights = [param for group in optimizer.param_groups for param in group["params"]]
        self._trained = set(weights)
        self._follow(weights, "weights")
        states = [list(state.values()) for state in optimizer.state.values()]
        self._follow(states, "optimizer's state")
        # What `zero_grad` drops, nobody touches; a simulated network may keep it for longer.
        self._follow([param.grad for param in weights], _UNTOUCHED)

    def __enter__(self) -> MemoryOverTime:
        self._saved.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._saved.__exit__(*error)
        for ms, sizes in self._looks:
            held = dict.fromkeys([*_KINDS, _UNTOUCHED], 0)
            for piece, nbytes in sizes.items():
                held[self._kind[piece]] += nbytes
            del held[_UNTOUCHED]
            self.moments.append(Moment(ms, held))
        for address in self._number:
            _let_go(address)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        # A forward that runs again begins at leaves too: at activations.
        leaves = {t for t in read if t.is_leaf and t.requires_grad}
        trained = {t for t in leaves - self._trained if self._kind_of(t) != "activations"}
        self._follow(list(trained), "gathered weights")
        self._trained |= trained
        written = () if func.is_view else out
        kinds = {self._kind_of(t) for t in read}
        self._follow(written, "gradients" if kinds == {"gradients"} else "other")
        for tensor in tree_leaves(written):
            if isinstance(tensor, Tensor) and self._kind_of(tensor) == _UNTOUCHED:
                self._kind[self._number[_memory_of(tensor)]] = "gradients"
        self._look()
        return out

    def _on_save(self, tensor: Tensor) -> Tensor:
        self._follow(tensor, "activations")
        return tensor

    def _kind_of(self, tensor: Tensor) -> str | None:
        return self._kind.get(self._number.get(_memory_of(tensor), -1))

    def _follow(self, tensors: Any, kind: str) -> None:
        """Follow the memory of tensors; what was "other" until now has another kind from now on."""
        for tensor in tree_leaves(tensors):
            if not isinstance(tensor, Tensor):
                continue
            address = _memory_of(tensor)
            piece = self._number.get(address)
            if piece is None:
                # As long as this reference lives, no other memory gets the address.
                tensor.untyped_storage()._weak_ref()
                piece = self._number[address] = len(self._kind)
                self._kind[piece] = kind
            elif self._kind[piece] == "other":
                self._kind[piece] = kind

    def _look(self) -> None:
        self._follow([param.grad for param in self._trained], "gradients")
        sizes = {}
        for address, piece in list(self._number.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(address)
            if storage is None:
                _let_go(address)
                del self._number[address]
            else:
                sizes[piece] = storage.nbytes()
        self._looks.append((1e3 * (self._clock() - self._begin), sizes))


def _memory_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _let_go(address: int) -> None:
    torch.UntypedStorage._free_weak_ref(address)  # type: ignore[no-untyped-call]


def memory_over_time(panels: Mapping[str, Sequence[Moment]]) -> Figure:
    """Draw the bytes by kind over time, one panel above the other; return the figure."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        len(panels), 1, sharex=True, sharey=True, squeeze=False, layout="constrained",
        figsize=(9.6, 0.6 + 2.4 * len(panels)),
    )  # fmt: skip
    for ax, (title, moments) in zip(axes[:, 0], panels.items(), strict=True):
        times = [moment.ms for moment in moments]
        below = [0.0] * len(moments)
        for kind, (color, hatch) in _KINDS.items():
            above = [b + m.held[kind] / 1e3 for b, m in zip(below, moments, strict=True)]
            ax.fill_between(
                times, below, above, step="post", label=kind,
                facecolor=color, hatch=hatch, edgecolor="black", linewidth=0.4,
            )  # fmt: skip
            below = above
        ax.set_title(title, loc="left", fontsize=11)
        ax.set(ylabel="kB")
        ax.margins(x=0)
    axes[0, 0].set_ylim(0, None)
    axes[-1, 0].set_xlabel("time (ms)")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(
        handles[::-1], labels[::-1], loc="outside right center", frameon=False,
    )  # fmt: skip
    return figure
