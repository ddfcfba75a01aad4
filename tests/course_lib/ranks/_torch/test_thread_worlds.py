"""Simulated ranks use unpromised parts of PyTorch: these tests say what a new release has moved.

The private names here are PyTorch's, and they are the point: nothing else says that one is gone.
"""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d

from course_lib.ranks._torch import this_thread, thread_worlds
from course_lib.ranks.simulated.operation import Operation
from course_lib.ranks.simulated.simulated_group import SimulatedRank


@pytest.mark.parametrize(
    ("holder", "name"),
    [
        (distributed_c10d, "_world"),
        (c10d, "_set_thread_isolation_mode"),
        (c10d, "_unregister_process_group"),
        (torch._C, "_current_graph_task_id"),
        (torch._C, "_current_autograd_node"),
        (torch._C.Future, "wait"),
        (torch._C, "_DisableTorchDispatch"),
        (torch._C, "_len_torch_dispatch_stack"),
        (torch._C, "_pop_torch_dispatch_stack"),
        (torch._C, "_push_on_torch_dispatch_stack"),
        (torch.autograd, "_engine_run_backward"),
        (torch.autograd.graph, "_engine_run_backward"),
        (torch.autograd.Variable._execution_engine, "queue_callback"),
        (dist, "HashStore"),
        (dist.Backend, "register_backend"),
        (dist.ProcessGroup, "_get_backend"),
    ],
)
def test_the_name_is_still_there(holder: object, name: str) -> None:
    assert hasattr(holder, name), f"PyTorch {torch.__version__} has no {name} any more"


def simulated_rank(rank: int, world_size: int) -> SimulatedRank:
    return SimulatedRank(rank, world_size, AnyEndpoint(), str)


class AnyEndpoint:
    def post(self, operation: Operation) -> None:
        pass

    def wait(self, operation: Operation) -> None:
        pass

    def is_done(self, operation: Operation) -> bool:
        return True


def test_our_world_has_every_attribute_of_pytorchs() -> None:
    ordinary = distributed_c10d._World
    properties = {n for n in vars(ordinary) if isinstance(vars(ordinary)[n], property)}
    there: set[str] = set()

    def rank() -> None:
        thread_worlds.join_world(simulated_rank(0, 1))
        there.update(n for n in properties if hasattr(distributed_c10d._world, n))
        thread_worlds.leave_world()

    with thread_worlds.thread_worlds():
        thread = threading.Thread(target=rank)
        thread.start()
        thread.join()
    missing = properties - there
    assert not missing, f"PyTorch {torch.__version__} keeps more in its world: {missing}"


def test_the_backend_is_for_simulated_ranks_only() -> None:
    thread = threading.Thread(target=lambda: thread_worlds.join_world(simulated_rank(0, 1)))
    with thread_worlds.thread_worlds():
        thread.start()  # registers the backend
        thread.join()
        with pytest.raises(RuntimeError, match='on="simulated"'):
            dist.init_process_group("simulated", store=dist.HashStore(), rank=0, world_size=1)
    assert not dist.is_initialized()


def test_callbacks_at_the_end_of_backward_keep_their_order() -> None:
    order: list[str] = []
    x = torch.ones(2, requires_grad=True)

    def hook(grad: torch.Tensor) -> None:
        assert this_thread.backward_id() is not None
        this_thread.at_end_of_backward(lambda: order.append("first"))
        this_thread.at_end_of_backward(lambda: order.append("second"))
        order.append("hook")

    x.register_hook(hook)
    assert this_thread.backward_id() is None
    (2 * x).sum().backward()
    assert order == ["hook", "first", "second"]


def test_a_handle_that_only_compiled_code_holds_can_still_be_waited_for() -> None:
    waits = []

    class Handle(dist.Work):
        def wait(self, timeout: object = None) -> bool:
            waits.append(1)
            return True

    class Group(dist.ProcessGroup):
        def broadcast(self, tensors: object, opts: object) -> Handle:  # type: ignore[override]
            return Handle()

    group = Group(0, 1)  # type: ignore[call-arg]
    tensors = [torch.ones(8) for _ in range(4)]
    # DDP's constructor calls this; each tensor is a bucket of its own.
    call = threading.Thread(
        target=dist._broadcast_coalesced, args=(group, tensors, 1, 0), daemon=True
    )
    call.start()
    call.join(10)
    assert not call.is_alive(), f"PyTorch {torch.__version__} lets go of handles written in Python"
    assert len(waits) == len(tensors)
