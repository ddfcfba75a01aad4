"""DDP: data parallelism as a wrapper around a module, with the surface of PyTorch's.

    >>> from course_lib.ddp import DistributedDataParallel
    >>> model = DistributedDataParallel(model)      # on every rank; rank 0's weights are taken
    >>> for x, y in loader:                         # each rank's own shard
    ...     optimizer.zero_grad()
    ...     loss_fn(model(x), y).backward()         # gradients are averaged before this returns
    ...     optimizer.step()                        # the same step on every rank

It combines the rungs before it: shards (`sharding`), the mean of the ranks' gradients (`replicas`,
`gradient_sync`), buckets (`bucketing`) that leave during backward (`reducer`), and equal states at
the start (`module_states`).

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
    """Wrap `module` so that backward leaves in `.grad` the mean over the ranks of `group`.

    All ranks must construct it, with modules of the same structure; parameters and buffers are
    broadcast from the group's first rank. Gradients are views into flat buckets: clear them with
    `zero_grad()`, and do not keep them beyond the next backward. Keep the wrapper, though: when it
    is gone, its module is an ordinary one again, and nothing is synchronised. PyTorch's other names
    of arguments, as `process_group`, are understood or refused: see `pytorch_arguments`.

    Args:
        module: any module with parameters on one device, which is also that of the collectives.
        bucket_cap_mb: size of a bucket in MiB; 0 sends every parameter by itself.
        first_bucket_mb: size of the first bucket, which the network waits for.
        group: the process group; None for all ranks.
        comm_hook: what is done with a bucket, in place of averaging: `hook`, called with `group` as
            its state, or a pair `(state, hook)`. See `comm_hooks`.
        find_unused_parameters: allow that a loss does not depend on some of the parameters. They
            are averaged with zeros for the ranks that did not use them, and keep the gradient None
            where no rank did. Costs one more all-reduce per step. If False, such a parameter is an
            error, named at the end of backward.
        static_graph: promise that every backward is like the first: then unused parameters cost
            nothing more, and one may be used several times by reentrant checkpointing (`uses`).
        broadcast_buffers: broadcast the first rank's buffers (BatchNorm's statistics) not only at
            the start, but also before each forward that follows a synchronised one; so all ranks
            must run that one, even if it only evaluates.
        init_sync: check at the start that the models are alike, and make them equal. Without it
            that is left to the caller.
        ignored: names of parameters and buffers that are left alone: not averaged, not broadcast.
            Names set with PyTorch's `_set_params_and_buffers_to_ignore_for_model` count as well.
        allocate: `allocate(numel, dtype, device)` makes the memory in which all gradients of a
            dtype and device lie, for kinds that collectives work on directly: `empty` of a
            `peer_memory.SharedMemory`.

    Attributes:
        module: the module that was wrapped, for `state_dict()` and the like.
        require_backward_grad_sync: False stands for `no_sync`.

    Raises:
        RuntimeError: no parameter needs a gradient, or the ranks' models differ; later, in forward
            or backward, whatever would leave the replicas different. The message names the
            parameter and the rank.
        ValueError: there is no process group, this rank is not in it, or a size is negative.
        TypeError, NotImplementedError: an argument is unknown, or only PyTorch's DDP can do that.

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
        """The group, also where that is the one of all ranks; hooks written for PyTorch ask it."""
        return dist.group.WORLD if self.group is None else self.group

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle takes along: not the hooks, nor special memory.

        A deep copy stays in its group; where a pickle is loaded, the group is that of all ranks.
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
        """Let `hook(state, bucket)` do what is done with a bucket. Once, on every rank.

        Raises TypeError if it cannot be called, RuntimeError if there is a hook already.
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
        """Let `hook(state, named_buffers)` make buffers equal, in place of a broadcast.

        On every rank; after each synchronised forward, or before it. See `buffers`. Raises
        TypeError if it cannot be called.
        """
        if not callable(hook):
            raise TypeError(f"a buffer hook must be callable, not {hook!r}")
        self._around.buffers.hook = (state, hook, after_forward)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, and expect a backward (where gradients are on, and not in `no_sync`).

        Raises RuntimeError if the last backward did not end, or a parameter that was frozen when it
        was wrapped is not any more.
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

        So it may be called between `backward()` and `optimizer.step()`, any number of times, and
        changes nothing. It matters only on a rank whose loss used no parameter at all (with
        `find_unused_parameters`): there backward reaches nothing that could tell. Without that
        option it raises RuntimeError, naming the parameters.
        """
        self._around.reducer.finish()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients of the forwards inside, and their backwards, add up on each rank.

        The next forward and backward outside average all that has been added up. To accumulate M
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

        A rank that leaves the loop averages zeros until the last one leaves it; then all take over
        the state of one of the last. See `uneven_inputs`. With `divide_by_initial_world_size=False`
        the mean is over the ranks that still have batches, not over K.

        `enable=False` switches it off, for inputs known to be even. `throw_on_early_termination`:
        when the first rank leaves the loop, raise RuntimeError on all of them.
        """
        if not enable:
            return nullcontext()
        by_initial, throw = divide_by_initial_world_size, throw_on_early_termination
        return self._around.join(by_initial, throw, self.broadcast_buffers)

    def join_hook(self, **kwargs: Any) -> NoReturn:
        """Refuse `torch.distributed.algorithms.Join([model, …])`, which asks for this hook first.

        Raises NotImplementedError.
        """
        raise join_of_several()
