"""Networks, devices and links: what they refuse, and which way a message goes."""

import dataclasses

import pytest
import torch

from course_lib.ranks.costs.links import Links
from course_lib.ranks.costs.network import Device, Network

NETWORK, INSIDE = Network(1e-3, 1e9), Network(1e-6, 100e9)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("right", "values", "text"),
    [
        (NETWORK, {"latency": -1.0}, "latency"),
        (NETWORK, {"bandwidth": 5e-324}, "bandwidth is too small"),
        (NETWORK, {"bandwidth": torch.tensor(1.0)}, "bandwidth must be above 0 bytes per second"),
        (NETWORK, {"overhead": True}, "overhead must be 0 seconds"),
        (NETWORK, {"eager_below": "8"}, "eager_below"),
        (NETWORK, {"node_size": 4}, "inside"),
        (NETWORK, {"node_size": 0, "inside": INSIDE}, "node_size"),
        (NETWORK, {"topology": "ring", "node_size": 2, "inside": INSIDE}, "switch"),
        (NETWORK, {"topology": "star"}, "topology"),
        (NETWORK, {"all_reduce": "best"}, "all_reduce"),
        (Device(), {"flops": "1e12"}, "flops"),
        (Device(), {"memory_bandwidth": -1.0}, "memory_bandwidth"),
        (Device(), {"slowdown": {1: 0.0}}, "slowdown"),
    ],
)
def test_refused(right: Network | Device, values: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        dataclasses.replace(right, **values)


def test_an_overhead_occupies_ranks_and_not_what_they_share() -> None:
    inside = Network(1.0, 10.0, overhead=0.25)
    node = Links(Network(1.0, 10.0, 0.5, node_size=2, inside=inside, shared_port=True), 4)
    assert node.send(0, 2, 50, ready=0.0) == (5.5, 7.0)
    assert node.send(1, 3, 50, ready=0.0) == (10.5, 12.0)  # the node's port was free at 5.5
    assert node.send(0, 1, 50, ready=0.0) == (5.25, 6.5)  # inside, its own overhead counts
    ring = Links(Network(1.0, 10.0, 0.5, topology="ring"), 5)
    assert ring.send(0, 2, 50, ready=0.0) == (5.5, 8.0)  # two hops
    assert ring.send(1, 3, 50, ready=0.0) == (11.5, 14.0)  # the link from 1 was free at 6.5


def test_two_levels() -> None:
    network = Network(10.0, 1.0, node_size=2, inside=Network(1.0, 100.0))
    links = Links(network, 4)
    assert links.send(0, 1, 100, ready=0.0) == (1.0, 2.0)
    assert links.send(0, 2, 100, ready=0.0) == (100.0, 110.0)
    assert links.send(1, 3, 100, ready=0.0) == (100.0, 110.0)  # each rank its own port
    shared = Links(dataclasses.replace(network, shared_port=True), 4)
    assert shared.send(0, 2, 100, ready=0.0) == (100.0, 110.0)
    assert shared.send(1, 3, 100, ready=0.0) == (200.0, 210.0)  # one port per node


def test_a_ring_goes_the_shorter_way_and_occupies_it() -> None:
    links = Links(Network(1.0, 10.0, topology="ring"), 5)
    assert links.send(0, 2, 50, ready=0.0) == (5.0, 7.0)  # two hops
    assert links.send(0, 4, 50, ready=0.0) == (5.0, 6.0)  # one hop, to the left
    assert links.send(1, 2, 50, ready=0.0) == (11.0, 12.0)  # waits for the link 1 → 2
    assert links.send(3, 4, 50, ready=0.0) == (5.0, 6.0)
