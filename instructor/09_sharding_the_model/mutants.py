"""Wrong solutions that people write, and right ones that differ from ours."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course_lib.checking.mutants import VIRTUAL, Mutant, edits_of, passes

# column_parallel ---------------------------------------------------------------------------


@passes
def column_parallel__by_hook(linear, group=None):
    class Columns(nn.Module):
        def __init__(self, weight, bias):
            super().__init__()
            self.weight = nn.Parameter(weight.clone())
            self.bias = None if bias is None else nn.Parameter(bias.clone())

        def forward(self, x):
            def add_up(grad):
                grad = grad.clone(memory_format=torch.contiguous_format)
                dist.all_reduce(grad, group=group)
                return grad

            x = x.view_as(x)
            if x.requires_grad:
                x.register_hook(add_up)
            return F.linear(x, self.weight, self.bias)

    k, rank = dist.get_world_size(group), dist.get_rank(group)
    weight = linear.weight.data.tensor_split(k)[rank]
    bias = None if linear.bias is None else linear.bias.data.tensor_split(k)[rank]
    return Columns(weight, bias)


column_parallel__by_hook_edited = edits_of(
    column_parallel__by_hook,
    Mutant("gradient_is_not_summed", "this rank's term alone", "x.register_hook(add_up)", "pass"),
    Mutant("rank_of_the_world", "in two groups", ".get_rank(group)", ".get_rank()"),
    Mutant("a_view", "shares memory with weight", "(weight.clone())", "(weight)"),
    Mutant(
        "keeps_the_layer",
        "the module still holds the whole layer: expected False",
        "super().__init__()",
        "super().__init__(); self.whole = linear",
    ),
    Mutant(
        "keeps_its_input",
        "keeps in memory in addition to its parameters: expected 0, got",
        "x = x.view_as(x)",
        "x = x.view_as(x); self.seen = x.detach()",
    ),
    Mutant(
        "without_outputs_no_sum",
        "which ended without taking part",
        "if x.requires_grad",
        "if x.requires_grad and len(self.weight)",
    ),
    Mutant("skips_zeros", "in all_reduce", "dist.all_reduce(", "grad.any() and dist.all_reduce("),
    Mutant("hook_on_x_itself", "gradient from other uses of x", "x = x.view_as(x)", "pass"),
)


# row_parallel ------------------------------------------------------------------------------


@passes
def row_parallel__the_output_where_it_is(linear, group=None):
    class Rows(nn.Module):
        def __init__(self, weight, bias):
            super().__init__()
            self.weight = nn.Parameter(weight.clone())
            self.bias = None if bias is None else nn.Parameter(bias.clone())

        def forward(self, x):
            y = (x @ self.weight.mT).contiguous()
            dist.all_reduce(y.data, group=group)
            return y if self.bias is None else y + self.bias

    parts = linear.weight.data.tensor_split(dist.get_world_size(group), 1)
    return Rows(parts[dist.get_rank(group)], None if linear.bias is None else linear.bias.data)


AFTER = "y if self.bias is None else y + self.bias", "y"


row_parallel__the_output_where_it_is_edited = edits_of(
    row_parallel__the_output_where_it_is,
    Mutant(
        "bias_in_the_product",
        "the bias added once by each rank",
        "(x @ self.weight.mT)",
        "F.linear(x, self.weight, self.bias)",
        also=(AFTER,),
    ),
    Mutant(
        "a_share_of_the_bias",
        "a K-th of the bias's gradient",
        "x @ self.weight.mT",
        "x @ self.weight.mT + (0 if self.bias is None else self.bias / dist.get_world_size(group))",
        also=(AFTER,),
    ),
    Mutant(
        "dist_nn",
        "K times the right gradient",
        "dist.all_reduce(y.data, group=group)",
        """
        import torch.distributed.nn as dnn
        y = dnn.functional.all_reduce(y, group=dist.group.WORLD if group is None else group)
        """,
    ),
    Mutant("rounds_to_bfloat16", "output", ".contiguous()", ".bfloat16().to(x.dtype)"),
    Mutant("a_view_if_contiguous", "shares memory", "weight.clone()", "weight.contiguous()"),
    Mutant("chunks", "tuple index out of range", "tensor_split(", "chunk("),
)


# sharded_optimizer -------------------------------------------------------------------------


@passes
def sharded_optimizer__chunks_in_lists(params, make_optimizer, group=None):
    k, rank = dist.get_world_size(group), dist.get_rank(group)
    params = [param for param in dict.fromkeys(params) if param.requires_grad]
    n = sum(param.numel() for param in params)
    chunk = (n + k - 1) // k

    def padded(tensors):
        flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
        return torch.cat([flat, flat.new_zeros(k * chunk - len(flat))])

    own_chunk = padded(params).split(chunk)[rank].clone()
    optimizer = make_optimizer([own_chunk])

    def step():
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
        total = torch.empty_like(own_chunk)
        dist.reduce_scatter(total, list(padded(grads).split(chunk)), group=group)
        own_chunk.grad = total / k
        optimizer.step()
        chunks = [torch.empty_like(own_chunk) for _ in range(k)]
        dist.all_gather(chunks, own_chunk, group=group)
        weights = torch.cat(chunks)[:n].split([param.numel() for param in params])
        with torch.no_grad():
            for param, weight in zip(params, weights, strict=True):
                param.copy_(weight.reshape(param.shape))

    return step


sharded_optimizer__chunks_in_lists_edited = edits_of(
    sharded_optimizer__chunks_in_lists,
    Mutant("one_number_more", "numbers of state", "(n + k - 1) // k", "n // k + 1"),
    Mutant("sum", "the sum over the ranks, not the mean", ".grad = total / k", ".grad = total"),
    Mutant(
        "goes_home_without_gradients",
        "waits in reduce_scatter",
        "grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]",
        """
        if not any(p.grad is not None for p in params):
            return
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
        """,
    ),
    Mutant("scatters_twice", "calls reduce_scatter", "dist.red", "for _ in range(2): dist.red"),
    Mutant("in_new_memory", "replaced: write into the old memory", "copy_", "set_"),
    Mutant(
        "optimizer_anew",
        "if every step makes a new optimizer",
        "optimizer.step()",
        "make_optimizer([own_chunk]).step()",
        also=(("optimizer = make_optimizer([own_chunk])", ""),),
    ),
    Mutant("tied_twice", "A tied parameter counts once", "dict.fromkeys(params)", "params"),
    Mutant(
        "equal_ones_once",
        "two equal parameters",
        "dict.fromkeys(params)",
        "{tuple(p.flatten().tolist()): p for p in params}.values()",
    ),
    Mutant(
        "skips_what_overflows",
        "has an inf or a NaN",
        "optimizer.step()",
        "total.isfinite().all() and optimizer.step()",
    ),
)


# pipeline_schedule -------------------------------------------------------------------------


@passes
def pipeline_schedule__last_micro_batch_first(world_size, bubble):
    p = world_size
    m = next(m for m in range(1, 1000) if (p - 1) / (m + p - 1) <= bubble)
    ranks = []
    for rank in range(p):
        forwards = [["F", i] for i in reversed(range(m))]
        backwards = [["B", i] for i in reversed(range(m))]
        steps = [forwards.pop(0) for _ in range(min(p - rank, m))]
        while backwards:
            steps.append(backwards.pop(0))
            if forwards:
                steps.append(forwards.pop(0))
        ranks.append(steps)
    return tuple(ranks)


@passes
def pipeline_schedule__by_warm_up(world_size, bubble):
    late, m = world_size - 1, 1
    while late / (m + late) > bubble:
        m += 1
    ranks = []
    for rank in range(world_size):
        ahead = min(late - rank, m)
        steps = [("F", i) for i in range(ahead)]
        for i in range(m):
            if ahead + i < m:
                steps.append(("F", ahead + i))
            steps.append(("B", i))
        ranks.append(steps)
    return ranks


pipeline_schedule__by_warm_up_edited = edits_of(
    pipeline_schedule__by_warm_up,
    Mutant("gpipe", "forwards before its first backward", "min(late - rank, m)", "m"),
    Mutant("no_warm_up", "enough forwards before", "min(late - rank, m)", "0", VIRTUAL),
    Mutant("the_ranks_reversed", "waits in recv", "ahead = min(late - rank,", "ahead = min(rank,"),
    Mutant(
        "backward_first",
        "before its forward",
        "steps = [",
        "steps = [('B', 0)] if rank == late else [",
        also=(('steps.append(("B", i))', 'rank == late and i == 0 or steps.append(("B", i))'),),
    ),
    Mutant("ends_early", "0 times", 'steps.append(("B",', 'ahead + i < m and steps.append(("B",'),
    Mutant(
        "rounded_up",
        "micro-batches, expected",
        "1, 1",
        "1, max(1, -int((1 - world_size) * (1 - bubble) / bubble // 1)) if bubble else 1",
    ),
    Mutant("begins_at_zero", "has 0 micro-batches", "1, 1", "1, int(world_size < 2)"),
    Mutant("no_rank_alone", "ZeroDivisionError", "1, 1", "1, int(bubble >= 1)"),
    Mutant("at_least_p", "micro-batches, expected", "1, 1", "1, world_size"),
    Mutant("the_papers_ratio", "micro-batches, expected", "/ (m + late) > bubble", "/ m > bubble"),
    Mutant(
        "schedule_of_the_first_call",
        "after another call",
        "return ranks",
        "return globals().setdefault(world_size, ranks)",
    ),
)
