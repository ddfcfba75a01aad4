"""DDP: data parallelism as a wrapper around a module, with the interface of PyTorch's DDP.

    >>> from course_lib.ddp import DistributedDataParallel
    >>> model = DistributedDataParallel(model)      # on every rank; rank 0's weights are taken
    >>> for x, y in loader:                         # each rank's own shard
    ...     optimizer.zero_grad()
    ...     loss_fn(model(x), y).backward()         # gradients are averaged before this returns
    ...     optimizer.step()                        # the same step on every rank

It combines earlier modules of the course: shards (`sharding`), the mean of the ranks' gradients
(`replicas`, `gradient_sync`), buckets (`bucketing`) that are sent during backward (`reducer`), and
equal states at the start (`module_states`).

With shards of equal size, its steps equal those of one machine with the batch of all ranks. If
shards differ in size, the mean over ranks is not the mean over examples (see `replicas`).

S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

import copy
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from course_lib.collectives import Group, place_in
from course_lib.ddp.around_forward import AroundForward
from course_lib.ddp.bucket_memory import Allocate, allocate_empty
from course_lib.ddp.buffers import BufferHook
from course_lib.ddp.comm_hooks import CommHook
from course_lib.ddp.errors import join_of_several, nothing_to_train
from course_lib.ddp.module_states import (
    broadcast_module_states,
    named_parameters,
    verify_same_model,
)
from course_lib.ddp.pytorch_arguments import translate


class DistributedDataParallel(nn.Module):
    """Wrap `module` so that backward leaves the mean over the ranks of `group` in `.grad`.

    All ranks must construct the wrapper, with modules of the same structure. Parameters and buffers
    are broadcast from the group's first rank. Gradients are views into flat buckets: clear them
    with `zero_grad()`, and do not keep them beyond the next backward. Keep a reference to the
    wrapper: when it is deleted, its module is an ordinary module again, and nothing is
    synchronised. Other argument names of PyTorch, such as `process_group`, are accepted or refused:
    see `pytorch_arguments`.

    Args:
        module: any module with parameters on one device; the collectives use the same device.
        bucket_cap_mb: size of a bucket in MiB; 0 sends every parameter by itself.
        first_bucket_mb: size of the first bucket, which the network waits for.
        group: the process group; None for all ranks.
        comm_hook: replaces averaging: `hook`, called with `group` as its state, or a pair
            `(state, hook)`. See `comm_hooks`.
        find_unused_parameters: allow a loss that does not depend on some of the parameters. Their
            gradients are averaged with zeros for the ranks that did not use them, and stay None if
            no rank used them. This costs one more all-reduce per step. If False, such a parameter
            is an error, which names it at the end of backward.
        static_graph: promise that every backward is like the first. Then unused parameters cost
            nothing more, and reentrant checkpointing may use a parameter several times (`uses`).
        broadcast_buffers: broadcast the first rank's buffers (BatchNorm's statistics) not only at
            the start, but also before each forward that follows a synchronised one. So all ranks
            must run this forward, even if it only evaluates.
        init_sync: check at the start that the models match, and make them equal. If False, the
            caller must ensure this.
        ignored: names of parameters and buffers that are neither averaged nor broadcast. Names set
            with PyTorch's `_set_params_and_buffers_to_ignore_for_model` are ignored as well.
        allocate: `allocate(numel, dtype, device)` makes the memory that holds all gradients of a
            dtype and device. Use it for special memory that collectives work on directly, such as
            `empty` of a `peer_memory.SharedMemory`.

    Attributes:
        module: the module that was wrapped, for `state_dict()` and the like.
        require_backward_grad_sync: False inside `no_sync`.

    Raises:
        RuntimeError: no parameter needs a gradient, or the ranks' models differ; later, forward or
            backward raise it for anything that would make the replicas differ. The message names
            the parameter and the rank.
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
        static_graph: bool = False,
        broadcast_buffers: bool | None = True,
        init_sync: bool = True,
        ignored: Collection[str] = (),
        allocate: Allocate = allocate_empty,
        **pytorch: Any,
    ) -> None:
        super().__init__()
        said = translate(module, group, bucket_cap_mb, broadcast_buffers, pytorch)
        self.group, self.device_mesh, self._device = said.group, said.mesh, said.device
        place_in(self.group)
        self._ignored = {*ignored, *getattr(module, "_ddp_params_and_buffers_to_ignore", ())}
        if init_sync:
            verify_same_model(module, self.group, self._ignored)
        if not any(param.requires_grad for _, param in named_parameters(module, self._ignored)):
            raise nothing_to_train()
        if any(isinstance(inner, DistributedDataParallel) for inner in module.modules()):
            raise RuntimeError("part of this module is wrapped already: wrap the plain module")
        if init_sync:
            broadcast_module_states(module, 0, self.group, self._ignored)
        self.module = module
        self.broadcast_buffers = said.sync_buffers
        self.require_backward_grad_sync = True
        self._options = (said.caps, first_bucket_mb, find_unused_parameters, static_graph)
        self._hook_in(allocate)
        if comm_hook is not None:
            pair = comm_hook if isinstance(comm_hook, tuple) else (self.group, comm_hook)
            self.register_comm_hook(*pair)

    def _hook_in(self, allocate: Allocate) -> None:
        options = (*self._options, allocate)
        self._around = AroundForward(self.module, self._ignored, self.group, options)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The group, never None, for hooks written for PyTorch, which read this attribute."""
        return dist.group.WORLD if self.group is None else self.group

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy or a pickle, without hooks and special memory.

        A deep copy stays in its group. A wrapper loaded from a pickle uses the group of all ranks.
        """
        state = {**self.__dict__, "require_backward_grad_sync": True}
        for name in ("_around", "group", "device_mesh"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({"group": None, "device_mesh": None, **state})  # type: ignore[no-untyped-call]
        self._hook_in(allocate_empty)

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
        if self._around.reducer.hook is not None:
            raise RuntimeError(
                'there is a comm hook already. (PyTorch: "register_comm_hook or '
                'register_builtin_comm_hook can only be called once.")'
            )
        self._around.reducer.hook = (state, hook)

    def register_buffer_hook(
        self, state: Any, hook: BufferHook, after_forward: bool = True
    ) -> None:
        """Use `hook(state, named_buffers)` instead of a broadcast to make buffers equal.

        Register it on every rank. It runs after each synchronised forward, or before it. See
        `buffers`. Raises TypeError if the hook is not callable.
        """
        if not callable(hook):
            raise TypeError(f"a buffer hook must be callable, not {hook!r}")
        self._around.buffers.hook = (state, hook, after_forward)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, and expect a backward (if gradients are enabled, and not in `no_sync`).

        Raises RuntimeError if the last backward did not end, or if a parameter that was frozen when
        it was wrapped now needs a gradient.
        """
        if self._device is not None:
            args, kwargs = tree_map_only(Tensor, self._move, (args, kwargs))
        synchronised = torch.is_grad_enabled() and self.require_backward_grad_sync
        self._around.before(synchronised, self.broadcast_buffers)
        outputs = self.module(*args, **kwargs)
        if synchronised:
            self._around.after(outputs, self.broadcast_buffers)
        return outputs

    def _move(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)

    def finish_gradient_synchronization(self) -> None:
        """Wait until the gradients are averaged. Backward does this itself when it ends.

        So you may call it between `backward()` and `optimizer.step()`, any number of times, and it
        changes nothing. It is needed only on a rank whose loss used no parameter at all (with
        `find_unused_parameters`), because there backward reaches no hook. Without that option it
        raises RuntimeError, naming the parameters.
        """
        self._around.reducer.finish()

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
        by_initial, throw = divide_by_initial_world_size, throw_on_early_termination
        return self._around.join(by_initial, throw, self.broadcast_buffers)

    def join_hook(self, **kwargs: Any) -> NoReturn:
        """Refuse `torch.distributed.algorithms.Join([model, …])`, which calls this first.

        Raises NotImplementedError.
        """
        raise join_of_several()
