"""Mixed precision: matrix products in 16 bits, sums that accumulate in 32.

Parameters, gradients, their averages and the optimizer stay in float32; autocast casts the inputs
of a matrix product. bfloat16 has float32's range and 8 significant bits. float16 has 11, but its
smallest number is about 6e-8, and many gradients are smaller. So the loss is scaled up before
backward, and gradients are scaled down before the step. If a gradient overflows, the step is
skipped and the scale is halved. All ranks decide the same, because they see the same averages.

P. Micikevicius et al., "Mixed Precision Training", 2018.
"""

from contextlib import AbstractContextManager

import torch

from course_lib.train.config import ConfigError, PrecisionName


class Precision:
    """How to compute with precision `name` on `device`.

    Attributes:
        scaler: scales the loss with `fp16`; otherwise it changes nothing.

    Raises:
        ConfigError: the device does not have this precision; the message says which to use.

    """

    def __init__(self, name: PrecisionName, device: torch.device) -> None:
        if name == "fp16" and device.type != "cuda":
            raise ConfigError(
                "--precision fp16 needs a GPU: on the CPU it is slower than fp32 and its gradients "
                "underflow. Use --precision bf16 or fp32."
            )
        self._device_type = device.type
        self._enabled = name != "fp32"
        self._dtype = torch.float16 if name == "fp16" else torch.bfloat16
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == "fp16")

    def autocast(self) -> AbstractContextManager[None]:
        """Return the context for forward and loss; backward uses the same types automatically."""
        return torch.autocast(self._device_type, dtype=self._dtype, enabled=self._enabled)
