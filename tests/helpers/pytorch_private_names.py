"""Our DDP under the private names by which PyTorch's tests reach what ours offers by public ones."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _BufferCommHookLocation

from course_lib.ddp import DistributedDataParallel


class WithPrivateNames(DistributedDataParallel):
    """Adds names only."""

    _set_params_and_buffers_to_ignore_for_model = staticmethod(
        TorchDDP._set_params_and_buffers_to_ignore_for_model
    )

    def _register_buffer_comm_hook(
        self, state: Any, hook: Any, location: Any = _BufferCommHookLocation.POST_FORWARD
    ) -> None:
        self.register_buffer_hook(state, hook, location == _BufferCommHookLocation.POST_FORWARD)

    @contextmanager
    def join(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        with super().join(*args, **kwargs):
            activity = self._around._activity
            yield
        self._authoritative_rank = activity.authority if activity else None
