"""Networks and devices by name, with the source of each figure.

Bandwidths are the published rates of one port in one direction, without protocol overhead. A
program reaches less. No standard defines a latency. The latencies here are round numbers, in the
order of the time that a small message takes through NCCL (inside a node) or TCP (between nodes).
Measure the latency of your own network.
"""

from __future__ import annotations

from course_lib.ranks.costs.network import Device, Network

_GBIT = 1e9 / 8
_INSIDE = 5e-6
_TCP = 30e-6
_RDMA = 10e-6

PCIE_4 = Network(_INSIDE, 31.5e9)
"""PCI Express 4.0, 16 lanes: 16 GT/s · 16 · 128/130. PCI-SIG, Base Specification 4.0 (2017)."""
PCIE_5 = Network(_INSIDE, 63.0e9)
"""PCI Express 5.0, 16 lanes: 32 GT/s · 16 · 128/130. PCI-SIG, Base Specification 5.0 (2019)."""
NVLINK_3 = Network(_INSIDE, 300e9)
"""NVLink of an A100: 600 GB/s, both directions together. NVIDIA, A100 data sheet."""
NVLINK_4 = Network(_INSIDE, 450e9)
"""NVLink of an H100 SXM: 900 GB/s, both directions together. NVIDIA, H100 data sheet."""
ETHERNET_1 = Network(_TCP, 1 * _GBIT)
"""1 Gb/s Ethernet. IEEE 802.3ab (1999)."""
ETHERNET_10 = Network(_TCP, 10 * _GBIT)
"""10 Gb/s Ethernet. IEEE 802.3ae (2002)."""
ETHERNET_25 = Network(_TCP, 25 * _GBIT)
"""25 Gb/s Ethernet. IEEE 802.3by (2016)."""
ETHERNET_100 = Network(_RDMA, 100 * _GBIT)
"""100 Gb/s Ethernet, with RDMA. IEEE 802.3ba (2010)."""
ETHERNET_400 = Network(_RDMA, 400 * _GBIT)
"""400 Gb/s Ethernet, with RDMA. IEEE 802.3bs (2017)."""

A100 = Device(flops=312e12, memory_bandwidth=2.039e12)
"""A100 80 GB SXM, dense bfloat16. NVIDIA, A100 data sheet."""
H100 = Device(flops=989e12, memory_bandwidth=3.35e12)
"""H100 SXM, dense bfloat16. NVIDIA, H100 data sheet."""
