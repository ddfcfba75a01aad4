"""PyTorch's world of process groups, one per process: its tables, its numbers, and `new_group`.

Ranks that are processes use it from call to call. `thread_worlds` gives each thread its own world.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


def number_groups_from(count: int) -> None:
    """Give the next group that this process makes the number `count`, which is also its name."""
    c10d._world.group_count = count


def refuse_other_numbers(rank: int, world_size: int, own_rank: int, own_size: int) -> None:
    """Raise ValueError if a script joins with other numbers than this rank's; -1: not given."""
    if rank not in (-1, own_rank) or world_size not in (-1, own_size):
        raise ValueError(
            f"init_process_group(rank={rank}, world_size={world_size}) on rank {own_rank} of "
            f"{own_size}: these ranks are already in a process group. Leave out rank and world_size"
        )


def all_groups() -> list[Any]:
    """Return the groups of this process."""
    return list(c10d._world.pg_map)


def name_of(group: Any) -> str | None:
    """Return a group's name; ``None`` if it is in no table."""
    return c10d._world.pg_names.get(group)


def is_registered(backend: object) -> bool:
    """Return whether a backend of this name was added to PyTorch's own."""
    return str(backend).upper() in dist.Backend._plugins


def replace_new_group(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the function through which all groups are made by ``wrap(that function)``."""
    c10d._new_group_with_tag = wrap(c10d._new_group_with_tag)


def pickle_objects_with(pickler: Any) -> None:
    """Let ``dist.send_object_list`` and similar functions pickle with the class `pickler`."""
    c10d._pickler = pickler


def group_names(mesh: Any) -> Iterator[str]:
    """Yield the names of the groups that a device mesh holds."""
    yield from getattr(mesh, "_dim_group_names", None) or ()
    for info in getattr(mesh, "_dim_group_infos", None) or ():  # before 2.9
        yield info[2]


def tables_of(group: Any) -> tuple[Any, ...]:
    """Return the entries of a group in PyTorch's tables."""
    world = c10d._world
    return (
        world.pg_map[group],
        world.pg_names[group],
        world.pg_group_ranks[group],
        world.pg_backend_config[group],
        world.pg_to_tag.get(group),
        [tag for tag, groups in world.tags_to_pg.items() if group in groups],
    )


def put_back(group: Any, entries: tuple[Any, ...]) -> None:
    """Restore the table entries of a removed group that turned out to be in use."""
    world = c10d._world
    world.pg_map[group], name, world.pg_group_ranks[group] = entries[:3]
    world.pg_names[group] = name
    world.pg_backend_config[group] = entries[3]
    if entries[4] is not None:
        world.pg_to_tag[group] = entries[4]
    for tag in entries[5]:
        world.tags_to_pg.setdefault(tag, []).append(group)
    torch._C._distributed_c10d._register_process_group(name, group)
