"""All-reduce four ways and a pipelined broadcast, in plain torch.distributed, for tests of time."""

import torch
import torch.distributed as dist


def _together(send: torch.Tensor, to: int, receive: torch.Tensor, source: int) -> None:
    work = dist.isend(send, to)
    dist.recv(receive, source)
    work.wait()


def central(x: torch.Tensor) -> None:
    rank, k = dist.get_rank(), dist.get_world_size()
    if rank:
        dist.send(x, 0)
        dist.recv(x, 0)
        return
    parts = [torch.empty_like(x) for _ in range(1, k)]
    for work in [dist.irecv(part, r + 1) for r, part in enumerate(parts)]:
        work.wait()
    for part in parts:
        x += part
    for work in [dist.isend(x, r) for r in range(1, k)]:
        work.wait()


def tree(x: torch.Tensor) -> None:
    rank, k = dist.get_rank(), dist.get_world_size()
    part = torch.empty_like(x)
    width = 1
    while width < k:
        if rank % (2 * width) == width:
            dist.send(x, rank - width)
        elif rank % (2 * width) == 0 and rank + width < k:
            dist.recv(part, rank + width)
            x += part
        width *= 2
    while width > 1:
        width //= 2
        if rank % (2 * width) == width:
            dist.recv(x, rank - width)
        elif rank % (2 * width) == 0 and rank + width < k:
            dist.send(x, rank + width)


def ring(x: torch.Tensor) -> None:
    rank, k = dist.get_rank(), dist.get_world_size()
    chunks = list(x.tensor_split(k))
    right, left = (rank + 1) % k, (rank - 1) % k
    for step in range(k - 1):
        target = chunks[(rank - step - 1) % k]
        part = torch.empty_like(target)
        _together(chunks[(rank - step) % k], right, part, left)
        target += part
    for step in range(k - 1):
        _together(chunks[(rank + 1 - step) % k], right, chunks[(rank - step) % k], left)


def halving_doubling(x: torch.Tensor) -> None:
    rank, k = dist.get_rank(), dist.get_world_size()
    power = 1 << (k.bit_length() - 1)
    if rank >= power:
        dist.send(x, rank - power)
        dist.recv(x, rank - power)
        return
    if rank + power < k:
        part = torch.empty_like(x)
        dist.recv(part, rank + power)
        x += part
    pieces, halves, width = x, [], power // 2
    while width:
        low, high = _halves(pieces, width, rank // width % 2)
        part = torch.empty_like(low)
        _together(high, rank ^ width, part, rank ^ width)
        low += part
        halves.append((low, high, width))
        pieces, width = low, width // 2
    for mine, other, width in reversed(halves):
        _together(mine, rank ^ width, other, rank ^ width)
    if rank + power < k:
        dist.send(x, rank + power)


def _halves(x: torch.Tensor, width: int, upper: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut 2 * width pieces, the longer ones first, in two; return the half kept, the half sent."""
    middle = sum(len(piece) for piece in x.tensor_split(2 * width)[:width])
    low, high = x[:middle], x[middle:]
    return (high, low) if upper else (low, high)


def pipelined_broadcast(x: torch.Tensor, segments: int) -> None:
    """Pass segments down the chain 0, 1, …; all receives are posted at the start."""
    rank, k = dist.get_rank(), dist.get_world_size()
    pieces = x.tensor_split(segments)
    coming = [dist.irecv(piece, rank - 1) for piece in pieces] if rank else []
    leaving = []
    for i, piece in enumerate(pieces):
        if rank:
            coming[i].wait()
        if rank + 1 < k:
            leaving.append(dist.isend(piece, rank + 1))
    for work in leaving:
        work.wait()


def blocking_broadcast(x: torch.Tensor, segments: int) -> None:
    """The same, with blocking receives and sends."""
    rank, k = dist.get_rank(), dist.get_world_size()
    for piece in x.tensor_split(segments):
        if rank:
            dist.recv(piece, rank - 1)
        if rank + 1 < k:
            dist.send(piece, rank + 1)
