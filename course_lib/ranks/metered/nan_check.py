"""The first communication that carries NaN: where it went wrong, and not where it shows."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def refuse_nan(kind: str, tensors: Sequence[torch.Tensor], puts: bool = True) -> None:
    """Check what a rank puts into a collective or a message.

    `puts`: whether it does; who waits for another's broadcast may bring anything.

    Raises:
        FloatingPointError: some of it is NaN; says how much and where.

    """
    for tensor in tensors if puts else ():
        if tensor.is_meta or not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        values = tensor.detach()
        found = torch.isnan(values).reshape(-1).nonzero()
        if found.numel():
            first = torch.unravel_index(found[0, 0], values.shape or (1,))
            place = ", ".join(str(int(index)) for index in first)
            raise FloatingPointError(
                f"{kind} carries NaN: {found.numel()} of {values.numel()} elements, the first at "
                f"[{place}]"
            )
