"""A stream for communication: the GPU's way of doing two things at once.

Work on a GPU is put into streams: in order within a stream, side by side across streams. Backward
runs on the current stream. The work on a bucket (all-reduce, compression) goes to a second stream,
which first waits for the gradients. Before the optimizer runs, the current stream waits for the
second one. Both waits are events on the GPU: the host only records them and continues, so it stays
ahead of the GPU. On a CPU there are no streams, and all of this does nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class CommunicationStream:
    """A stream beside the current one of `device`; on a CPU, nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def after_current(self) -> Iterator[None]:
        """Let what is launched inside run after all that the current stream holds by now."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def join_current(self) -> None:
        """Let what the current stream is given from now on run after all that was launched here."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
