"""Simulated ranks use unpromised parts of PyTorch: these tests say what a new release has moved.

The private names here are PyTorch's, and they are the point: nothing else says that one is gone.
"""

import threading

import torch
from torch.distributed import distributed_c10d

from course_lib.ranks._torch import thread_worlds
from course_lib.ranks.simulated.simulated_group import SimulatedRank


def test_our_world_has_every_attribute_of_pytorchs() -> None:
    ordinary = distributed_c10d._World
    properties = {n for n in vars(ordinary) if isinstance(vars(ordinary)[n], property)}
    attributes: set[str] = set()

    endpoint = None  # one rank sends nothing

    def rank() -> None:
        thread_worlds.join_world(SimulatedRank(0, 1, endpoint, str))
        attributes.update(n for n in properties if hasattr(distributed_c10d._world, n))
        thread_worlds.leave_world()

    with thread_worlds.thread_worlds():
        thread = threading.Thread(target=rank)
        thread.start()
        thread.join()
    lacking = properties - attributes
    assert not lacking, f"PyTorch {torch.__version__} keeps more in its world: {lacking}"
