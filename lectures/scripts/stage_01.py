"""Stage 1, lecture 01: mini-batch SGD in one process, on the bytes of Python's documentation.

python scripts/stage_01.py
"""

from itertools import count, islice

import torch

from course_lib.mesh import Shape, next_word_loss, transformer
from course_lib.train.datasets import documentation_text

SHAPE = Shape(words=256, length=32, width=32, heads=4, hidden=128, layers=2)
ROWS, LR = 16, 0.3


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


def train(steps):
    """Train; return the model, and the loss of every step."""
    torch.manual_seed(0)
    model, losses = transformer(SHAPE), []
    for batch in islice(batches(texts()[0]), steps):
        model.zero_grad()
        loss = next_word_loss(model(batch[:, :-1]), batch[:, 1:])
        loss.backward()
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
    model, losses = train(steps=100)
    print(f"loss {losses[0]:.6f}, then {losses[-1]:.6f}; held out {held_out_loss(model):.6f}")
