"""Compute the time of a collective in a group whose members may share nodes.

A group of K ranks, every `stride`-th of the cluster, has L members in a node and M = K/L nodes. The
collective has two levels. First it runs inside the nodes, so that each member holds an L-th. Then
each of the L members communicates with its counterparts in the other nodes, over its own adapter.
Half an all-reduce (a reduce-scatter or an all-gather of n bytes) takes

    (L-1) (α₁ + n/(Lβ₁)) + (M-1) (α₂ + n/(Kβ₂))          α₁, β₁ inside, α₂, β₂ between nodes

So a group that fills its nodes sends over all their adapters at once.
"""

from course_lib import cost_model
from course_lib.cost_model import ring_reduce_scatter_time
from course_lib.simulate.cluster import Cluster


def half_time(nbytes: float, size: int, stride: int, cluster: Cluster) -> float:
    """Return the seconds of a reduce-scatter, or of an all-gather, of `nbytes` in all."""
    per_node = max(1, min(size, cluster.node_size // stride))  # L members share a node
    nodes = -(-size // per_node)
    inside = ring_reduce_scatter_time(nbytes, per_node, cluster.link_inside)
    return inside + ring_reduce_scatter_time(nbytes / per_node, nodes, cluster.link_between)


def all_reduce_time(nbytes: float, size: int, stride: int, cluster: Cluster) -> float:
    """Return the seconds of an all-reduce of `nbytes`."""
    return 2 * half_time(nbytes, size, stride, cluster)


def all_to_all_time(nbytes: float, size: int, stride: int, cluster: Cluster) -> float:
    """Return the seconds of an all-to-all in which each member sends `nbytes` in all.

    Most members are in other nodes, and each member sends to them over its own adapter.
    """
    link = cluster.link_inside if size * stride <= cluster.node_size else cluster.link_between
    return cost_model.all_to_all_time(nbytes, size, link)
