"""A stream for communication: how a GPU computes and communicates at the same time.

Work on a GPU is put into streams. Work in one stream runs in order; work in different streams can
run at the same time. Backward runs on the current stream. The work on a bucket (all-reduce,
compression) goes to a second stream, which first waits for the gradients. Before the optimizer
runs, the current stream waits for the second one. Both waits are events on the GPU: the host only
records them and continues, so it stays ahead of the GPU. On a CPU there are no streams, and all of
this does nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class CommunicationStream:
    """A second stream of `device`, in addition to the current one; on a CPU, nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def after_current(self) -> Iterator[None]:
        """Run work that is launched inside after all work that is now in the current stream."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def join_current(self) -> None:
        """Run later work of the current stream after all work that was launched here."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
