"""One function that calls every operation of torch.distributed, for tests on all kinds of ranks."""

from typing import Any

import torch
import torch.distributed as dist

from course_lib.ranks.simulated.simulated_group import SimulatedProcessGroup

REDUCE_OPS = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
]

# What a rank has after an operation, by the operation's name.
Results = dict[str, Any]


def allowed(op: str, dtype: torch.dtype) -> bool:
    """Return whether gloo has the reduction for the dtype."""
    if op == "AVG":
        return dtype.is_floating_point
    return op not in ("BAND", "BOR", "BXOR") or not dtype.is_floating_point


def values(rank: int, n: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """Return a tensor that differs between ranks; small, so that integers do not overflow."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    return torch.randint(1, 4, (n,), generator=generator).to(dtype)


def all_reduces(n: int) -> dict[str, torch.Tensor]:
    rank = dist.get_rank()
    out = {}
    for dtype in DTYPES:
        for name in REDUCE_OPS:
            if allowed(name, dtype):
                x = values(rank, n, dtype)
                dist.all_reduce(x, op=getattr(dist.ReduceOp, name))
                out[f"all_reduce {name} {dtype}"] = x
    x = torch.complex(values(rank, n, torch.float32), values(rank, n, torch.float32, 1))
    dist.all_reduce(x)
    out["all_reduce complex"] = x
    x = values(rank, 2 * n, torch.float32).view(n, 2).t()
    dist.all_reduce(x)
    out["all_reduce strided"] = x.contiguous()
    return out


def all_to_all(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
    """Exchange tensors of one size; gloo takes lists of them from PyTorch 2.12 on."""
    if isinstance(dist.group.WORLD, SimulatedProcessGroup) or torch.__version__ >= "2.12":
        dist.all_to_all(outputs, inputs)
    else:
        received = torch.stack(outputs)
        dist.all_to_all_single(received, torch.stack(inputs))
        for output, row in zip(outputs, received, strict=True):
            output.copy_(row)


def collectives(dtype: torch.dtype, n: int) -> Results:
    rank, k = dist.get_rank(), dist.get_world_size()
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    out: Results = {}

    def own(salt: int, length: int = n) -> torch.Tensor:
        return values(rank, length, dtype, salt)

    def received(name: str, *shape: int) -> torch.Tensor:
        out[name] = torch.empty(*shape, dtype=dtype)
        return out[name]

    def parts_of(name: str) -> list[torch.Tensor]:
        out[name] = [torch.empty(n, dtype=dtype) for _ in range(k)]
        return out[name]

    for root in range(k):
        x = own(1)
        dist.broadcast(x, src=root)
        out[f"broadcast {root}"] = x
        x = own(2)
        dist.reduce(x, dst=root)
        if rank == root:  # elsewhere its contents are not defined
            out[f"reduce {root}"] = x
        dist.gather(own(3), parts_of(f"gather {root}") if rank == root else None, dst=root)
        lists = [values(i, n, dtype, 4) for i in range(k)] if rank == root else None
        dist.scatter(received(f"scatter {root}", n), lists, src=root)
    dist.all_gather(parts_of("all_gather"), own(5))
    gather(received("all_gather_single", k * n), own(6))
    dist.reduce_scatter(received("reduce_scatter", n), [own(7 + i) for i in range(k)])
    scatter(received("reduce_scatter_single", n), own(20, k * n))
    all_to_all(parts_of("all_to_all"), [own(30 + i) for i in range(k)])
    dist.all_to_all_single(received("all_to_all_single", k * n), own(40, k * n))
    # Rank r sends r + i + 1 rows to rank i.
    splits = [rank + i + 1 for i in range(k)]
    x = received("all_to_all_single uneven", sum(splits), 2)
    dist.all_to_all_single(x, own(41, 2 * sum(splits)).view(-1, 2), splits, splits)
    dist.barrier()
    return out


def point_to_point(n: int) -> Results:
    rank, k = dist.get_rank(), dist.get_world_size()
    out: Results = {}
    if k == 1:
        return out
    right, left = (rank + 1) % k, (rank - 1) % k
    got = [torch.empty(n) for _ in range(3)]
    works = [dist.isend(values(rank, n, torch.float32, i), right, tag=i) for i in range(3)]
    works += [dist.irecv(got[i], left, tag=i) for i in range(3)]
    for work in works:
        work.wait()
    out["isend irecv"] = got
    x, y = values(rank, n, torch.int64, 9), torch.empty(n, dtype=torch.int64)
    ops = [dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, y, left)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    out["batch_isend_irecv"] = y
    z = values(rank, n, torch.float32, 11)
    if rank % 2 == 0 and rank + 1 < k:
        dist.send(z, rank + 1)
    elif rank % 2 == 1:
        dist.recv(z, rank - 1)
    out["send recv"] = z
    objects = [None] * k
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
    out["all_gather_object"] = torch.tensor([o["rank"] + len(o["text"]) for o in objects])
    return out


def groups(n: int) -> Results:
    rank, k = dist.get_rank(), dist.get_world_size()
    out: Results = {}
    even, odd = list(range(0, k, 2)), list(range(1, k, 2))
    for members in (even, odd, list(range(k))[::-1]):
        if not members:
            continue
        group = dist.new_group(members)
        if rank not in members:
            continue
        x = values(rank, n, torch.float32, 50)
        works = [dist.all_reduce(x, group=group, async_op=True)]
        y = values(rank, n, torch.float32, 51)
        works.append(dist.broadcast(y, src=members[-1], group=group, async_op=True))
        for work in works:
            work.wait()
        parts = [torch.empty(n) for _ in members]
        dist.all_gather(parts, values(rank, n, torch.float32, 52), group=group)
        out[f"group {members}"] = [x, y, *parts]
    future = dist.all_reduce(values(rank, n, torch.float32, 60), async_op=True).get_future()
    out["future"] = future.then(lambda f: f.value()[0] * 2).wait()
    return out


def everything(n: int) -> Results:
    out: Results = {}
    out.update(all_reduces(n))
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
        out.update({f"{name} {dtype}": x for name, x in collectives(dtype, n).items()})
    out.update(point_to_point(n))
    out.update(groups(n))
    return out
