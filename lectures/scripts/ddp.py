"""DDP, whole: torchrun --standalone --nproc-per-node 2 scripts/ddp.py."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from course_lib.data import digits

dist.init_process_group()
rank, world_size = dist.get_rank(), dist.get_world_size()
train_set, _ = digits()
sampler = DistributedSampler(train_set, drop_last=True)
loader = DataLoader(train_set, batch_size=96 // world_size, sampler=sampler)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(x), y)
        loss.backward()
        optimizer.step()
    weights = sum(param.norm() for param in model.parameters())
    print(f"epoch {epoch + 1}, rank {rank} of {world_size}: loss {loss:.3f}, |w| {weights:.6f}")
dist.destroy_process_group()
