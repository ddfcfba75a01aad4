"""Wrong solutions that people write, and right ones that differ from ours.

See `instructor/02_data_parallel_sgd/mutants.py`. Time is exact on a virtual clock alone; gloo
keeps small messages, tells nobody of a handle without `wait`, and ends the process where lengths do
not match. What fails for these is looked for on simulated ranks and in the grader.
"""

import torch
import torch.distributed as dist

from course_lib.checking.mutants import VIRTUAL, edited, fails, passes

# tree_broadcast ----------------------------------------------------------------------------


@passes
def tree_broadcast__doubling(tensor, src, group=None):
    rank, k = dist.get_rank(group), dist.get_world_size(group)
    root = dist.get_process_group_ranks(group).index(src)
    place = (rank - root) % k
    data = tensor.contiguous()
    width = 1
    while width < k:
        if place < width and place + width < k:
            dist.send(data, group=group, group_dst=(rank + width) % k)
        elif width <= place < 2 * width:
            dist.recv(data, group=group, group_src=(rank - width) % k)
        width *= 2
    tensor.copy_(data)


@passes
def tree_broadcast__halving(tensor, src, group=None):
    members = dist.get_process_group_ranks(group)
    k, root = len(members), members.index(src)
    place = (members.index(dist.get_rank()) - root) % k
    data = tensor.contiguous()
    first, last = 0, k
    while last - first > 1:
        middle = (first + last + 1) // 2
        if place == first:
            dist.send(data, members[(middle + root) % k], group=group)
        elif place == middle:
            dist.recv(data, members[(first + root) % k], group=group)
        first, last = (first, middle) if place < middle else (middle, last)
    tensor.copy_(data)


@passes
def tree_broadcast__to_all_children_at_once(tensor, src, group=None):
    members = dist.get_process_group_ranks(group)
    k, root = len(members), members.index(src)
    place = (members.index(dist.get_rank()) - root) % k
    data = tensor.clone(memory_format=torch.contiguous_format)
    width = 1
    while width <= place:
        width *= 2
    if place:
        dist.irecv(data, members[(place - width // 2 + root) % k], group=group).wait()
    handles = []
    while place + width < k:
        handles.append(dist.isend(data, members[(place + width + root) % k], group=group))
        width *= 2
    for handle in handles:
        handle.wait()
    tensor.copy_(data)


def broadcast_with(*edits):
    return edited(tree_broadcast__doubling, *edits)


SENDS = "dist.send(data, group=group, group_dst=(rank + width) % k)"
RECEIVES = "dist.recv(data, group=group, group_src=(rank - width) % k)"

tree_broadcast__ignores_the_source = fails("2 ranks, from rank 1")(
    broadcast_with(("dist.get_process_group_ranks(group).index(src)", "0"))
)
tree_broadcast__takes_src_for_a_number_in_the_group = fails("4 ranks in two groups")(
    broadcast_with(("dist.get_process_group_ranks(group).index(src)", "src"))
)
tree_broadcast__takes_numbers_for_ranks = fails("4 ranks in two groups")(
    broadcast_with(("group_dst=", "dst="), ("group_src=", "src="))
)
tree_broadcast__whole_world = fails("4 ranks in two groups")(
    broadcast_with(("group)", "None)"), ("group=group", "group=None"))
)
tree_broadcast__powers_of_two_only = fails("3 ranks, from rank 2")(
    broadcast_with((" and place + width < k", ""))
)
tree_broadcast__one_round_too_few = fails("nothing arrived")(
    broadcast_with(("while width < k", "while 2 * width < k"))
)
tree_broadcast__into_a_copy = fails("nothing arrived")(
    broadcast_with(("tensor.copy_(data)", "return data"), ("contiguous()", "clone()"))
)
tree_broadcast__contiguous_only = fails("view size is not compatible")(
    broadcast_with(("tensor.contiguous()", "tensor.view(-1)"), ("tensor.copy_(data)", "pass"))
)
tree_broadcast__through_float32 = fails("rounded to float32")(
    broadcast_with(("tensor.contiguous()", "tensor.float().contiguous()"))
)
tree_broadcast__in_other_memory = fails("nothing arrived")(
    broadcast_with(
        ("tensor.contiguous()", "tensor.clone()"), ("tensor.copy_(data)", "tensor.data = data")
    )
)
tree_broadcast__set = fails("nothing arrived")(
    broadcast_with(
        ("tensor.contiguous()", "tensor.clone()"), ("tensor.copy_(data)", "tensor.set_(data)")
    )
)
tree_broadcast__vectors_as_they_are = fails("needs a contiguous tensor", only=VIRTUAL)(
    broadcast_with(("tensor.contiguous()", "tensor.contiguous() if tensor.dim() > 1 else tensor"))
)
tree_broadcast__groups_are_every_second_rank = fails("one of them alone")(
    broadcast_with(
        (
            "dist.get_process_group_ranks(group).index(src)",
            "(src if k == dist.get_world_size() else src // 2)",
        )
    )
)
tree_broadcast__world_of_one_only = fails("one of them alone")(
    broadcast_with(
        ("root =", "root, first = 0, dist.get_world_size() > 1\n    root ="),
        ("while width < k", "while width < k or first"),
        ("place < width and place + width < k", "place < width and (first or place + width < k)"),
        ("width *= 2", "width *= 2; first = False"),
    )
)
tree_broadcast__more_than_the_tensor = fails("A message is the tensor")(
    broadcast_with(
        ("data = tensor.contiguous()", "data = torch.stack([tensor, tensor])"),
        ("tensor.copy_(data)", "tensor.copy_(data[0])"),
    )
)
tree_broadcast__does_not_wait = fails("never waits for the handle of send", only=VIRTUAL)(
    broadcast_with(("dist.send(", "dist.isend("))
)
tree_broadcast__a_chain = fails("Those that have the tensor send at the same time", only=VIRTUAL)(
    broadcast_with(
        ("if place < width and place + width < k", "if place == width - 1"),
        ("elif width <= place < 2 * width", "elif place == width"),
        ("(rank + width)", "(rank + 1)"),
        ("(rank - width)", "(rank - 1)"),
        ("width *= 2", "width += 1"),
    )
)


@fails("Whoever has the tensor helps")
def tree_broadcast__root_sends_to_all(tensor, src, group=None):
    members = dist.get_process_group_ranks(group)
    data = tensor.contiguous()
    if dist.get_rank() == src:
        for rank in members:
            if rank != src:
                dist.send(data, rank, group=group)
    else:
        dist.recv(data, src, group=group)
    tensor.copy_(data)


@fails("this task allows send and recv only")
def tree_broadcast__the_librarys(tensor, src, group=None):
    data = tensor.contiguous()
    dist.broadcast(data, src, group=group)
    tensor.copy_(data)


@fails("nobody sends in more than")
def tree_broadcast__twice(tensor, src, group=None):
    rank, k = dist.get_rank(group), dist.get_world_size(group)
    root = dist.get_process_group_ranks(group).index(src)
    place = (rank - root) % k
    data = tensor.contiguous()
    width = 1
    while width < k:
        for part in (data.view(-1)[:1], data.view(-1)[1:]):
            if place < width and place + width < k:
                dist.send(part, group=group, group_dst=(rank + width) % k)
            elif width <= place < 2 * width:
                dist.recv(part, group=group, group_src=(rank - width) % k)
        width *= 2
    tensor.copy_(data)


# ring_reduce_scatter -----------------------------------------------------------------------


@passes
def ring_reduce_scatter__to_the_right(tensor, group=None):
    rank, k = dist.get_rank(group), dist.get_world_size(group)
    chunks = list(tensor.flatten().clone().tensor_split(k))
    for step in range(k - 1):
        mine = (rank - step - 2) % k
        incoming = torch.empty_like(chunks[mine])
        sending = dist.isend(chunks[(mine + 1) % k], group=group, group_dst=(rank + 1) % k)
        receiving = dist.irecv(incoming, group=group, group_src=(rank - 1) % k)
        sending.wait()
        receiving.wait()
        chunks[mine] += incoming
    return chunks[rank]


@passes
def ring_reduce_scatter__to_the_left(tensor, group=None):
    members = dist.get_process_group_ranks(group)
    k, rank = len(members), members.index(dist.get_rank())
    left, right = members[rank - 1], members[(rank + 1) % k]
    sizes = [tensor.numel() // k + (r < tensor.numel() % k) for r in range(k)]
    chunks = tensor.reshape(-1).split(sizes)
    partial = chunks[(rank + 1) % k].clone()
    for step in range(1, k):
        number = (rank + 1 + step) % k
        incoming = partial.new_empty(sizes[number])
        handles = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, partial, left, group),
                dist.P2POp(dist.irecv, incoming, right, group),
            ]
        )
        for handle in handles:
            handle.wait()
        partial = incoming + chunks[number]
    return partial


def scatter_with(*edits):
    return edited(ring_reduce_scatter__to_the_right, *edits)


CUTS = "list(tensor.flatten().clone().tensor_split(k))"
SENDING = "sending = dist.isend(chunks[(mine + 1) % k], group=group, group_dst=(rank + 1) % k)"
RECEIVING = "receiving = dist.irecv(incoming, group=group, group_src=(rank - 1) % k)"
IN_TURNS = """for turn in (0, 1):
            if rank % 2 == turn:
                dist.send(chunks[(mine + 1) % k], group=group, group_dst=(rank + 1) % k)
            else:
                dist.recv(incoming, group=group, group_src=(rank - 1) % k)"""

ring_reduce_scatter__deadlock = fails("waits in send", only=VIRTUAL)(
    scatter_with(("dist.isend", "dist.send"), ("sending.wait()", "pass"))
)
ring_reduce_scatter__receives_first = fails("waits in recv")(
    scatter_with(
        (SENDING, "sending = None"),
        (RECEIVING, "dist.recv(incoming, group=group, group_src=(rank - 1) % k)"),
        ("sending.wait()", SENDING + "; sending.wait()"),
        ("receiving.wait()", "pass"),
    )
)
ring_reduce_scatter__in_turns = fails("Send and receive at the same time", only=VIRTUAL)(
    scatter_with(
        (SENDING, IN_TURNS),
        (RECEIVING, "pass"),
        ("sending.wait()", "pass"),
        ("receiving.wait()", "pass"),
    )
)
ring_reduce_scatter__keeps_the_next_chunk = fails("chunk r + 1 of the sum")(
    scatter_with(("rank - step - 2", "rank - step - 1"), ("chunks[rank]", "chunks[(rank + 1) % k]"))
)
ring_reduce_scatter__one_step_too_few = fails("expected")(
    scatter_with(("range(k - 1)", "range(k - 2)"))
)
ring_reduce_scatter__copies = fails("expected")(scatter_with(("+= incoming", "= incoming")))
ring_reduce_scatter__never_uses_what_arrives = fails("nothing was written")(
    scatter_with(("chunks[mine] += incoming", "pass"))
)
ring_reduce_scatter__divisible_only = fails("shape")(
    scatter_with((CUTS, "list(tensor.reshape(k, -1).clone())"))
)
ring_reduce_scatter__drops_the_rest = fails("has shape [2], expected [3]")(
    scatter_with((CUTS, "list(tensor.flatten().clone().split(max(1, tensor.numel() // k)))"))
)
ring_reduce_scatter__rounds_up = fails("has shape [3], expected [2]")(
    scatter_with((CUTS, "list(tensor.flatten().clone().chunk(k))"))
)
ring_reduce_scatter__changes_the_input = fails("changes tensor, which is not its to change")(
    scatter_with((".clone()", ""))
)
ring_reduce_scatter__returns_its_input = fails("shares memory with tensor")(
    scatter_with(
        (".clone()", ""), ("chunks[mine] += incoming", "chunks[mine] = chunks[mine] + incoming")
    )
)
ring_reduce_scatter__contiguous_only = fails("view size is not compatible")(
    scatter_with(("tensor.flatten()", "tensor.view(-1)"))
)
ring_reduce_scatter__mean = fails("nobody asked to divide")(
    scatter_with(("chunks[rank]", "(chunks[rank] / k).to(tensor.dtype)"))
)
ring_reduce_scatter__float32_buffer = fails("float32", only=VIRTUAL)(
    scatter_with(("torch.empty_like(chunks[mine])", "torch.empty(len(chunks[mine]))"))
)
ring_reduce_scatter__through_float32 = fails("rounded to float32")(
    scatter_with(
        ("tensor.flatten()", "tensor.flatten().float()"),
        ("chunks[rank]", "chunks[rank].to(tensor.dtype)"),
    )
)
ring_reduce_scatter__integers_through_float64 = fails("expected")(
    scatter_with(
        (
            "tensor.flatten()",
            "(tensor if tensor.is_floating_point() else tensor.double()).flatten()",
        ),
        ("chunks[rank]", "chunks[rank].to(tensor.dtype)"),
    )
)
ring_reduce_scatter__in_float64 = fails("in the tensor's dtype")(
    scatter_with(
        (
            "tensor.flatten()",
            "(tensor.double() if tensor.is_floating_point() else tensor).flatten()",
        ),
        ("chunks[rank]", "chunks[rank].to(tensor.dtype)"),
    )
)
ring_reduce_scatter__one_result_for_all_calls = fails("called twice")(
    scatter_with(
        (
            "return chunks[rank]",
            "kept = globals().setdefault('_kept', {})\n    result = kept.setdefault("
            "(len(chunks[rank]), tensor.dtype), torch.empty_like(chunks[rank]))\n"
            "    return result.copy_(chunks[rank])",
        )
    )
)
ring_reduce_scatter__knows_the_answer_already = fails("called twice")(
    scatter_with(
        (
            "return chunks[rank]",
            "kept = globals().setdefault('_known', {})\n    return kept.setdefault("
            "(k, rank, tensor.shape, tensor.dtype), chunks[rank]).clone()",
        )
    )
)
EVERY_SECOND = "(2 if group else 1) + (dist.get_rank() % 2 if group else 0)"
ring_reduce_scatter__groups_are_every_second_rank = fails("one of them alone", only=VIRTUAL)(
    scatter_with(
        (
            "group=group, group_dst=(rank + 1) % k",
            f"(rank + 1) % k * {EVERY_SECOND}",
        ),
        (
            "group=group, group_src=(rank - 1) % k",
            f"(rank - 1) % k * {EVERY_SECOND}",
        ),
    )
)
TOO_EARLY = scatter_with(
    ("incoming = torch.empty_like(chunks[mine])", "incoming = torch.zeros_like(chunks[mine])"),
    ("sending.wait()", "chunks[mine] = chunks[mine] + incoming; sending.wait()"),
    ("\n        chunks[mine] += incoming", ""),
)
ring_reduce_scatter__uses_it_before_it_is_there = fails("before its wait()", only=["simulated"])(
    edited(TOO_EARLY)
)
ring_reduce_scatter__uses_what_is_not_there = fails("expected", only=["grader"])(edited(TOO_EARLY))
ring_reduce_scatter__up_to_six_ranks = fails("hidden case", only=["simulated"])(
    scatter_with(("for step in", "k = min(k, 6); rank = rank % k\n    for step in"))
)
ring_reduce_scatter__whole_world = fails("4 ranks in two groups")(
    scatter_with(("(group)", "()"), ("group=group", "group=None"))
)
ring_reduce_scatter__does_not_wait = fails("never waits for the handle of send", only=VIRTUAL)(
    scatter_with(("sending.wait()", "pass"))
)
ring_reduce_scatter__rank_0_only = fails("is None")(
    scatter_with(("return chunks[rank]", "return chunks[rank] if rank == 0 else None"))
)
ring_reduce_scatter__seeds = fails("draws or seeds random numbers")(
    scatter_with(("rank, k =", "torch.manual_seed(0); rank, k ="))
)
ring_reduce_scatter__whole_tensors = fails("never the whole tensor")(
    scatter_with(
        (CUTS, "tensor.flatten().clone(); moving = chunks.clone()"),
        ("mine = (rank - step - 2) % k", "pass"),
        ("torch.empty_like(chunks[mine])", "torch.empty_like(chunks)"),
        ("chunks[(mine + 1) % k]", "moving"),
        ("chunks[mine] += incoming", "chunks += incoming; moving = incoming"),
        ("chunks[rank]", "chunks.tensor_split(k)[rank]"),
    )
)


@fails("this task allows send and recv only")
def ring_reduce_scatter__the_librarys(tensor, group=None):
    rank, k = dist.get_rank(group), dist.get_world_size(group)
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total.flatten().tensor_split(k)[rank].clone()


@fails("may talk to")
def ring_reduce_scatter__gathers_on_one_rank(tensor, group=None):
    rank, k = dist.get_rank(group), dist.get_world_size(group)
    flat = tensor.flatten().clone()
    if rank:
        dist.send(flat, group=group, group_dst=0)
        chunk = torch.empty_like(flat.tensor_split(k)[rank])
        dist.recv(chunk, group=group, group_src=0)
        return chunk
    for other in range(1, k):
        part = torch.empty_like(flat)
        dist.recv(part, group=group, group_src=other)
        flat += part
    for other, chunk in enumerate(flat.tensor_split(k)):
        if other:
            dist.send(chunk, group=group, group_dst=other)
    return flat.tensor_split(k)[0]


@fails("expected")
def ring_reduce_scatter__recomputes_from_a_seed(tensor, group=None):
    rank, k = dist.get_rank(group), dist.get_world_size(group)
    total = sum(
        torch.randint(-16, 16, tensor.shape, generator=torch.Generator().manual_seed(r))
        for r in range(k)
    )
    return total.to(tensor.dtype).flatten().tensor_split(k)[rank].clone()


@fails("course_lib", only=["grader"])
def ring_reduce_scatter__imports_the_reference(tensor, group=None):
    import importlib

    reduce_scatter = importlib.import_module("course_lib.collectives").reduce_scatter

    return reduce_scatter(tensor.clone(memory_format=torch.contiguous_format), group)


# ring_all_gather ---------------------------------------------------------------------------


@passes
def ring_all_gather__to_the_right(chunk, length, group=None):
    rank, k = dist.get_rank(group), dist.get_world_size(group)
    whole = chunk.new_empty(length)
    chunks = list(whole.tensor_split(k))
    chunks[rank].copy_(chunk)
    for step in range(k - 1):
        given, got = chunks[(rank - step) % k], chunks[(rank - step - 1) % k]
        sending = dist.isend(given, group=group, group_dst=(rank + 1) % k)
        receiving = dist.irecv(got, group=group, group_src=(rank - 1) % k)
        sending.wait()
        receiving.wait()
    return whole


@passes
def ring_all_gather__padded(chunk, length, group=None):
    members = dist.get_process_group_ranks(group)
    k, rank = len(members), members.index(dist.get_rank())
    size = -(-length // k)
    rows = chunk.new_zeros(k, size)
    rows[rank, : len(chunk)] = chunk
    for step in range(k - 1):
        ops = [
            dist.P2POp(dist.isend, rows[(rank + step) % k], members[rank - 1], group),
            dist.P2POp(dist.irecv, rows[(rank + step + 1) % k], members[(rank + 1) % k], group),
        ]
        for handle in dist.batch_isend_irecv(ops):
            handle.wait()
    lengths = [(length + k - 1 - r) // k for r in range(k)]
    return torch.cat([row[:n] for row, n in zip(rows, lengths, strict=True)])


def gather_with(*edits):
    return edited(ring_all_gather__to_the_right, *edits)


ring_all_gather__in_order_of_arrival = fails("chunk r belongs to place r")(
    gather_with(
        ("return whole", "return torch.cat(chunks[rank:] + chunks[:rank])"),
    )
)
ring_all_gather__one_step_too_few = fails("expected")(gather_with(("range(k - 1)", "range(k - 2)")))
ring_all_gather__forwards_its_own = fails("receives them as", only=VIRTUAL)(
    gather_with(("given, got = chunks[(rank - step) % k]", "given, got = chunks[rank]"))
)
ring_all_gather__divisible_only = fails("3 ranks, 7 numbers")(
    gather_with(("chunks = list(whole.tensor_split(k))", "chunks = list(whole.view(k, -1))"))
)
ring_all_gather__like_its_own_chunk = fails("3 ranks, 7 numbers")(
    gather_with(
        ("list(whole.tensor_split(k))", "[torch.empty_like(chunk) for _ in range(k)]"),
        ("return whole", "return torch.cat(chunks)"),
    )
)
ring_all_gather__returns_its_input = fails("shares memory with chunk")(
    gather_with(("return whole", "return whole if k > 1 else chunk"))
)
ring_all_gather__receives_into_its_input = fails("changes chunk, which is not its to change")(
    gather_with(("return whole", "chunk.zero_(); return whole"))
)
ring_all_gather__float32_only = fails("float32")(
    gather_with(("chunk.new_empty(length)", "torch.empty(length)"))
)
ring_all_gather__whole_world = fails("4 ranks in two groups")(
    gather_with(("(group)", "()"), ("group=group", "group=None"))
)
ring_all_gather__deadlock = fails("waits in send", only=VIRTUAL)(
    gather_with(("dist.isend", "dist.send"), ("sending.wait()", "pass"))
)
ring_all_gather__does_not_wait = fails("never waits for the handle of recv", only=VIRTUAL)(
    gather_with(("receiving.wait()", "pass"))
)
ring_all_gather__a_list = fails("list")(gather_with(("return whole", "return chunks")))
ring_all_gather__whole_tensors = fails("never the whole tensor")(
    gather_with(
        (
            "given, got = chunks[(rank - step) % k], chunks[(rank - step - 1) % k]",
            "got = torch.empty_like(whole)",
        ),
        ("dist.isend(given", "dist.isend(whole"),
        (
            "receiving.wait()",
            "receiving.wait(); n = (rank - step - 1) % k; chunks[n].copy_(got.tensor_split(k)[n])",
        ),
    )
)
ring_all_gather__chunk_as_it_is = fails("needs a contiguous tensor", only=VIRTUAL)(
    gather_with(
        ("for step in", "chunks[rank] = chunk\n    for step in"),
        ("return whole", "return torch.cat(chunks)"),
    )
)
ring_all_gather__own_chunk_forgotten = fails("0 in the place of this rank's own chunk")(
    gather_with(
        ("new_empty", "new_zeros"),
        ("chunks[rank].copy_(chunk)", "chunks[rank] = chunk.contiguous()"),
    )
)
ring_all_gather__one_result_for_all_calls = fails("called twice")(
    gather_with(
        (
            "return whole",
            "kept = globals().setdefault('_kept', {})\n    return kept.setdefault("
            "(length, whole.dtype), torch.empty_like(whole)).copy_(whole)",
        )
    )
)


@fails("may talk to")
def ring_all_gather__to_everybody(chunk, length, group=None):
    rank, k = dist.get_rank(group), dist.get_world_size(group)
    whole = chunk.new_empty(length)
    chunks = whole.tensor_split(k)
    chunks[rank].copy_(chunk)
    for step in range(1, k):
        to, source = (rank + step) % k, (rank - step) % k
        sending = dist.isend(chunk.contiguous(), group=group, group_dst=to)
        dist.recv(chunks[source], group=group, group_src=source)
        sending.wait()
    return whole


@fails("this task allows send and recv only")
def ring_all_gather__the_librarys(chunk, length, group=None):
    rank, k = dist.get_rank(group), dist.get_world_size(group)
    whole = chunk.new_zeros(length)
    whole.tensor_split(k)[rank].copy_(chunk)
    dist.all_reduce(whole, group=group)
    return whole


@fails("course_lib", only=["grader"])
def ring_all_gather__imports_the_reference(chunk, length, group=None):
    import importlib

    all_gather = importlib.import_module("course_lib.collectives").all_gather

    whole = chunk.new_empty(length)
    whole.tensor_split(dist.get_world_size(group))[dist.get_rank(group)].copy_(chunk)
    all_gather(whole, group)
    return whole


# ring_all_reduce ---------------------------------------------------------------------------


@passes
def ring_all_reduce__in_one_loop(tensor, group=None):
    rank, k = dist.get_rank(group), dist.get_world_size(group)
    flat = tensor.flatten().contiguous()
    chunks = flat.tensor_split(k)
    for step in range(2 * (k - 1)):
        given, got = chunks[(rank - step) % k], chunks[(rank - step - 1) % k]
        incoming = torch.empty_like(got)
        sending = dist.isend(given, group=group, group_dst=(rank + 1) % k)
        receiving = dist.irecv(incoming, group=group, group_src=(rank - 1) % k)
        sending.wait()
        receiving.wait()
        got.copy_(got + incoming if step < k - 1 else incoming)
    tensor.copy_(flat.view(tensor.shape))


@passes
def ring_all_reduce__padded(tensor, group=None):
    members = dist.get_process_group_ranks(group)
    k, rank = len(members), members.index(dist.get_rank())
    size = -(-tensor.numel() // k)
    rows = tensor.new_zeros(k * size)
    rows[: tensor.numel()] = tensor.reshape(-1)
    rows = rows.view(k, size)
    for adding in (True, False):
        for step in range(k - 1):
            given, got = (rank + step) % k, (rank + step + 1) % k
            if not adding:
                given, got = (given - 1) % k, (got - 1) % k
            incoming = torch.empty_like(rows[got])
            ops = [
                dist.P2POp(dist.isend, rows[given], members[rank - 1], group),
                dist.P2POp(dist.irecv, incoming, members[(rank + 1) % k], group),
            ]
            for handle in dist.batch_isend_irecv(ops):
                handle.wait()
            rows[got] = rows[got] + incoming if adding else incoming
    tensor.copy_(rows.view(-1)[: tensor.numel()].view_as(tensor))


def reduce_with(*edits):
    return edited(ring_all_reduce__in_one_loop, *edits)


ADDS = "got.copy_(got + incoming if step < k - 1 else incoming)"
BACK = "tensor.copy_(flat.view(tensor.shape))"
GIVEN = "given, got = chunks[(rank - step) % k], chunks[(rank - step - 1) % k]"

ring_all_reduce__into_a_copy = fails("nothing was written into it")(
    reduce_with(
        ("tensor.flatten()", "tensor.flatten().clone()"), (BACK, "return flat.view(tensor.shape)")
    )
)
ring_all_reduce__contiguous_only = fails("nothing was written into it")(reduce_with((BACK, "pass")))
ring_all_reduce__needs_contiguous = fails("view size is not compatible")(
    reduce_with(("tensor.flatten()", "tensor.view(-1)"), (BACK, "pass"))
)
ring_all_reduce__in_other_memory = fails("nothing was written into it")(
    reduce_with(
        ("tensor.flatten()", "tensor.flatten().clone()"),
        (BACK, "tensor.data = flat.view(tensor.shape)"),
    )
)
ring_all_reduce__set = fails("nothing was written into it")(
    reduce_with(
        ("tensor.flatten()", "tensor.flatten().clone()"),
        (BACK, "tensor.set_(flat.view(tensor.shape))"),
    )
)
ring_all_reduce__flat_as_it_is = fails("needs a contiguous tensor", only=VIRTUAL)(
    reduce_with(("tensor.flatten().contiguous()", "tensor.flatten()"))
)
ring_all_reduce__integers_through_float64 = fails("expected")(
    reduce_with(
        (
            "tensor.flatten()",
            "(tensor if tensor.is_floating_point() else tensor.double()).flatten()",
        )
    )
)
ring_all_reduce__in_float64 = fails("in the tensor's dtype")(
    reduce_with(
        (
            "tensor.flatten()",
            "(tensor.double() if tensor.is_floating_point() else tensor).flatten()",
        )
    )
)
ring_all_reduce__knows_the_answer_already = fails("called twice")(
    reduce_with(
        (
            BACK,
            "kept = globals().setdefault('_known', {})\n    tensor.copy_(kept.setdefault("
            "(k, rank, tensor.shape, tensor.dtype), flat.clone()).view(tensor.shape))",
        )
    )
)
ring_all_reduce__mean = fails("nobody asked to divide")(
    reduce_with((BACK, "tensor.copy_(flat.view(tensor.shape) / k)"))
)
ring_all_reduce__half_of_the_sum = fails("nobody asked to divide")(
    reduce_with((BACK, "tensor.copy_(flat.view(tensor.shape) / min(k, 2))"))
)
ring_all_reduce__divisible_only = fails("3 ranks, 7 numbers")(
    reduce_with(("flat.tensor_split(k)", "flat.view(k, -1)"))
)
ring_all_reduce__drops_the_rest = fails("3 ranks, 7 numbers")(
    reduce_with(("flat.tensor_split(k)", "flat[: len(flat) // k * k].tensor_split(k)"))
)
ring_all_reduce__not_fewer_than_ranks = fails("4 ranks, 3 numbers")(
    reduce_with(
        ("flat.tensor_split(k)", "flat.chunk(k) if len(flat) % k != 1 else flat.tensor_split(k)")
    )
)
ring_all_reduce__one_step_too_few = fails("expected")(
    reduce_with(("range(2 * (k - 1))", "range(2 * (k - 1) - 1)"))
)
ring_all_reduce__adds_all_the_way = fails("expected")(reduce_with((ADDS, "got += incoming")))
ring_all_reduce__adds_its_own = fails("expected")(reduce_with(("got + incoming", "got + got")))
ring_all_reduce__float32_only = fails("float32", only=VIRTUAL)(
    reduce_with(("torch.empty_like(got)", "torch.empty(len(got))"))
)
ring_all_reduce__through_float32 = fails("rounded to float32")(
    reduce_with(("tensor.flatten()", "tensor.flatten().float()"))
)
ring_all_reduce__whole_world = fails("4 ranks in two groups")(
    reduce_with(("(group)", "()"), ("group=group", "group=None"))
)
ring_all_reduce__deadlock = fails("waits in send", only=VIRTUAL)(
    reduce_with(("dist.isend", "dist.send"), ("sending.wait()", "pass"))
)
ring_all_reduce__does_not_wait = fails("never waits for the handle of send", only=VIRTUAL)(
    reduce_with(("sending.wait()", "pass"))
)
ring_all_reduce__whole_tensors = fails("never the whole tensor")(
    reduce_with(
        ("chunks = flat.tensor_split(k)", "given = flat.clone()"),
        ("range(2 * (k - 1))", "range(k - 1)"),
        (GIVEN, "got = flat"),
        (ADDS, "got += incoming; given = incoming"),
    )
)
ring_all_reduce__own_tensor_again = fails("what arrives is never used")(
    reduce_with(
        ("chunks = flat.tensor_split(k)", "given, own = flat.clone(), flat.clone()"),
        ("range(2 * (k - 1))", "range(k - 1)"),
        (GIVEN, "got = flat"),
        (ADDS, "got += own; given = incoming"),
    )
)


@fails("this task allows send and recv only")
def ring_all_reduce__the_librarys(tensor, group=None):
    total = tensor.contiguous()
    dist.all_reduce(total, group=group)
    tensor.copy_(total)


@fails("this task allows send and recv only")
def ring_all_reduce__by_reduce_scatter_of_the_library(tensor, group=None):
    k = dist.get_world_size(group)
    copies = [torch.empty_like(tensor.contiguous()) for _ in range(k)]
    dist.all_gather(copies, tensor.contiguous(), group=group)
    tensor.copy_(sum(copies))


@fails("may talk to")
def ring_all_reduce__through_one_rank(tensor, group=None):
    rank, k = dist.get_rank(group), dist.get_world_size(group)
    flat = tensor.flatten().contiguous()
    if rank:
        dist.send(flat, group=group, group_dst=0)
        dist.recv(flat, group=group, group_src=0)
    else:
        part = torch.empty_like(flat)
        for other in range(1, k):
            dist.recv(part, group=group, group_src=other)
            flat += part
        for other in range(1, k):
            dist.send(flat, group=group, group_dst=other)
    tensor.copy_(flat.view(tensor.shape))


@fails("3 ranks, 7 numbers")
def ring_all_reduce__powers_of_two_only(tensor, group=None):
    rank, k = dist.get_rank(group), dist.get_world_size(group)
    flat = tensor.flatten().contiguous()
    distance = 1
    while distance < k:
        partner, incoming = rank ^ distance, torch.empty_like(flat)
        sending = dist.isend(flat, group=group, group_dst=partner)
        dist.recv(incoming, group=group, group_src=partner)
        sending.wait()
        flat += incoming
        distance *= 2
    tensor.copy_(flat.view(tensor.shape))


@fails("nothing was written into it")
def ring_all_reduce__rank_0_only(tensor, group=None):
    rank, k = dist.get_rank(group), dist.get_world_size(group)
    flat = tensor.flatten().contiguous()
    if rank:
        dist.send(flat, group=group, group_dst=0)
        return
    part = torch.empty_like(flat)
    for other in range(1, k):
        dist.recv(part, group=group, group_src=other)
        flat += part
    tensor.copy_(flat.view(tensor.shape))


@fails("course_lib", only=["grader"])
def ring_all_reduce__imports_the_reference(tensor, group=None):
    import importlib

    simple_ring_all_reduce = importlib.import_module(
        "course_lib.collectives"
    ).simple_ring_all_reduce

    simple_ring_all_reduce(tensor, group)


# two_level_all_reduce ----------------------------------------------------------------------


@passes
def two_level_all_reduce__three_rings(tensor, inside, between):
    def ring(flat, group, steps):
        rank, k = dist.get_rank(group), dist.get_world_size(group)
        chunks = flat.tensor_split(k)
        for step in range(*steps(k)):
            given, got = chunks[(rank - step) % k], chunks[(rank - step - 1) % k]
            incoming = torch.empty_like(got)
            sending = dist.isend(given, group=group, group_dst=(rank + 1) % k)
            dist.recv(incoming, group=group, group_src=(rank - 1) % k)
            sending.wait()
            got.copy_(got + incoming if step < k - 1 else incoming)
        return chunks[(rank + 1) % k]

    flat = tensor.flatten().contiguous()
    mine = ring(flat, inside, lambda k: (k - 1,))
    ring(mine, between, lambda k: (2 * (k - 1),))
    ring(flat, inside, lambda k: (k - 1, 2 * (k - 1)))
    tensor.copy_(flat.view(tensor.shape))


@passes
def two_level_all_reduce__everybody_to_everybody_inside(tensor, inside, between):
    def swap(given, got, group):
        ranks = dist.get_process_group_ranks(group)
        me = ranks.index(dist.get_rank())
        for step in range(1, len(ranks)):
            to, source = (me + step) % len(ranks), (me - step) % len(ranks)
            sending = dist.isend(given[to], ranks[to], group=group)
            dist.recv(got[source], ranks[source], group=group)
            sending.wait()

    def add_up(flat, group):
        me, k = dist.get_rank(group), dist.get_world_size(group)
        chunks = flat.tensor_split(k)
        parts = [torch.zeros_like(chunks[me]) for _ in range(k)]
        swap(chunks, parts, group)
        return chunks[me] + sum(parts)

    def collect(flat, chunk, group):
        me, k = dist.get_rank(group), dist.get_world_size(group)
        chunks = flat.tensor_split(k)
        chunks[me].copy_(chunk)
        swap([chunk] * k, chunks, group)

    flat = tensor.flatten().contiguous()
    mine = add_up(flat, inside)
    collect(mine, add_up(mine, between), between)
    collect(flat, mine, inside)
    tensor.copy_(flat.view(tensor.shape))


def levels_with(*edits):
    return edited(two_level_all_reduce__three_rings, *edits)


FIRST = "mine = ring(flat, inside, lambda k: (k - 1,))"
MIDDLE = "ring(mine, between, lambda k: (2 * (k - 1),))"
LAST = "ring(flat, inside, lambda k: (k - 1, 2 * (k - 1)))"
ALL = "lambda k: (2 * (k - 1),))"

two_level_all_reduce__inside_only = fails("of this node only")(levels_with((MIDDLE, "pass")))
two_level_all_reduce__between_only = fails("of this place in all nodes only")(
    levels_with((FIRST, f"ring(flat, between, {ALL}"), (MIDDLE, "pass"), (LAST, "pass"))
)
two_level_all_reduce__never_gathers = fails("expected")(levels_with((LAST, "pass")))
two_level_all_reduce__sums_before_it_gathers = fails("expected")(
    levels_with((LAST, "ring(flat, inside, lambda k: (2 * (k - 1),))"))
)
two_level_all_reduce__wrong_way_round = fails("What leaves the node", only=VIRTUAL)(
    levels_with(
        (FIRST, FIRST.replace("inside", "between")),
        (MIDDLE, MIDDLE.replace("between", "inside")),
        (LAST, LAST.replace("inside", "between")),
    )
)
two_level_all_reduce__whole_tensors_between = fails("What leaves the node", only=VIRTUAL)(
    levels_with(
        (FIRST, f"ring(flat, inside, {ALL}"), (MIDDLE, f"ring(flat, between, {ALL}"), (LAST, "pass")
    )
)
two_level_all_reduce__one_flat_ring = fails("What leaves the node", only=VIRTUAL)(
    levels_with((FIRST, f"ring(flat, None, {ALL}"), (MIDDLE, "pass"), (LAST, "pass"))
)
two_level_all_reduce__blocking = fails("waits in send", only=VIRTUAL)(
    levels_with(("dist.isend", "dist.send"), ("sending.wait()", "pass"))
)
two_level_all_reduce__in_other_memory = fails("nothing was written into it")(
    levels_with(
        ("tensor.flatten()", "tensor.flatten().clone()"),
        ("tensor.copy_(flat.view(tensor.shape))", "tensor.data = flat.view(tensor.shape)"),
    )
)
two_level_all_reduce__in_float64 = fails("What leaves the node", only=VIRTUAL)(
    levels_with(
        (
            "tensor.flatten()",
            "(tensor.double() if tensor.is_floating_point() else tensor).flatten()",
        )
    )
)
two_level_all_reduce__between_in_float64 = fails("What leaves the node", only=VIRTUAL)(
    levels_with(
        (
            MIDDLE,
            "wide = mine.double() if tensor.is_floating_point() else mine.clone()\n"
            "    ring(wide, between, lambda k: (2 * (k - 1),))\n"
            "    mine.copy_(wide)",
        )
    )
)
two_level_all_reduce__integers_through_float64 = fails("expected")(
    levels_with(
        (
            "tensor.flatten()",
            "(tensor if tensor.is_floating_point() else tensor.double()).flatten()",
        )
    )
)
two_level_all_reduce__flat_as_it_is = fails("needs a contiguous tensor", only=VIRTUAL)(
    levels_with(("tensor.flatten().contiguous()", "tensor.flatten()"))
)
two_level_all_reduce__gathers_between_nodes = fails("hidden case", only=["simulated"])(
    levels_with(
        (
            MIDDLE,
            "rank, k, own = dist.get_rank(between), dist.get_world_size(between), mine.clone()\n"
            "    for step in range(k - 1):\n"
            "        incoming = torch.empty_like(own)\n"
            "        sending = dist.isend(own, group=between, group_dst=(rank + 1) % k)\n"
            "        dist.recv(incoming, group=between, group_src=(rank - 1) % k)\n"
            "        sending.wait()\n"
            "        mine += incoming\n"
            "        own = incoming",
        )
    )
)
two_level_all_reduce__into_a_copy = fails("nothing was written into it")(
    levels_with(
        ("tensor.flatten()", "tensor.flatten().clone()"),
        ("tensor.copy_(flat.view(tensor.shape))", "return flat"),
    )
)
two_level_all_reduce__contiguous_only = fails("view size is not compatible")(
    levels_with(("tensor.flatten()", "tensor.view(-1)"))
)
two_level_all_reduce__float32_only = fails("float32", only=VIRTUAL)(
    levels_with(("torch.empty_like(got)", "torch.empty(len(got))"))
)
two_level_all_reduce__divisible_only = fails("3 nodes of 1 rank")(
    levels_with(("flat.tensor_split(k)", "flat.view(k, -1)"))
)
two_level_all_reduce__two_per_node = fails("1 node of 3 ranks")(
    levels_with((FIRST, "mine = ring(flat, inside, lambda k: (min(k, 2) - 1,))"))
)
two_level_all_reduce__mean = fails("nobody asked to divide")(
    levels_with(
        (
            "tensor.copy_(flat.view(tensor.shape))",
            "tensor.copy_(flat.view(tensor.shape) / dist.get_world_size())",
        )
    )
)


@fails("this task allows send and recv only")
def two_level_all_reduce__the_librarys(tensor, inside, between):
    total = tensor.contiguous()
    dist.all_reduce(total, group=inside)
    dist.all_reduce(total, group=between)
    tensor.copy_(total)


@fails("What leaves the node", only=VIRTUAL)
def two_level_all_reduce__one_rank_per_node_speaks(tensor, inside, between):
    def through(flat, group, adding):
        rank, k = dist.get_rank(group), dist.get_world_size(group)
        part = torch.empty_like(flat)
        for other in range(1, k):
            if adding and rank == other:
                dist.send(flat, group=group, group_dst=0)
            elif adding and rank == 0:
                dist.recv(part, group=group, group_src=other)
                flat += part
            elif not adding and rank == 0:
                dist.send(flat, group=group, group_dst=other)
            elif not adding and rank == other:
                dist.recv(flat, group=group, group_src=0)

    flat = tensor.flatten().contiguous()
    through(flat, inside, adding=True)
    if dist.get_rank(inside) == 0:
        through(flat, between, adding=True)
        through(flat, between, adding=False)
    through(flat, inside, adding=False)
    tensor.copy_(flat.view(tensor.shape))


@fails("course_lib", only=["grader"])
def two_level_all_reduce__imports_the_reference(tensor, inside, between):
    import importlib

    hierarchical_all_reduce = importlib.import_module(
        "course_lib.collectives"
    ).hierarchical_all_reduce

    hierarchical_all_reduce(tensor, inside, between)


ring_all_reduce__wants_gradients = fails("a tensor that came in requires a gradient")(
    edited(
        ring_all_reduce__in_one_loop,
        (
            "tensor.copy_(flat",
            "tensor.requires_grad_(tensor.is_floating_point()).data.copy_(flat",
        ),
    )
)


# From whoever sends, along another tree, and past the messages -------------------------------

tree_broadcast__from_whoever_sends = passes(
    broadcast_with((RECEIVES, "dist.recv(data, group=group)"))
)


@fails("hidden case", only=["simulated"])
def tree_broadcast__binary_tree(tensor, src, group=None):
    rank, k = dist.get_rank(group), dist.get_world_size(group)
    root = dist.get_process_group_ranks(group).index(src)
    place, data = (rank - root) % k, tensor.contiguous()
    if place:
        dist.recv(data, group=group, group_src=((place - 1) // 2 + root) % k)
    for child in (2 * place + 1, 2 * place + 2):
        if child < k:
            dist.send(data, group=group, group_dst=(child + root) % k)
    tensor.copy_(data)


@fails("expected at least", only=["simulated", "cpu"])
def ring_all_reduce__through_the_store(tensor, group=None):
    store = dist.distributed_c10d._get_default_store()
    members = dist.get_process_group_ranks(group or dist.group.WORLD)
    key = f"{members} {tuple(tensor.shape)} {tensor.dtype} "
    key += str(store.add(key + str(dist.get_rank()), 1))  # which call it is
    store.set(f"{key} {dist.get_rank()}", str(tensor.tolist()))
    theirs = [eval(store.get(f"{key} {rank}").decode()) for rank in members]
    tensor.copy_(sum(torch.tensor(each, dtype=tensor.dtype) for each in theirs))


ring_all_reduce__twice_alone = fails("This equals twice the sum")(
    reduce_with((BACK, BACK.replace("copy_", "add_")))
)
ring_all_reduce__left_to_right = passes(
    reduce_with(
        ("(rank + 1) % k", "(rank - 1) % k"),
        ("group_src=(rank - 1) % k", "group_src=(rank + 1) % k"),
        ("(rank - step) % k", "(rank + step) % k"),
        ("(rank - step - 1) % k", "(rank + step + 1) % k"),
    )
)
