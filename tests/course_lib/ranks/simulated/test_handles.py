"""A handle never waited for and a buffer touched too early are found, by rank and line."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from course_lib.ranks import MisuseWarning, RankError, Ranks

pytestmark = pytest.mark.every_case


def never_waited() -> None:
    dist.all_reduce(torch.ones(3), async_op=True)


def read_before_wait() -> None:
    x = torch.ones(3)
    work = dist.all_reduce(x, async_op=True)
    x.sum()
    work.wait()


def written_before_wait() -> None:
    x = torch.ones(3)
    work = dist.all_reduce(x, async_op=True)
    x.add_(1)
    work.wait()


def view_read_before_wait() -> None:
    matrix = torch.ones(4, 3)
    work = dist.broadcast(matrix[1], 0, async_op=True)
    if dist.get_rank() != 0:
        matrix[:2].sum()
    work.wait()


def send_buffer_written() -> None:
    x = torch.ones(3)
    if dist.get_rank() == 0:
        work = dist.isend(x, 1)
        x.zero_()
        work.wait()
    elif dist.get_rank() == 1:
        dist.recv(x, 0)


def received_and_passed_on() -> None:
    x = torch.ones(3)
    if dist.get_rank() == 0:
        dist.send(x, 1)
    elif dist.get_rank() == 1:
        work = dist.irecv(x, 0)
        dist.send(x, 2)
        work.wait()
    else:
        dist.recv(x, 1)


def step_before_wait() -> None:
    """Gradients are reduced from hooks, and the optimizer does not wait."""
    layer = torch.nn.Linear(2, 1, bias=False)
    works = []
    layer.weight.register_post_accumulate_grad_hook(
        lambda p: works.append(dist.all_reduce(p.grad, async_op=True))
    )
    layer(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    for work in works:
        work.wait()


WRONG = [
    (never_waited, "Ranks 0, 1, 2 never waited for all_reduce #1", 1, None),
    (read_before_wait, "Ranks 0, 1, 2 read the buffer of all_reduce #1", 2, 3),
    (written_before_wait, "Ranks 0, 1, 2 wrote to the buffer of all_reduce #1", 2, 3),
    (view_read_before_wait, "Ranks 1, 2 read the buffer of broadcast #1", 2, 4),
    (send_buffer_written, "Rank 0 wrote to the buffer of send to rank 1", 3, 4),
    (received_and_passed_on, "Rank 1 read the buffer of recv from rank 0", 5, 6),
    (step_before_wait, "Ranks 0, 1, 2 read the buffer of all_reduce #1", 5, 8),
]


@pytest.mark.parametrize(("fn", "text", "launch", "line"), WRONG)
def test_found_by_rank_and_line(fn, text, launch, line):
    first = fn.__code__.co_firstlineno
    text += f" (test_handles.py, line {first + launch})"
    if line is not None:
        text += f" before its wait(): test_handles.py, line {first + line}."
    with pytest.warns(MisuseWarning) as caught:
        Ranks(3, on="simulated").run(fn)
    (message,) = {str(warning.message) for warning in caught}
    assert text in message


def waited_for() -> None:
    x, y = torch.ones(3), torch.zeros(3)
    work = dist.all_reduce(x, async_op=True)
    y += 1
    assert x.shape == (3,) and torch.zeros_like(x).sum() == 0 and x.view(1, 3).size(0) == 1
    work.wait()
    x += 1


def asked_until_done() -> None:
    work = dist.all_reduce(x := torch.ones(3), async_op=True)
    while not work.is_completed():
        pass
    x += 1


def future_with_a_callback() -> None:
    work = dist.all_reduce(x := torch.ones(3), async_op=True)
    work.get_future().then(lambda future: future.value()[0].div_(3)).wait()
    x += 1


def the_other_half() -> None:
    x = torch.ones(6)
    work = dist.all_reduce(x[:3], async_op=True)
    x[3:] += 1
    work.wait()


def sent_and_read() -> None:
    rank, k = dist.get_rank(), dist.get_world_size()
    x, y = torch.ones(3), torch.ones(3)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, (rank + 1) % k), dist.P2POp(dist.irecv, y, (rank - 1) % k)]
    )
    x.sum()
    for work in works:
        work.wait()
    y.sum()


def inside_a_mode_of_the_user() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    x = torch.ones(3)
    before = dist.all_reduce(torch.ones(1), async_op=True)
    with FlopCounterMode(display=False) as counter:
        before.wait()
        work = dist.all_reduce(x, async_op=True)
        torch.ones(4, 4) @ torch.ones(4, 4)
    work.wait()
    assert counter.get_total_flops() == 2 * 4**3
    assert torch._C._len_torch_dispatch_stack() == 0


def trained_by_ddp() -> None:
    model = DDP(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)))
    model.register_comm_hook(None, hook_that_chains)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()


def hook_that_chains(state, bucket):
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0] / 3)


def functional() -> None:
    from torch.distributed import _functional_collectives as functional_collectives

    x = functional_collectives.all_reduce(torch.ones(3), "sum", dist.group.WORLD)
    assert x.sum() == 9


RIGHT = [waited_for, asked_until_done, future_with_a_callback, the_other_half, sent_and_read,
         inside_a_mode_of_the_user, trained_by_ddp, functional]  # fmt: skip


@pytest.mark.parametrize("fn", RIGHT)
def test_what_is_right_is_left_alone(fn) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Ranks(3, on="simulated").run(fn)


def test_every_call_says_it_again_and_a_failure_says_only_itself() -> None:
    def fails() -> None:
        never_waited()
        raise ValueError

    ranks = Ranks(2, on="simulated")
    for _ in range(2):
        with pytest.warns(MisuseWarning):
            ranks.run(never_waited)
    with warnings.catch_warnings(), pytest.raises(RankError):
        warnings.simplefilter("error")
        ranks.run(fails)
