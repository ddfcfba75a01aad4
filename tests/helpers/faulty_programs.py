"""Programs for four ranks that cannot work; `student_bugs` has the whole list, with its errors."""

import torch
import torch.distributed as dist


def neighbours() -> tuple[int, int, int, int]:
    rank, k = dist.get_rank(), dist.get_world_size()
    return rank, k, (rank + 1) % k, (rank - 1) % k


def all_send_first() -> None:
    _, _, right, left = neighbours()
    dist.send(torch.ones(3), right)
    dist.recv(torch.ones(3), left)


def one_skips() -> None:
    if dist.get_rank() != 2:
        dist.all_reduce(torch.ones(3))


def nobody_sends() -> None:
    if dist.get_rank() == 1:
        dist.recv(torch.ones(3), 3)


def other_shape() -> None:
    dist.all_reduce(torch.ones(3 + (dist.get_rank() == 2)))


def one_raises() -> None:
    if dist.get_rank() == 2:
        raise KeyError("lost")
    dist.all_reduce(torch.ones(3))
