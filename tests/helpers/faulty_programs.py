"""Programs for four ranks that cannot work, with the error they must end in and words of it."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from course_lib.ranks import DeadlockError, MismatchError, RankError, RanksError


def neighbours() -> tuple[int, int, int, int]:
    rank, k = dist.get_rank(), dist.get_world_size()
    return rank, k, (rank + 1) % k, (rank - 1) % k


def all_send_first() -> None:
    _, _, right, left = neighbours()
    dist.send(torch.ones(3), right)
    dist.recv(torch.ones(3), left)


def all_receive_first() -> None:
    _, _, right, left = neighbours()
    dist.recv(torch.ones(3), left)
    dist.send(torch.ones(3), right)


def one_skips() -> None:
    if dist.get_rank() != 2:
        dist.all_reduce(torch.ones(3))


def uneven_loops() -> None:
    for _ in range(3 if dist.get_rank() == 0 else 2):
        dist.all_reduce(torch.ones(3))


def nobody_sends() -> None:
    if dist.get_rank() == 1:
        dist.recv(torch.ones(3), 3)


def nobody_receives() -> None:
    if dist.get_rank() == 1:
        dist.send(torch.ones(3), 3)


def never_received() -> None:
    if dist.get_rank() == 1:
        dist.isend(torch.ones(3), 3)


def other_collective() -> None:
    if dist.get_rank() == 2:
        dist.broadcast(torch.ones(3), src=0)
    else:
        dist.all_reduce(torch.ones(3))


def other_shape() -> None:
    dist.all_reduce(torch.ones(3 + (dist.get_rank() == 2)))


def other_dtype() -> None:
    dist.all_reduce(torch.ones(3, dtype=torch.int32 if dist.get_rank() == 2 else torch.float32))


def other_source() -> None:
    dist.broadcast(torch.ones(3), src=int(dist.get_rank() == 2))


def other_reduction() -> None:
    dist.all_reduce(
        torch.ones(3), op=dist.ReduceOp.MAX if dist.get_rank() == 2 else dist.ReduceOp.SUM
    )


def other_message_size() -> None:
    if dist.get_rank() == 0:
        dist.send(torch.ones(3), 2)
    elif dist.get_rank() == 2:
        dist.recv(torch.ones(4), 0)


def other_tag() -> None:
    if dist.get_rank() == 0:
        dist.send(torch.ones(3), 2, tag=1)
    elif dist.get_rank() == 2:
        dist.recv(torch.ones(3), 0, tag=2)


def crossed_groups() -> None:
    a, b = dist.new_group([0, 1, 2, 3]), dist.new_group([0, 1, 2, 3])
    for group in (a, b) if dist.get_rank() == 0 else (b, a):
        dist.all_reduce(torch.ones(1), group=group)


def one_raises() -> None:
    if dist.get_rank() == 2:
        raise KeyError("lost")
    dist.all_reduce(torch.ones(3))


def outside_the_group() -> None:
    group = dist.new_group([0, 1])
    if dist.get_rank() == 0:
        dist.send(torch.ones(1), 3, group=group)


CASES: list[tuple[Callable[[], None], type[RanksError], list[str]]] = [
    (all_send_first, DeadlockError, ["rank 0 → rank 1 → rank 2 → rank 3 → rank 0", "send first"]),
    (all_receive_first, DeadlockError, ["receive first", "recv from rank 3"]),
    (one_skips, DeadlockError, ["all_reduce #1", "rank 2 never called", "finished"]),
    (uneven_loops, DeadlockError, ["collective #3", "ranks 1, 2, 3 never called"]),
    (nobody_sends, DeadlockError, ["Rank 1 receives from rank 3, which ended without sending"]),
    (nobody_receives, DeadlockError, ["Rank 1 sends to rank 3, which ended without receiving"]),
    (never_received, DeadlockError, ["Rank 1 sent 1 message to rank 3, which never received it"]),
    (other_collective, MismatchError, ["broadcast root=0", "all_reduce sum"]),
    (other_shape, MismatchError, ["3 elements", "4 elements"]),
    (other_dtype, MismatchError, ["int32", "float32"]),
    (other_source, MismatchError, ["root=0", "root=1"]),
    (other_reduction, MismatchError, ["max", "sum"]),
    (other_message_size, MismatchError, ["Rank 0 sends 3 elements", "rank 2 receives them as 4"]),
    (other_tag, DeadlockError, ["tag 2, not 1"]),
    (
        crossed_groups,
        DeadlockError,
        ["rank 0 → rank 1 → rank 0", "of group 1, ranks 0-3", "of group 2, ranks 0-3", "another"],
    ),
    (one_raises, RankError, ["Rank 2 raised KeyError", "lost", "waits in all_reduce #1"]),
    (outside_the_group, RankError, ["Rank 0 raised ValueError", "not part of group"]),
]
