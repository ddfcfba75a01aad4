"""Two ranks, one of which skips an all_reduce; when time is up, each writes its flight recorder.

    TORCH_FR_BUFFER_SIZE=100 torchrun --standalone --nproc-per-node 2 scripts/hang.py FOLDER

Needs no GPU. With NCCL, PyTorch writes such files by itself when a collective takes too long.
"""

import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace


def train(rows_per_step: list[int]) -> None:
    """Take a step for each entry, unless this rank has no rows for it; meet at the end."""
    for rows in rows_per_step:
        if rows > 0:
            gradient = torch.ones(5)
            dist.all_reduce(gradient)
    dist.barrier()


dist.init_process_group("gloo", timeout=timedelta(seconds=3))
rank = dist.get_rank()
try:
    train([8, 8, 8] if rank == 0 else [8, 8, 0])
except RuntimeError as error:
    reason = str(error).split("] ")[-1].partition(". ")[0]
    print(f"rank {rank}: {reason}\n", end="", flush=True)
    Path(sys.argv[1], f"rank_{rank}").write_bytes(_dump_fr_trace())
    time.sleep(1)  # time for the other rank to do the same
dist.destroy_process_group()
