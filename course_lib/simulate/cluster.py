"""A cluster as numbers: devices, and the links inside a node and between nodes.

A device reaches less than its data sheet says: see `Reached`. The shares of the presets were fitted
to the published runs, and rounded.

The devices and networks of the presets come from the table in `course_lib.ranks`, which follows
NVIDIA's data sheets. A comment at each preset gives the number and rate of its adapters.
"""

from dataclasses import dataclass, replace

from course_lib.cost_model import Link
from course_lib.ranks import Device
from course_lib.ranks.costs.presets import A100, H100, NVLINK_3, NVLINK_4


@dataclass(frozen=True)
class Reached:
    """The shares of the data sheet that a program reaches.

    `matmul`, `eager` and `tensor_hidden` were fitted; docs/simulator.md shows how well the runs
    determine each. The others are fixed, because the runs do not determine them.

    Args:
        matmul: share of the peak that large matrix products reach.
        attention: share of the peak that a fused attention kernel reaches. Half of an A100's
            (T. Dao, "FlashAttention-2", 2023: 50 to 73 %; its predecessor 25 to 40 %), 35 % of an
            H100's (J. Shah et al., "FlashAttention-3", 2024, abstract, of FlashAttention-2).
        memory: share of the memory's bandwidth that a streaming kernel reaches: assumed, between
            the 0.75 and 0.9 that calculon-ai/calculon, systems/a100_80g.json, has for 10 and 100
            MB.
        eager: factor by which operations move more bytes if each runs on its own.
        inside: share of the bandwidth inside a node: assumed (calculon's file has 0.65).
        between: share of the bandwidth between nodes, as in calculon's file.
        hidden: share of the communication of weights and gradients that costs no time if it runs
            during computation. The rest costs time because both share multiprocessors and memory:
            calculon's file has 15 % inside a node and 2 % between nodes.
        tensor_hidden: the same share of tensor-parallel collectives, if they run during the matrix
            products around them. The products are cut into pieces for that, and become slower.

    """

    matmul: float
    attention: float = 0.5
    memory: float = 0.85
    eager: float = 5.0
    inside: float = 0.78
    between: float = 0.9
    hidden: float = 0.9
    tensor_hidden: float = 0.3


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of `node_size` devices.

    Args:
        device: the peak rate (FLOP/s) and memory bandwidth (bytes/s) of a device.
        memory: bytes of a device's memory.
        node_size: devices of one node.
        inside: latency and bandwidth from one device to the others of its node, in each direction.
        between: the same to other nodes, for one device: for one adapter, if each has its own.
        reached: the shares of all these numbers that a program reaches.

    """

    device: Device
    memory: float
    node_size: int
    inside: Link
    between: Link
    reached: Reached = Reached(0.7)

    @property
    def link_inside(self) -> Link:
        """The network of one rank inside its node, as a program sees it."""
        return Link(self.inside.latency, self.inside.bandwidth * self.reached.inside)

    @property
    def link_between(self) -> Link:
        """The network of one rank to other nodes, as a program sees it."""
        return Link(self.between.latency, self.between.bandwidth * self.reached.between)

    def link(self, ranks: int) -> Link:
        """Return the network of a group that spans `ranks` neighbouring devices."""
        return self.link_inside if ranks <= self.node_size else self.link_between


ON_A100, ON_H100 = Reached(0.72), Reached(0.62, attention=0.35)
_RDMA = 10e-6
_GBIT = 1e9 / 8
_GIB = 2**30  # memories are sold as GB and have this many bytes each


def _a100s(gbit: float, device: Device = A100, memory: float = 80) -> Cluster:
    """Return nodes of eight with NVLink 3, `gbit` Gb/s per device between them, `memory` in GiB."""
    inside, between = Link(5e-6, NVLINK_3.bandwidth), Link(_RDMA, gbit * _GBIT)
    return Cluster(device, memory * _GIB, 8, inside, between, reached=ON_A100)


def _h100s(gbit: float, device: Device = H100, memory: float = 80) -> Cluster:
    """Return the same as `_a100s`, with NVLink 4."""
    inside, between = Link(5e-6, NVLINK_4.bandwidth), Link(_RDMA, gbit * _GBIT)
    return Cluster(device, memory * _GIB, 8, inside, between, reached=ON_H100)


CLUSTERS = {
    # Eight 200 Gb/s InfiniBand adapters per node. D. Narayanan et al., 2021, section 5.
    "selene": _a100s(200),
    # 1600 Gb/s RoCE per node. mosaicml/llm-foundry, scripts/train/benchmarking/README.md.
    "mosaic-a100": _a100s(200),
    # Eight 200 Gb/s adapters per node. Z. Jiang et al., "MegaScale", 2024, section 3.6.
    "megascale": _a100s(200),
    # 400 Gb/s per GPU. Llama team, "The Llama 3 Herd of Models", 2024, section 3.3.1.
    "llama3": _h100s(400),
    # 400 Gb/s per GPU; HBM2e, and power limited to 500 W, so that "the actual peak is between SXM
    # and NVL" (989 and 835 TFLOP/s): the middle is assumed. pytorch/torchtitan, llama3_h100_202412.
    "grand-teton": _h100s(400, Device(912e12, 2.4e12), memory=96),
    # 400 Gb/s per GPU: assumed, the page does not say. mosaicml/llm-foundry, as above.
    "mosaic-h100": _h100s(400),
    # As mosaic-a100, with 40 GB of HBM2 at 1.555 TB/s. NVIDIA, A100 data sheet.
    "mosaic-a100-40gb": _a100s(200, replace(A100, memory_bandwidth=1.555e12), memory=40),
    # 400 Gb/s per node of eight: 50 a GPU. foundation-model-stack/fms-fsdp, README.md.
    "ibm-a100": _a100s(50),
    # 800 Gb/s per node of eight: 100 a GPU. foundation-model-stack/fms-fsdp, README.md.
    "ibm-h100": _h100s(100),
    # 200 Gb/s per GPU: assumed, the page does not say. pytorch/torchtitan, docs/performance.md.
    "torchtitan-a100": _a100s(200),
    # Four Omni-Path adapters of 100 Gb/s per node of eight: assumed, the page does not say.
    # bigscience-workshop/bigscience, train/tr11-176B-ml/chronicles-prequel.md.
    "jean-zay": _a100s(50),
    # 8 x 400 Gb/s per node. NVIDIA/Megatron-LM, megatron/core/transformer/moe/README.md.
    "dgx-h100": _h100s(400),
}
"""Published clusters by name; the comment above each one gives its source."""
