"""Wrong solutions that people write, and right ones that differ from ours.

Each wrong one must fail for its own reason, each right one must pass. A function is named
``task__mistake``; ``@fails(part)`` says what the report must contain. Most mistakes are one line of
a right solution: ``edited`` writes it in place of another.
"""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course_lib.checking.mutants import VIRTUAL, edited, fails, passes

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


def columns_with(*edits):
    return edited(column_parallel__by_function, *edits)


TAKE = "linear.weight.detach()[start:stop].clone()"
APPLY = "x = AddUp.apply(x)"
RUN = "return F.linear(x, self.weight, self.bias)"

column_parallel__no_partition = fails("output has shape")(
    columns_with(("start = rank * size + min(rank, more)", "start, size = 0, out; more = 0"))
)
column_parallel__whole_weight_sliced_output = fails("weight has shape")(
    columns_with(
        ("[start:stop].clone()", ".clone()"),
        (
            RUN,
            "return F.linear(x, self.weight, self.bias)"
            ".tensor_split(dist.get_world_size(group), -1)[dist.get_rank(group)]",
        ),
    )
)
column_parallel__cuts_the_inputs = fails("cannot be multiplied")(
    columns_with((TAKE, "linear.weight.detach()[:, start:stop].clone()"))
)
column_parallel__gradient_is_not_summed = fails("this rank's term alone")(
    columns_with((APPLY, "pass"))
)
column_parallel__mean = fails("gradient of x")(
    columns_with(("return total", "return total / dist.get_world_size(group)"))
)
column_parallel__sums_the_output = fails("output")(
    columns_with((RUN, "y = F.linear(x, self.weight, self.bias); dist.all_reduce(y); return y"))
)
column_parallel__gathers_the_output = fails("output has shape")(
    columns_with(
        (
            RUN,
            "y = F.linear(x, self.weight, self.bias); "
            "parts = [torch.empty_like(y) for _ in range(dist.get_world_size(group))]; "
            "dist.all_gather(parts, y, group=group); return torch.cat(parts, -1)",
        )
    )
)
column_parallel__hook_on_x_itself = fails("takes in the gradient of other uses of x")(
    edited(column_parallel__by_hook, ("x = x.view_as(x)", "pass"))
)
column_parallel__whole_world = fails("✗ 4 ranks, in two groups")(
    columns_with(("all_reduce(total, group=group, async_op=True)", "all_reduce(total)"), (
        "work.wait()", "pass"))
)  # fmt: skip
column_parallel__rank_of_the_world = fails("✗ 4 ranks, in two groups")(
    columns_with(("dist.get_rank(group)", "dist.get_rank()"))
)
column_parallel__as_many_as_divide = fails("✗ 3 ranks, uneven")(
    columns_with(("size, more = divmod(out, k)", "size, more = out // k, 0"))
)
column_parallel__rest_to_the_last = fails("✗ 3 ranks, uneven")(
    columns_with(
        ("start = rank * size + min(rank, more)", "start = rank * size"),
        ("start + size + (rank < more)", "out if rank == k - 1 else start + size"),
    )
)
column_parallel__rounded_up = fails("✗ 4 ranks, uneven")(
    columns_with(
        ("size, more = divmod(out, k)", "size, more = -(-out // k), 0"),
        ("start + size + (rank < more)", "min(start + size, out)"),
        ("start = rank * size + min(rank, more)", "start = min(rank * size, out)"),
    )
)
column_parallel__chunks = fails("✗ 3 ranks, fewer than one each")(
    edited(column_parallel__by_hook, ("tensor_split", "chunk"))
)
column_parallel__whole_bias = fails("RuntimeError")(
    columns_with(("linear.bias.detach()[start:stop].clone()", "linear.bias.detach().clone()"))
)
column_parallel__forgets_the_bias = fails("output")(
    columns_with(("if linear.bias is not None:", "if False:"))
)
column_parallel__a_bias_always = fails("NoneType")(
    columns_with(("if linear.bias is not None:", "if True:"))
)
column_parallel__a_view = fails("shares memory with weight")(
    columns_with((TAKE, "linear.weight.detach()[start:stop]"))
)
column_parallel__tensors_for_parameters = fails("numbers in the module's parameters")(
    columns_with((f"nn.Parameter({TAKE})", f"{TAKE}.requires_grad_()"))
)
column_parallel__matrices_only = fails("✗ 2 ranks, x is one row")(
    columns_with((APPLY, "x = AddUp.apply(x.view(x.shape[0], -1, x.shape[-1]).view(x.shape))"))
)
column_parallel__empties_the_layer = fails("the function changes linear")(
    columns_with(
        (
            "return Columns(linear)",
            "made = Columns(linear)\n"
            "    linear.weight.data = linear.weight.data[:0]\n"
            "    return made",
        ),
    )
)
column_parallel__keeps_the_layer = fails("whole layer is still held: expected False")(
    columns_with((TAKE + ")", TAKE + "); self.whole = linear"))
)
column_parallel__makes_a_linear = fails("draws or seeds random numbers")(
    columns_with(
        ("self.weight = nn.Parameter(" + TAKE + ")", "layer = nn.Linear(9, 9); "
        "layer.weight.data = " + TAKE + "; self.weight = layer.weight"),
    )
)  # fmt: skip
column_parallel__does_not_wait = fails("never waits for the handle")(
    columns_with(("work.wait()", "pass"))
)
column_parallel__row_by_row = fails("Forward sends nothing, backward one sum")(
    columns_with(
        ("work = dist.all_reduce(total, group=group, async_op=True)", "rows = total.unbind()"),
        ("work.wait()", "[dist.all_reduce(row, group=group) for row in rows]"),
    )
)
column_parallel__sums_the_weights_gradient = fails("Forward sends nothing, backward one sum")(
    columns_with(
        (
            RUN,
            "y = F.linear(x, self.weight, self.bias); "
            "y.register_hook(lambda g: dist.all_reduce(g.sum(), group=group)); return y",
        )
    )
)
column_parallel__through_float32 = fails("dtype")(
    columns_with((RUN, "return F.linear(x.float(), self.weight.float(), self.bias)"))
)
column_parallel__every_input_needs_a_gradient = fails("cannot register a hook")(
    edited(
        column_parallel__by_hook,
        (
            "            if x.requires_grad:\n                x.register_hook(add_up)\n",
            "            x.register_hook(add_up)\n",
        ),
    )
)
column_parallel__remembers_its_input = fails("later output")(
    columns_with((APPLY, "x = self.__dict__.setdefault('x', AddUp.apply(x))"))
)
column_parallel__a_view_of_a_copy = fails("This equals what slices of a copy keep")(
    columns_with((TAKE, "linear.weight.detach().clone()[start:stop]"))
)
column_parallel__keeps_a_copy = fails("keeps in memory beside its parameters: expected 0, got 12")(
    columns_with(
        (
            f"self.weight = nn.Parameter({TAKE})",
            f"self.weight = nn.Parameter({TAKE}); "
            "self.register_buffer('whole', linear.weight.detach().clone())",
        )
    )
)
column_parallel__keeps_its_input = fails(
    "keeps in memory beside its parameters: expected 0, got 6"
)(columns_with((APPLY, "self.seen = x.detach(); " + APPLY)))
column_parallel__changes_the_mode = fails("the function changes linear")(
    columns_with(
        (
            "return Columns(linear)",
            "made = Columns(linear); linear.train(not linear.training); return made",
        )
    )
)
column_parallel__freezes = fails("the function changes linear")(
    columns_with(
        ("return Columns(linear)", "made = Columns(linear); linear.requires_grad_(False)\n"
         "    return made"),
    )
)  # fmt: skip
column_parallel__the_layer_if_alone = fails("whole layer is still held: expected False")(
    columns_with(
        (
            "return Columns(linear)",
            "return linear if dist.get_world_size(group) == 1 else Columns(linear)",
        )
    )
)
column_parallel__group_of_the_first_call = fails("something is kept from the call before")(
    edited(
        column_parallel__by_hook,
        (
            "linear, group=None):",
            "linear, group=None, kept=[]):\n    kept.append(group)\n    group = kept[0]",
        ),
    )
)
column_parallel__without_outputs_no_sum = fails("Ranks 0, 1 wait for rank 2")(
    columns_with((APPLY, "x = AddUp.apply(x) if len(self.weight) else x"))
)
column_parallel__no_module = fails("expected an nn.Module")(
    columns_with(("return Columns(linear)", "return Columns(linear).forward"))
)


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


def rows_with(*edits):
    return edited(row_parallel__by_function, *edits)


PART = "columns.tensor_split(k)[rank].t().clone()"
PRODUCT = "partial = F.linear(x, self.weight)"
ADD = "return y if self.bias is None else y + self.bias"
SUM = "y = Total.apply(partial)"
OWN_BIAS = "self.bias = nn.Parameter(linear.bias.detach().clone())"

row_parallel__bias_in_the_product = fails("the bias added once by each rank")(
    rows_with((PRODUCT, "partial = F.linear(x, self.weight, self.bias)"), (ADD, "return y"))
)
row_parallel__a_share_of_the_bias = fails("gradient of bias")(
    rows_with(
        (
            PRODUCT,
            "b = None if self.bias is None else self.bias / dist.get_world_size(group); "
            "partial = F.linear(x, self.weight, b)",
        ),
        (ADD, "return y"),
    )
)
row_parallel__bias_of_rank_0 = fails("gradient of bias")(
    rows_with(
        (
            PRODUCT,
            "b = None if self.bias is None else self.bias * (dist.get_rank(group) == 0); "
            "partial = F.linear(x, self.weight, b)",
        ),
        (ADD, "return y"),
    )
)
row_parallel__bias_on_rank_0_only = fails("bias is None")(
    rows_with(
        ("if linear.bias is not None:", "if linear.bias is not None and rank == 0:"),
        (PRODUCT, "partial = F.linear(x, self.weight, self.bias)"),
        (ADD, "return y"),
    )
)
row_parallel__cuts_the_bias = fails("RuntimeError")(
    rows_with((OWN_BIAS, "self.bias = nn.Parameter(linear.bias.detach().tensor_split(k)[rank])"))
)
row_parallel__forgets_the_bias = fails("output")(
    rows_with(("if linear.bias is not None:", "if False:"))
)
row_parallel__bias_is_no_parameter = fails("gradient of bias")(
    rows_with((OWN_BIAS, "del self.bias; self.register_buffer('bias', linear.bias.data.clone())"))
)
row_parallel__no_sum = fails("output")(rows_with((SUM, "y = partial")))
row_parallel__mean = fails("output")(
    rows_with(("return total", "return total / dist.get_world_size(group)"))
)
row_parallel__sums_on_the_way_back = fails("K times the right one")(
    rows_with(
        ("return grad", "grad = grad.contiguous(); dist.all_reduce(grad, group=group); return grad")
    )
)
row_parallel__dist_nn = fails("K times the right one")(
    rows_with(
        (
            SUM,
            "import torch.distributed.nn as dnn; "
            "y = dnn.functional.all_reduce(partial.contiguous(), "
            "group=dist.group.WORLD if group is None else group)",
        )
    )
)
row_parallel__sums_the_gradient_of_x = fails("gradient of x")(
    rows_with(
        (
            PRODUCT,
            "x = x.view_as(x); x.requires_grad and x.register_hook(lambda g: "
            "(g := g.contiguous(), dist.all_reduce(g, group=group))[0]); " + PRODUCT,
        )
    )
)
row_parallel__one_buffer_for_all_outputs = fails("output")(
    rows_with(
        (
            "total = y.clone(memory_format=torch.contiguous_format)",
            "total = kept.setdefault('total', torch.empty(y.shape, dtype=y.dtype)).copy_(y)",
        ),
        ("    class Total", "    kept = {}\n\n    class Total"),
    )
)
row_parallel__to_the_first = fails("output")(
    rows_with(
        (
            "work = dist.all_reduce(total, group=group, async_op=True)",
            "work = dist.reduce(total, 0 if group is None else "
            "dist.get_process_group_ranks(group)[0], group=group, async_op=True)",
        )
    )
)
row_parallel__gathers = fails("this task allows all_reduce only")(
    rows_with(
        (
            "work = dist.all_reduce(total, group=group, async_op=True)",
            "parts = [torch.empty_like(total) for _ in range(dist.get_world_size(group))]; "
            "work = dist.all_gather(parts, total, group=group, async_op=True)",
        ),
        ("return total", "return sum(parts)"),
    )
)
row_parallel__no_partition = fails("cannot be multiplied")(
    rows_with((PART, "linear.weight.detach().clone()"))
)
row_parallel__cuts_the_outputs = fails("cannot be multiplied")(
    rows_with((PART, "linear.weight.detach().tensor_split(k)[rank].clone()"))
)
row_parallel__chunks = fails("✗ 3 ranks, fewer than one each")(
    rows_with(("columns.tensor_split(k)", "columns.chunk(k)"))
)
row_parallel__as_many_as_divide = fails("✗ 3 ranks, uneven")(
    rows_with(("columns.tensor_split(k)", "columns[: len(columns) // k * k].tensor_split(k)"))
)
row_parallel__whole_world = fails("✗ 4 ranks, in two groups")(
    rows_with(("group=group, async_op=True", "async_op=True"))
)
row_parallel__a_view = fails("shares memory with weight")(
    rows_with((PART, "columns.tensor_split(k)[rank].t()"))
)
row_parallel__a_view_of_a_copy = fails("This equals what slices of a copy keep")(
    rows_with(
        ("columns = linear.weight.detach().t()", "columns = linear.weight.detach().clone().t()"),
        (PART, "columns.tensor_split(k)[rank].t()"),
    )
)
row_parallel__sets_the_gradient = fails("what an earlier one has left in .grad")(
    rows_with(
        (
            ADD,
            "return y if self.bias is None else Plus.apply(y, self.bias, self)",
        ),
        (
            "    class Rows",
            "    class Plus(torch.autograd.Function):\n"
            "        @staticmethod\n"
            "        def forward(ctx, y, bias, layer):\n"
            "            ctx.layer = layer\n"
            "            return y + bias\n\n"
            "        @staticmethod\n"
            "        def backward(ctx, grad):\n"
            "            ctx.layer.bias.grad = grad.reshape(-1, grad.shape[-1]).sum(0)\n"
            "            return grad, None, None\n\n"
            "    class Rows",
        ),
    )
)
row_parallel__group_of_the_first_call = fails("after ‘3 ranks, fewer than one each’")(
    edited(
        row_parallel__in_place,
        (
            "linear, group=None):",
            "linear, group=None, kept=[]):\n    kept.append(group)\n    group = kept[0]",
        ),
    )
)
row_parallel__sums_in_bfloat16 = fails("output")(
    rows_with((SUM, "y = Total.apply(partial.bfloat16()).to(partial.dtype)"))
)
row_parallel__keeps_the_layer = fails("whole layer is still held: expected False")(
    rows_with(("columns = linear", "self.make = lambda: linear; columns = linear"))
)
row_parallel__does_not_wait = fails("never waits for the handle")(
    rows_with(("work.wait()", "pass"))
)
row_parallel__through_float32 = fails("dtype")(
    rows_with((PRODUCT, "partial = F.linear(x.float(), self.weight.float())"))
)
row_parallel__row_by_row = fails("Forward sends one sum, backward nothing")(
    rows_with(
        ("work = dist.all_reduce(total, group=group, async_op=True)", "rows = total.unbind()"),
        ("work.wait()", "[dist.all_reduce(row, group=group) for row in rows]"),
    )
)


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


def sharded_with(*edits):
    return edited(sharded_optimizer__chunks_in_lists, *edits)


PARAMS = "[param for param in dict.fromkeys(params) if param.requires_grad]"
SHARD = "mine = padded(params).split(chunk)[rank].clone()"
SCATTER = "dist.reduce_scatter(total, list(padded(grads).split(chunk)), group=group)"
GATHER = "dist.all_gather(chunks, mine, group=group)"
MEAN = "mine.grad = total / k"

sharded_optimizer__stale_gradients = fails("✗ 2 ranks, one without gradients")(
    edited(
        sharded_optimizer__one_buffer,
        (
            "            if param.grad is None:\n"
            "                place.zero_()\n            else:\n",
            "            if param.grad is not None:\n",
        ),
    )
)
sharded_optimizer__equal_ones_once = fails("✗ 4 ranks, in two groups")(
    edited(
        sharded_optimizer__one_buffer,
        ("any(param is other for", "any(param.equal(other) for"),
    )
)
sharded_optimizer__no_care_if_alone = fails("✗ 1 rank")(
    sharded_with(
        ("    params = [", "    if k == 1:\n        return make_optimizer(list(params)).step\n"
         "    params = ["),
    )
)  # fmt: skip
sharded_optimizer__group_of_the_first_call = fails("something is kept from the call before")(
    sharded_with(
        (
            "make_optimizer, group=None):",
            "make_optimizer, group=None, kept=[]):\n    kept.append(group)\n    group = kept[0]",
        )
    )
)
sharded_optimizer__one_number_more = fails("updates 9 numbers, expected at most 8")(
    sharded_with(("chunk = (n + k - 1) // k", "chunk = n // k + 1"))
)
sharded_optimizer__adds_up_gradients = fails("✗ 1 rank")(
    sharded_with((MEAN, "mine.grad = total / k if mine.grad is None else mine.grad + total / k"))
)
sharded_optimizer__sum = fails("the sum over the ranks, not the mean")(
    sharded_with((MEAN, "mine.grad = total"))
)
sharded_optimizer__half = fails("✗ 3 ranks, tied")(sharded_with((MEAN, "mine.grad = total / 2")))
sharded_optimizer__divides_twice = fails("divided by the number of ranks once more")(
    sharded_with((MEAN, "mine.grad = total / k / k"))
)
sharded_optimizer__one_for_all_models = fails("parameter 0")(
    sharded_with(
        ("make_optimizer, group=None):", "make_optimizer, group=None, made=[]):"),
        (
            "optimizer = make_optimizer([mine])",
            "made.append(make_optimizer([mine])); optimizer = made[0]",
        ),
    )
)
sharded_optimizer__freezes = fails("which parameters require a gradient")(
    sharded_with(
        (
            "    def step():",
            "    for param in params:\n        param.requires_grad_(False)\n\n    def step():",
        )
    )
)
sharded_optimizer__goes_home_without_gradients = fails("waits in reduce_scatter")(
    sharded_with(
        (
            "        grads = [",
            "        if not any(p.grad is not None for p in params):\n            return\n"
            "        grads = [",
        )
    )
)
sharded_optimizer__own_gradients = fails("parameter 0")(
    sharded_with((SCATTER, "total = k * padded(grads).split(chunk)[rank].clone()"))
)
sharded_optimizer__state_is_not_sharded = fails("numbers, expected at most")(
    sharded_with(
        (SHARD, "mine = padded(params)"),
        ("total = torch.empty_like(mine)", "total = torch.empty_like(mine[:chunk])"),
        (
            MEAN,
            "mine.grad = torch.zeros_like(mine); "
            "mine.grad[rank * chunk : (rank + 1) * chunk] = total / k",
        ),
        ("chunks = [torch.empty_like(mine)", "chunks = [torch.empty_like(total)"),
        (
            GATHER,
            "dist.all_gather(chunks, mine[rank * chunk : (rank + 1) * chunk].clone(), group=group)",
        ),
    )
)
sharded_optimizer__all_reduce = fails("this task allows reduce_scatter and all_gather only")(
    sharded_with(
        (
            SCATTER,
            "every = padded(grads); dist.all_reduce(every, group=group); "
            "total.copy_(every.split(chunk)[rank])",
        )
    )
)
sharded_optimizer__gathers_gradients = fails("rank 0 calls all_gather")(
    sharded_with(
        (
            SCATTER,
            "every = [torch.empty_like(padded(grads)) for _ in range(k)]; "
            "dist.all_gather(every, padded(grads), group=group); "
            "total.copy_(sum(every).split(chunk)[rank])",
        )
    )
)
sharded_optimizer__per_parameter = fails("rank 0 calls reduce_scatter")(
    sharded_with(
        (
            SCATTER,
            "pieces = padded(grads).view(k, chunk).split([1] * chunk, 1); "
            "parts = [torch.empty(1, dtype=total.dtype) for _ in pieces]; "
            "[dist.reduce_scatter(part, [row.clone() for row in piece.unbind()], group=group) "
            "for part, piece in zip(parts, pieces, strict=True)]; total = torch.cat(parts)",
        )
    )
)
sharded_optimizer__steps_twice = fails("parameter 0")(
    sharded_with(("optimizer.step()", "optimizer.step(); optimizer.step()"))
)
sharded_optimizer__optimizer_anew = fails("parameter 0")(
    sharded_with(
        ("optimizer.step()", "make_optimizer([mine]).step()"),
        ("optimizer = make_optimizer([mine])", ""),
    )
)
sharded_optimizer__an_optimizer_of_its_own = fails("parameter 0")(
    sharded_with(("make_optimizer([mine])", "torch.optim.SGD([mine], lr=0.1)"))
)
sharded_optimizer__does_not_gather = fails("parameter 0")(
    sharded_with((GATHER, "chunks = list(padded(params).split(chunk)); chunks[rank] = mine"))
)
sharded_optimizer__gathers_before_the_step = fails("parameter 0")(
    sharded_with(
        ("        optimizer.step()\n", ""),
        (GATHER, GATHER + "\n        optimizer.step()"),
    )
)
sharded_optimizer__does_not_write_back = fails("parameter 0")(
    sharded_with(("param.copy_(weight.reshape(param.shape))", "param = weight"))
)
sharded_optimizer__frozen_ones_too = fails("numbers, expected at most 5")(
    sharded_with((PARAMS, "list(dict.fromkeys(params))"))
)
sharded_optimizer__tied_twice = fails("numbers, expected at most 5")(
    sharded_with((PARAMS, "[param for param in params if param.requires_grad]"))
)
sharded_optimizer__walks_twice = fails("✗ 2 ranks")(
    sharded_with(("    params = [", "    sum(p.numel() for p in params)\n    params = ["))
)
sharded_optimizer__loses_the_rest = fails("✗ 3 ranks, uneven")(
    sharded_with(
        ("chunk = (n + k - 1) // k", "chunk = n // k; n = k * chunk"),
        (
            "return torch.cat([flat, flat.new_zeros(k * chunk - len(flat))])",
            "return flat[: k * chunk]",
        ),
        (
            "[:n].split([param.numel() for param in params])",
            "[:n]; weights = torch.cat([weights, padded_rest()])"
            ".split([param.numel() for param in params])",
        ),
        (
            "    mine = padded",
            "    def padded_rest():\n"
            "        return torch.cat([p.detach().flatten() for p in params])[k * chunk :]\n\n"
            "    mine = padded",
        ),
    )
)
sharded_optimizer__no_padding = fails("✗ 3 ranks, uneven")(
    sharded_with(("return torch.cat([flat, flat.new_zeros(k * chunk - len(flat))])", "return flat"))
)
sharded_optimizer__leaves_out_what_is_missing = fails("✗ 2 ranks, frozen, tied, one unused")(
    sharded_with(
        (
            "grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]",
            "grads = [p.grad for p in params if p.grad is not None]",
        )
    )
)
sharded_optimizer__needs_every_gradient = fails("✗ 2 ranks, frozen, tied, one unused")(
    sharded_with(("torch.zeros_like(p) if p.grad is None else p.grad", "p.grad"))
)
sharded_optimizer__whole_world = fails("✗ 4 ranks, in two groups")(
    sharded_with(("group=group", "group=None"))
)
sharded_optimizer__rank_of_the_world = fails("✗ 4 ranks, in two groups")(
    sharded_with(("dist.get_rank(group)", "dist.get_rank()"))
)
sharded_optimizer__through_float32 = fails("rank 0")(
    sharded_with(("tensor.detach().flatten()", "tensor.detach().float().flatten()"))
)
sharded_optimizer__does_not_wait = fails("never waits for the handle")(
    sharded_with((GATHER, "dist.all_gather(chunks, mine, group=group, async_op=True)"))
)
sharded_optimizer__returns_nothing = fails("expected a function step()")(
    sharded_with(("return step", "step"))
)


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


@fails("numbers, expected at most")
def sharded_optimizer__deals_out_whole_tensors(params, make_optimizer, group=None):
    params = [param for param in dict.fromkeys(params) if param.requires_grad]
    k, rank = dist.get_world_size(group), dist.get_rank(group)
    members = list(range(k)) if group is None else dist.get_process_group_ranks(group)
    mine = [param for i, param in enumerate(params) if i % k == rank]
    optimizer = make_optimizer(mine) if mine else None

    def step():
        for param in params:
            grad = torch.zeros_like(param) if param.grad is None else param.grad.contiguous()
            dist.all_reduce(grad, group=group)
            param.grad = grad / k
        if optimizer is not None:
            optimizer.step()
        for i, param in enumerate(params):
            weight = param.detach().contiguous()
            dist.broadcast(weight, members[i % k], group=group)
            param.data.copy_(weight)

    return step


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
    done, free = {}, [0.0] * p  # (action, micro-batch, rank) -> when it is over
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


def schedule_with(*edits):
    return edited(pipeline_schedule__by_warm_up, *edits)


AHEAD = "ahead = min(late - rank, m)"
COUNT = "while late / (m + late) > bubble:"

pipeline_schedule__numpys_numbers = passes(
    schedule_with(
        ("m = world_size - 1, 1", "m = world_size - 1, 1\n    import numpy as np"),
        ("range(ahead)", "np.arange(ahead)"),
        ("for i in range(m)", "for i in np.arange(m)"),
    )
)
pipeline_schedule__gpipe = fails("a forward and a backward in turn")(
    schedule_with((AHEAD, "ahead = m"))
)
pipeline_schedule__one_more_ahead = fails("a forward and a backward in turn")(
    schedule_with((AHEAD, "ahead = min(late - rank + 1, m)"))
)
pipeline_schedule__twice_as_many_ahead = fails("a forward and a backward in turn")(
    schedule_with((AHEAD, "ahead = min(2 * (late - rank), m)"))
)
pipeline_schedule__no_warm_up = fails("enough forwards before its first backward", only=VIRTUAL)(
    schedule_with((AHEAD, "ahead = 0"))
)
pipeline_schedule__one_too_few_ahead = fails(
    "enough forwards before its first backward", only=VIRTUAL
)(schedule_with((AHEAD, "ahead = min(max(late - rank - 1, 0), m)")))
pipeline_schedule__the_ranks_reversed = fails("waits in recv")(
    schedule_with((AHEAD, "ahead = min(rank, m)"))
)
pipeline_schedule__all_but_the_last_warm_up = fails("waits in recv")(
    schedule_with((AHEAD, "ahead = 0 if rank == 0 else min(late, m)"))
)
pipeline_schedule__warm_up_beyond_the_end = fails("micro-batches, expected 2")(
    schedule_with(
        (AHEAD, "ahead = late - rank"), ("if ahead + i < m", "if ahead + i < max(m, ahead)")
    )
)
pipeline_schedule__backward_first = fails("before its forward")(
    schedule_with(("steps = [", "steps = [('B', 0)] if rank == late else ["),
                  ('steps.append(("B", i))', 'rank == late and i == 0 or steps.append(("B", i))'))
)  # fmt: skip
pipeline_schedule__backward_before_forward_in_turn = fails("before its forward")(
    schedule_with(
        (
            'if ahead + i < m:\n                steps.append(("F", ahead + i))\n'
            '            steps.append(("B", i))',
            'steps.append(("B", i))\n            if ahead + i < m:\n'
            '                steps.append(("F", ahead + i))',
        )
    )
)
pipeline_schedule__no_last_backwards = fails("0 times")(
    schedule_with(('steps.append(("B", i))', 'ahead + i < m and steps.append(("B", i))'))
)
pipeline_schedule__a_backward_twice = fails("2 times")(
    schedule_with(('steps.append(("B", i))', 'steps += [("B", i)] * (1 + (i == 0))'))
)
pipeline_schedule__counts_from_1 = fails("0 times")(
    schedule_with(
        ('("F", i) for i', '("F", i + 1) for i'),
        ('("F", ahead + i)', '("F", ahead + i + 1)'),
        ('("B", i)', '("B", i + 1)'),
    )
)
pipeline_schedule__one_micro_batch_more = fails("micro-batches, expected")(
    schedule_with((COUNT, "while late / (m - 1 + late) > bubble:"), ("m = world_size - 1, 1",
        "m = world_size - 1, 2"))
)  # fmt: skip
pipeline_schedule__one_micro_batch_too_few = fails("micro-batches, expected")(
    schedule_with((COUNT, "while late / (m + 1 + late) > bubble:"))
)
pipeline_schedule__the_papers_ratio = fails("micro-batches, expected")(
    schedule_with((COUNT, "while late / m > bubble:"))
)
pipeline_schedule__ranks_instead_of_ranks_less_one = fails("micro-batches, expected")(
    schedule_with((COUNT, "while world_size > 1 and world_size / (m + world_size) > bubble:"))
)
pipeline_schedule__as_many_as_ranks = fails("micro-batches, expected")(
    schedule_with((COUNT, "while m < world_size:"))
)
pipeline_schedule__divides_by_the_bubble = fails("ZeroDivisionError")(
    schedule_with((COUNT, "m = math.ceil(late * (1 - bubble) / bubble)\n    while False:"))
)
pipeline_schedule__formula_without_a_least = fails("rank 0 has 0 micro-batches, expected 1")(
    edited(pipeline_schedule__by_formula, ("max(1, math.ceil(", "math.ceil(("))
)
pipeline_schedule__formula_rounded = fails("rank 0 has 8 micro-batches, expected 9")(
    edited(pipeline_schedule__by_formula, ("math.ceil", "round"))
)
pipeline_schedule__schedule_of_the_first_call = fails("after ‘p = 4, bubble 0.27’")(
    schedule_with(
        ("world_size, bubble):", "world_size, bubble, kept={}):"),
        ("    return ranks", "    return kept.setdefault(world_size, ranks)"),
    )
)
pipeline_schedule__as_text = fails("is no list of steps")(
    schedule_with(
        ('("F", i) for', 'f"F{i}" for'),
        ('("F", ahead + i)', 'f"F{ahead + i}"'),
        ('("B", i)', 'f"B{i}"'),
    )
)
pipeline_schedule__own_steps_only = fails("steps for 1 ranks, and there are 2")(
    schedule_with(("return ranks", "return ranks[dist.get_rank() :][:1]"))
)
pipeline_schedule__returns_nothing = fails("is no list of steps")(
    schedule_with(("return ranks", "ranks"))
)


@fails("course_lib", only=GRADER)
def pipeline_schedule__imports_the_reference(world_size, bubble):
    import importlib

    reference = importlib.import_module("course_lib.pipeline_parallel").one_forward_one_backward

    steps = reference(world_size, 4).steps
    return [[(step.action, step.micro_batch) for step in mine] for mine in steps]
