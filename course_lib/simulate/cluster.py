"""A cluster as numbers: devices, and the links inside a node and between nodes.

A device reaches less than its data sheet says: see `Reached`. The numbers here are rounded from
those that `published.validate` fits to half of the published runs.

Sources of the presets: `course_lib.ranks`' table of devices and networks, of NVIDIA's data sheets;
the number and rate of adapters is given for each.
"""

from dataclasses import dataclass, replace

from course_lib.cost_model import Link
from course_lib.ranks import Device
from course_lib.ranks.costs.presets import A100, H100, NVLINK_3, NVLINK_4


@dataclass(frozen=True)
class Reached:
    """The shares of the data sheet that a program reaches; `published.fit` fits all of them.

    Args:
        matmul: share of the peak that matrix products reach.
        traffic: how often a forward moves the bytes it keeps for backward through memory.
        inside: share of the bandwidth inside a node.
        between: share of the bandwidth between nodes.
        hidden: share of communication that overlaps completely with computation.
        waiting: share of a step lost for each doubling of the ranks, by waiting for the slowest.

    """

    matmul: float
    traffic: float = 5.6
    inside: float = 0.9
    between: float = 0.9
    hidden: float = 0.05
    waiting: float = 0.0


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of `node_size` devices.

    Args:
        device: its peak rate (FLOP/s) and memory bandwidth (bytes/s).
        memory: bytes of a device's memory.
        node_size: devices of one node.
        inside: latency and bandwidth from one device to the others of its node, in each direction.
        between: the same to other nodes, for one device: for one adapter, if each has its own.
        oversubscription: the adapters' total rate over that of the upper switches: 4 means that
            these carry a quarter. It divides the bandwidth between nodes.
        in_network: whether switches between nodes add, so that an all-reduce sends n bytes.
        reached: the shares of all these that a program reaches.

    Raises:
        ValueError: a number is out of range.

    """

    device: Device
    memory: float
    node_size: int
    inside: Link
    between: Link
    oversubscription: float = 1.0
    in_network: bool = False
    reached: Reached = Reached(0.75)

    def __post_init__(self) -> None:
        if self.node_size < 1:
            raise ValueError(f"node_size={self.node_size} must be 1 or more")
        if self.memory <= 0:
            raise ValueError(f"memory={self.memory} must be above 0 bytes")
        if self.oversubscription < 1:
            raise ValueError(f"oversubscription={self.oversubscription} must be 1 or more")

    @property
    def link_inside(self) -> Link:
        """The network of one rank inside its node, as a program sees it."""
        return Link(self.inside.latency, self.inside.bandwidth * self.reached.inside)

    @property
    def link_between(self) -> Link:
        """The network of one rank to other nodes, as a program sees it."""
        share = self.reached.between / self.oversubscription
        return Link(self.between.latency, self.between.bandwidth * share)

    def link(self, ranks: int) -> Link:
        """Return the network of a group that spans `ranks` neighbouring devices."""
        return self.link_inside if ranks <= self.node_size else self.link_between


ON_A100, ON_H100 = Reached(0.83), Reached(0.74)
_RDMA = 10e-6
_GBIT = 1e9 / 8

CLUSTERS = {
    # Eight 200 Gb/s InfiniBand adapters per node. D. Narayanan et al., 2021, section 5.
    "selene": Cluster(
        A100, 80e9, 8, Link(5e-6, NVLINK_3.bandwidth), Link(_RDMA, 200 * _GBIT), reached=ON_A100
    ),
    # 1600 Gb/s RoCE per node. mosaicml/llm-foundry, scripts/train/benchmarking/README.md.
    "mosaic-a100": Cluster(
        A100, 80e9, 8, Link(5e-6, NVLINK_3.bandwidth), Link(_RDMA, 200 * _GBIT), reached=ON_A100
    ),
    # Eight 200 Gb/s adapters per node. Z. Jiang et al., "MegaScale", 2024, section 3.6.
    "megascale": Cluster(
        A100, 80e9, 8, Link(5e-6, NVLINK_3.bandwidth), Link(_RDMA, 200 * _GBIT), reached=ON_A100
    ),
    # 400 Gb/s per GPU. Llama team, "The Llama 3 Herd of Models", 2024, section 3.3.1.
    "llama3": Cluster(
        H100, 80e9, 8, Link(5e-6, NVLINK_4.bandwidth), Link(_RDMA, 400 * _GBIT), reached=ON_H100
    ),
    # 400 Gb/s per GPU, power limited to 500 W. pytorch/torchtitan, llama3_h100_202412.
    "grand-teton": Cluster(
        replace(H100, memory_bandwidth=2.4e12), 96e9, 8,
        Link(5e-6, NVLINK_4.bandwidth), Link(_RDMA, 400 * _GBIT), reached=ON_H100,
    ),
    # 400 Gb/s per GPU: assumed, the page does not say. mosaicml/llm-foundry, as above.
    "mosaic-h100": Cluster(
        H100, 80e9, 8, Link(5e-6, NVLINK_4.bandwidth), Link(_RDMA, 400 * _GBIT), reached=ON_H100
    ),
}  # fmt: skip
"""Published clusters by name; the comment above each one gives its source."""
