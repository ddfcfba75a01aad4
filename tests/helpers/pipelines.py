"""Models, schedules and one process's training, for tests of pipelines."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from course_lib.pipeline_parallel import gpipe, interleaved, one_forward_one_backward, zero_bubble

# Name → the schedule for so many ranks and micro-batches.
SCHEDULES = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zero_bubble": zero_bubble,
    "zero_bubble_2": partial(zero_bubble, ahead=2),
}
MODELS = ["plain", "single", "frozen_first", "frozen_middle"]
BATCH = 12
WIDTH = 5


class Block(nn.Module):
    """A layer of its own shape of graph: a skip connection, and weights of two kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def model(kind: str = "plain") -> nn.Sequential:
    """Return nine layers, equal wherever they are built, that no K but 1 and 3 divides.

    In double precision, so that an error is no rounding; `single` is the plain one in float32.
    """
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, WIDTH), *[Block() for _ in range(7)], nn.Linear(WIDTH, 2))
    if kind == "frozen_first":
        layers[:5].requires_grad_(False)
    if kind == "frozen_middle":
        layers[4:6].requires_grad_(False)
    return layers if kind == "single" else layers.double()


def batch(step: int, kind: str = "plain"):
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(BATCH, 4, generator=generator), torch.randn(BATCH, 2, generator=generator)
    return (x, y) if kind == "single" else (x.double(), y.double())


def optimizer_of(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def train_alone(kind: str, steps: int):
    """Return the weights, by name, and the losses of one process with whole batches."""
    net = model(kind)
    optimizer = optimizer_of(list(net.parameters()))
    losses = []
    for step in range(steps):
        x, y = batch(step, kind)
        optimizer.zero_grad()
        loss = F.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return net.state_dict(), losses
