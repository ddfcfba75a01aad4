"""Our DDP under the private names by which PyTorch's tests reach our public names."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from course_lib.bucketing import MEGABYTE
from course_lib.ddp import DistributedDataParallel
from course_lib.ddp.buffers import BROADCAST_MB, broadcast_tensors


class WithPrivateNames(DistributedDataParallel):
    """Adds names only."""

    _set_params_and_buffers_to_ignore_for_model = staticmethod(
        TorchDDP._set_params_and_buffers_to_ignore_for_model
    )
    _get_data_parallel_params = staticmethod(TorchDDP._get_data_parallel_params)
    broadcast_bucket_size = BROADCAST_MB * MEGABYTE

    @property
    def parameters_to_ignore(self) -> set[str]:
        return self._ignored

    @property
    def forward_sync_buffers(self) -> bool:
        return self.broadcast_buffers

    def _default_broadcast_coalesced(self, tensors: list[Tensor]) -> None:
        broadcast_tensors(tensors, 0, self.group)

    @contextmanager
    def join(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        self._join_config = SimpleNamespace(enable=kwargs.get("enable", True))
        with super().join(*args, **kwargs):
            activity = self._activity
            yield
        self._authoritative_rank = activity.authority if activity else None
