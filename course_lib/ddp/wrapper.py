"""DDP: data parallelism as a wrapper around a module, with the interface of PyTorch's DDP.

    >>> from course_lib.ddp import DistributedDataParallel
    >>> model = DistributedDataParallel(model)      # on every rank; rank 0's weights are taken
    >>> for x, y in loader:                         # each rank's own shard
    ...     optimizer.zero_grad()
    ...     loss_fn(model(x), y).backward()         # gradients are averaged before this returns
    ...     optimizer.step()                        # the same step on every rank

It combines equal states at the start, equal buffers before each forward (`buffers`), buckets that
are sent during backward (`reducer`), and ranks that run out of batches (`uneven_inputs`). The
module runs as it would without a wrapper, so `torch.compile` sees only the module.

A script should run with either class. If an argument of PyTorch's only has a different name, it is
translated. If it asks for something that our class always does, it is accepted. If our class cannot
support it, it is refused by name, with the reason: ignoring it silently would change the training.
docs/ddp_beside_pytorch.md has the table.

With shards of equal size, its steps equal those of one machine with the batch of all ranks. If
shards differ in size, the mean over ranks is not the mean over examples: see
`gradient_sync.data_parallel_step`.

S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from course_lib.collectives import Group, place_in
from course_lib.ddp.buffers import (
    broadcast_module_states,
    broadcast_tensors,
    named_buffers,
    named_parameters,
    verify_same_model,
)
from course_lib.ddp.hooks import CommHook
from course_lib.ddp.reducer import Reducer
from course_lib.ddp.uneven_inputs import Activity
from course_lib.guard import Guard, form_of, rank_error, use_of

ACCEPTED = {
    "process_group": None,
    "device_mesh": None,
    "device_ids": None,
    "output_device": None,
    "forward_sync_buffers": None,
    "dim": 0,
    "check_reduction": False,
    "gradient_as_bucket_view": False,
    "batched_grad_copy": False,
    "lazy_bucket_allocation": False,
    "static_graph": False,
}
"""Name → its default in PyTorch."""

REFUSED = {
    "bucket_cap_mb_list": "give one cap, and `first_bucket_mb` for the first bucket",
    "delay_all_reduce_named_params": "name the parameters in `ignored` and reduce them yourself",
    "param_to_hook_all_reduce": "name the parameters in `ignored` and reduce them yourself",
    "mixed_precision": "run forward and loss in `with torch.autocast(…):`; gradients are then "
    "averaged in the parameters' dtype. A comm hook can send them in another dtype",
    "skip_all_reduce_unused_params": "before wrapping, freeze the parameters that no rank uses "
    "(requires_grad_(False)): then they are in no bucket",
}
"""Name → what to do instead."""

_NOT_COPIED = ("_reducer", "_guard", "_params", "_hooked_in", "_activity", "group", "device_mesh")
"""Attributes that no copy and no pickle takes over."""


class DistributedDataParallel(nn.Module):
    """Wrap `module` so that backward leaves the mean over the ranks of `group` in `.grad`.

    All ranks must construct the wrapper, with modules of the same structure. Parameters and buffers
    are broadcast from the group's first rank. Gradients are views into flat buckets: clear them
    with `zero_grad()`, and do not keep them beyond the next backward. Gradients of
    `torch.autograd.grad` are this rank's own, as it calls no hooks. Keep a reference to the
    wrapper: when it is deleted, its module is an ordinary module again, and nothing is
    synchronised. Other argument names of PyTorch, such as `process_group`, are accepted or refused:
    see `ACCEPTED` and `REFUSED`.

    Args:
        module: any module with parameters on one device; the collectives use the same device.
        bucket_cap_mb: size of a bucket in MiB; 0 sends every parameter by itself.
        first_bucket_mb: size of the first bucket, which the network waits for.
        group: the process group; None for all ranks.
        comm_hook: replaces averaging: `hook`, called with `group` as its state, or a pair
            `(state, hook)`. See `hooks`.
        find_unused_parameters: allow a loss that does not depend on some of the parameters. Their
            gradients are averaged with zeros for the ranks that did not use them, and stay None if
            no rank used them. This costs one more all-reduce per step. If False, such a parameter
            is an error, which names it at the end of backward.
        broadcast_buffers: broadcast the first rank's buffers (BatchNorm's statistics) not only at
            the start, but also before each forward that follows a synchronised one. So all ranks
            must run this forward, even if it only evaluates.
        init_sync: check at the start that the models match, and make them equal. If False, the
            caller must ensure this.
        ignored: names of parameters and buffers that are neither averaged nor broadcast. Names set
            with PyTorch's `_set_params_and_buffers_to_ignore_for_model` are ignored as well.

    Attributes:
        module: the module that was wrapped, for `state_dict()` and the like.
        require_backward_grad_sync: False inside `no_sync`.

    Raises:
        RuntimeError: no parameter needs a gradient, a parameter or buffer is lazy or on the meta
            device, or the ranks' models differ; later, forward or backward raise it for anything
            that would make the replicas differ. The message names the parameter and the rank.
        ValueError: there is no process group, this rank is not in it, or a size is negative.
        TypeError, NotImplementedError: an argument is unknown, or only PyTorch's DDP supports it.

    """

    def __init__(
        self,
        module: nn.Module,
        bucket_cap_mb: float | None = 25,
        first_bucket_mb: float = 1,
        group: Group = None,
        comm_hook: CommHook | tuple[Any, CommHook] | None = None,
        *,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool | None = True,
        init_sync: bool = True,
        ignored: Collection[str] = (),
        **pytorch: Any,
    ) -> None:
        super().__init__()
        arguments = _arguments(pytorch)
        sync = [arguments["forward_sync_buffers"], broadcast_buffers, True]
        self.broadcast_buffers: bool = next(choice for choice in sync if choice is not None)
        self.device_mesh = arguments["device_mesh"]
        self.group = _group(group, arguments["process_group"], self.device_mesh)
        self._device = _device(module, arguments["device_ids"], arguments["output_device"])
        place_in(self.group)
        self._ignored = {*ignored, *getattr(module, "_ddp_params_and_buffers_to_ignore", ())}
        _verify_numbers_exist(module, self._ignored)
        if init_sync:
            verify_same_model(module, self.group, self._ignored)
        if not any(param.requires_grad for _, param in named_parameters(module, self._ignored)):
            raise rank_error(
                "no parameter of this module needs a gradient, so there is nothing to synchronise",
                "Use the module without a wrapper.",
                "DistributedDataParallel is not needed when a module doesn't have any parameter "
                "that requires a gradient.",
            )
        if any(isinstance(inner, DistributedDataParallel) for inner in module.modules()):
            raise RuntimeError("part of this module is wrapped already: wrap the plain module")
        if init_sync:
            broadcast_module_states(module, 0, self.group, self._ignored)
        self.module = module
        self.require_backward_grad_sync = True
        cap = _cap(bucket_cap_mb)
        unused = find_unused_parameters or arguments["static_graph"]
        self._options = (cap, first_bucket_mb, unused)
        self._hook_in()
        if comm_hook is not None:
            pair = comm_hook if isinstance(comm_hook, tuple) else (self.group, comm_hook)
            self.register_comm_hook(*pair)

    def _hook_in(self) -> None:
        self._buffers_may_differ = True
        self._activity: Activity | None = None
        self._guard = Guard(self.module, self._ignored)
        self._make_reducer()

    def _make_reducer(self) -> None:
        params = named_parameters(self.module, self._ignored)
        trained = [(name, param) for name, param in params if param.requires_grad]
        # A copy may have only frozen parameters.
        self._reducer = Reducer(trained or params, self.group, *self._options)
        self._params = [param for _, param in params]
        self._hooked_in = [(form_of(param), use_of(param)) for param in self._params]

    def _follow_parameters(self) -> None:
        """Make the reducer again if parameters were converted, frozen, unfrozen or hooked.

        Raises RuntimeError if there are others.
        """
        self._guard.verify()
        if [(form_of(param), use_of(param)) for param in self._params] != self._hooked_in:
            last = self._reducer
            self._make_reducer()
            self._reducer.hook, self._reducer.divisor = last.hook, last.divisor

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The group, never None, for hooks written for PyTorch, which read this attribute."""
        return dist.group.WORLD if self.group is None else self.group

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy or a pickle, without hooks.

        A deep copy stays in its group. A wrapper loaded from a pickle uses the group of all ranks.
        """
        state = {**self.__dict__, "require_backward_grad_sync": True}
        for name in _NOT_COPIED:
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({"group": None, "device_mesh": None, **state})  # type: ignore[no-untyped-call]
        self._hook_in()

    def __deepcopy__(self, memo: dict[int, Any]) -> "DistributedDataParallel":
        twin = memo[id(self)] = type(self).__new__(type(self))
        place = {"group": self.group, "device_mesh": self.device_mesh}
        twin.__setstate__({**copy.deepcopy(self.__getstate__(), memo), **place})
        return twin

    def __copy__(self) -> "DistributedDataParallel":
        raise TypeError("two wrappers cannot share a module: use copy.deepcopy(model)")

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Use `hook(state, bucket)` to average a bucket. Call this once, on every rank.

        Raises TypeError if the hook is not callable, RuntimeError if there is a hook already.
        """
        if not callable(hook):
            raise TypeError(f"a communication hook must be callable, not {hook!r}")
        if self._reducer.hook is not None:
            raise RuntimeError(
                'there is a comm hook already. (PyTorch: "register_comm_hook or '
                'register_builtin_comm_hook can only be called once.")'
            )
        self._reducer.hook = (state, hook)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, and expect a backward (if gradients are enabled, and not in `no_sync`).

        Raises RuntimeError if the last backward did not end, or if the module has other parameters
        than those that were wrapped.
        """
        if self._device is not None:
            args, kwargs = tree_map_only(Tensor, self._move, (args, kwargs))
        synchronised = torch.is_grad_enabled() and self.require_backward_grad_sync
        self._before_forward(synchronised)
        outputs = self.module(*args, **kwargs)
        if synchronised:
            self._after_forward(outputs)
        return outputs

    # torch.compiler.disable, the public name, would load the compiler when this file is imported.
    @_disable_dynamo
    def _before_forward(self, synchronised: bool) -> None:
        """Prepare a forward; `synchronised` says whether its backward averages the gradients."""
        if synchronised and self._activity is not None:
            self._reducer.divisor = self._activity.announce(active=True)
        if synchronised or self._activity is None:  # ranks without inputs know only of these
            self._sync_buffers(synchronised)
        if synchronised:
            self._reducer.verify_ready()
            self._follow_parameters()
            self._reducer.prepare()
        elif torch.is_grad_enabled():
            self._reducer.stay_local()

    @_disable_dynamo
    def _after_forward(self, outputs: Any) -> None:
        self._reducer.watch(outputs)

    def _sync_buffers(self, synchronised: bool) -> None:
        """Make the buffers equal if the last forward may have made them different.

        `synchronised` says whether the backward of the coming forward averages the gradients.
        """
        if self.broadcast_buffers and self._buffers_may_differ:
            source = 0 if self._activity is None else self._activity.authority
            buffers = named_buffers(self.module, self._ignored)
            broadcast_tensors([b for _, b in buffers if b.numel()], source, self.group)
        self._buffers_may_differ = synchronised

    def _move(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)

    def finish_gradient_synchronization(self) -> None:
        """Wait until the gradients are averaged. Backward does this itself when it ends.

        So you may call it between `backward()` and `optimizer.step()`, any number of times, and it
        changes nothing. It is needed only on a rank whose loss used no parameter at all (with
        `find_unused_parameters`), because there backward reaches no hook. Without that option it
        raises RuntimeError, naming the parameters.
        """
        self._reducer.finish()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let the gradients of forwards and backwards inside add up on each rank.

        The next forward and backward outside average the accumulated gradients. To accumulate M
        micro-batches, put the first M - 1 inside: one synchronisation instead of M.
        """
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> AbstractContextManager[None]:
        """Train with different numbers of batches per rank: `with model.join(): for x in …`.

        A rank that leaves the loop averages zeros until the last rank leaves it. Then all ranks
        copy the state of one of the last. See `uneven_inputs`. With
        `divide_by_initial_world_size=False` the mean is over the ranks that still have batches, not
        over K.

        `enable=False` switches this off, for inputs that are known to be even. With
        `throw_on_early_termination`, all ranks raise RuntimeError when the first one leaves the
        loop.
        """
        if not enable:
            return nullcontext()
        return self._joined(divide_by_initial_world_size, throw_on_early_termination)

    @contextmanager
    def _joined(self, by_initial: bool, throw_early: bool) -> Iterator[None]:
        device = self._reducer.params[0].device
        self._activity = Activity(self.group, device, throw_early, by_initial)
        try:
            yield
            while divisor := self._activity.announce(active=False):
                self._reducer.divisor = divisor
                self._sync_buffers(True)
                self._reducer.contribute_zeros()
            source = self._activity.authority
            broadcast_module_states(self.module, source, self.group, self._ignored)
        finally:
            self._activity = None
            self._reducer.divisor = self._reducer.world_size


def _verify_numbers_exist(module: nn.Module, ignored: Collection[str]) -> None:
    for name, tensor in [*named_parameters(module, ignored), *named_buffers(module, ignored)]:
        if is_lazy(tensor) or tensor.is_meta:
            raise rank_error(
                f"'{name}' has no numbers yet, because it is lazy or on the meta device",
                "Before wrapping, run a lazy module once on a batch; give a module on the meta "
                "device memory by to_empty(device=…), and initialise it.",
                "Modules with uninitialized parameters can't be used with "
                "`DistributedDataParallel`.",
            )


def _arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return PyTorch's arguments, with defaults for those that are not in `options`.

    Raises TypeError for a name that PyTorch does not have either, and NotImplementedError for a
    refused name, unless its value is false.
    """
    for name, value in options.items():
        if name in REFUSED and value:
            raise NotImplementedError(f"DistributedDataParallel({name}=…): {REFUSED[name]}")
        if name not in REFUSED and name not in ACCEPTED:
            raise TypeError(
                f"DistributedDataParallel() got an unexpected keyword argument '{name}'"
            )
    return {**ACCEPTED, **options}


def _cap(bucket_cap_mb: float | None) -> float:
    if bucket_cap_mb is not None and not isinstance(bucket_cap_mb, int | float):
        raise TypeError(
            f"bucket_cap_mb={bucket_cap_mb!r} is not a number. PyTorch's second argument is "
            "device_ids: say device_ids=[…]"
        )
    return 25 if bucket_cap_mb is None else bucket_cap_mb


def _group(group: Group, process_group: Group, mesh: Any) -> Group:
    if sum(choice is not None for choice in (group, process_group, mesh)) > 1:
        raise RuntimeError(
            "group, process_group and device_mesh mean the same: give only one of them. (PyTorch: "
            '"Cannot specify both process_group and device_mesh arguments.")'
        )
    if mesh is not None:
        if mesh.ndim != 1:
            raise RuntimeError(
                f"Only 1D device mesh is supported, but got {mesh}. Give only the dimension along "
                'which the replicas lie, for example mesh["dp"]'
            )
        mesh_group: Group = mesh.get_group(mesh_dim=0)
        return mesh_group
    return group if process_group is None else process_group


def _device(module: nn.Module, device_ids: Any, output_device: Any) -> torch.device | None:
    """Return the module's device if the arguments name it, else None; no other may be named."""
    named = [*(device_ids or []), *([] if output_device is None else [output_device])]
    if not named:
        return None
    actual = next(module.parameters()).device
    devices = [
        torch.device(actual.type, d) if isinstance(d, int) else torch.device(d) for d in named
    ]
    if any(d.type != actual.type or d.index not in (None, actual.index) for d in devices):
        raise ValueError(
            f"DistributedDataParallel's device_ids={device_ids} and output_device={output_device} "
            f"must name the one GPU of the module's parameters, but these are on {actual}. First "
            "move the module with model.to(device). On a CPU, leave both arguments out"
        )
    return actual
