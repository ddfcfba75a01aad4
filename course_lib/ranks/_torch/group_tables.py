"""PyTorch's tables of process groups: what is in them, and how a group is put back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d


def group_names(mesh: Any) -> Iterator[str]:
    """Yield the names of the groups that a device mesh holds."""
    yield from getattr(mesh, "_dim_group_names", None) or ()
    for info in getattr(mesh, "_dim_group_infos", None) or ():  # before 2.9
        yield info[2]


def tables_of(group: Any) -> tuple[Any, ...]:
    """Return what the tables hold of a group."""
    world = c10d._world
    return (
        world.pg_map[group],
        world.pg_names[group],
        world.pg_group_ranks[group],
        world.pg_backend_config[group],
        world.pg_to_tag.get(group),
        [tag for tag, groups in world.tags_to_pg.items() if group in groups],
    )


def put_back(group: Any, kept: tuple[Any, ...]) -> None:
    """Enter again a group that was taken out and turned out to be in use."""
    world = c10d._world
    world.pg_map[group], name, world.pg_group_ranks[group] = kept[:3]
    world.pg_names[group] = name
    world.pg_backend_config[group] = kept[3]
    if kept[4] is not None:
        world.pg_to_tag[group] = kept[4]
    for tag in kept[5]:
        world.tags_to_pg.setdefault(tag, []).append(group)
    torch._C._distributed_c10d._register_process_group(name, group)
