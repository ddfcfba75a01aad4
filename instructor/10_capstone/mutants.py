"""Wrong solutions that people write, ways to cheat, and right ones that differ from ours."""

import torch
import torch.distributed as dist

from course_lib.checking.mutants import VIRTUAL, Mutant, edits_of, fails, passes

# speed_of_light ----------------------------------------------------------------------------------


@passes
def speed_of_light__by_kind(flops, sent, received, rate, bandwidth):
    return max(max(flops) / rate, max(sent) / bandwidth, max(received) / bandwidth)


@passes
def speed_of_light__in_float32(flops, sent, received, rate, bandwidth):
    f, s, r = (torch.tensor(list(x), dtype=torch.float32) for x in (flops, sent, received))
    return torch.maximum(f / rate, torch.maximum(s, r) / bandwidth).max()


speed_of_light__by_kind_edited = edits_of(
    speed_of_light__by_kind,
    Mutant("forgets_to_receive", "bytes that are received", ", max(received) / bandwidth", ""),
    Mutant("forgets_to_send", "without the bytes that are sent", "max(sent) / bandwidth, ", ""),
    Mutant("forgets_its_bytes", "seconds: expected", "max(sent)", "max(list(sent)[:-1] or [0])"),
    Mutant("keeps_the_rate", "from the call before", "/ rate", "/ globals().setdefault(0, rate)"),
    Mutant(
        "imports_the_reference",
        "course_lib.capstone.light",
        "return",
        "__import__('importlib').import_module('course_lib.capstone.light'); return",
        ("grader",),
    ),
    Mutant("walks_twice", "a second loop", "max(flops)", "sum(flops) and max(flops)"),
)


speed_of_light__in_float32_edited = edits_of(
    speed_of_light__in_float32,
    Mutant(
        "adds_up",
        "perfect overlap hides the shorter one",
        "torch.maximum(f / rate, torch.maximum(s, r) / bandwidth)",
        "(f / rate + torch.maximum(s, r) / bandwidth)",
    ),
    Mutant("mean_over_ranks", "the slowest rank sets the time", ".max()", ".mean()"),
    Mutant("sum_over_ranks", "they work at the same time", ".max()", ".sum()"),
    Mutant("both_ways", "a rank does both at once", "torch.maximum(s, r)", "(s + r)"),
)


@fails("seconds: expected")
def speed_of_light__of_the_rank_that_computes_most(flops, sent, received, rate, bandwidth):
    f, s, r = max(zip(flops, sent, received, strict=True))
    return max(f / rate, s / bandwidth, r / bandwidth)


# train -------------------------------------------------------------------------------------------


@fails("60 ms for the points of ‘all together’", VIRTUAL)
def train__local_steps(job):
    world_size = dist.get_world_size()
    params = list(job.model.parameters())
    sizes = [p.numel() for p in params]
    optimizer = torch.optim.SGD(params, lr=0.2, momentum=0.9)
    sent = 0
    for step in range(1, 73):
        at = 64 * step % job.rows
        job.backward(slice(at, at + 64))
        optimizer.step()
        if step % 24 == 0:
            with torch.no_grad():
                flat = torch.cat([p.flatten() for p in params]) / world_size
                dist.all_reduce(flat)
                for p, piece in zip(params, flat.split(sizes), strict=True):
                    p.copy_(piece.view(p.shape))
            sent += 2 * (world_size - 1) * flat.numel() * 4 // world_size
    return sent


@passes
def train__four_bits_without_feedback(job):
    world_size, rank = dist.get_world_size(), dist.get_rank()
    params = list(job.model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.2, momentum=0.9)
    flat = torch.cat([p.detach().flatten() for p in params])
    missing, sent = -len(flat) % 64, 0
    for step in range(1, 70):
        at = 64 * step % job.rows
        job.backward(slice(at, at + 64))
        optimizer.step()
        if step % 23:
            continue
        moved = torch.cat([p.detach().flatten() for p in params]) - flat
        blocks = torch.nn.functional.pad(moved, (0, missing)).view(-1, 64)
        scales = blocks.abs().amax(1, keepdim=True).clamp(min=1e-9)
        halves = (7 * blocks / scales).round().to(torch.int8).add(8).to(torch.uint8)
        halves = halves[:, ::2] | halves[:, 1::2] << 4
        rows = torch.cat([halves, scales.bfloat16().view(torch.uint8)], 1)
        all_rows = [rows.clone() for _ in range(world_size)]
        calls = []
        for s in range(1, world_size):
            to, source = (rank + s) % world_size, (rank - s) % world_size
            calls.append(dist.P2POp(dist.isend, rows, to))
            calls.append(dist.P2POp(dist.irecv, all_rows[source], source))
        for handle in dist.batch_isend_irecv(calls):
            handle.wait()
        for rows in all_rows:
            numbers = torch.stack([rows[:, :32] & 15, rows[:, :32] >> 4], 2).flatten(1).float() - 8
            numbers *= rows[:, 32:].contiguous().view(torch.bfloat16).float() / 7 / world_size
            flat = flat + numbers.flatten()[: len(flat)]
            sent += rows.nbytes
        sent -= rows.nbytes
        for p, piece in zip(params, flat.split([p.numel() for p in params]), strict=True):
            p.data.copy_(piece.view(p.shape))
    return sent


@fails("expected at most 4000 ms for the points of ‘bucketing’", VIRTUAL)
def train__parameter_by_parameter(job):
    world_size = dist.get_world_size()
    sent = 0
    for step in range(80):
        at = 64 * step % job.rows
        job.backward(slice(at, at + 64))
        with torch.no_grad():
            for p in job.model.parameters():
                dist.all_reduce(p.grad)
                p -= 0.6 * p.grad / world_size
                sent += 2 * (world_size - 1) * p.numel() * 4 // world_size
    return sent


train__parameter_by_parameter_edited = edits_of(
    train__parameter_by_parameter,
    Mutant(
        "in_one_message",
        "2500 ms for the points of ‘fewer bytes’",
        """
        for p in job.model.parameters():
            dist.all_reduce(p.grad)
            p -= 0.6 * p.grad / world_size
            sent += 2 * (world_size - 1) * p.numel() * 4 // world_size
        """,
        """
        params = list(job.model.parameters())
        flat = torch.cat([p.grad.flatten() for p in params])
        dist.all_reduce(flat)
        sent += 2 * (world_size - 1) * flat.nbytes // world_size
        for p, g in zip(params, flat.split([p.numel() for p in params]), strict=True):
            p -= 0.6 * g.view(p.shape) / world_size
        """,
        VIRTUAL,
    ),
)

train__in_one_message_edited = edits_of(
    train__parameter_by_parameter_edited[0],
    Mutant(
        "in_one_message_of_half_the_bytes",
        "200 ms for the points of ‘fewer rounds’",
        "torch.cat([p.grad.flatten() for p in params])",
        "torch.cat([p.grad.flatten() for p in params]).bfloat16()",
        VIRTUAL,
        also=(("flat.split", "flat.float().split"),),
    ),
)


train__local_steps_edited = edits_of(
    train__local_steps,
    Mutant(
        "too_few_steps",
        "the loss on test rows, which no rank has, is",
        "range(1, 73)",
        "range(1, 4)",
        also=(("step % 24 == 0", "step == 3"),),
    ),
    Mutant("steps_after_the_last_mean", "different weights", "range(1, 73)", "range(1, 74)"),
    Mutant("returns_a_tensor", "not return a number", "return sent", "return torch.tensor(sent)"),
    Mutant(
        "counts_the_tensor",
        "rank 0 says that it sent",
        "2 * (world_size - 1) * flat.numel() * 4 // world_size",
        "flat.numel()",
    ),
)


# Ways to cheat: to ask for other gradients than one's own, and to change the rules of the race.


@fails("the loss on test rows, which no rank has, is")
def train__an_easier_target(job):
    job.target, job.rows = 10.0, 1
    job.model.forward = lambda x: 100 * torch.eye(10)[:1]
    job.ask = lambda question: {"loss": 0.0, "gradients": question["weights"]}
    job.backward([0])
    for p in job.model.parameters():
        dist.broadcast(p.data, 0)
    return 0


@fails("a question has weights and rows")
def train__asks_for_another_rank(job):
    params = [p.detach() for p in job.model.parameters()]
    other = (dist.get_rank() + 1) % dist.get_world_size()
    job.ask({"weights": params, "rows": torch.arange(64), "rank": other})
    return 0
