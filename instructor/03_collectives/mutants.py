"""Wrong solutions that people write, and right ones that differ from ours.

Time is exact only on a virtual clock. gloo keeps small messages, does not report a handle without
`wait`, and ends the process if lengths do not match.
"""

import torch
import torch.distributed as dist

from course_lib.checking.mutants import VIRTUAL, Mutant, edits_of, fails, passes

# ring_reduce_scatter -----------------------------------------------------------------------


@passes
def ring_reduce_scatter__to_the_right(tensor, group=None):
    rank, k = dist.get_rank(group), dist.get_world_size(group)
    chunks = list(tensor.flatten().clone().tensor_split(k))
    for step in range(k - 1):
        place = (rank - step - 2) % k
        incoming = torch.empty_like(chunks[place])
        sending = dist.isend(chunks[(place + 1) % k], group=group, group_dst=(rank + 1) % k)
        receiving = dist.irecv(incoming, group=group, group_src=(rank - 1) % k)
        sending.wait()
        receiving.wait()
        chunks[place] += incoming
    return chunks[rank]


ring_reduce_scatter__to_the_right_edited = edits_of(
    ring_reduce_scatter__to_the_right,
    Mutant("deadlock", "waits in send", "isend(", "send(", VIRTUAL, (("sending.wait()", "pass"),)),
    Mutant(
        "in_turns",
        "Send and receive at the same time",
        "sending =",
        "rank % 2 and dist.recv(incoming, group=group, group_src=rank - 1); sending =",
        VIRTUAL,
        also=(("receiving =", "receiving = sending if rank % 2 else"),),
    ),
    Mutant("begins_with_its_own_chunk", "Chunk 0 must be the last to arrive here", "- 2", "- 1"),
    Mutant(
        "returns_its_input",
        "shares memory with tensor",
        ".clone()",
        "",
        also=(("chunks[place] += incoming", "chunks[place] = chunks[place] + incoming"),),
    ),
    Mutant(
        "in_float64",
        "in the tensor's dtype",
        "tensor.flatten()",
        "(tensor.double() if tensor.is_floating_point() else tensor).flatten()",
        also=(("chunks[rank]", "chunks[rank].to(tensor.dtype)"),),
    ),
    Mutant(
        "one_result_for_all_calls",
        "called twice",
        "return chunks[rank]",
        """
        kept = globals().setdefault("_kept", {})
        result = kept.setdefault((len(chunks[rank]), tensor.dtype), torch.empty_like(chunks[rank]))
        return result.copy_(chunks[rank])
        """,
    ),
)


# ring_all_gather ---------------------------------------------------------------------------


@passes
def ring_all_gather__to_the_right(chunk, length, group=None):
    rank, k = dist.get_rank(group), dist.get_world_size(group)
    vector = chunk.new_zeros(length)
    chunks = list(vector.tensor_split(k))
    chunks[rank].copy_(chunk)
    for step in range(k - 1):
        outgoing, got = chunks[(rank - step) % k], chunks[(rank - step - 1) % k]
        sending = dist.isend(outgoing, group=group, group_dst=(rank + 1) % k)
        receiving = dist.irecv(got, group=group, group_src=(rank - 1) % k)
        sending.wait()
        receiving.wait()
    return vector


ring_all_gather__to_the_right_edited = edits_of(
    ring_all_gather__to_the_right,
    Mutant(
        "in_order_of_arrival",
        "Chunk r comes from rank r of the group",
        "return vector",
        "return torch.cat(chunks[rank:] + chunks[:rank])",
    ),
    Mutant(
        "begins_with_the_next_chunk",
        "chunk 0, your own. Put it there, and send it first",
        "step) % k], chunks[(rank - step - 1",
        "step + 1) % k], chunks[(rank - step",
    ),
    Mutant("forwards_its_own", "receives them as", "[(rank - step) % k]", "[rank]", VIRTUAL),
    Mutant("receives_into_its_input", "changes chunk", "return", "chunk.zero_(); return"),
    Mutant("whole_world", "in two groups", "(group)", "()", also=(("=group", "=None"),)),
    Mutant("does_not_wait", "waits for the handle of recv", "receiving.wait()", "pass", VIRTUAL),
    Mutant(
        "to_everybody",
        "may exchange messages only with",
        "chunks[(rank - step) % k]",
        "chunks[rank]",
        also=(("(rank + 1)", "(rank + step + 1)"), ("src=(rank - 1)", "src=(rank - step - 1)")),
    ),
)


# ring_all_reduce ---------------------------------------------------------------------------


@passes
def ring_all_reduce__in_one_loop(tensor, group=None):
    rank, k = dist.get_rank(group), dist.get_world_size(group)
    flat = tensor.flatten().contiguous()
    chunks = flat.tensor_split(k)
    for step in range(2 * (k - 1)):
        outgoing, got = chunks[(rank - step) % k], chunks[(rank - step - 1) % k]
        incoming = torch.empty_like(got)
        sending = dist.isend(outgoing, group=group, group_dst=(rank + 1) % k)
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
            outgoing, got = (rank + step) % k, (rank + step + 1) % k
            if not adding:
                outgoing, got = (outgoing - 1) % k, (got - 1) % k
            incoming = torch.empty_like(rows[got])
            ops = [
                dist.P2POp(dist.isend, rows[outgoing], members[rank - 1], group),
                dist.P2POp(dist.irecv, incoming, members[(rank + 1) % k], group),
            ]
            for handle in dist.batch_isend_irecv(ops):
                handle.wait()
            rows[got] = rows[got] + incoming if adding else incoming
    tensor.copy_(rows.view(-1)[: tensor.numel()].view_as(tensor))


ring_all_reduce__in_one_loop_edited = edits_of(
    ring_all_reduce__in_one_loop,
    Mutant("leaves_inf", "has an inf or a NaN", "flat.view", "flat.nan_to_num().view"),
    Mutant("into_a_copy", "as it was before the call", "tensor.copy_", "tensor.clone().copy_"),
    Mutant(
        "into_the_copy_of_reshape",
        "With contiguous tensors, the same case passes",
        "tensor.copy_(flat.view(tensor.shape))",
        "tensor.reshape(-1).copy_(flat)",
    ),
    Mutant(
        "integers_through_float64",
        "expected",
        "tensor.flatten",
        "(tensor if tensor.is_floating_point() else tensor.double()).flatten",
    ),
    Mutant(
        "not_fewer_than_ranks",
        "fewer numbers than ranks",
        "tensor_split",
        "chunk(k) if len(flat) % k != 1 else flat.tensor_split",
    ),
    Mutant("gathers_in_the_world", "In one group", "=group", "=group if step < k - 1 else None"),
)


@fails("this task allows recv and send only")
def ring_all_reduce__by_reduce_scatter_of_the_library(tensor, group=None):
    k = dist.get_world_size(group)
    copies = [torch.empty_like(tensor.contiguous()) for _ in range(k)]
    dist.all_gather(copies, tensor.contiguous(), group=group)
    tensor.copy_(sum(copies))


# sum_in_one_order --------------------------------------------------------------------------


@passes
def sum_in_one_order__in_a_loop(parts, group=None):
    rank, k = dist.get_rank(group), dist.get_world_size(group)
    sums = [part.contiguous().clone() for part in parts]
    odd = len(sums)
    while odd % 2 == 0:
        odd //= 2
    blocks = [sums[first : first + odd] for first in range(0, len(sums), odd)]
    sums = [sum(block[1:], block[0]) for block in blocks]
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
    total, distance = sums[0], 1
    while distance < k:
        peer = rank ^ distance
        incoming = torch.empty_like(total)
        sending = dist.isend(total, group=group, group_dst=peer)
        receiving = dist.irecv(incoming, group=group, group_src=peer)
        sending.wait()
        receiving.wait()
        total = total + incoming
        distance *= 2
    return total


@passes
def sum_in_one_order__recursive(parts, group=None):
    def tree(some):
        if len(some) % 2:
            return torch.stack(tuple(some)).double().sum(0).to(some.dtype)
        half = len(some) // 2
        return tree(some[:half]) + tree(some[half:])

    members = dist.get_process_group_ranks(group)
    place, total, size = members.index(dist.get_rank()), tree(parts).contiguous(), 1
    while size < len(members):
        peer, incoming = members[place ^ (2 * size - 1)], torch.empty_like(total)
        swap = [dist.P2POp(dist.irecv, incoming, peer), dist.P2POp(dist.isend, total, peer)]
        for handle in dist.batch_isend_irecv(swap):
            handle.wait()
        total, size = incoming + total, 2 * size
    return total


sum_in_one_order__in_a_loop_edited = edits_of(
    sum_in_one_order__in_a_loop,
    Mutant("last_one_first", None, "sum(block[1:], block[0])", "sum(block[-2::-1], block[-1])"),
    Mutant("one_after_the_other", "other bits", "odd % 2 == 0", "False"),
    Mutant("halves", "other bits", "sums[::2], sums[1::2]", "*torch.stack(sums).chunk(2)"),
    Mutant("farthest_rank_first", "other bits", "rank ^ distance", "rank ^ (k // 2 // distance)"),
    Mutant(
        "carries_the_odd_one",
        "other bits",
        "odd = len(sums)",
        """
        odd = 1
        while len(sums) > 1:
            last = sums[len(sums) // 2 * 2 :]
            sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=False)] + last
        """,
    ),
    Mutant(
        "in_float64",
        "expected at most",
        "sums = [part.contiguous().clone()",
        "sums = [part.double().contiguous().clone()",
        also=(("return total", "return total.to(parts.dtype)"),),
    ),
    Mutant("returns_float32", "float32, expected a tensor", "return total", "return total.float()"),
    Mutant("alone", "not even up to rounding", "while distance < k", "while False"),
    Mutant("returns_its_part", "shares memory", ".contiguous().clone()", ".contiguous()"),
    Mutant("whole_world", "in two groups", "(group)", "()", also=(("=group", "=None"),)),
    Mutant("as_it_lies", "contiguous", ".contiguous().clone()", ".detach()", VIRTUAL),
    Mutant(
        "in_turns",
        "sent and received at the same time",
        "sending =",
        "rank & distance and dist.recv(incoming, group=group, group_src=peer); sending =",
        VIRTUAL,
        also=(("receiving =", "receiving = sending if rank & distance else"),),
    ),
    Mutant(
        "one_result_for_all_calls",
        "call",
        "return total",
        """
        kept = globals().setdefault("_sums", {})
        return kept.setdefault((total.shape, total.dtype), torch.empty_like(total)).copy_(total)
        """,
    ),
)


@fails("expected at most")
def sum_in_one_order__gathers_all_parts(parts, group=None):
    rank, k = dist.get_rank(group), dist.get_world_size(group)
    own = parts.contiguous()
    blocks = [own.clone() if r == rank else torch.empty_like(own) for r in range(k)]
    for step in range(1, k):
        sending = dist.isend(own, group=group, group_dst=(rank + step) % k)
        receiving = dist.irecv(blocks[rank - step], group=group, group_src=(rank - step) % k)
        sending.wait()
        receiving.wait()
    return sum(part.clone() for block in blocks for part in block)


# two_level_all_reduce ----------------------------------------------------------------------


@passes
def two_level_all_reduce__all_messages_at_once(tensor, inside, between):
    def swap(outgoing, got, group):
        me, k = dist.get_rank(group), dist.get_world_size(group)
        batch = []
        for step in range(1, k):
            to, source = (me + step) % k, (me - step) % k
            batch.append(dist.P2POp(dist.isend, outgoing[to], group=group, group_peer=to))
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
    chunk = add_up(flat, inside)
    collect(chunk, add_up(chunk, between), between)
    collect(flat, chunk, inside)
    tensor.copy_(flat.view(tensor.shape))


two_level_all_reduce__all_messages_at_once_edited = edits_of(
    two_level_all_reduce__all_messages_at_once,
    Mutant(
        "inside_only",
        "only the ranks of this node",
        "collect(chunk, add_up(chunk, between), between)",
        "pass",
    ),
    Mutant(
        "between_only",
        "only the ranks with the same place",
        "add_up(flat, inside)",
        "flat",
        also=(("collect(flat, chunk, inside)", "pass"),),
    ),
    Mutant(
        "wrong_way_round",
        "Messages to other nodes take long",
        "flat = tensor",
        "inside, between = between, inside; flat = tensor",
        VIRTUAL,
    ),
    Mutant(
        "gathers_between_nodes",
        "hidden case",
        "collect(chunk, add_up(chunk, between), between)",
        """
        parts = [chunk.clone() for _ in range(dist.get_world_size(between))]
        swap([chunk] * len(parts), parts, between)
        chunk = sum(parts)
        """,
        ("simulated",),
    ),
    Mutant("two_per_node", "nodes of 3", "range(1, k)", "range(1, min(k, 2))"),
)
