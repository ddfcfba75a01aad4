"""Stage 4, lecture 04: what stands around the step of stage 2, so that its result is right.

torchrun --standalone --nproc-per-node 2 scripts/stage_04.py [CHECKPOINT]

The rows come from PyTorch's sampler, the mean gradient is clipped, all ranks share the held-out
rows, and a run that was stopped goes on from its checkpoint.
"""

import sys
from itertools import count, islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from course_lib.mesh import Shape, next_word_loss, transformer
from course_lib.train.datasets import documentation_text

SHAPE = Shape(words=256, length=32, width=32, heads=4, hidden=128, layers=2)
ROWS, LR, LARGEST_NORM = 16, 0.3, 1.0


def texts():
    """Return the rows to train on and the held-out rows: 32 bytes to read, and the next of each."""
    text = documentation_text()
    rows = text[: len(text) // 33 * 33].view(-1, 33).long()
    held_out = torch.arange(len(rows)) % 10 == 0
    return rows[~held_out], rows[held_out]


def batches(rows):
    """Yield this rank's part of every batch; every epoch has an order of its own."""
    sampler = DistributedSampler(rows, seed=0, drop_last=True)
    loader = DataLoader(rows, ROWS // dist.get_world_size(), sampler=sampler, drop_last=True)
    for epoch in count():
        sampler.set_epoch(epoch)  # without it, all epochs have one order
        yield from loader


def average(params):
    """Replace every gradient by its mean over the ranks."""
    for param in params:
        param.grad /= dist.get_world_size()
        dist.all_reduce(param.grad)


def train(steps, checkpoint=None):
    """Train, from a checkpoint if there is one; return the model, and this rank's losses."""
    torch.manual_seed(0)
    model, losses = transformer(SHAPE), []
    done = load(checkpoint, model)
    for batch in islice(batches(texts()[0]), done, steps):
        model.zero_grad()
        loss = next_word_loss(model(batch[:, :-1]), batch[:, 1:])
        loss.backward()
        average(model.parameters())
        nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM)  # of the mean, equal on all
        with torch.no_grad():
            for param in model.parameters():
                param -= LR * param.grad
        losses.append(loss.detach())
    save(checkpoint, model, steps)
    return model, torch.stack(losses)


def load(checkpoint, model):
    """Copy the weights of a checkpoint into the model, on every rank; return its steps."""
    if checkpoint is None or not checkpoint.exists():
        return 0
    state = torch.load(checkpoint)
    model.load_state_dict(state["model"])
    return state["steps"]


def save(checkpoint, model, steps):
    """Write a checkpoint, on rank 0; a reader never finds half a file under its name."""
    if checkpoint is not None and dist.get_rank() == 0:
        unfinished = checkpoint.with_suffix(".tmp")
        torch.save({"model": model.state_dict(), "steps": steps}, unfinished)
        unfinished.replace(checkpoint)


@torch.no_grad()
def held_out_loss(model):
    """Return the mean loss over all held-out rows; every rank computes its part of them."""
    rows = texts()[1][dist.get_rank() :: dist.get_world_size()]
    loss = next_word_loss(model(rows[:, :-1]), rows[:, 1:])
    sums = torch.stack([loss * len(rows), torch.tensor(float(len(rows)))])
    dist.all_reduce(sums)  # each row counts once, however many a rank has
    return (sums[0] / sums[1]).item()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, losses = train(100, Path(sys.argv[1]) if len(sys.argv) > 1 else None)
    average_loss = losses / dist.get_world_size()
    dist.all_reduce(average_loss)
    (first, last), held_out = average_loss[[0, -1]], held_out_loss(model)
    if dist.get_rank() == 0:
        print(f"loss {first:.6f}, then {last:.6f}; held out {held_out:.6f}")
    dist.destroy_process_group()
