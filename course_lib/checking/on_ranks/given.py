"""The rank's side of a check: prepare the arguments, call the program, report its side effects.

The inputs and outputs are plain values. Nothing here decides anything, because this code runs on
untrusted ranks, in the same process as the student's code.
"""

from __future__ import annotations

import functools
import operator
import os
import threading
import types
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.checking.on_ranks.effects import Watch
from course_lib.checking.on_ranks.leaves import (
    ARRAY,
    leaves,
    tensors_in,
    with_tensors,
    without_numbers,
)
from course_lib.ranks.costs.computation import compute, examiner, is_simulated
from course_lib.ranks.explain.lines import is_installed
from course_lib.ranks.wire import NotPlainError, encode


class Given:
    """The case's forms, which a task's program gets in addition to its input, ready to pass on.

    Attributes:
        group: the process group of this rank, or ``None`` for all ranks.
        device: the device of the input's tensors; a model should be on it, too.

    """

    def __init__(
        self,
        form: dict[str, Any],
        inputs: Any,
        may_change: Sequence[str] = (),
        answers: Callable[[Any], tuple[Any, float]] | None = None,
    ) -> None:
        self._answers = answers
        self._iterable: str = form["iterable"]
        self._training: bool = form["training"]
        self.device = _device()
        self.group = _my_group(form["groups"])
        # Watch only after the groups are made: PyTorch may draw random numbers for their names.
        self.watch = Watch(inputs, may_change, form["seed"])

    def group_among(self, groups: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        """Return the group of this rank, for a function that works in several groups at once.

        Args:
            groups: lists of ranks, each rank in one of them; the same on all ranks.

        """
        group = _my_group(groups)
        assert group is not None, "every rank is in a group"
        return group

    def iterable(self, items: Sequence[Any]) -> Iterable[Any]:
        """Return the items as a list, a tuple or a generator; iterate over the result only once."""
        if self._iterable == "generator":
            return (item for item in items)
        return tuple(items) if self._iterable == "tuple" else list(items)

    def ask(self, question: Any) -> Any:
        """Return the answer to a question; see `Check`. Its virtual time passes meanwhile.

        In a sandbox the examiner answers. Elsewhere the rank has all that is needed to answer.
        """
        asks = examiner()
        if asks is not None:
            return asks(question)
        assert self._answers is not None, "this check answers no questions"
        answer, seconds = self._answers(question)
        if is_simulated():
            compute(seconds)
        return answer

    def model(self, module: nn.Module) -> nn.Module:
        """Return the module in the case's mode; its mode, hooks and structure are watched."""
        module.train(self._training)
        self.watch.add_module("the model", module)
        return module


_groups = threading.local()
"""The groups of this rank that earlier cases made; a process can hold only a limited number."""


def _my_group(groups: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
    """Return the one of these groups that has this rank; all ranks must pass the same groups."""
    if getattr(_groups, "world", None) is not dist.group.WORLD:
        _groups.world, _groups.made = dist.group.WORLD, {}
    own_group = None
    for members in map(tuple, groups):
        if members not in _groups.made:
            _groups.made[members] = dist.new_group(list(members))
        if dist.get_rank() in members:
            own_group = _groups.made[members]
    return own_group


class _Strict:
    """A context in which two mistakes are found that would otherwise pass by chance.

    Memory of ``torch.empty`` holds nan, or the largest integer. Without this context, it often
    holds zeros, and a function that forgets to write into it would sometimes be right. And
    ``init_process_group`` raises an error if there is a group already, as PyTorch's own function
    does; otherwise the ranks of this course let a script join again. Warnings are not shown: each
    case would repeat them above the report. The context is active for all threads of a process,
    until the last one leaves it.
    """

    def __init__(self) -> None:
        self._lock, self._active, self._left = threading.Lock(), 0, ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._active:
                self._left.enter_context(warnings.catch_warnings(action="ignore"))
                before, join = torch.get_deterministic_debug_mode(), dist.init_process_group
                self._left.callback(torch.set_deterministic_debug_mode, before)
                self._left.callback(setattr, dist, "init_process_group", join)
                torch.set_deterministic_debug_mode("warn")
                dist.init_process_group = functools.partial(_join, join)
            self._active += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._active -= 1
            if not self._active:
                self._left.close()


def _join(join: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    if dist.is_initialized():
        raise ValueError(
            "init_process_group: the caller has made the process group already, so use that one"
        )
    join(*args, **kwargs)


_STRICT = _Strict()

_DESTROYED = (
    "the process group was destroyed or replaced: leave it as it is, because the caller needs it"
)

Program = Callable[[Callable[..., Any], Any, Given], Any]


@dataclass(frozen=True)
class RankProgram:
    """A task's program in the form that a `Check` needs: from plain values to plain values.

    Args:
        program: the author's ``program(function, inputs, case)``.
        may_change: keys of the input that the function may change, or return.
        answers: answers the questions of the program, if no examiner does.
        withheld: keys of the input that only `answers` sees.

    """

    program: Program
    may_change: tuple[str, ...] = ()
    answers: Callable[[Any, Any], tuple[Any, float]] | None = None
    withheld: tuple[str, ...] = ()

    def __call__(self, function: Callable[..., Any], rank_input: Any) -> Any:
        """Run the program; return its value and the report of the state after the call."""
        with _STRICT:
            before, form = rank_input.get("before"), rank_input["form"]
            earlier_results = [] if before is None else self._kept_from(function, before)
            inputs = _laid_out(rank_input["own"], form["layout"])
            answers = None if self.answers is None else functools.partial(self.answers, inputs)
            inputs = without(inputs, self.withheld)
            case = Given(form, inputs, self.may_change, answers)
            case.watch.add_results(earlier_results)
            value = self._value(function, inputs, case)
            try:
                for name, leaf in leaves(value):
                    encode(leaf, without_numbers(name) or "the result")
            except NotPlainError as error:
                return {"refused": str(error)}
            return {"value": value, "left": case.watch.report(value)}

    def _kept_from(self, function: Callable[..., Any], before: Any) -> list[Tensor]:
        """Run the program with the input of an earlier call; return the tensors that it gave."""
        inputs = _laid_out(before["own"], before["form"]["layout"])
        value = self._value(function, inputs, Given(before["form"], None))
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.barrier()  # in the trace, the operations after it belong to the case itself
        return list(tensors_in(value))

    def _value(self, function: Callable[..., Any], inputs: Any, case: Given) -> Any:
        """Return what the program gives; of an exception, keep only the student's lines.

        Our lines and PyTorch's lead to theirs, or come after.
        """
        world = dist.group.WORLD  # None if a task needs no ranks and nobody made a group
        try:
            value = simple(self.program(function, inputs, case))
            if dist.group.WORLD is not world:
                raise RuntimeError(_DESTROYED)
        except Exception as error:
            raise error.with_traceback(own_frames(error.__traceback__, self.program)) from None
        return value


def without(inputs: Any, withheld: Sequence[str]) -> Any:
    """Return a rank's input without what is withheld from its program."""
    return {k: v for k, v in inputs.items() if k not in withheld} if withheld else inputs


def simple(value: Any) -> Any:
    """Convert NumPy's numbers to Python's, slices to pairs, and arrays to dicts with `ARRAY`."""
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(simple(item) for item in value)
    if type(value) is dict:
        return {key: simple(item) for key, item in value.items()}
    if isinstance(value, np.bool_ | np.floating):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return {ARRAY: torch.from_numpy(value)} if value.ndim else value.item()
    if isinstance(value, slice | range) and getattr(value, "step", None) in (None, 1):
        return simple((value.start, value.stop))
    if isinstance(value, Tensor | bool | int) or not hasattr(value, "__index__"):
        return value
    return operator.index(value)


def linear_of(weight: nn.Parameter, bias: Any) -> nn.Linear:
    """Return a layer that has these parameters; `bias` may be None. Nothing random is drawn."""
    layer = nn.Linear(1, 1, device="meta")
    layer.out_features, layer.in_features = weight.shape
    layer.weight, layer.bias = weight, bias
    return layer


def expect_function(value: object, name: str) -> Callable[..., Any]:
    """Return what a student's function returned, called `name`; raise TypeError unless callable."""
    if not callable(value):
        raise TypeError(f"{name} is {type(value).__name__}, expected a function")
    return value


def expect_pair(value: Any, name: str, pair: str) -> tuple[Any, Any]:
    """Return what a student's function returned if it is a `pair`, else raise TypeError."""
    if not isinstance(value, tuple) or len(value) != 2:
        raise TypeError(f"{name} returns {type(value).__name__}, expected {pair}")
    return value


def own_frames(trace: types.TracebackType | None, program: Program) -> types.TracebackType | None:
    """Return a traceback without the frames of the course, of the check and of PyTorch."""
    folder = os.path.dirname(program.__code__.co_filename)
    frames = []
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if os.path.dirname(name) != folder and not is_installed(name):
            frames.append(trace)
        trace = trace.tb_next
    following = None
    for frame in reversed(frames):
        following = types.TracebackType(following, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return following


def _device() -> torch.device:
    """Return this rank's device: CUDA is initialised only on GPU ranks."""
    return torch.device("cuda" if torch.cuda.is_initialized() else "cpu")  # type: ignore[no-untyped-call]


def _laid_out(value: Any, layout: str) -> Any:
    """Return the plain value with its tensors in the layout of the case, on this rank's device."""

    def laid_out(tensor: Tensor) -> Tensor:
        if layout == "transposed" and tensor.dim() > 1:
            tensor = tensor.transpose(0, -1).contiguous().transpose(0, -1)
        if layout == "strided" and tensor.dim():
            wide = tensor.new_zeros(*tensor.shape[:-1], 2 * tensor.shape[-1])
            wide[..., ::2] = tensor
            tensor = wide[..., ::2]
        return tensor.to(_device())

    return with_tensors(value, laid_out)
