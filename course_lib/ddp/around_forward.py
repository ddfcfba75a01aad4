"""Around forward: the ranks' common work before and after each rank runs its module.

Before forward, a rank tells the others whether it has inputs (`uneven_inputs`), makes the buffers
equal (`buffers`) and prepares for gradients (`reducer`). After forward, it learns where backward
will begin. In between, the module runs as it would without a wrapper. So `torch.compile` sees only
the module.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo

from course_lib.collectives import Group
from course_lib.ddp.buffers import Buffers
from course_lib.ddp.module_states import broadcast_module_states, named_parameters
from course_lib.ddp.reducer import Reducer
from course_lib.ddp.uneven_inputs import Activity


class AroundForward:
    """Synchronises `module` among the ranks of `group`, except for the names in `ignored`.

    `options` are the remaining arguments of `Reducer`.

    Attributes:
        reducer: averages the module's gradients.
        buffers: keeps the module's buffers equal.

    """

    def __init__(
        self, module: nn.Module, ignored: Collection[str], group: Group, options: Sequence[Any]
    ) -> None:
        named = named_parameters(module, ignored)
        trained = [(name, param) for name, param in named if param.requires_grad]
        # A copy may have only frozen parameters.
        self.reducer = Reducer(trained or named, group, *options)
        self.buffers = Buffers(module, ignored, group)
        self._frozen = [(name, param) for name, param in named if not param.requires_grad]
        self._module = module
        self._ignored = ignored
        self._activity: Activity | None = None
        self._divide_by_active = False

    # torch.compiler.disable, the public name, would load the compiler when this file is imported.
    @_disable_dynamo
    def before(self, synchronised: bool, sync_buffers: bool) -> None:
        """Prepare a forward; `synchronised` says whether its backward averages the gradients.

        Raises RuntimeError if the last backward did not end, or if a parameter that was frozen when
        it was wrapped now needs a gradient.
        """
        if synchronised and self._activity is not None:
            self._activity.announce(active=True)
        self._sync_buffers(synchronised, sync_buffers)
        if synchronised:
            self._check_frozen()
            self.reducer.prepare()
        elif torch.is_grad_enabled():
            self.reducer.stay_local()

    @_disable_dynamo
    def after(self, outputs: Any, sync_buffers: bool) -> None:
        """Do the work after a synchronised forward that returned `outputs`."""
        self.reducer.watch(outputs)
        if sync_buffers:
            self.reducer.other_waits += self.buffers.after_forward()

    def _sync_buffers(self, synchronised: bool, sync_buffers: bool) -> None:
        """Make the buffers equal if the last forward may have made them different."""
        source = 0
        if self._activity is not None:
            if not synchronised:
                return  # ranks without inputs do not know of this forward
            source = self._activity.authority
            active = len(self._activity.active)
            self.reducer.divisor = active if self._divide_by_active else self.reducer.world_size
        if sync_buffers:
            self.reducer.other_waits += self.buffers.before_forward(source, synchronised)

    def _check_frozen(self) -> None:
        for name, param in self._frozen:
            if param.requires_grad:
                raise RuntimeError(
                    f"'{name}' was frozen when the model was wrapped, but now needs a gradient. "
                    "This gradient would stay different on every rank: wrap the model again"
                )

    @contextmanager
    def join(self, by_initial: bool, throw_early: bool, sync_buffers: bool) -> Iterator[None]:
        """Let a rank that leaves the block join the others' collectives until all have left."""
        group, device = self.reducer.group, self.reducer.params[0].device
        self._activity = Activity(group, device, throw_early)
        self._divide_by_active = not by_initial
        try:
            yield
            while self._activity.announce(active=False):
                self._sync_buffers(True, sync_buffers)
                if sync_buffers:
                    self.reducer.other_waits += self.buffers.after_forward()
                self.reducer.contribute_zeros()
            source = self._activity.authority
            broadcast_module_states(self._module, source, group, self._ignored)
        finally:
            self._activity = None
            self.reducer.divisor = self.reducer.world_size
