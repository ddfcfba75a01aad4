"""Wrong solutions that people write, and right ones that differ from ours.

Each wrong one must fail for its own reason, each right one must pass. A function is named
``task__mistake``; ``@fails(part)`` says what the report must contain. Most mistakes change one
line of a right solution: ``edits_of`` gives that line and its replacement.
"""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course_lib.checking.mutants import edits_of, fails, passes

GRADER = ("grader",)

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


@passes
def column_parallel__by_function(linear, group=None):
    class AddUp(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            total = grad.contiguous()
            work = dist.all_reduce(total, group=group, async_op=True)
            work.wait()
            return total

    class Columns(nn.Module):
        def __init__(self, linear):
            super().__init__()
            k, rank = dist.get_world_size(group), dist.get_rank(group)
            out = linear.out_features
            size, more = divmod(out, k)
            start = rank * size + min(rank, more)
            stop = start + size + (rank < more)
            self.weight = nn.Parameter(linear.weight.detach()[start:stop].clone())
            self.register_parameter("bias", None)
            if linear.bias is not None:
                self.bias = nn.Parameter(linear.bias.detach()[start:stop].clone())

        def forward(self, x):
            x = AddUp.apply(x)
            return F.linear(x, self.weight, self.bias)

    return Columns(linear)


@passes
def column_parallel__whole_layer_as_function(linear, group=None):
    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias):
            ctx.save_for_backward(x, weight)
            return F.linear(x, weight, bias)

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            total = work = None
            if ctx.needs_input_grad[0]:
                total = (grad @ weight).contiguous()
                work = dist.all_reduce(total, group=group, async_op=True)
            rows = grad.shape[:-1].numel()
            flat = grad.reshape(rows, len(weight))
            of_weight = flat.t() @ x.reshape(rows, x.shape[-1])
            of_bias = flat.sum(0) if ctx.needs_input_grad[2] else None
            if work is not None:
                work.wait()
            return total, of_weight, of_bias

    k, rank = dist.get_world_size(group), dist.get_rank(group)
    module = nn.Module()
    module.weight, module.bias = (
        None if whole is None else nn.Parameter(whole.tensor_split(k)[rank].clone())
        for whole in (linear.weight, linear.bias)
    )
    module.forward = lambda x: Linear.apply(x, module.weight, module.bias)
    return module


@passes
def column_parallel__hook_of_the_module(linear, group=None):
    def add_up(module, of_inputs, of_outputs):
        if of_inputs[0] is None:
            return None
        total = of_inputs[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return (total,)

    k, rank = dist.get_world_size(group), dist.get_rank(group)
    weight = linear.weight.detach().tensor_split(k)[rank].clone()
    with_bias = linear.bias is not None
    made = nn.utils.skip_init(nn.Linear, linear.in_features, len(weight), bias=with_bias)
    made.weight = nn.Parameter(weight)
    if with_bias:
        made.bias = nn.Parameter(linear.bias.detach().tensor_split(k)[rank].clone())
    made.register_full_backward_hook(add_up)
    return made


edits_of(column_parallel__by_function)("""
weights_through_float16: output[
    linear.weight.detach()[start:stop] → linear.weight.detach()[start:stop].half().to(x_dtype)
    out = linear.out_features → out, x_dtype = linear.out_features, linear.weight.dtype
weights_through_bfloat16: output[
    linear.weight.detach()[start:stop] → linear.weight.detach()[start:stop].bfloat16().to(x_dtype)
    out = linear.out_features → out, x_dtype = linear.out_features, linear.weight.dtype
""")
edits_of(column_parallel__by_function)("""
mean_of_the_terms: dX is their sum
    return total → return total / dist.get_world_size(group)
no_partition: output has shape
    start = rank * size + min(rank, more) → start, size = 0, out; more = 0
whole_weight_sliced_output: weight has shape
    [start:stop].clone() → .clone()
    return F.linear(x, self.weight, self.bias)
  → ….tensor_split(dist.get_world_size(group), -1)[dist.get_rank(group)]
cuts_the_inputs: cannot be multiplied
    linear.weight.detach()[start:stop].clone() → linear.weight.detach()[:, start:stop].clone()
gradient_is_not_summed: this rank's term alone
    x = AddUp.apply(x) → pass
mean: gradient of x
    return total → … / dist.get_world_size(group)
sums_the_output: output
    return F.linear(x, self.weight, self.bias)
  → y = F.linear(x, self.weight, self.bias); dist.all_reduce(y); return y
gathers_the_output: output has shape
    return F.linear(x, self.weight, self.bias)
  → y = F.linear(x, self.weight, self.bias)
  → parts = [torch.empty_like(y) for _ in range(dist.get_world_size(group))]
  → dist.all_gather(parts, y, group=group)
  → return torch.cat(parts, -1)
""")
edits_of(column_parallel__by_hook)("""
hook_on_x_itself: also contains the gradient from other uses of x
    x = x.view_as(x) → pass
""")
edits_of(column_parallel__by_function)("""
whole_world: ✗ 4 ranks, in two groups
    all_reduce(total, group=group, async_op=True) → all_reduce(total)
    work.wait() → pass
rank_of_the_world: ✗ 4 ranks, in two groups
    dist.get_rank(group) → dist.get_rank()
as_many_as_divide: ✗ 3 ranks, uneven
    size, more = divmod(out, k) → size, more = out // k, 0
rest_to_the_last: ✗ 3 ranks, uneven
    start = rank * size + min(rank, more) → start = rank * size
    start + size + (rank < more) → out if rank == k - 1 else start + size
rounded_up: ✗ 4 ranks, uneven
    size, more = divmod(out, k) → size, more = -(-out // k), 0
    start + size + (rank < more) → min(start + size, out)
    start = rank * size + min(rank, more) → start = min(rank * size, out)
""")
edits_of(column_parallel__by_hook)("""
chunks: ✗ 3 ranks, fewer than one each
    tensor_split → chunk
""")
edits_of(column_parallel__by_function)("""
whole_bias: RuntimeError
    linear.bias.detach()[start:stop].clone() → linear.bias.detach().clone()
forgets_the_bias: output
    if linear.bias is not None: → if False:
a_bias_always: NoneType
    if linear.bias is not None: → if True:
a_view: shares memory with weight
    linear.weight.detach()[start:stop].clone() → linear.weight.detach()[start:stop]
tensors_for_parameters: numbers in the module's parameters
    nn.Parameter(linear.weight.detach()[start:stop].clone())
  → linear.weight.detach()[start:stop].clone().requires_grad_()
matrices_only: ✗ 2 ranks, x is one row
    x = AddUp.apply(x) → x = AddUp.apply(x.view(x.shape[0], -1, x.shape[-1]).view(x.shape))
empties_the_layer: the function changes linear
    return Columns(linear)
  → made = Columns(linear)
  → linear.weight.data = linear.weight.data[:0]
  → return made
keeps_the_layer: the module still holds the whole layer: expected False
    Parameter(linear.weight.detach()[start:stop].clone()) → …; self.whole = linear
makes_a_linear: draws or seeds random numbers
    self.weight = nn.Parameter(linear.weight.detach()[start:stop].clone())
  → layer = nn.Linear(9, 9)
  → layer.weight.data = linear.weight.detach()[start:stop].clone()
  → self.weight = layer.weight
does_not_wait: never waits for the handle
    work.wait() → pass
row_by_row: Send nothing in forward, and one sum in backward
    work = dist.all_reduce(total, group=group, async_op=True) → rows = total.unbind()
    work.wait() → [dist.all_reduce(row, group=group) for row in rows]
sums_the_weights_gradient: Send nothing in forward, and one sum in backward
    return F.linear(x, self.weight, self.bias)
  → y = F.linear(x, self.weight, self.bias)
  → y.register_hook(lambda g: dist.all_reduce(g.sum(), group=group))
  → return y
through_float32: dtype
    x, self.weight → x.float(), self.weight.float()
""")
edits_of(column_parallel__by_hook)("""
every_input_needs_a_gradient: cannot register a hook
    if x.requires_grad:
        x.register_hook(add_up)
  → x.register_hook(add_up)
""")
edits_of(column_parallel__by_function)("""
remembers_its_input: later output
    x = AddUp.apply(x) → x = self.__dict__.setdefault('x', AddUp.apply(x))
a_view_of_a_copy: This equals the size of the whole weight
    linear.weight.detach()[start:stop].clone() → linear.weight.detach().clone()[start:stop]
keeps_a_copy: keeps in memory in addition to its parameters: expected 0, got 12
    self.weight = nn.Parameter(linear.weight.detach()[start:stop].clone())
  → …; self.register_buffer('whole', linear.weight.detach().clone())
keeps_its_input: keeps in memory in addition to its parameters: expected 0, got 6
    x = AddUp.apply(x) → self.seen = x.detach(); …
changes_the_mode: the function changes linear
    return Columns(linear) → made = Columns(linear); linear.train(not linear.training); return made
freezes: the function changes linear
    return Columns(linear)
  → made = Columns(linear)
  → linear.requires_grad_(False)
  → return made
the_layer_if_alone: the module still holds the whole layer: expected False
    return Columns(linear) → return linear if dist.get_world_size(group) == 1 else Columns(linear)
""")
edits_of(column_parallel__by_hook)("""
group_of_the_first_call: something is kept from the call before
    def column_parallel__by_hook(linear, group=None):
  → def column_parallel__by_hook(linear, group=None, kept=[]):
  →     kept.append(group)
  →     group = kept[0]
""")
edits_of(column_parallel__by_function)("""
without_outputs_no_sum: Ranks 0, 1 wait for rank 2
    x = AddUp.apply(x) → … if len(self.weight) else x
no_module: expected an nn.Module
    return Columns(linear) → return Columns(linear).forward
""")


@fails("the function changes linear")
def column_parallel__cuts_the_layer_itself(linear, group=None):
    k, rank = dist.get_world_size(group), dist.get_rank(group)
    for param in linear.parameters():
        param.data = param.data.tensor_split(k)[rank].clone()

    def add_up(module, inputs):
        x = inputs[0].view_as(inputs[0])
        if x.requires_grad:
            x.register_hook(lambda g: (g := g.contiguous(), dist.all_reduce(g, group=group))[0])
        return (x,)

    linear.register_forward_pre_hook(add_up)
    return linear


@fails("course_lib", only=GRADER)
def column_parallel__imports_the_reference(linear, group=None):
    import importlib

    reference = importlib.import_module("course_lib.tensor_parallel").ColumnParallelLinear

    return reference.from_linear(linear, group)


# row_parallel ------------------------------------------------------------------------------


@passes
def row_parallel__in_place(linear, group=None):
    class Rows(nn.Module):
        def __init__(self, weight, bias):
            super().__init__()
            self.weight, self.bias = weight, bias

        def forward(self, x):
            y = F.linear(x, self.weight)
            total = y.detach().clone(memory_format=torch.contiguous_format)
            dist.all_reduce(total, group=group)
            y = y + (total - y).detach()
            return y if self.bias is None else y + self.bias

    rank = dist.get_rank(group)
    parts = linear.weight.data.tensor_split(dist.get_world_size(group), dim=1)
    bias = None if linear.bias is None else nn.Parameter(linear.bias.data.clone())
    return Rows(nn.Parameter(parts[rank].clone()), bias)


@passes
def row_parallel__by_function(linear, group=None):
    class Total(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            total = y.clone(memory_format=torch.contiguous_format)
            work = dist.all_reduce(total, group=group, async_op=True)
            work.wait()
            return total

        @staticmethod
        def backward(ctx, grad):
            return grad

    class Rows(nn.Module):
        def __init__(self, linear):
            super().__init__()
            k, rank = dist.get_world_size(group), dist.get_rank(group)
            columns = linear.weight.detach().t()
            self.weight = nn.Parameter(columns.tensor_split(k)[rank].t().clone())
            self.register_parameter("bias", None)
            if linear.bias is not None:
                self.bias = nn.Parameter(linear.bias.detach().clone())

        def forward(self, x):
            partial = F.linear(x, self.weight)
            y = Total.apply(partial)
            return y if self.bias is None else y + self.bias

    return Rows(linear)


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


edits_of(row_parallel__by_function)("""
bias_in_the_product: the bias added once by each rank
    partial = F.linear(x, self.weight) → partial = F.linear(x, self.weight, self.bias)
    return y if self.bias is None else y + self.bias → return y
a_share_of_the_bias: a K-th of the bias's gradient
    partial = F.linear(x, self.weight)
  → b = None if self.bias is None else self.bias / dist.get_world_size(group)
  → partial = F.linear(x, self.weight, b)
    return y if self.bias is None else y + self.bias → return y
bias_of_rank_0: Add the whole bias on every rank, after the sum
    partial = F.linear(x, self.weight)
  → b = None if self.bias is None else self.bias * (dist.get_rank(group) == 0)
  → partial = F.linear(x, self.weight, b)
    return y if self.bias is None else y + self.bias → return y
bias_on_rank_0_only: bias is None
    if linear.bias is not None: → if linear.bias is not None and rank == 0:
    partial = F.linear(x, self.weight) → partial = F.linear(x, self.weight, self.bias)
    return y if self.bias is None else y + self.bias → return y
cuts_the_bias: RuntimeError
    detach().clone() → detach().tensor_split(k)[rank]
forgets_the_bias: output
    if linear.bias is not None: → if False:
bias_is_no_parameter: gradient of bias
    self.bias = nn.Parameter(linear.bias.detach().clone())
  → del self.bias; self.register_buffer('bias', linear.bias.data.clone())
no_sum: output
    y = Total.apply(partial) → y = partial
mean: output
    return total → … / dist.get_world_size(group)
sums_on_the_way_back: K times the right gradient
    return grad → grad = grad.contiguous(); dist.all_reduce(grad, group=group); …
dist_nn: K times the right gradient
    y = Total.apply(partial)
  → import torch.distributed.nn as dnn
  → y = dnn.functional.all_reduce(
  →     partial.contiguous(), group=dist.group.WORLD if group is None else group
  → )
sums_the_gradient_of_x: gradient of x
    partial = F.linear(x, self.weight)
  → x = x.view_as(x)
  → x.requires_grad and x.register_hook(
  →     lambda g: (g := g.contiguous(), dist.all_reduce(g, group=group))[0]
  → )
  → …
one_buffer_for_all_outputs: output
    total = y.clone(memory_format=torch.contiguous_format)
  → total = kept.setdefault("total", torch.empty(y.shape, dtype=y.dtype)).copy_(y)
    class Total(torch.autograd.Function):
  → kept = {}
  → …
to_the_first: output
    work = dist.all_reduce(total, group=group, async_op=True)
  → work = dist.reduce(
  →     total,
  →     0 if group is None else dist.get_process_group_ranks(group)[0],
  →     group=group,
  →     async_op=True,
  → )
gathers: this task allows all_reduce only
    work = dist.all_reduce(total, group=group, async_op=True)
  → parts = [torch.empty_like(total) for _ in range(dist.get_world_size(group))]
  → work = dist.all_gather(parts, total, group=group, async_op=True)
    return total → return sum(parts)
no_partition: cannot be multiplied
    columns.tensor_split(k)[rank].t().clone() → linear.weight.detach().clone()
cuts_the_outputs: cannot be multiplied
    columns.tensor_split(k)[rank].t().clone() → linear.weight.detach().tensor_split(k)[rank].clone()
chunks: ✗ 3 ranks, fewer than one each
    columns.tensor_split(k) → columns.chunk(k)
as_many_as_divide: ✗ 3 ranks, uneven
    columns.tensor_split(k) → columns[: len(columns) // k * k].tensor_split(k)
whole_world: ✗ 4 ranks, in two groups
    group=group, async_op=True → async_op=True
a_view: shares memory with weight
    columns.tensor_split(k)[rank].t().clone() → columns.tensor_split(k)[rank].t()
a_view_of_a_copy: This equals the size of the whole weight
    columns = linear.weight.detach().t() → columns = linear.weight.detach().clone().t()
    columns.tensor_split(k)[rank].t().clone() → columns.tensor_split(k)[rank].t()
sets_the_gradient: add it to the gradient that is in .grad already
    class Rows(nn.Module):
  → class Plus(torch.autograd.Function):
  →     @staticmethod
  →     def forward(ctx, y, bias, layer):
  →         ctx.layer = layer
  →         return y + bias
  →     @staticmethod
  →     def backward(ctx, grad):
  →         ctx.layer.bias.grad = grad.reshape(-1, grad.shape[-1]).sum(0)
  →         return grad, None, None
  → …
    y + self.bias → Plus.apply(y, self.bias, self)
""")

edits_of(row_parallel__in_place)("""
group_of_the_first_call: after ‘3 ranks, fewer than one each’
    def row_parallel__in_place(linear, group=None):
  → def row_parallel__in_place(linear, group=None, kept=[]):
  →     kept.append(group)
  →     group = kept[0]
""")
edits_of(row_parallel__by_function)("""
sums_in_bfloat16: output
    y = Total.apply(partial) → y = Total.apply(partial.bfloat16()).to(partial.dtype)
keeps_the_layer: the module still holds the whole layer: expected False
    columns = linear → self.make = lambda: linear; …
does_not_wait: never waits for the handle
    work.wait() → pass
through_float32: dtype
    partial = F.linear(x, self.weight) → partial = F.linear(x.float(), self.weight.float())
row_by_row: Send one sum in each forward, and nothing in backward
    work = dist.all_reduce(total, group=group, async_op=True) → rows = total.unbind()
    work.wait() → [dist.all_reduce(row, group=group) for row in rows]
""")


@fails("course_lib", only=GRADER)
def row_parallel__imports_the_reference(linear, group=None):
    import importlib

    reference = importlib.import_module("course_lib.tensor_parallel").RowParallelLinear

    return reference.from_linear(linear, group)


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

    mine = padded(params).split(chunk)[rank].clone()
    optimizer = make_optimizer([mine])

    def step():
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
        total = torch.empty_like(mine)
        dist.reduce_scatter(total, list(padded(grads).split(chunk)), group=group)
        mine.grad = total / k
        optimizer.step()
        chunks = [torch.empty_like(mine) for _ in range(k)]
        dist.all_gather(chunks, mine, group=group)
        weights = torch.cat(chunks)[:n].split([param.numel() for param in params])
        with torch.no_grad():
            for param, weight in zip(params, weights, strict=True):
                param.copy_(weight.reshape(param.shape))

    return step


@passes
def sharded_optimizer__one_buffer(params, make_optimizer, group=None):
    k, rank = dist.get_world_size(group), dist.get_rank(group)
    unique = []
    for param in params:
        if param.requires_grad and not any(param is other for other in unique):
            unique.append(param)
    sizes = [param.numel() for param in unique]
    chunk = math.ceil(sum(sizes) / k)
    buffer, grads = (unique[0].detach().new_zeros(k * chunk) for _ in range(2))
    for param, place in zip(unique, buffer[: sum(sizes)].split(sizes), strict=True):
        place.view(param.shape).copy_(param.detach())
        param.data = place.view(param.shape)
    places = grads[: sum(sizes)].split(sizes)
    mine = buffer[rank * chunk : (rank + 1) * chunk]
    optimizer = make_optimizer([mine])

    def step():
        for param, place in zip(unique, places, strict=True):
            if param.grad is None:
                place.zero_()
            else:
                torch.div(param.grad, k, out=place.view(param.shape))
        part = torch.empty_like(mine)
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        scatter(part, grads, group=group)
        mine.grad = part
        optimizer.step()
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(buffer, mine.clone(), group=group)

    return step


@passes
def sharded_optimizer__pieces_of_parameters(params, make_optimizer, group=None):
    k, rank = dist.get_world_size(group), dist.get_rank(group)
    params = [param for param in dict.fromkeys(params) if param.requires_grad]
    chunk = -(-sum(param.numel() for param in params) // k)
    whole = torch.zeros(k * chunk, dtype=params[0].dtype)
    places, at, pieces = [], 0, []
    for param in params:
        first, last = max(rank * chunk, at), min((rank + 1) * chunk, at + param.numel())
        places.append(slice(at, at + param.numel()))
        if first < last:
            own = param.detach().reshape(-1)[first - at : last - at].clone()
            pieces.append((own, slice(first - rank * chunk, last - rank * chunk)))
        at += param.numel()
    optimizer = make_optimizer([own for own, _ in pieces] or [whole[:1].clone()])

    def step():
        for param, place in zip(params, places, strict=True):
            whole[place] = 0 if param.grad is None else param.grad.reshape(-1) / k
        part = whole.new_zeros(chunk)
        dist.reduce_scatter(part, list(whole.view(k, chunk)), group=group)
        for own, place in pieces:
            own.grad = part[place]
        optimizer.step()
        for own, place in pieces:
            part[place] = own
        chunks = [torch.empty_like(part) for _ in range(k)]
        dist.all_gather(chunks, part, group=group)
        weights = torch.cat(chunks)
        for param, place in zip(params, places, strict=True):
            param.data.copy_(weights[place].view(param.shape))

    return step


@passes
def sharded_optimizer__hooks_of_the_optimizer(params, make_optimizer, group=None):
    k, rank = dist.get_world_size(group), dist.get_rank(group)
    params = [param for param in dict.fromkeys(params) if param.requires_grad]
    sizes = [param.numel() for param in params]
    chunk = math.ceil(sum(sizes) / k)

    def padded(tensors):
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        return F.pad(flat, (0, k * chunk - len(flat))).chunk(k)

    def before(*_):
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
        mine.grad = torch.empty_like(mine)
        dist.reduce_scatter(mine.grad, list(padded(grads)), group=group)
        mine.grad /= k

    def after(*_):
        chunks = [torch.empty_like(mine) for _ in range(k)]
        dist.all_gather(chunks, mine, group=group)
        for param, weight in zip(params, torch.cat(chunks)[: sum(sizes)].split(sizes), strict=True):
            param.data.copy_(weight.view(param.shape))
            param.grad = None

    mine = padded(params)[rank].clone()
    optimizer = make_optimizer([{"params": [mine]}])
    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    return optimizer.step


edits_of(sharded_optimizer__one_buffer)("""
stale_gradients: ✗ 2 ranks, one without gradients
    if param.grad is None:
        place.zero_()
    else:
  → if param.grad is not None:
equal_ones_once: ✗ 4 ranks, in two groups
    any(param is other for other in unique) → any(param.equal(other) for other in unique)
""")
edits_of(sharded_optimizer__chunks_in_lists)("""
no_care_if_alone: ✗ 1 rank
    k, rank = dist.get_world_size(group), dist.get_rank(group)
  → …
  → if k == 1:
  →     return make_optimizer(list(params)).step
group_of_the_first_call: something is kept from the call before
    def sharded_optimizer__chunks_in_lists(params, make_optimizer, group=None):
  → def sharded_optimizer__chunks_in_lists(params, make_optimizer, group=None, kept=[]):
  →     kept.append(group)
  →     group = kept[0]
one_number_more: updates 9 numbers, expected at most 8
    chunk = (n + k - 1) // k → chunk = n // k + 1
adds_up_gradients: ✗ 1 rank
    mine.grad = total / k → … if mine.grad is None else mine.grad + total / k
sum: the sum over the ranks, not the mean
    mine.grad = total / k → mine.grad = total
half: ✗ 3 ranks
    mine.grad = total / k → mine.grad = total / 2
divides_twice: divided by the number of ranks a second time
    mine.grad = total / k → … / k
one_for_all_models: parameter 0
    make_optimizer, group=None): → make_optimizer, group=None, made=[]):
    optimizer = make_optimizer([mine]) → made.append(make_optimizer([mine])); optimizer = made[0]
freezes: step() changes requires_grad of a parameter
    optimizer = make_optimizer([mine])
  → …
  → for param in params:
  →     param.requires_grad_(False)
goes_home_without_gradients: waits in reduce_scatter
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
  → if not any(p.grad is not None for p in params):
  →     return
  → …
own_gradients: parameter 0
    dist.reduce_scatter(total, list(padded(grads).split(chunk)), group=group)
  → total = k * padded(grads).split(chunk)[rank].clone()
state_is_not_sharded: numbers, expected at most
    mine = padded(params).split(chunk)[rank].clone() → mine = padded(params)
    total = torch.empty_like(mine) → total = torch.empty_like(mine[:chunk])
    total / k → torch.zeros_like(mine); mine.grad[rank * chunk : (rank + 1) * chunk] = total / k
    chunks = [torch.empty_like(mine) → chunks = [torch.empty_like(total)
    mine, group → mine[rank * chunk : (rank + 1) * chunk].clone(), group
all_reduce: this task allows reduce_scatter and all_gather only
    dist.reduce_scatter(total, list(padded(grads).split(chunk)), group=group)
  → every = padded(grads)
  → dist.all_reduce(every, group=group)
  → total.copy_(every.split(chunk)[rank])
gathers_gradients: rank 0 calls all_gather
    dist.reduce_scatter(total, list(padded(grads).split(chunk)), group=group)
  → every = [torch.empty_like(padded(grads)) for _ in range(k)]
  → dist.all_gather(every, padded(grads), group=group)
  → total.copy_(sum(every).split(chunk)[rank])
per_parameter: rank 0 calls reduce_scatter
    dist.reduce_scatter(total, list(padded(grads).split(chunk)), group=group)
  → pieces = padded(grads).view(k, chunk).split([1] * chunk, 1)
  → parts = [torch.empty(1, dtype=total.dtype) for _ in pieces]
  → [
  →     dist.reduce_scatter(part, [row.clone() for row in piece.unbind()], group=group)
  →     for part, piece in zip(parts, pieces, strict=True)
  → ]
  → total = torch.cat(parts)
steps_twice: parameter 0
    optimizer.step() → optimizer.step(); optimizer.step()
in_new_memory: got 'replaced: write into the old memory
    param.copy_(weight.reshape(param.shape)) → param.data = weight.reshape(param.shape)
no_gradient_for_zeros: ✗ 3 ranks, one that nobody uses
    mine.grad = total / k → mine.grad = total / k if total.any() else None
optimizer_anew: if every step makes a new optimizer
    optimizer.step() → make_optimizer([mine]).step()
    optimizer = make_optimizer([mine]) →
an_optimizer_of_its_own: parameter 0
    make_optimizer([mine]) → torch.optim.SGD([mine], lr=0.1)
does_not_gather: parameter 0
    dist.all_gather(chunks, mine, group=group)
  → chunks = list(padded(params).split(chunk)); chunks[rank] = mine
gathers_before_the_step: parameter 0
    optimizer.step() →
    dist.all_gather(chunks, mine, group=group) → …; optimizer.step()
does_not_write_back: parameter 0
    param.copy_(weight.reshape(param.shape)) → param = weight
frozen_ones_too: numbers, expected at most 5
    [param for param in dict.fromkeys(params) if param.requires_grad] → list(dict.fromkeys(params))
tied_twice: A tied parameter counts once
    dict.fromkeys(params) → params
walks_twice: ✗ 2 ranks
    k, rank = dist.get_world_size(group), dist.get_rank(group) → …; sum(p.numel() for p in params)
loses_the_rest: ✗ 3 ranks, uneven
    chunk = (n + k - 1) // k → chunk = n // k; n = k * chunk
    return torch.cat([flat, flat.new_zeros(k * chunk - len(flat))]) → return flat[: k * chunk]
    mine = padded(params).split(chunk)[rank].clone()
  → def padded_rest():
  →     return torch.cat([p.detach().flatten() for p in params])[k * chunk :]
  → …
    weights = torch.cat(chunks)[:n].split([param.numel() for param in params])
  → weights = torch.cat(chunks)[:n]
  → weights = torch.cat([weights, padded_rest()]).split([param.numel() for param in params])
no_padding: ✗ 3 ranks, uneven
    return torch.cat([flat, flat.new_zeros(k * chunk - len(flat))]) → return flat
leaves_out_what_is_missing: a gradient that is None is left out
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
  → grads = [p.grad for p in params if p.grad is not None]
needs_every_gradient: ✗ 2 ranks, frozen, tied, one unused
    torch.zeros_like(p) if p.grad is None else p.grad → p.grad
whole_world: ✗ 4 ranks, in two groups
    group=group → group=None
rank_of_the_world: ✗ 4 ranks, in two groups
    dist.get_rank(group) → dist.get_rank()
through_float32: rank 0
    tensor.detach().flatten() → tensor.detach().float().flatten()
does_not_wait: never waits for the handle
    mine, group=group → mine, group=group, async_op=True
returns_nothing: expected a function step()
    return step → step
""")


@fails("updates 10 numbers, expected at most 5")
def sharded_optimizer__from_the_first_rank(params, make_optimizer, group=None):
    params = [param for param in dict.fromkeys(params) if param.requires_grad]
    optimizer, k = make_optimizer(params), dist.get_world_size(group)
    first = 0 if group is None else dist.get_process_group_ranks(group)[0]

    def step():
        for param in params:
            grad = torch.zeros_like(param) if param.grad is None else param.grad.contiguous()
            dist.all_reduce(grad, group=group)
            param.grad = grad / k
        optimizer.step()
        for param in params:
            weight = param.detach().contiguous()
            dist.broadcast(weight, first, group=group)
            param.data.copy_(weight)

    return step


edits_of(sharded_optimizer__from_the_first_rank)("""
deals_out_whole_tensors: numbers, expected at most
    optimizer, k = make_optimizer(params), dist.get_world_size(group)
    first = 0 if group is None else dist.get_process_group_ranks(group)[0]
  → k, rank = dist.get_world_size(group), dist.get_rank(group)
  → members = list(range(k)) if group is None else dist.get_process_group_ranks(group)
  → mine = [param for i, param in enumerate(params) if i % k == rank]
  → optimizer = make_optimizer(mine) if mine else None
    optimizer.step()
    for param in params:
  → if optimizer is not None:
  →     optimizer.step()
  → for i, param in enumerate(params):
    dist.broadcast(weight, first, group=group) → dist.broadcast(weight, members[i % k], group=group)
""")


@fails("course_lib", only=GRADER)
def sharded_optimizer__imports_the_reference(params, make_optimizer, group=None):
    import importlib

    reference = importlib.import_module("course_lib.sharded_optimizer").FlatChunks

    chunks = reference(list(params), [0], group)
    return make_optimizer([chunks.chunk()]).step


# pipeline_schedule -------------------------------------------------------------------------


@passes
def pipeline_schedule__greedy(world_size, bubble):
    p, m = world_size, 1
    while (p - 1) / (m + p - 1) > bubble:
        m += 1
    done, free = {}, [0.0] * p  # (action, micro-batch, rank) -> its end
    steps = [[] for _ in range(p)]
    while any(len(each) < 2 * m for each in steps):
        choices = []
        for rank, mine in enumerate(steps):
            f = sum(action == "F" for action, _ in mine)
            b = len(mine) - f
            before = 0.0 if rank == 0 else done.get(("F", f, rank - 1))
            after = done.get(("B", b, rank + 1)) if rank < p - 1 else done.get(("F", b, rank))
            if b < f and after is not None:
                choices.append((max(free[rank], after), 0, rank, "B", b))
            if f < m and f - b < p - rank and before is not None:
                choices.append((max(free[rank], before), 1, rank, "F", f))
        start, _, rank, action, number = min(choices)
        free[rank] = done[action, number, rank] = start + (1 if action == "F" else 2)
        steps[rank].append((action, number))
    return steps


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


@passes
def pipeline_schedule__by_formula(world_size, bubble):
    late = world_size - 1
    m = max(1, math.ceil(late * (1 - bubble) / bubble)) if late else 1
    ranks = []
    for rank in range(world_size):
        ahead = min(late - rank, m)
        forwards, backwards = [("F", i) for i in range(m)], [("B", i) for i in range(m)]
        in_turn = zip(forwards[ahead:], backwards, strict=False)
        in_turn = [step for pair in in_turn for step in pair]
        ranks.append((*forwards[:ahead], *in_turn, *backwards[m - ahead :]))
    return ranks


edits_of(pipeline_schedule__by_warm_up)("""
numpys_numbers passes
    late, m = world_size - 1, 1
  → …
  → import numpy as np
    range(ahead) → np.arange(ahead)
    for i in range(m) → for i in np.arange(m)
gpipe: forwards before its first backward, but needs only 2
    ahead = min(late - rank, m) → ahead = m
one_more_ahead: forwards before its first backward, but needs only 2
    ahead = min(late - rank, m) → ahead = min(late - rank + 1, m)
twice_as_many_ahead: forwards before its first backward, but needs only 2
    ahead = min(late - rank, m) → ahead = min(2 * (late - rank), m)
no_warm_up (simulated, grader): enough forwards before its first backward
    ahead = min(late - rank, m) → ahead = 0
one_too_few_ahead (simulated, grader): enough forwards before its first backward
    ahead = min(late - rank, m) → ahead = min(max(late - rank - 1, 0), m)
the_ranks_reversed: waits in recv
    ahead = min(late - rank, m) → ahead = min(rank, m)
all_but_the_last_warm_up: waits in recv
    ahead = min(late - rank, m) → ahead = 0 if rank == 0 else min(late, m)
warm_up_beyond_the_end: micro-batches, expected 2
    ahead = min(late - rank, m) → ahead = late - rank
    if ahead + i < m → if ahead + i < max(m, ahead)
backward_first: before its forward
    steps = [ → steps = [('B', 0)] if rank == late else [
    steps.append(("B", i)) → rank == late and i == 0 or …
backward_before_forward_in_turn: before its forward
    if ahead + i < m:
        steps.append(("F", ahead + i))
    steps.append(("B", i))
  → steps.append(("B", i))
  → if ahead + i < m:
  →     steps.append(("F", ahead + i))
no_last_backwards: 0 times
    steps.append(("B", i)) → ahead + i < m and …
a_backward_twice: 2 times
    steps.append(("B", i)) → steps += [("B", i)] * (1 + (i == 0))
counts_from_1: 0 times
    ("F", i) for i → ("F", i + 1) for i
    ("F", ahead + i) → ("F", ahead + i + 1)
    ("B", i) → ("B", i + 1)
one_micro_batch_more: micro-batches, expected
    while late / (m + late) > bubble: → while late / (m - 1 + late) > bubble:
    m = world_size - 1, 1 → m = world_size - 1, 2
one_micro_batch_too_few: micro-batches, expected
    while late / (m + late) > bubble: → while late / (m + 1 + late) > bubble:
the_papers_ratio: micro-batches, expected
    while late / (m + late) > bubble: → while late / m > bubble:
ranks_instead_of_ranks_less_one: micro-batches, expected
    late / (m + late) → world_size > 1 and world_size / (m + world_size)
as_many_as_ranks: micro-batches, expected
    while late / (m + late) > bubble: → while m < world_size:
divides_by_the_bubble: ZeroDivisionError
    while late / (m + late) > bubble:
  → m = math.ceil(late * (1 - bubble) / bubble)
  → while False:
""")
edits_of(pipeline_schedule__by_formula)("""
formula_without_a_least: rank 0 has 0 micro-batches, expected 1
    max(1, math.ceil(late * (1 - bubble) / bubble)) → math.ceil((late * (1 - bubble) / bubble))
formula_rounded: rank 0 has 8 micro-batches, expected 9
    math.ceil → round
""")
edits_of(pipeline_schedule__by_warm_up)("""
schedule_of_the_first_call: after ‘p = 4, bubble 0.27
    world_size, bubble): → world_size, bubble, kept={}):
    return ranks → return kept.setdefault(world_size, ranks)
as_text: expected a list that holds a list of steps
    ("F", i) for → f"F{i}" for
    ("F", ahead + i) → f"F{ahead + i}"
    ("B", i) → f"B{i}"
own_steps_only: the schedule has steps for 1 rank, expected 2
    return ranks → return ranks[dist.get_rank() :][:1]
returns_nothing: expected a list that holds a list of steps
    return ranks → ranks
""")


@fails("course_lib", only=GRADER)
def pipeline_schedule__imports_the_reference(world_size, bubble):
    import importlib

    reference = importlib.import_module("course_lib.pipeline_parallel").one_forward_one_backward

    steps = reference(world_size, 4).steps
    return [[(step.action, step.micro_batch) for step in mine] for mine in steps]
