"""DDP as tutorials write it, whole: `mp.spawn` starts a process for each rank.

    python scripts/spawn_ddp.py  # a rank per GPU with NCCL; without GPUs two on the CPU with gloo

Training scripts start with torchrun instead: train_ddp.py, beside this file.
"""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from course_lib.data import digits


def setup(rank: int, world_size: int, port: int) -> torch.device:
    """Join the process group; return this rank's device."""
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", str(port)
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=world_size)
    return device


def cleanup() -> None:
    """Leave the process group."""
    dist.destroy_process_group()


def train(rank: int, world_size: int, port: int) -> None:
    """Train for three epochs: what every rank runs."""
    device = setup(rank, world_size, port)
    torch.manual_seed(0)
    train_set, _ = digits()
    sampler = DistributedSampler(train_set, drop_last=True)
    loader = DataLoader(train_set, batch_size=96 // world_size, sampler=sampler)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    # device_ids is for a GPU. A module on the CPU has none, and DDP refuses them.
    ddp = DistributedDataParallel(model, device_ids=[rank] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(ddp(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
        weights = sum(param.norm() for param in model.parameters())
        said = f"epoch {epoch + 1}, rank {rank} of {world_size}: loss {loss:.3f}, |w| {weights:.6f}"
        print(said + "\n", end="")  # in one piece, since all ranks write to the same place
    cleanup()


if __name__ == "__main__":
    world_size = torch.cuda.device_count() or 2
    with socket.socket() as free:  # tutorials write a fixed port: two jobs on a machine collide
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    mp.spawn(train, args=(world_size, port), nprocs=world_size)
