"""A mesh: every rank has one coordinate for each kind of parallelism.

    >>> from course_lib.mesh import make_mesh
    >>> mesh = make_mesh(data=1, tensor=2)  # on two ranks
    >>> mesh["tensor"].size()
    2

Take eight ranks as data × pipeline × tensor = 2 × 2 × 2. The last axis counts fastest, like the
last digit of a number:

    rank = (d · P + p) · T + t           d = 0           d = 1
                                       t=0   t=1       t=0   t=1
                                 p=0    0  ─  1         4  ─  5      ─  a group along tensor
                                 p=1    2  ─  3         6  ─  7

Ranks that differ only in one coordinate are a *group* of this axis: {0, 1} of tensor, {0, 2} of
pipeline, {0, 4} of data. A rank is in one group of each axis. Every algorithm of the course that
takes a `group` runs on the group of an axis as it runs on all ranks.

A node holds ranks with consecutive numbers. So the order of the axes determines which axes stay
inside a node: first the last one.

D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", SC 2021. PyTorch's is `torch.distributed.device_mesh.init_device_mesh`.
"""

import itertools
import math
from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Mesh:
    """The axes of a mesh, and the groups that this rank is in."""

    sizes: dict[str, int]
    """Axis → its number of coordinates, outermost axis first."""
    coordinates: dict[str, int]
    """Axis → this rank's coordinate on it."""
    groups: dict[str, dist.ProcessGroup]
    """Axis, or the names of two joined by ``×`` → this rank's group."""

    def __getitem__(self, axis: str) -> dist.ProcessGroup:
        """Return this rank's group of an axis."""
        return self.groups[axis]


AXES = ("data", "pipeline", "expert", "tensor")
"""The axes in their default order: the axis with the most communication comes last."""


def make_mesh(**sizes: int) -> Mesh:
    """Return the mesh of all ranks with these axes, outermost first; an axis left out has size 1.

    The names of axes are those of `AXES`. All ranks must call. Traces show a group by the name of
    its axis. In addition to the groups of single axes, there is ``data×expert``: ranks that have
    the same weights except for those of experts.

    Raises ValueError for an unknown axis, or if the sizes do not multiply to the number of ranks.
    """
    unknown = sizes.keys() - set(AXES)
    if unknown or min(sizes.values(), default=1) < 1:
        raise ValueError(f"axes must be among {', '.join(AXES)}, of size 1 or more; got {sizes}")
    sizes = {**{axis: 1 for axis in AXES if axis not in sizes}, **sizes}
    world_size = dist.get_world_size()
    if (product := math.prod(sizes.values())) != world_size:
        shape = " × ".join(f"{axis} {size}" for axis, size in sizes.items())
        raise ValueError(
            f"the sizes {shape} have the product {product}, but there are {world_size} ranks: "
            "choose other sizes"
        )
    places = list(itertools.product(*(range(size) for size in sizes.values())))
    coordinates = dict(zip(sizes, places[dist.get_rank()], strict=True))
    together = [*((axis,) for axis in AXES), ("data", "expert")]
    groups = {"×".join(axes): _groups_along(axes, list(sizes), places) for axes in together}
    return Mesh(sizes, coordinates, groups)


def _groups_along(
    axes: tuple[str, ...], order: list[str], places: list[tuple[int, ...]]
) -> dist.ProcessGroup:
    """Return this rank's group: all ranks with its coordinates, except for those of `axes`."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(places):
        fixed = tuple(at for axis, at in zip(order, place, strict=True) if axis not in axes)
        groups.setdefault(fixed, []).append(rank)
    own_group: dist.ProcessGroup | None = None
    for ranks in groups.values():  # every rank makes all groups, in one order
        group = dist.new_group(ranks, group_desc="×".join(axes))
        own_group = group if dist.get_rank() in ranks else own_group
    assert own_group is not None, "every rank has a place on every axis"
    return own_group
