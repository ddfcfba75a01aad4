"""PyTorch's arguments: names that scripts for PyTorch's DDP use, and that ours does not need.

    >>> from course_lib.ddp import DistributedDataParallel
    >>> model = DistributedDataParallel(model, process_group=dist.group.WORLD, init_sync=True)

A script should run with either class. If an argument only has a different name, it is translated.
If it asks for something that our class always does, it is accepted. If our class cannot support it,
it is refused by name, with the reason: ignoring it silently would change the training.

docs/ddp_beside_pytorch.md has the table.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from course_lib.collectives import Group

ACCEPTED = {
    "process_group": None,
    "device_mesh": None,
    "device_ids": None,
    "output_device": None,
    "bucket_cap_mb_list": None,
    "forward_sync_buffers": None,
    "dim": 0,
    "check_reduction": False,
    "gradient_as_bucket_view": False,
    "batched_grad_copy": False,
}
"""Name → its default in PyTorch."""

REFUSED = {
    "delay_all_reduce_named_params": "name the parameters in `ignored` and reduce them yourself",
    "param_to_hook_all_reduce": "name the parameters in `ignored` and reduce them yourself",
    "mixed_precision": "run forward and loss in `with torch.autocast(…):`; gradients are then "
    "averaged in the parameters' dtype. A comm hook can send them in another dtype",
    "skip_all_reduce_unused_params": "before wrapping, freeze the parameters that no rank uses "
    "(requires_grad_(False)): then they are in no bucket",
}
"""Name → what to do instead."""


@dataclass
class Translated:
    """The meaning of all arguments, in our names and PyTorch's.

    Attributes:
        group: the process group; None for all ranks.
        mesh: the device mesh that the group comes from, if any.
        device: the device that inputs are moved to; None leaves them where they are.
        caps: sizes of buckets in MiB, as `assign_buckets` takes them.
        sync_buffers: whether buffers are broadcast before each forward.

    """

    group: Group
    mesh: Any
    device: torch.device | None
    caps: float | Sequence[float]
    sync_buffers: bool


def translate(
    module: nn.Module,
    group: Group,
    bucket_cap_mb: float | None,
    broadcast_buffers: bool | None,
    arguments: Mapping[str, Any],
) -> Translated:
    """Return what our arguments, and those with PyTorch's names, mean for a wrapper of `module`.

    Raises TypeError for a name that PyTorch does not have either; NotImplementedError for a refused
    name, unless its value is false; ValueError or RuntimeError if arguments contradict one another
    or the module.
    """
    for name, value in arguments.items():
        if name in REFUSED and value:
            raise NotImplementedError(f"DistributedDataParallel({name}=…): {REFUSED[name]}")
        if name not in REFUSED and name not in ACCEPTED:
            raise TypeError(
                f"DistributedDataParallel() got an unexpected keyword argument '{name}'"
            )
    said = {**ACCEPTED, **arguments}
    if said["dim"] != 0:
        raise NotImplementedError(
            "DistributedDataParallel(dim=…): a rank has one device, so inputs are not split among "
            "devices; split them among ranks with a sampler"
        )
    caps = said["bucket_cap_mb_list"] or _cap(bucket_cap_mb)
    sync = [said["forward_sync_buffers"], broadcast_buffers, True]
    return Translated(
        group=_group(group, said["process_group"], said["device_mesh"]),
        mesh=said["device_mesh"],
        device=_device(module, said["device_ids"], said["output_device"]),
        caps=caps,
        sync_buffers=next(choice for choice in sync if choice is not None),
    )


def _cap(bucket_cap_mb: float | None) -> float:
    if bucket_cap_mb is not None and not isinstance(bucket_cap_mb, int | float):
        raise TypeError(
            f"bucket_cap_mb={bucket_cap_mb!r} is not a number. For several sizes say "
            "bucket_cap_mb_list=[…]. PyTorch's second argument is device_ids: say device_ids=[…]"
        )
    return 25 if bucket_cap_mb is None else bucket_cap_mb


def _group(group: Group, process_group: Group, mesh: Any) -> Group:
    if sum(given is not None for given in (group, process_group, mesh)) > 1:
        raise RuntimeError(
            "group, process_group and device_mesh mean the same: give only one of them. (PyTorch: "
            '"Cannot specify both process_group and device_mesh arguments.")'
        )
    if mesh is not None:
        if mesh.ndim != 1:
            raise RuntimeError(
                f"Only 1D device mesh is supported, but got {mesh}. Give only the dimension along "
                'which the replicas lie, for example mesh["dp"]'
            )
        found: Group = mesh.get_group(mesh_dim=0)
        return found
    return group if process_group is None else process_group


def _device(module: nn.Module, device_ids: Any, output_device: Any) -> torch.device | None:
    """Return the module's device if the arguments name it, else None; no other may be named."""
    named = [*(device_ids or []), *([] if output_device is None else [output_device])]
    if not named:
        return None
    if len(device_ids or []) > 1:
        raise ValueError(
            "device_ids can only be None or contain a single element, as in device_ids=[rank]: a "
            "rank uses one GPU"
        )
    actual = next(module.parameters()).device
    places = [
        torch.device(actual.type, d) if isinstance(d, int) else torch.device(d) for d in named
    ]
    elsewhere = [p for p in places if p.type != actual.type or p.index not in (None, actual.index)]
    if elsewhere or actual.type == "cpu":
        raise ValueError(
            f"DistributedDataParallel's device_ids={device_ids} and output_device={output_device} "
            f"must name the GPU of the module's parameters, but the parameters are on {actual}. "
            "First move the module with model.to(device). On a CPU, leave both arguments out"
        )
    return actual
