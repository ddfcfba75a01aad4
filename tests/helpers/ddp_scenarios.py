"""Models for tests of gradient synchronisation, and comparisons of ours with PyTorch's."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from course_lib.bucketing import MEGABYTE
from course_lib.ddp import DistributedDataParallel
from course_lib.sharding import shard

WORLDS = [("simulated", k) for k in (1, 2, 3, 4)] + [("cpu", k) for k in (1, 2, 3, 4)]
FEW = [("simulated", 3), ("cpu", 2)]
STEPS, BATCH = 5, 24
BOTH = [DistributedDataParallel, TorchDDP]
SMALL_CAP = 400 / MEGABYTE


def mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 3)
    ).double()


def batches(steps: int = STEPS, dtype: torch.dtype = torch.float64):
    g = torch.Generator().manual_seed(1)
    x, y = (torch.randn(steps, BATCH, n, generator=g, dtype=dtype) for n in (6, 3))
    return list(zip(x, y, strict=True))


def own(batch):
    rank, k = dist.get_rank(), dist.get_world_size()
    return shard(batch[0], k, rank), shard(batch[1], k, rank)


def own_shards(steps: int = STEPS):
    return [own(batch) for batch in batches(steps)]


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9, weight_decay=0.01)


def state_of(net: nn.Module):
    return [tensor.detach() for tensor in (*net.parameters(), *net.buffers())]


def random(*shape: int, seed: int = 0):
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def gradients(net: nn.Module):
    return [torch.zeros(0) if p.grad is None else p.grad.clone() for p in net.parameters()]


def steps(wrapped, net, data=None):
    """Train on this rank's shards, or on `data`; return parameters and buffers of `net`."""
    optimizer = sgd(net)
    for x, y in own_shards() if data is None else data:
        optimizer.zero_grad()
        mse_loss(wrapped(x), y).backward()
        optimizer.step()
    return state_of(net)


def train(ddp: type, cap: float = SMALL_CAP, **options):
    net = mlp(seed=dist.get_rank())
    return steps(ddp(net, bucket_cap_mb=cap, **options), net)


def one_machine(net: nn.Module):
    return steps(net, net, batches())


def expect(replicas, expected) -> None:
    """Check that replicas have the expected numbers, to rounding, and all the same bits."""
    for replica in replicas:
        torch.testing.assert_close(replica, expected, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(replica, replicas[0], rtol=0, atol=0)


def compare(ranks, scenario, *args):
    """Run with both classes; check that they agree, and the replicas too; return the numbers."""
    ours, torch_replicas = (ranks.run(scenario, ddp, *args) for ddp in BOTH)
    torch.testing.assert_close(ours, torch_replicas, rtol=1e-11, atol=1e-12)
    expect(ours, torch_replicas[0])
    return ours[0]
