"""DDP: data parallelism as a wrapper around a module, with the surface of PyTorch's.

    >>> from course_lib.ddp import DistributedDataParallel
    >>> model = DistributedDataParallel(model)      # on every rank; rank 0's weights are taken
    >>> for x, y in loader:                         # each rank's own shard
    ...     optimizer.zero_grad()
    ...     loss_fn(model(x), y).backward()         # gradients are averaged before this returns
    ...     optimizer.step()                        # the same step on every rank

Everything before it comes together here: shards (`sharding`), the mean of the ranks' gradients
(`replicas`, `gradient_sync`), buckets (`bucketing`) that are sent while backward goes on
(`reducer`), equal states at the start (`module_states`).

With shards of equal size the steps are those of one machine with the batch of all ranks. Where
shards differ in size, the mean over ranks is not the mean over examples (see `replicas`).

S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.collectives import Group, place_in
from course_lib.ddp.bucket_memory import Allocate, allocate_empty
from course_lib.ddp.comm_hooks import CommHook
from course_lib.ddp.module_states import (
    broadcast_module_states,
    broadcast_tensors,
    verify_same_model,
)
from course_lib.ddp.reducer import Reducer
from course_lib.ddp.uneven_inputs import Activity


class DistributedDataParallel(nn.Module):
    """Wrap `module` so that backward leaves in `.grad` the mean over the ranks of `group`.

    All ranks must construct it, with modules of the same structure; parameters and buffers are
    broadcast from the group's first rank. Gradients are views into flat buckets: clear them with
    `zero_grad()`, and do not keep them beyond the next backward. Keep the wrapper, though: when it
    is gone, its module is an ordinary one again, and nothing is synchronised.

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
        broadcast_buffers: broadcast the first rank's buffers (BatchNorm's statistics) not only at
            the start, but also before each forward that follows a synchronised one; so all ranks
            must run that one, even if it only evaluates.
        allocate: `allocate(numel, dtype, device)` makes the memory in which all gradients of a
            dtype and device lie, for kinds that collectives work on directly: `empty` of a
            `peer_memory.SharedMemory`.

    Attributes:
        module: the module that was wrapped, for `state_dict()` and the like.

    Raises:
        RuntimeError: no parameter needs a gradient, or the ranks' models differ; later, in forward
            or backward, whatever would leave the replicas different. The message names the
            parameter and the rank.
        ValueError: there is no process group, this rank is not in it, or a size is negative.

    """

    def __init__(
        self,
        module: nn.Module,
        bucket_cap_mb: float = 25,
        first_bucket_mb: float = 1,
        group: Group = None,
        comm_hook: CommHook | tuple[Any, CommHook] | None = None,
        *,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
        allocate: Allocate = allocate_empty,
    ) -> None:
        super().__init__()
        place_in(group)
        verify_same_model(module, group)
        if not any(param.requires_grad for param in module.parameters()):
            raise RuntimeError(
                "no parameter of this module needs a gradient, so there is nothing to synchronise: "
                "use the module without DistributedDataParallel"
            )
        if any(isinstance(inner, DistributedDataParallel) for inner in module.modules()):
            raise RuntimeError("part of this module is wrapped already: wrap the plain module")
        broadcast_module_states(module, 0, group)
        self.module = module
        self.group = group
        self.broadcast_buffers = broadcast_buffers
        self._modules_inside = list(module.modules())
        self._options = (bucket_cap_mb, first_bucket_mb, find_unused_parameters)
        self._hook_in(allocate)
        if comm_hook is not None:
            pair = comm_hook if isinstance(comm_hook, tuple) else (group, comm_hook)
            self.register_comm_hook(*pair)
        self._sync = True
        self._buffers_may_differ = True
        self._activity: Activity | None = None
        self._divide_by_active = False

    def _hook_in(self, allocate: Allocate) -> None:
        # Each once, under its first name: a tied parameter is one parameter.
        named = list(self.module.named_parameters())
        trained = [(name, param) for name, param in named if param.requires_grad]
        self._frozen = [(name, param) for name, param in named if not param.requires_grad]
        # A copy may be frozen as a whole.
        self._reducer = Reducer(trained or named, *self._options, self.group, allocate)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle takes along: not the comm hook, nor special memory.

        A deep copy stays in its group; where a pickle is loaded, the group is that of all ranks.
        """
        state = {**self.__dict__, "_sync": True, "_activity": None, "_divide_by_active": False}
        del state["_reducer"], state["_frozen"], state["group"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({"group": None, **state})  # type: ignore[no-untyped-call]
        self._hook_in(allocate_empty)

    def __deepcopy__(self, memo: dict[int, Any]) -> "DistributedDataParallel":
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__setstate__({**copy.deepcopy(self.__getstate__(), memo), "group": self.group})
        return twin

    def __copy__(self) -> "DistributedDataParallel":
        raise TypeError("two wrappers cannot share a module: use copy.deepcopy")

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Let `hook(state, bucket)` do what is done with a bucket. Once, on every rank.

        Raises RuntimeError if there is a hook already.
        """
        if self._reducer.hook is not None:
            raise RuntimeError("there is a comm hook already: it can be registered only once")
        self._reducer.hook = (state, hook)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, and expect a backward (where gradients are on, and not in `no_sync`).

        Raises RuntimeError if the last backward did not end, or a parameter that was frozen when it
        was wrapped is not any more.
        """
        synchronised = torch.is_grad_enabled() and self._sync
        if synchronised and self._activity is not None:
            self._activity.announce(active=True)
        self._before_forward(synchronised)
        if synchronised:
            self._check_frozen()
            self._reducer.prepare()
        elif torch.is_grad_enabled():
            self._reducer.stay_local()
        outputs = self.module(*args, **kwargs)
        if synchronised:
            self._reducer.watch(outputs)
        return outputs

    def _before_forward(self, synchronised: bool) -> None:
        """Make buffers equal, where the last forward may have made them different."""
        source = 0
        if self._activity is not None:
            if not synchronised:
                return  # ranks without inputs do not hear of this forward
            source = self._activity.authority
            active = len(self._activity.active)
            self._reducer.divisor = active if self._divide_by_active else self._reducer.world_size
        if self._buffers_may_differ and self.broadcast_buffers:
            broadcast_tensors(self._current_buffers(), source, self.group)
        self._buffers_may_differ = synchronised

    def _current_buffers(self) -> list[Tensor]:
        """Return the buffers, looked up anew: a module may have replaced one by another tensor."""
        found = [b for m in self._modules_inside for b in m._buffers.values() if b is not None]
        return [b for b in dict.fromkeys(found) if b.numel()]

    def _check_frozen(self) -> None:
        for name, param in self._frozen:
            if param.requires_grad:
                raise RuntimeError(
                    f"'{name}' was frozen when it was wrapped and is not any more, so its gradient "
                    "would stay different on every rank: wrap the model again"
                )

    def finish_gradient_synchronization(self) -> None:
        """Wait until the gradients are averaged. Backward does this itself when it ends.

        So it may be called between `backward()` and `optimizer.step()`, any number of times, and
        changes nothing. It matters only on a rank whose loss used no parameter at all (with
        `find_unused_parameters`): there backward reaches nothing that could tell. Without that
        option it raises RuntimeError, naming the parameters.
        """
        self._reducer.finish()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients of the forwards inside, and their backwards, add up on each rank.

        The next forward and backward outside average all that has been added up. To accumulate M
        micro-batches, put the first M - 1 inside: one synchronisation instead of M.
        """
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    @contextmanager
    def join(self, divide_by_initial_world_size: bool = True) -> Iterator[None]:
        """Train with different numbers of batches per rank: `with model.join(): for x in …`.

        A rank that leaves the loop averages zeros until the last one leaves it; then all take over
        the state of one of the last. See `uneven_inputs`. With `divide_by_initial_world_size=False`
        the mean is over the ranks that still have batches, not over K.
        """
        self._activity = Activity(self.group, self._reducer.params[0].device)
        self._divide_by_active = not divide_by_initial_world_size
        try:
            yield
            while self._activity.announce(active=False):
                self._before_forward(synchronised=True)
                self._reducer.contribute_zeros()
            broadcast_module_states(self.module, self._activity.authority, self.group)
        finally:
            self._activity = None
            self._reducer.divisor = self._reducer.world_size
