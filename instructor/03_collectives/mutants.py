"""Wrong solutions that people write, and right ones that differ from ours.

See `instructor/02_data_parallel_sgd/mutants.py`. Time is exact only on a virtual clock. gloo
keeps small messages, does not report a handle without `wait`, and ends the process if lengths do
not match. Such mistakes are only tested on simulated ranks and in the grader.
"""

import torch
import torch.distributed as dist

from course_lib.checking.mutants import VIRTUAL, edits_of, fails, passes

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


edits_of(tree_broadcast__doubling)("""
into_the_copy_of_reshape: make a copy, and the result went into the copy
    tensor.copy_(data) → tensor.reshape(-1).copy_(data.reshape(-1))
never_received: memory of torch.empty holds
    data = tensor.contiguous() → data = torch.empty(tensor.shape, dtype=tensor.dtype)
through_bfloat16: rounded to bfloat16 on the way
    data = tensor.contiguous() → data = tensor.bfloat16().to(tensor.dtype).contiguous()
ignores_the_source: 2 ranks, from rank 1
    dist.get_process_group_ranks(group).index(src) → 0
takes_src_for_a_number_in_the_group: which is number 1 in the group
    dist.get_process_group_ranks(group).index(src) → src
takes_numbers_for_ranks: 4 ranks in two groups
    group_dst=(rank + width) → dst=(rank + width)
    group_src=(rank - width) → src=(rank - width)
whole_world: 4 ranks in two groups
    group) → None)
    group=group → group=None
powers_of_two_only: 3 ranks, from rank 2
    and place + width < k →
forgets_to_copy_back: make a copy, and the result went into the copy
    tensor.copy_(data) → pass
one_round_too_few: received nothing
    while width < k → while 2 * width < k
into_a_copy: received nothing
    tensor.copy_(data) → return data
    contiguous() → clone()
contiguous_only: view size is not compatible
    tensor.contiguous() → tensor.view(-1)
    tensor.copy_(data) → pass
through_float32: rounded to float32
    tensor.contiguous() → tensor.float().contiguous()
in_other_memory: received nothing
    tensor.contiguous() → tensor.clone()
    tensor.copy_(data) → tensor.data = data
set: received nothing
    tensor.contiguous() → tensor.clone()
    tensor.copy_(data) → tensor.set_(data)
vectors_as_they_are (simulated, grader): needs a contiguous tensor
    tensor.contiguous() → … if tensor.dim() > 1 else tensor
groups_are_every_second_rank: one of them alone
    dist.get_process_group_ranks(group).index(src) → src if k == dist.get_world_size() else src // 2
world_of_one_only: one of them alone
    rank, k = dist.get_rank(group), dist.get_world_size(group)
  → …
  → root, first = 0, dist.get_world_size() > 1
    while width < k → … or first
    place < width and place + width < k → place < width and (first or place + width < k)
    width *= 2 → …; first = False
more_than_the_tensor: Send in each message only the tensor
    data = tensor.contiguous() → data = torch.stack([tensor, tensor])
    tensor.copy_(data) → tensor.copy_(data[0])
does_not_wait (simulated, grader): never waits for the handle of send
    dist.send( → dist.isend(
a_chain (simulated, grader): All ranks that have the tensor must send at the same time
    if place < width and place + width < k → if place == width - 1
    elif width <= place < 2 * width → elif place == width
    (rank + width) → (rank + 1)
    (rank - width) → (rank - 1)
    width *= 2 → width += 1
""")


@fails("Let every rank that has the tensor pass it on")
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


edits_of(tree_broadcast__doubling)("""
twice: no rank sends more than
    if place < width and place + width < k:
        dist.send(data, group=group, group_dst=(rank + width) % k)
    elif width <= place < 2 * width:
        dist.recv(data, group=group, group_src=(rank - width) % k)
  → for part in (data.view(-1)[:1], data.view(-1)[1:]):
  →     if place < width and place + width < k:
  →         dist.send(part, group=group, group_dst=(rank + width) % k)
  →     elif width <= place < 2 * width:
  →         dist.recv(part, group=group, group_src=(rank - width) % k)
""")


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


edits_of(ring_reduce_scatter__to_the_right)("""
deadlock (simulated, grader): waits in send
    dist.isend → dist.send
    sending.wait() → pass
receives_first: waits in recv
    dist.isend(chunks[(mine + 1) % k], group=group, group_dst=(rank + 1) % k) → None
    receiving = dist.irecv → dist.recv
    sending.wait()
  → sending = dist.isend(chunks[(mine + 1) % k], group=group, group_dst=(rank + 1) % k); …
    receiving.wait() → pass
in_turns (simulated, grader): Send and receive at the same time
    sending = dist.isend(chunks[(mine + 1) % k], group=group, group_dst=(rank + 1) % k)
  → for turn in (0, 1):
  →     if rank % 2 == turn:
  →         dist.send(chunks[(mine + 1) % k], group=group, group_dst=(rank + 1) % k)
  →     else:
  →         dist.recv(incoming, group=group, group_src=(rank - 1) % k)
    receiving = dist.irecv(incoming, group=group, group_src=(rank - 1) % k) → pass
    sending.wait() → pass
    receiving.wait() → pass
keeps_the_next_chunk: chunk 1 of the finished sum. You are number 0 and must keep chunk 0
    rank - step - 2 → rank - step - 1
    chunks[rank] → chunks[(rank + 1) % k]
begins_with_its_own_chunk: In the last step, chunk 0 must arrive here
    rank - step - 2 → rank - step - 1
begins_with_the_next_chunk: arrives here in step 1 and not in the last step (2)
    rank - step - 2 → rank - step
one_step_too_few: expected
    range(k - 1) → range(k - 2)
copies: expected
    += incoming → = incoming
never_uses_what_arrives: no other part was added
    chunks[mine] += incoming → pass
divisible_only: shape
    list(tensor.flatten().clone().tensor_split(k)) → list(tensor.reshape(k, -1).clone())
drops_the_rest: has shape [2], expected [3]
    tensor_split(k) → split(max(1, tensor.numel() // k))
rounds_up: has shape [4], expected [3]
    list(tensor.flatten().clone().tensor_split(k)) → list(tensor.flatten().clone().chunk(k))
changes_the_input: changes tensor, which must stay as it is
    .clone() →
returns_its_input: shares memory with tensor
    .clone() →
    chunks[mine] += incoming → chunks[mine] = chunks[mine] + incoming
contiguous_only: view size is not compatible
    tensor.flatten() → tensor.view(-1)
mean: the task asks for the sum
    chunks[rank] → (… / k).to(tensor.dtype)
float32_buffer (simulated, grader): float32
    torch.empty_like(chunks[mine]) → torch.empty(len(chunks[mine]))
through_float32: rounded to float32
    tensor.flatten() → tensor.flatten().float()
    chunks[rank] → chunks[rank].to(tensor.dtype)
integers_through_float64: expected
    tensor.flatten() → (tensor if tensor.is_floating_point() else tensor.double()).flatten()
    chunks[rank] → chunks[rank].to(tensor.dtype)
in_float64: in the tensor's dtype
    tensor.flatten() → (tensor.double() if tensor.is_floating_point() else tensor).flatten()
    chunks[rank] → chunks[rank].to(tensor.dtype)
one_result_for_all_calls: called twice
    return chunks[rank]
  → kept = globals().setdefault("_kept", {})
  → result = kept.setdefault((len(chunks[rank]), tensor.dtype), torch.empty_like(chunks[rank]))
  → return result.copy_(chunks[rank])
knows_the_answer_already: called twice
    return chunks[rank]
  → kept = globals().setdefault("_known", {})
  → return kept.setdefault((k, rank, tensor.shape, tensor.dtype), chunks[rank]).clone()
groups_are_every_second_rank (simulated, grader): one of them alone
    group=group, group_dst=(rank + 1) % k
  → (rank + 1) % k * (2 if group else 1) + (dist.get_rank() % 2 if group else 0)
    group=group, group_src=(rank - 1) % k
  → (rank - 1) % k * (2 if group else 1) + (dist.get_rank() % 2 if group else 0)
uses_it_before_it_is_there (simulated): before its wait()
uses_what_is_not_there (grader): expected
    incoming = torch.empty_like(chunks[mine]) → incoming = torch.zeros_like(chunks[mine])
    sending.wait() → chunks[mine] = chunks[mine] + incoming; …
    chunks[mine] += incoming →
up_to_six_ranks (simulated): hidden case
    chunks = list(tensor.flatten().clone().tensor_split(k)) → …; k = min(k, 6); rank = rank % k
whole_world: 4 ranks in two groups
    (group) → ()
    group=group → group=None
does_not_wait (simulated, grader): never waits for the handle of send
    sending.wait() → pass
rank_0_only: is None
    return chunks[rank] → … if rank == 0 else None
seeds: draws or seeds random numbers
    rank, k = → torch.manual_seed(0); rank, k =
whole_tensors: never the whole tensor
    list(tensor.flatten().clone().tensor_split(k))
  → tensor.flatten().clone(); moving = chunks.clone()
    mine = (rank - step - 2) % k → pass
    torch.empty_like(chunks[mine]) → torch.empty_like(chunks)
    chunks[(mine + 1) % k] → moving
    chunks[mine] += incoming → chunks += incoming; moving = incoming
    chunks[rank] → chunks.tensor_split(k)[rank]
""")


@fails("this task allows send and recv only")
def ring_reduce_scatter__the_librarys(tensor, group=None):
    rank, k = dist.get_rank(group), dist.get_world_size(group)
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total.flatten().tensor_split(k)[rank].clone()


@fails("may exchange messages only with")
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


edits_of(ring_all_gather__to_the_right)("""
in_order_of_arrival: Put chunk r in place r
    return whole → return torch.cat(chunks[rank:] + chunks[:rank])
begins_with_the_next_chunk: chunk 0, your own. Send your own chunk first
    given, got = chunks[(rank - step) % k], chunks[(rank - step - 1) % k]
  → given, got = chunks[(rank - step + 1) % k], chunks[(rank - step) % k]
one_step_too_few: pass on the chunk that you received last
    range(k - 1) → range(k - 2)
forwards_its_own (simulated, grader): receives them as
    given, got = chunks[(rank - step) % k] → given, got = chunks[rank]
divisible_only: 3 ranks, 10 numbers
    chunks = list(whole.tensor_split(k)) → chunks = list(whole.view(k, -1))
like_its_own_chunk: 3 ranks, 10 numbers
    list(whole.tensor_split(k)) → [torch.empty_like(chunk) for _ in range(k)]
    return whole → return torch.cat(chunks)
returns_its_input: shares memory with chunk
    return whole → … if k > 1 else chunk
receives_into_its_input: changes chunk, which must stay as it is
    return whole → chunk.zero_(); …
float32_only: float32
    chunk.new_empty(length) → torch.empty(length)
whole_world: 4 ranks in two groups
    (group) → ()
    group=group → group=None
deadlock (simulated, grader): waits in send
    dist.isend → dist.send
    sending.wait() → pass
does_not_wait (simulated, grader): never waits for the handle of recv
    receiving.wait() → pass
a_list: list
    return whole → return chunks
whole_tensors: never the whole tensor
    given, got = chunks[(rank - step) % k], chunks[(rank - step - 1) % k]
  → got = torch.empty_like(whole)
    dist.isend(given → dist.isend(whole
    receiving.wait() → …; n = (rank - step - 1) % k; chunks[n].copy_(got.tensor_split(k)[n])
chunk_as_it_is (simulated, grader): needs a contiguous tensor
    chunks[rank].copy_(chunk) → …; chunks[rank] = chunk
    return whole → return torch.cat(chunks)
own_chunk_forgotten: 0 in the place of this rank's own chunk
    new_empty → new_zeros
    chunks[rank].copy_(chunk) → chunks[rank] = chunk.contiguous()
one_result_for_all_calls: called twice
    return whole
  → kept = globals().setdefault("_kept", {})
  → return kept.setdefault((length, whole.dtype), torch.empty_like(whole)).copy_(whole)
""")


@fails("may exchange messages only with")
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


edits_of(ring_all_reduce__in_one_loop)("""
into_a_copy: the tensor as it was before the call
    tensor.flatten() → tensor.flatten().clone()
    tensor.copy_(flat.view(tensor.shape)) → return flat.view(tensor.shape)
contiguous_only: make a copy, and the result went into the copy
    tensor.copy_(flat.view(tensor.shape)) → pass
needs_contiguous: view size is not compatible
    tensor.flatten() → tensor.view(-1)
    tensor.copy_(flat.view(tensor.shape)) → pass
in_other_memory: the tensor as it was before the call
    tensor.flatten() → tensor.flatten().clone()
    tensor.copy_(flat.view(tensor.shape)) → tensor.data = flat.view(tensor.shape)
set: the tensor as it was before the call
    tensor.flatten() → tensor.flatten().clone()
    tensor.copy_(flat.view(tensor.shape)) → tensor.set_(flat.view(tensor.shape))
flat_as_it_is (simulated, grader): needs a contiguous tensor
    tensor.flatten().contiguous() → tensor.flatten()
integers_through_float64: expected
    tensor.flatten() → (tensor if tensor.is_floating_point() else tensor.double()).flatten()
in_float64: in the tensor's dtype
    tensor.flatten() → (tensor.double() if tensor.is_floating_point() else tensor).flatten()
knows_the_answer_already: called twice
    tensor.copy_(flat.view(tensor.shape))
  → kept = globals().setdefault("_known", {})
  → tensor.copy_(
  →     kept.setdefault((k, rank, tensor.shape, tensor.dtype), flat.clone()).view(tensor.shape)
  → )
mean: the task asks for the sum
    tensor.copy_(flat.view(tensor.shape)) → tensor.copy_(flat.view(tensor.shape) / k)
half_of_the_sum: the task asks for the sum
    tensor.copy_(flat.view(tensor.shape)) → tensor.copy_(flat.view(tensor.shape) / min(k, 2))
divisible_only: 3 ranks, 10 numbers
    flat.tensor_split(k) → flat.view(k, -1)
drops_the_rest: 3 ranks, 10 numbers
    flat.tensor_split(k) → flat[: len(flat) // k * k].tensor_split(k)
not_fewer_than_ranks: 4 ranks, 3 numbers
    flat.tensor_split(k) → flat.chunk(k) if len(flat) % k != 1 else …
one_step_too_few: expected
    range(2 * (k - 1)) → range(2 * (k - 1) - 1)
adds_all_the_way: expected
    got.copy_(got + incoming if step < k - 1 else incoming) → got += incoming
adds_its_own: expected
    got + incoming → got + got
float32_only (simulated, grader): float32
    torch.empty_like(got) → torch.empty(len(got))
through_float32: were rounded to float32 on the way
    tensor.flatten() → tensor.flatten().float()
whole_world: 4 ranks in two groups
    (group) → ()
    group=group → group=None
deadlock (simulated, grader): waits in send
    dist.isend → dist.send
    sending.wait() → pass
does_not_wait (simulated, grader): never waits for the handle of send
    sending.wait() → pass
gathers_without_the_group: no passing case, have several groups of ranks
    group=group → group=group if step < k - 1 else None
whole_tensors: never the whole tensor
    chunks = flat.tensor_split(k) → given = flat.clone()
    range(2 * (k - 1)) → range(k - 1)
    given, got = chunks[(rank - step) % k], chunks[(rank - step - 1) % k] → got = flat
    got.copy_(got + incoming if step < k - 1 else incoming) → got += incoming; given = incoming
own_tensor_again: the numbers that arrive are never used
    chunks = flat.tensor_split(k) → given, own = flat.clone(), flat.clone()
    range(2 * (k - 1)) → range(k - 1)
    given, got = chunks[(rank - step) % k], chunks[(rank - step - 1) % k] → got = flat
    got.copy_(got + incoming if step < k - 1 else incoming) → got += own; given = incoming
""")


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


@fails("may exchange messages only with")
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


@fails("3 ranks, 10 numbers")
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


@fails("the tensor as it was before the call")
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


@passes
def two_level_all_reduce__all_messages_at_once(tensor, inside, between):
    def swap(given, got, group):
        me, k = dist.get_rank(group), dist.get_world_size(group)
        batch = []
        for step in range(1, k):
            to, source = (me + step) % k, (me - step) % k
            batch.append(dist.P2POp(dist.isend, given[to], group=group, group_peer=to))
            batch.append(dist.P2POp(dist.irecv, got[source], group=group, group_peer=source))
        for handle in dist.batch_isend_irecv(batch) if batch else []:
            handle.wait()

    def add_up(flat, group):
        me, k = dist.get_rank(group), dist.get_world_size(group)
        chunks = flat.tensor_split(k)
        parts = [chunks[me].clone() for _ in range(k)]
        swap(chunks, parts, group)
        return sum(parts)

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


edits_of(two_level_all_reduce__three_rings)("""
inside_only: only the ranks of this node
    ring(mine, between, lambda k: (2 * (k - 1),)) → pass
between_only: only the ranks with the same place
    mine = ring(flat, inside, lambda k: (k - 1,)) → ring(flat, between, lambda k: (2 * (k - 1),))
    ring(mine, between, lambda k: (2 * (k - 1),)) → pass
    ring(flat, inside, lambda k: (k - 1, 2 * (k - 1))) → pass
never_gathers: expected
    ring(flat, inside, lambda k: (k - 1, 2 * (k - 1))) → pass
sums_before_it_gathers: expected
    k - 1, 2 * (k - 1) → 2 * (k - 1),
wrong_way_round (simulated, grader): Messages to other nodes take long
    mine = ring(flat, inside, lambda k: (k - 1,)) → mine = ring(flat, between, lambda k: (k - 1,))
    ring(mine, between, lambda k: (2 * (k - 1),)) → ring(mine, inside, lambda k: (2 * (k - 1),))
    inside, lambda k: (k - 1, 2 * (k - 1)) → between, lambda k: (k - 1, 2 * (k - 1))
whole_tensors_between (simulated, grader): Messages to other nodes take long
    mine = ring(flat, inside, lambda k: (k - 1,)) → ring(flat, inside, lambda k: (2 * (k - 1),))
    ring(mine, between, lambda k: (2 * (k - 1),)) → ring(flat, between, lambda k: (2 * (k - 1),))
    ring(flat, inside, lambda k: (k - 1, 2 * (k - 1))) → pass
one_flat_ring (simulated, grader): Messages to other nodes take long
    mine = ring(flat, inside, lambda k: (k - 1,)) → ring(flat, None, lambda k: (2 * (k - 1),))
    ring(mine, between, lambda k: (2 * (k - 1),)) → pass
    ring(flat, inside, lambda k: (k - 1, 2 * (k - 1))) → pass
blocking (simulated, grader): waits in send
    dist.isend → dist.send
    sending.wait() → pass
in_other_memory: the tensor as it was before the call
    tensor.flatten() → tensor.flatten().clone()
    tensor.copy_(flat.view(tensor.shape)) → tensor.data = flat.view(tensor.shape)
in_float64 (simulated, grader): Messages to other nodes take long
    tensor.flatten() → (tensor.double() if tensor.is_floating_point() else tensor).flatten()
between_in_float64 (simulated, grader): Messages to other nodes take long
    ring(mine, between, lambda k: (2 * (k - 1),))
  → wide = mine.double() if tensor.is_floating_point() else mine.clone()
  → ring(wide, between, lambda k: (2 * (k - 1),))
  → mine.copy_(wide)
integers_through_float64: expected
    tensor.flatten() → (tensor if tensor.is_floating_point() else tensor.double()).flatten()
flat_as_it_is (simulated, grader): needs a contiguous tensor
    tensor.flatten().contiguous() → tensor.flatten()
gathers_between_nodes (simulated): hidden case
    ring(mine, between, lambda k: (2 * (k - 1),))
  → rank, k, own = dist.get_rank(between), dist.get_world_size(between), mine.clone()
  → for step in range(k - 1):
  →     incoming = torch.empty_like(own)
  →     sending = dist.isend(own, group=between, group_dst=(rank + 1) % k)
  →     dist.recv(incoming, group=between, group_src=(rank - 1) % k)
  →     sending.wait()
  →     mine += incoming
  →     own = incoming
into_a_copy: the tensor as it was before the call
    tensor.flatten() → tensor.flatten().clone()
    tensor.copy_(flat.view(tensor.shape)) → return flat
contiguous_only: view size is not compatible
    tensor.flatten() → tensor.view(-1)
float32_only (simulated, grader): float32
    torch.empty_like(got) → torch.empty(len(got))
divisible_only: 3 nodes of 1 rank
    flat.tensor_split(k) → flat.view(k, -1)
two_per_node: 1 node of 3 ranks
    k: (k - 1,) → k: (min(k, 2) - 1,)
mean: the task asks for the sum
    flat.view(tensor.shape) → … / dist.get_world_size()
""")


@fails("this task allows send and recv only")
def two_level_all_reduce__the_librarys(tensor, inside, between):
    total = tensor.contiguous()
    dist.all_reduce(total, group=inside)
    dist.all_reduce(total, group=between)
    tensor.copy_(total)


@fails("sends nothing to other nodes", only=VIRTUAL)
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


edits_of(ring_all_reduce__in_one_loop)("""
wants_gradients: a tensor of the input requires a gradient
    tensor.copy_(flat → tensor.requires_grad_(tensor.is_floating_point()).data.copy_(flat
""")


# From any sender, along another tree, and past the messages ----------------------------------

edits_of(tree_broadcast__doubling)("""
from_whoever_sends passes
    dist.recv(data, group=group, group_src=(rank - width) % k) → dist.recv(data, group=group)
""")


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
    key += str(store.add(key + str(dist.get_rank()), 1))  # the number of the call
    store.set(f"{key} {dist.get_rank()}", str(tensor.tolist()))
    theirs = [eval(store.get(f"{key} {rank}").decode()) for rank in members]
    tensor.copy_(sum(torch.tensor(each, dtype=tensor.dtype) for each in theirs))


edits_of(ring_all_reduce__in_one_loop)("""
twice_alone: This equals twice the sum
    tensor.copy_(flat.view(tensor.shape)) → tensor.add_(flat.view(tensor.shape))
left_to_right passes
    (rank + 1) % k → (rank - 1) % k
    group_src=(rank - 1) % k → group_src=(rank + 1) % k
    (rank - step) % k → (rank + step) % k
    (rank - step - 1) % k → (rank + step + 1) % k
""")
