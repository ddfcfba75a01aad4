"""The checks of this assignment. They are handed out: read them if a message is not enough.

A rank's program gets only that rank's input. Right answers come from PyTorch, on the whole batch.
"""

import torch
import torch.nn.functional as F
from torch import nn

from course_lib.checking import (
    Case,
    Check,
    Wrong,
    expect_close,
    expect_number,
    expect_same_on_all_ranks,
)

# shard_bounds ------------------------------------------------------------------------------


def bounds_program(shard_bounds, questions):
    """Ask for the bounds of every rank; one rank is enough, nothing is communicated."""
    return [
        [shard_bounds(length, world_size, rank) for rank in range(world_size)]
        for length, world_size in questions
    ]


def bounds_inputs(case, generator):
    return [case.parameters["questions"]]


def judge_bounds(case, inputs, outputs):
    for (length, world_size), answer in zip(inputs[0], outputs[0], strict=True):
        asked = f"shard_bounds({length}, {world_size}, rank)"
        for rank, bounds in enumerate(answer):
            pair = isinstance(bounds, tuple | list) and len(bounds) == 2
            if not pair or any(type(bound) is not int for bound in bounds):
                raise Wrong(f"{asked}: rank {rank} got {bounds!r}, expected two whole numbers")
        at = 0
        for rank, (start, stop) in enumerate(answer):
            if start != at:
                what = "is skipped" if start > at else "is held twice"
                raise Wrong(
                    f"{asked}: rank {rank} starts at {start}, but rank {rank - 1} stopped at {at}"
                    if rank
                    else f"{asked}: rank 0 starts at {start}, expected 0",
                    f"Element {min(start, at)} {what}.",
                )
            if stop < start:
                raise Wrong(f"{asked}: rank {rank} stops at {stop}, before its start {start}")
            at = stop
        if at != length:
            lost = f"{length - at} of {length} elements belong to nobody"
            beyond = f"the last rank stops at {at}, beyond the end"
            hint = "What does the integer division leave over?" if at < length else ""
            raise Wrong(f"{asked}: {lost if at < length else beyond}", hint)
        sizes = [stop - start for start, stop in answer]
        if max(sizes) - min(sizes) > 1 or sizes != sorted(sizes, reverse=True):
            raise Wrong(
                f"{asked}: the shards have sizes {sizes}",
                "Sizes may differ by one at most, and the first ranks take the extra elements.",
            )


# average_gradients -------------------------------------------------------------------------


def average_program(average_gradients, mine):
    """Set the gradients that came with the input, average, return them."""
    params = []
    for shape, gradient in zip(mine["shapes"], mine["gradients"], strict=True):
        param = nn.Parameter(torch.zeros(shape))
        param.grad = gradient
        params.append(param)
    average_gradients(params)
    return [param.grad for param in params]


def average_inputs(case, generator):
    shapes = case.parameters["shapes"]
    frozen = case.parameters.get("frozen", ())
    return [
        {
            "shapes": shapes,
            "gradients": [
                None if i in frozen else torch.randn(shape, generator=generator)
                for i, shape in enumerate(shapes)
            ],
        }
        for _ in range(case.world_size)
    ]


def judge_average(case, inputs, outputs):
    for i, local in enumerate(inputs[0]["gradients"]):
        if local is None:
            for rank, output in enumerate(outputs):
                if output[i] is not None:
                    raise Wrong(
                        f"rank {rank}: parameter {i} had no gradient (None), and got one",
                        "A frozen parameter takes no part: skip it.",
                    )
            continue
        gradients = torch.stack([rank_input["gradients"][i] for rank_input in inputs])
        total = gradients.double().sum(0)
        mean = (total / case.world_size).float()
        for rank, output in enumerate(outputs):
            mistakes = {
                "the sum over the ranks, not the mean": total.float(),
                "rank 0's gradient": gradients[0],
                "the mean divided by the number of ranks once more": mean / case.world_size,
            }
            if case.world_size > 1:
                mistakes = {"this rank's own gradient: nothing was averaged": gradients[rank]} | (
                    mistakes
                )
            expect_close(
                output[i],
                mean,
                f"rank {rank}: gradient of parameter {i}",
                atol=1e-5,
                lookalikes=mistakes if case.world_size > 1 else None,
            )
        expect_same_on_all_ranks([output[i] for output in outputs], f"gradient of parameter {i}")


# data_parallel_step ------------------------------------------------------------------------


def make_model(weights):
    """Return a small network with the given weights, the same on every rank."""
    hidden, inputs = weights[0].shape
    model = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, 3))
    with torch.no_grad():
        for param, weight in zip(model.parameters(), weights, strict=True):
            param.copy_(weight)
    return model


def step_program(data_parallel_step, mine):
    """Take two steps on this rank's own rows; return the losses and the weights."""
    model = make_model(mine["weights"])
    losses = [
        data_parallel_step(model, F.cross_entropy, x, y, mine["lr"])
        for x, y in zip(mine["x"], mine["y"], strict=True)
    ]
    return {"losses": losses, "weights": [param.detach() for param in model.parameters()]}


def step_inputs(case, generator):
    weights = [0.5 * torch.randn(s, generator=generator) for s in ((6, 4), (6,), (3, 6), (3,))]
    return [
        {
            "lr": 0.5,
            "weights": weights,
            "x": [torch.randn(rows, 4, generator=generator) for _ in range(2)],
            "y": [torch.randint(0, 3, (rows,), generator=generator) for _ in range(2)],
        }
        for rows in case.parameters["rows"]
    ]


def big_batch_steps(inputs, row_weights):
    """Return losses and weights of plain SGD on the union of the shards, rows weighted."""
    model = make_model(inputs[0]["weights"])
    optimizer = torch.optim.SGD(model.parameters(), lr=inputs[0]["lr"])
    losses = []
    for step in range(2):
        x = torch.cat([mine["x"][step] for mine in inputs])
        y = torch.cat([mine["y"][step] for mine in inputs])
        optimizer.zero_grad()
        loss = (row_weights * F.cross_entropy(model(x), y, reduction="none")).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [param.detach() for param in model.parameters()]


def judge_step(case, inputs, outputs):
    rows = case.parameters["rows"]
    mean = torch.full((sum(rows),), 1 / sum(rows))
    plain = torch.cat([torch.full((n,), 1 / (n * len(rows))) for n in rows if n])
    losses, weights = big_batch_steps(inputs, mean)
    mistakes = {
        "the sum of the shards' gradients, not the mean": big_batch_steps(
            inputs, plain * len(rows)
        ),
        "the weights before the steps: the model was not updated": (None, inputs[0]["weights"]),
    }
    if len(set(rows)) > 1:
        label = "what you get when a shard of few rows counts as much as one of many"
        mistakes[label] = big_batch_steps(inputs, plain)
    for rank, output in enumerate(outputs):
        for i, weight in enumerate(weights):
            expect_close(
                output["weights"][i],
                weight,
                f"rank {rank}: parameter {i} after two steps",
                atol=1e-5,
                lookalikes={name: right[1][i] for name, right in mistakes.items()},
            )
        for step, loss in enumerate(losses):
            expect_number(
                output["losses"][step],
                loss,
                f"rank {rank}: loss returned by step {step}",
                atol=1e-5,
            )
    for i in range(len(weights)):
        expect_same_on_all_ranks([o["weights"][i] for o in outputs], f"parameter {i}")


# -------------------------------------------------------------------------------------------

SHAPES = [(3, 2), (5,), ()]

CHECKS = {
    "shard_bounds": Check(
        function="shard_bounds",
        program=bounds_program,
        inputs=bounds_inputs,
        judge=judge_bounds,
        cases=(
            Case("lengths that divide", 1, {"questions": [(12, 1), (12, 2), (12, 3), (12, 4)]}),
            Case("lengths that do not divide", 1, {"questions": [(10, 3), (10, 4), (7, 2)]}),
            Case("fewer elements than ranks", 1, {"questions": [(2, 4), (0, 3), (1, 1)]}),
        ),
    ),
    "average_gradients": Check(
        function="average_gradients",
        program=average_program,
        inputs=average_inputs,
        judge=judge_average,
        cases=(
            Case("1 rank", 1, {"shapes": SHAPES}),
            Case("2 ranks", 2, {"shapes": SHAPES}),
            Case("3 ranks", 3, {"shapes": SHAPES}),
            Case("4 ranks", 4, {"shapes": SHAPES}),
            Case("2 ranks, a frozen parameter", 2, {"shapes": SHAPES, "frozen": [1]}),
        ),
    ),
    "data_parallel_step": Check(
        function="data_parallel_step",
        program=step_program,
        inputs=step_inputs,
        judge=judge_step,
        cases=(
            Case("1 rank, 6 rows", 1, {"rows": [6]}),
            Case("2 ranks, 4 rows each", 2, {"rows": [4, 4]}),
            Case("3 ranks, 4, 3 and 3 rows", 3, {"rows": [4, 3, 3]}),
            Case("4 ranks, 5, 1, 2 and 8 rows", 4, {"rows": [5, 1, 2, 8]}),
        ),
    ),
}
