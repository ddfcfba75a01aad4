"""The running model: all exact ways train alike, and send what their formulas say."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from course_lib.mesh import transformer
from course_lib.running_model import (
    RATE,
    ROWS,
    SHAPE,
    WAYS,
    WORLD_SIZE,
    Row,
    batch_of,
    measure,
)

STEPS = 3
PARAMETERS = sum(param.numel() for param in transformer(SHAPE).parameters())


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    return {way: measure(way, STEPS) for way in WAYS}


def loss_of_one_process() -> float:
    """Return the loss of the last global batch, trained with PyTorch alone."""
    torch.manual_seed(0)
    model = transformer(SHAPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for step in range(STEPS):
        batch = batch_of(step)
        optimizer.zero_grad()
        loss = cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
    return loss.item()


@pytest.mark.parametrize("way", [way for way in WAYS if way != "8 bits"])
def test_exact_ways_have_the_loss_of_one_process(rows, way):
    assert rows[way].loss == pytest.approx(loss_of_one_process(), rel=1e-4)


def test_eight_bits_are_near(rows):
    exact = loss_of_one_process()
    assert rows["8 bits"].loss != exact
    assert rows["8 bits"].loss == pytest.approx(exact, rel=0.05)


def test_bytes_are_those_of_the_formulas(rows):
    one_way = (WORLD_SIZE - 1) / WORLD_SIZE * 4 * PARAMETERS  # half of a ring all-reduce
    activation = 4 * ROWS * SHAPE.length * SHAPE.width
    expected = {
        "one rank": 0,
        "data parallel": 2 * one_way,
        "overlap": 2 * one_way,
        "8 bits": 2 * one_way / 4,
        "ZeRO-1": 2 * one_way,
        "ZeRO-2": 2 * one_way,
        "ZeRO-3": 3 * one_way,
        # Four all-reduces in a layer: one after each half, forward and backward.
        "tensor parallel": SHAPE.layers * 4 * 2 * (WORLD_SIZE - 1) / WORLD_SIZE * activation,
    }
    for way, sent in expected.items():
        assert rows[way].sent == pytest.approx(sent, rel=0.02), way
