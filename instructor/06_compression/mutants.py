"""Wrong solutions that people write, and right ones that differ from ours."""

import numpy as np
import torch
import torch.distributed as dist

from course_lib.checking.mutants import VIRTUAL, Mutant, edits_of, fails, passes

# quantize ----------------------------------------------------------------------------------


@passes
def quantize__numpy(x, u):
    flat, u = x.detach().float().numpy().ravel(), u.numpy().ravel()
    scale = np.float32(np.abs(flat).max(initial=0) / np.float32(127))
    scaled = flat / scale if scale else flat
    codes = np.minimum(np.floor(scaled + u), 127).astype(np.int8)
    wire = torch.from_numpy(np.frombuffer(scale.tobytes() + codes.tobytes(), np.uint8).copy())
    return wire


quantize__numpy_edited = edits_of(
    quantize__numpy,
    Mutant("to_the_nearest", "rounded to the nearest integer", "floor(scaled + u", "round(scaled"),
    Mutant("floats_on_the_wire", "A code must be one byte", "astype(np.int8", "astype(np.float32"),
    Mutant("column_order", "codes[", "ravel()", "ravel(order='A')"),
    Mutant("an_epsilon", "codes[", "flat / scale if scale else flat", "flat / (scale + 1e-30)"),
    Mutant(
        "scale_in_the_dtype_of_x",
        "scale[0]: expected",
        "scaled = flat",
        "scale = torch.tensor(scale).to(x.dtype).float().numpy(); scaled = flat",
    ),
    Mutant("lets_128_wrap", "except that 128 became -128", "u), 127)", "u), 128).astype(np.int32)"),
    Mutant(
        "into_the_same_memory",
        "this call has changed the result of an earlier call",
        "return wire",
        "return globals().setdefault(len(wire), wire).copy_(wire)",
    ),
)


# dequantize --------------------------------------------------------------------------------


@passes
def dequantize__in_place(wire, shape, dtype):
    wire = wire.clone()
    result = wire[4:].view(torch.int8).reshape(shape).to(torch.float32)
    return result.mul_(wire[:4].view(torch.float32)[0]).to(dtype)


dequantize__in_place_edited = edits_of(
    dequantize__in_place,
    Mutant("unsigned", "the codes are read as 0 to 255", ".view(torch.int8)", ""),
    Mutant("views_any_four_bytes", "divisible", "wire = wire.clone()", "pass"),
    Mutant("float32_only", "has dtype torch.float32", ".to(dtype)", ""),
    Mutant("rounds_to_float16", "rounded to float16 on the way", ".to(dtype)", ".half().to(dtype)"),
)


# encode_top_k ------------------------------------------------------------------------------


@passes
def encode_top_k__numpy(x, k):
    x = x.detach().float().numpy().ravel()
    n = len(x)
    places = np.sort(np.argsort(-np.abs(x))[:k]).astype(np.int32)
    bits = np.zeros(n, np.uint8)
    bits[places] = 1
    bitmap = np.packbits(bits, bitorder="little").tobytes()
    listed = places.tobytes()
    data = x[places].tobytes() + (bitmap if len(bitmap) < len(listed) else listed)
    return torch.tensor(list(data), dtype=torch.uint8)


encode_top_k__numpy_edited = edits_of(
    encode_top_k__numpy,
    Mutant("largest_numbers", "keep the k largest absolute values", "-np.abs(x)", "-x"),
    Mutant("without_signs", "without signs", "x[places].tobytes()", "np.abs(x[places]).tobytes()"),
    Mutant("int64_places", "send the places as int32", ".astype(np.int32)", ".astype(np.int64)"),
    Mutant("always_a_list", "Here the bitmap", "len(bitmap) < len(listed)", "False"),
    Mutant("counts_whole_bytes", "send the list", "len(bitmap) < len(listed)", "n // 8 < 4 * k"),
    Mutant("highest_bit_first", "the first element has the highest bit", ', bitorder="little"', ""),
    Mutant("in_order_of_size", "not in the same order", "np.sort(", "np.array("),
    Mutant("compares_squares", "expected", "-np.abs(x)", "-x * x"),
    Mutant("drops_a_zero", "4 k + min(4 k, ceil(n/8))", "x[places].", "x[places[x[places] != 0]]."),
)

# with_feedback -----------------------------------------------------------------------------


@passes
def with_feedback__a_class(compress):
    class Sender:
        def __init__(self):
            self.left = {}

        def __call__(self, x, key):
            e = self.left.setdefault(key, torch.zeros(x.shape))
            e += x
            sent = compress(e)
            e -= sent
            return sent.clone().to(x.dtype)

    return Sender()


with_feedback__a_class_edited = edits_of(
    with_feedback__a_class,
    Mutant("dropped", "what the last call with an equal key left out", "(e)", "(x.float())"),
    Mutant("by_its_text", "expected", "default(key,", "default(str(key),"),
    Mutant("by_object", "last call with an equal key", "default(key,", "default(id(key),"),
    Mutant("by_its_hash", "many keys", "default(key,", "default(hash(key),"),
    Mutant("one_for_all_keys", "all keys share one residual", "key, torch.zeros", "0, torch.zeros"),
    Mutant("of_x_alone", "of x - C(x + e)", "e -= sent", "self.left[key] = x.float() - sent"),
    Mutant("in_the_dtype_of_x", "nearly right", "e -= sent", "e -= sent; e.copy_(e.to(x.dtype))"),
    Mutant("changes_x", "x after the call", "e += x", "e += x; x.copy_(e)"),
    Mutant("drops_nan", "expected", "e -= sent", "e -= sent; e.nan_to_num_()"),
    Mutant("compresses_twice", "twice for the same tensor", "e -= sent", "e -= compress(e)"),
    Mutant("for_good", "second sender", "left = {}", "left = globals().setdefault(0, {})"),
)


# compressed_all_reduce ---------------------------------------------------------------------


@passes
def compressed_all_reduce__messages(x, encode, decode, group=None):
    rank, k = dist.get_rank(group), dist.get_world_size(group)
    flat = x.detach().to(torch.float32).reshape(-1)
    shards = list(flat.tensor_split(k))
    wires = [encode(shard) for shard in shards]

    def swap(outgoing, like):
        incoming = [torch.empty_like(wire) for wire in like]
        incoming[rank] = outgoing[rank]
        handles = []
        for step in range(1, k):
            to, source = (rank + step) % k, (rank - step) % k
            handles.append(dist.isend(outgoing[to], group=group, group_dst=to))
            handles.append(dist.irecv(incoming[source], group=group, group_src=source))
        for handle in handles:
            handle.wait()
        return incoming

    own_shard = shards[rank]
    total = torch.zeros_like(own_shard)
    for wire in swap(wires, [wires[rank]] * k):
        total += decode(wire, own_shard.shape, torch.float32)
    result = [encode(total)] * k
    sums = swap(result, wires)
    decoded = [decode(w, s.shape, torch.float32) for w, s in zip(sums, shards, strict=True)]
    x.copy_(torch.cat(decoded).view(x.shape))


compressed_all_reduce__messages_edited = edits_of(
    compressed_all_reduce__messages,
    Mutant(
        "compresses_the_sum_only",
        "compress the shards",
        "total = torch.zeros_like(own_shard)",
        "dist.all_reduce(flat, group=group); total = own_shard",
        also=(("total += decode(wire, own_shard.shape, torch.float32)", "pass"),),
    ),
    Mutant(
        "every_second_rank",
        "in two groups",
        "get_rank(group",
        "get_rank() // (1 if group is None else 2",
        VIRTUAL,
    ),
    Mutant(
        "sum_of_compressed",
        "compress the sums, too",
        "result = [encode(total)] * k",
        "result, decode = [total] * k, lambda whole, shape, dtype: whole",
        also=(("swap(result, wires)", "swap(result, shards)"),),
    ),
    Mutant(
        "everything_to_everybody",
        "the bytes do not grow with K",
        "result = [encode(total)] * k",
        "result = [encode(total)] * k; wire = encode(flat); "
        "dist.all_gather([torch.empty_like(wire) for _ in range(k)], wire, group=group)",
    ),
    Mutant("into_a_copy", "write the result into it", "x.copy_(torch.cat(", "return (torch.cat("),
    Mutant(
        "own_shard_as_it_was",
        "expected",
        "= decode",
        "= own_shard if wire is wires[rank] else decode",
    ),
    Mutant("encodes_twice", "expected", "[encode(total)] * k", "[encode(total) for _ in range(k)]"),
    Mutant(
        "sums_in_the_dtype_of_x",
        "In float32, the same case passes",
        "total += decode(wire, own_shard.shape, torch.float32)",
        "total = (total + decode(wire, own_shard.shape, torch.float32)).to(x.dtype).float()",
    ),
    Mutant(
        "remembers_its_wires",
        "of the second call",
        "wires = [encode(shard) for shard in shards]",
        "wires = globals().setdefault((rank, x.shape), [encode(shard) for shard in shards])",
    ),
)


# mean_rounded_once -------------------------------------------------------------------------


@passes
def mean_rounded_once__equal_pieces(x, group=None):
    n, k = x.numel(), dist.get_world_size(group)
    piece = -(-n // k)
    outgoing = torch.zeros(k * piece, dtype=x.dtype)
    outgoing[:n] = x.detach().flatten()
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing, group=group)
    mean = (incoming.view(k, piece).float().sum(0) / k).to(x.dtype)
    gathered = [torch.empty_like(mean) for _ in range(k)]
    dist.all_gather(gathered, mean, group=group)
    x.copy_(torch.cat(gathered)[:n].view(x.shape))


mean_rounded_once__equal_pieces_edited = edits_of(
    mean_rounded_once__equal_pieces,
    Mutant(
        "sum_in_bf16",
        "add in float32",
        "incoming.view(k, piece).float().sum(0)",
        "sum(incoming.view(k, piece))",
    ),
    Mutant("rounds_before_it_divides", "divide before you round", ".float().sum(0)", ".sum(0)"),
    Mutant(
        "divides_first",
        "divide the sum",
        "x.detach().flatten()",
        "x.detach().flatten() / k",
        also=((".sum(0) / k", ".sum(0)"),),
    ),
    Mutant("the_sum", "the sum: divide it by K", ".sum(0) / k", ".sum(0)"),
    Mutant("world_size", "in two groups", ".sum(0) / k", ".sum(0) / dist.get_world_size()"),
    Mutant("into_a_copy", "write the result into it", "x.copy_", "x.clone().copy_"),
    Mutant("float32_travels", "two bytes for each number", "dtype=x.dtype", "dtype=torch.float32"),
    Mutant("drops_inf", "an inf or a NaN", ".float()", ".float().nan_to_num(0, 0, 0)"),
    Mutant(
        "sum_of_the_first_call",
        "of the second call",
        "outgoing[:n] = x.detach().flatten()",
        "outgoing[:n] = globals().setdefault((dist.get_rank(), n), x.detach().flatten().clone())",
    ),
)


@passes
def mean_rounded_once__messages(x, group=None):
    rank, k = dist.get_rank(group), dist.get_world_size(group)
    shards = [shard.clone() for shard in x.detach().flatten().tensor_split(k)]

    def swap(outgoing, incoming):
        for step in range(1, k):
            to, source = (rank + step) % k, (rank - step) % k
            handle = dist.isend(outgoing[to], group=group, group_dst=to)
            dist.irecv(incoming[source], group=group, group_src=source).wait()
            handle.wait()

    parts = [torch.empty_like(shards[rank]) for _ in range(k)]
    parts[rank] = shards[rank]
    swap(shards, parts)
    total = parts[0].double()
    for part in parts[1:]:
        total += part
    shards[rank] = (total * (1 / k)).float().bfloat16()
    swap([shards[rank]] * k, shards)
    x.copy_(torch.cat(shards).view(x.shape))


@passes
def mean_rounded_once__owner_by_owner(x, group=None):
    rank, k = dist.get_rank(group), dist.get_world_size(group)
    shards = [shard.clone() for shard in x.detach().flatten().tensor_split(k)]
    for owner, shard in enumerate(shards):
        parts = [torch.empty_like(shard) for _ in range(k)] if rank == owner else None
        dist.gather(shard, parts, group=group, group_dst=owner)
        if rank == owner:
            shard.copy_(torch.stack(parts).float().sum(0).div(k))
        dist.broadcast(shard, group=group, group_src=owner)
    x.copy_(torch.cat(shards).view(x.shape))


@fails("a ring's sum in bfloat16")
def mean_rounded_once__ring(x, group=None):
    rank, k = dist.get_rank(group), dist.get_world_size(group)
    shards = [shard.clone() for shard in x.detach().flatten().tensor_split(k)]
    for step in range(2 * (k - 1)):
        out, into = shards[(rank - step - 1) % k], shards[(rank - step - 2) % k]
        handle = dist.isend(out, group=group, group_dst=(rank + 1) % k)
        received = torch.empty_like(into)
        dist.recv(received, group=group, group_src=(rank - 1) % k)
        handle.wait()
        into.copy_(into + received if step < k - 1 else received)
    x.copy_((torch.cat(shards) / k).view(x.shape))


@fails("as in a ring")
def mean_rounded_once__everything_to_everybody(x, group=None):
    k, x_flat = dist.get_world_size(group), x.detach().contiguous()
    gathered = [torch.empty_like(x_flat) for _ in range(k)]
    dist.all_gather(gathered, x_flat, group=group)
    x.copy_(torch.stack(gathered).float().sum(0) / k)
