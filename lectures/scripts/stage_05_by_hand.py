"""Stage 5 by hand, lecture 05: gradients leave in buckets, while backward goes on.

torchrun --standalone --nproc-per-node 2 scripts/stage_05_by_hand.py
"""

from functools import partial
from itertools import count, islice

import torch
import torch.distributed as dist

from course_lib.mesh import Shape, next_word_loss, transformer
from course_lib.train.datasets import documentation_text

SHAPE = Shape(words=256, length=32, width=32, heads=4, hidden=128, layers=2)
ROWS, LR = 16, 0.3
CAP = 50_000  # bytes in a bucket


def texts():
    """Return the rows to train on and the held-out rows: 32 bytes to read, and the next of each."""
    text = documentation_text()
    rows = text[: len(text) // 33 * 33].view(-1, 33).long()
    held_out = torch.arange(len(rows)) % 10 == 0
    return rows[~held_out], rows[held_out]


def batches(rows):
    """Yield batches without end; every epoch has an order of its own."""
    for epoch in count():
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(epoch))
        for batch in order[: len(rows) // ROWS * ROWS].split(ROWS):
            yield rows[batch]


class Bucket:
    """Some gradients side by side in one buffer, which one call sends."""

    def __init__(self, params):
        sizes = [param.numel() for param in params]
        self.buffer = torch.empty(sum(sizes))
        pieces = zip(params, self.buffer.split(sizes), strict=True)
        self.views = {param: piece.view_as(param) for param, piece in pieces}
        self.missing = set(params)

    def put(self, param):
        """Move a gradient into its place, divided by K; the optimizer finds the mean there."""
        torch.div(param.grad, dist.get_world_size(), out=self.views[param])
        param.grad = self.views[param]
        self.missing.remove(param)


def buckets_of(params, cap):
    """Return buckets of at most `cap` bytes, from the last parameter to the first."""
    groups, size = [[]], 0
    for param in reversed(list(params)):
        if groups[-1] and size + param.nbytes > cap:
            groups.append([])
            size = 0
        groups[-1].append(param)
        size += param.nbytes
    return [Bucket(group) for group in groups]


class Overlap:
    """Averages gradients over the ranks during backward; `finish` waits for the last bucket."""

    def __init__(self, model, cap=CAP):
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, 0)  # replicas start equal, whatever their seeds
        self.buckets, self.works = buckets_of(model.parameters(), cap), []
        for bucket in self.buckets:
            for param in bucket.views:
                param.register_post_accumulate_grad_hook(partial(self.ready, bucket))

    def ready(self, bucket, param):
        """Put a gradient into its bucket, and send every full bucket whose turn it is."""
        bucket.put(param)
        while len(self.works) < len(self.buckets):
            following = self.buckets[len(self.works)]
            if following.missing:
                break
            self.works.append(dist.all_reduce(following.buffer, async_op=True))

    def finish(self):
        """Wait for all buckets, and make them ready for the next step."""
        assert len(self.works) == len(self.buckets), "a parameter got no gradient"
        for work in self.works:
            work.wait()
        self.works.clear()
        for bucket in self.buckets:
            bucket.missing = set(bucket.views)


def train(steps):
    """Train; return the model, and this rank's loss of every step."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model, losses = transformer(SHAPE), []
    overlap = Overlap(model)
    for batch in islice(batches(texts()[0]), steps):
        batch = batch[rank::world_size]
        model.zero_grad()
        loss = next_word_loss(model(batch[:, :-1]), batch[:, 1:])
        loss.backward()
        overlap.finish()
        with torch.no_grad():
            for param in model.parameters():
                param -= LR * param.grad
        losses.append(loss.detach())
    return model, torch.stack(losses)


@torch.no_grad()
def held_out_loss(model):
    """Return the mean loss over the held-out rows, in nats per byte."""
    rows = texts()[1]
    return next_word_loss(model(rows[:, :-1]), rows[:, 1:]).item()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, losses = train(steps=100)
    average_loss = losses / dist.get_world_size()
    dist.all_reduce(average_loss)
    if dist.get_rank() == 0:
        first, last = average_loss[0], average_loss[-1]
        print(f"loss {first:.6f}, then {last:.6f}; held out {held_out_loss(model):.6f}")
    dist.destroy_process_group()
