"""Wrong solutions that people write, and right ones that differ from ours.

See `instructor/02_data_parallel_sgd/mutants.py`. Most mistakes here are found on all
kinds of ranks, because bytes and values are the same there.
"""

import numpy as np
import torch
import torch.distributed as dist

from course_lib.checking.mutants import edits_of, fails, passes

# quantize ----------------------------------------------------------------------------------


@passes
def quantize__numpy(x, u):
    x, u = x.detach().float().numpy().ravel(), u.numpy().ravel()
    scale = np.float32(np.abs(x).max(initial=0) / np.float32(127))
    scaled = x / scale if scale else x
    codes = np.minimum(np.floor(scaled + u), 127).astype(np.int8)
    return torch.from_numpy(np.frombuffer(scale.tobytes() + codes.tobytes(), np.uint8).copy())


@passes
def quantize__into_the_wire(x, u):
    import struct

    wire = torch.zeros(4 + x.numel(), dtype=torch.uint8)
    flat = x.detach().reshape(-1).to(torch.float32)
    largest = max([abs(v) for v in flat.tolist()], default=0.0)
    wire[:4] = torch.tensor(list(struct.pack("=f", largest / 127)), dtype=torch.uint8)
    if largest:
        codes = torch.floor(flat * (127 / largest) + u.reshape(-1))
        codes[codes > 127] = 127
        wire[4:] = codes.char().view(torch.uint8)
    return wire


edits_of(quantize__numpy)("""
to_the_nearest: rounded to the nearest integer: let u decide
    np.floor(scaled + u) → np.round(scaled)
rounds_down: which rounds every number down
    scaled + u → scaled
cuts_off: x/s truncated towards zero: add u
    np.floor(scaled + u) → np.trunc(scaled)
cuts_off_after_adding: which moves negative numbers up: use the floor
    np.floor( → np.trunc(
subtracts_u: that u moves the wrong way
    np.minimum(np.floor(scaled + u), 127) → np.maximum(np.ceil(scaled - u), -127)
""")
edits_of(quantize__into_the_wire)("""
lets_128_wrap: except that 128 became -128
    codes[codes > 127] = 127 → codes[codes > 127] = -128
""")
edits_of(quantize__numpy)("""
floats_on_the_wire: A code must be one byte
    .astype(np.int8) → .astype(np.float32)
""")
edits_of(quantize__into_the_wire)("""
returns_codes: expected a vector of
    return wire → return wire[4:].view(torch.int8)
returns_a_pair: expected a vector of
    return wire → return wire[:4], wire[4:]
without_the_scale: Where is the scale?
    return wire → return wire[4:]
""")
edits_of(quantize__numpy)("""
a_scale_of_eight_bytes: The scale must be float32, 4 bytes
    scale.tobytes() → np.float64(scale).tobytes()
a_scale_above_zero: scale[0]: expected 0
    max(initial=0) → max(initial=1e-6)
needs_numbers: no numbers
    .max(initial=0) → .max()
by_128: scale
    np.float32(127) → np.float32(128)
largest_not_absolute: scale
    np.abs(x).max → x.max
own_noise: codes
    u.numpy().ravel() → np.random.default_rng(0).random(x.numel())
""")
edits_of(quantize__into_the_wire)("""
contiguous_only: view size is not compatible
    x.detach().reshape(-1) → x.view(-1)
""")
edits_of(quantize__numpy)("""
column_order: codes[
    ravel() → ravel(order='A')
next_to_nothing_for_zero: codes
    x / scale if scale else x → x / (scale + np.float32(1e-12))
rounds_u_to_half: codes[
    scaled + u → scaled + u.astype(np.float16)
""")
edits_of(quantize__into_the_wire)("""
scale_in_the_dtype_of_x: scale[0]: expected
    largest / 127 → float((x.abs().max() / 127)) if largest else 0.0
""")
edits_of(quantize__numpy)("""
an_epsilon: codes[
    x / scale if scale else x → x / (scale + np.float32(1e-30))
x_in_float16: the result if x is rounded to float16
    x.detach().float() → x.detach().half().float()
quotient_in_float16: the result if x/s is rounded to float16
    np.floor(scaled + u) → np.floor(scaled.astype(np.float16).astype(np.float32) + u)
scale_behind: scale[0]: expected
    scale.tobytes() + codes.tobytes() → codes.tobytes() + scale.tobytes()
""")
edits_of(quantize__into_the_wire)("""
x_in_bfloat16: the result if x is rounded to bfloat16:
    to(torch.float32) → bfloat16().float()
bfloat16_beside_the_right_scale: rounded to bfloat16 after the scale was computed
    torch.floor(flat → torch.floor(flat.bfloat16().float()
""")


@fails("scale[0]: expected")
def quantize__largest_so_far(x, u, memory=[0.0]):  # noqa: B006
    x, u = x.float().flatten(), u.flatten()
    memory[0] = max([memory[0], *(x.abs() / 127).tolist()])
    scale = torch.tensor(memory[0])
    codes = (x / torch.where(scale == 0, 1, scale) + u).floor().clamp(-127, 127).to(torch.int8)
    return torch.cat([scale.view(1).view(torch.uint8), codes.view(torch.uint8)])


@fails("the function changes x")
def quantize__in_place(x, u):
    scale = x.float().abs().max() / 127 if x.numel() else torch.zeros(())
    x /= torch.where(scale == 0, 1, scale)
    codes = (x.flatten().float() + u.flatten()).floor().clamp(max=127).to(torch.int8)
    return torch.cat([scale.view(1).view(torch.uint8), codes.view(torch.uint8)])


@fails("the function changes u")
def quantize__adds_to_u(x, u):
    scale = x.float().abs().max() / 127 if x.numel() else torch.zeros(())
    u += x.float() / torch.where(scale == 0, 1, scale)
    codes = u.flatten().floor().clamp(max=127).to(torch.int8)
    return torch.cat([scale.view(1).view(torch.uint8), codes.view(torch.uint8)])


@fails("were rounded")
def quantize__in_the_dtype_of_x(x, u):
    scale = x.abs().max() / 127 if x.numel() else torch.zeros((), dtype=x.dtype)
    scaled = x.flatten() / torch.where(scale == 0, 1, scale)
    codes = (scaled + u.flatten().to(x.dtype)).floor().clamp(max=127).to(torch.int8)
    return torch.cat([scale.float().view(1).view(torch.uint8), codes.view(torch.uint8)])


@fails("course_lib.compression", only=("grader",))
def quantize__imports_the_reference(x, u):
    import importlib

    importlib.import_module("course_lib.compression")
    scale = x.float().abs().max() / 127 if x.numel() else torch.zeros(())
    scaled = x.float() / torch.where(scale == 0, 1, scale)
    codes = (scaled + u).flatten().floor().clamp(max=127).to(torch.int8)
    return torch.cat([scale.view(1).view(torch.uint8), codes.view(torch.uint8)])


@fails("this call has changed the result of an earlier call")
def quantize__into_the_same_memory(x, u, kept={}):  # noqa: B006
    x, u = x.float().flatten(), u.flatten()
    wire = kept.setdefault(len(x), torch.zeros(len(x) + 4, dtype=torch.uint8))
    scale = x.abs().max() / 127 if len(x) else x.new_zeros(())
    codes = (x / (scale if scale > 0 else 1) + u).floor().clamp(max=127).to(torch.int8)
    wire[:4], wire[4:] = scale.view(1).view(torch.uint8), codes.view(torch.uint8)
    return wire


# dequantize --------------------------------------------------------------------------------


@passes
def dequantize__struct(wire, shape, dtype):
    import struct

    (scale,) = struct.unpack("=f", bytes(wire[:4].tolist()))
    codes = [code - 256 if code > 127 else code for code in wire[4:].tolist()]
    return torch.tensor([scale * code for code in codes]).to(dtype).reshape(shape)


@passes
def dequantize__numpy(wire, shape, dtype):
    data = wire.numpy().tobytes()
    scale, codes = np.frombuffer(data[:4], np.float32), np.frombuffer(data[4:], np.int8)
    return torch.from_numpy(codes * scale).to(dtype).view(shape)


@passes
def dequantize__in_place(wire, shape, dtype):
    wire = wire.clone()
    result = wire[4:].view(torch.int8).reshape(shape).to(torch.float32)
    return result.mul_(wire[:4].view(torch.float32)[0]).to(dtype)


edits_of(dequantize__in_place)("""
unsigned: the codes are read as 0 to 255
    .view(torch.int8) →
views_any_four_bytes: divisible
    wire = wire.clone() → pass
float32_only: has dtype torch.float32
    .to(dtype) →
in_the_dtype_of_the_result: numbers
    .to(torch.float32) → .to(dtype)
    [0]).to(dtype) → [0].to(dtype))
flat: has shape
    reshape(shape) → clone()
rounds_to_float16: rounded to float16 on the way
    .to(dtype) → .half().to(dtype)
divides: numbers
    result.mul_(wire[:4].view(torch.float32)[0]) → result.div_(wire[:4].view(torch.float32)[0])
reads_the_scale_at_the_end: numbers
    wire[4:] → wire[:-4]
    wire[:4] → wire[-4:].clone()
drops_the_scale: numbers
    .mul_(wire[:4].view(torch.float32)[0]) →
writes_into_the_wire: the function changes bytes
    wire = wire.clone() → wire, given = wire.clone(), wire
    result = wire[4:].view(torch.int8).reshape(shape).to(torch.float32) → …; given.zero_()
""")


@fails("this call has changed the result of an earlier call")
def dequantize__into_the_same_memory(wire, shape, dtype, kept={}):  # noqa: B006
    scale, codes = wire[:4].clone().view(torch.float32), wire[4:].view(torch.int8)
    result = kept.setdefault((codes.numel(), dtype), torch.empty(codes.numel(), dtype=dtype))
    return result.copy_(codes * scale).view(shape)


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


@passes
def encode_top_k__by_hand(x, k):
    flat = x.detach().reshape(-1).to(torch.float32)
    n = flat.numel()
    kept = torch.zeros(n, dtype=torch.bool)
    kept[flat.abs().argsort(descending=True)[:k]] = True
    wire = [flat[kept].view(torch.uint8)]
    if (n + 7) // 8 < 4 * k:
        bits = torch.zeros((n + 7) // 8 * 8, dtype=torch.int64)
        bits[:n] = kept
        wire.append((bits.view(-1, 8) << torch.arange(8)).sum(1).to(torch.uint8))
    else:
        wire.append(kept.nonzero().flatten().to(torch.int32).view(torch.uint8))
    return torch.cat(wire)


@passes
def encode_top_k__by_threshold(x, k):
    x = x.flatten().float()
    sizes = x.abs()
    threshold = sizes.sort(descending=True).values[k - 1] if k else torch.inf
    places = torch.where(sizes >= threshold)[0]
    n = len(x)
    if 8 * 4 * k > n + (-n % 8):
        bitmap = torch.zeros((n + 7) // 8, dtype=torch.uint8)
        for place in places.tolist():
            bitmap[place // 8] |= 1 << place % 8
        return torch.cat([x[places].view(torch.uint8), bitmap])
    return torch.cat([x[places].view(torch.uint8), places.int().view(torch.uint8)])


edits_of(encode_top_k__numpy)("""
largest_numbers: keep the k largest absolute values
    -np.abs(x) → -x
smallest: the k smallest
    -np.abs(x) → np.abs(x)
without_signs: without signs
    x[places].tobytes() → np.abs(x[places]).tobytes()
int64_places: send the places as int32
    .astype(np.int32) → .astype(np.int64)
always_a_list: Here the bitmap
    bitmap if len(bitmap) < len(listed) else listed → listed
always_a_bitmap: Here the list, k places of 4 bytes, is smaller
    bitmap if len(bitmap) < len(listed) else listed → bitmap
counts_whole_bytes_only: 61 bits take 8 whole bytes
    len(bitmap) < len(listed) → n // 8 < 4 * k
counts_bits: 61 bits take 8 whole bytes
    len(bitmap) < len(listed) → n < 8 * 4 * k
one_byte_too_many: Here the bitmap
    len(bitmap) < len(listed) → n // 8 + 1 < 4 * k
without_places: The places of the values are missing
    + (bitmap if len(bitmap) < len(listed) else listed) →
bools: A bool takes a whole byte
    np.packbits(bits, bitorder="little") → bits
highest_bit_first: the first element has the highest bit
    bits, bitorder="little" → bits
""")
edits_of(encode_top_k__by_hand)("""
last_byte_missing: Do not leave out the last byte
    bits = torch.zeros((n + 7) // 8 * 8 → bits = torch.zeros(n // 8 * 8
    bits[:n] = kept → bits[:] = kept[: len(bits)]
padded_in_front: the places are not
    bits[:n] = kept → bits[-n:] = kept
""")
edits_of(encode_top_k__numpy)("""
in_order_of_size: not in the same order
    np.sort(np.argsort(-np.abs(x))[:k]) → np.argsort(-np.abs(x))[:k]
""")
edits_of(encode_top_k__by_hand)("""
zeros_left_in: Do not send the zeros
    kept[flat.abs().argsort(descending=True)[:k]] = True
  → …
  → return torch.where(kept, flat, 0).view(torch.uint8)
values_in_the_dtype_of_x: The values must be float32 on the wire
    reshape(-1).to(torch.float32) → reshape(-1)
two_tensors: expected a vector of
    return torch.cat(wire) → return wire
""")
edits_of(encode_top_k__numpy)("""
one_too_few: expected
    np.sort(np.argsort(-np.abs(x))[:k]) → np.sort(np.argsort(-np.abs(x))[: k - 1])
""")
edits_of(encode_top_k__by_hand)("""
contiguous_only: view size is not compatible
    x.detach().reshape(-1) → x.view(-1)
clears_what_it_sends: the function changes x
    kept[flat.abs().argsort(descending=True)[:k]] = True
  → …
  → x *= 1 - kept.view(x.shape).to(x.dtype)
    x.detach().reshape(-1).to(torch.float32) → x.detach().clone().reshape(-1).float()
drops_a_zero: all of 9
    kept[flat.abs().argsort(descending=True)[:k]] = True → …; kept &= flat != 0
""")
edits_of(encode_top_k__numpy)("""
at_least_one: none of six
    np.sort(np.argsort(-np.abs(x))[:k]) → np.sort(np.argsort(-np.abs(x))[: max(k, 1)])
""")
edits_of(encode_top_k__by_hand)("""
places_below_256: of 600
    .to(torch.int32) → .to(torch.uint8).to(torch.int32)
""")
edits_of(encode_top_k__by_threshold)("""
compares_in_bfloat16: compare in float32
    sizes = x.abs() → sizes = x.abs().bfloat16().float() + torch.arange(len(x)) * 1e-6
values_in_bfloat16: rounded to bfloat16: send float32
    x[places] → x[places].bfloat16().float()
list_in_order_of_size: not in the order of x
    n = len(x)
  → …
  → if 8 * 4 * k <= n:
  →     places = places[x[places].abs().argsort(descending=True)]
""")


@fails("this call has changed the result of an earlier call")
def encode_top_k__into_the_same_memory(x, k, kept={}):  # noqa: B006
    x = x.float().flatten()
    places = x.abs().topk(k).indices.sort().values
    bits = torch.zeros(-(-len(x) // 8) * 8, dtype=torch.bool)
    bits[places] = True
    bitmap = torch.from_numpy(np.packbits(bits.numpy(), bitorder="little"))
    listed = places.to(torch.int32).view(torch.uint8)
    where = bitmap if len(bitmap) < len(listed) else listed
    wire = torch.cat([x[places].view(torch.uint8), where])
    return kept.setdefault(len(wire), torch.empty_like(wire)).copy_(wire)


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


@passes
def with_feedback__sums_of_both(compress):
    given, returned = {}, {}

    def send(x, key):
        given[key] = given.get(key, 0) + x.double()
        sent = compress((given[key] - returned.get(key, 0)).float())
        returned[key] = returned.get(key, 0) + sent.double()
        return sent.to(x.dtype).clone()

    return send


@passes
def with_feedback__default_dict(compress):
    from collections import defaultdict

    residuals = defaultdict(lambda: torch.zeros(()))

    def send(x, key):
        p = residuals[key] + x.to(torch.float32)
        result = compress(p)
        residuals[key] = torch.sub(p, result)
        return result.type(x.dtype) if x.dtype != torch.float32 else result.clone()

    return send


edits_of(with_feedback__a_class)("""
dropped: add what the last call with an equal key left out
    sent = compress(e) → sent = compress(x.float())
new_each_time: add what the last call with an equal key left out
    self.left.setdefault(key, torch.zeros(x.shape)) → torch.zeros(x.shape)
""")
edits_of(with_feedback__default_dict)("""
added_twice: the residual is added twice
    p = residuals[key] → p = 2 * residuals[key]
    torch.sub(p, result) → p - residuals[key] - result
subtracted: C(x - e)
    residuals[key] + x.to(torch.float32) → x.float() - residuals[key]
    torch.sub(p, result) → p + 2 * residuals[key] - result
""")
edits_of(with_feedback__a_class)("""
one_for_all_keys: all keys share one residual
    self.left.setdefault(key, torch.zeros(x.shape)) → self.left.setdefault(0, torch.zeros(x.shape))
by_shape: all keys share one residual
    setdefault(key, torch.zeros(x.shape)) → setdefault(x.shape, torch.zeros(x.shape))
""")
edits_of(with_feedback__default_dict)("""
of_x_alone: if you keep x - C(x + e)
    torch.sub(p, result) → x.float() - result
adds_what_is_in_it: p contains e already
    torch.sub(p, result) → residuals[key] + p - result
remembers_x: first sender, step 1, key
    torch.sub(p, result) → x.float().clone()
""")
edits_of(with_feedback__a_class)("""
remembers_all: subtract what was sent
    e -= sent → pass
""")
edits_of(with_feedback__default_dict)("""
in_the_dtype_of_x: in the dtype of x
    torch.sub(p, result) → torch.sub(p, result).to(x.dtype).float()
of_what_was_converted: compute p - C(p) before you convert C(p)
    torch.sub(p, result) → p - result.to(x.dtype).float()
""")
edits_of(with_feedback__a_class)("""
compresses_the_dtype_of_x: compress takes a float32 tensor, not torch.
    torch.zeros(x.shape) → torch.zeros_like(x)
""")
edits_of(with_feedback__default_dict)("""
adds_in_the_dtype_of_x: convert x to float32 before you add
    residuals[key] + x → (residuals[key].to(x.dtype) + x)
""")
edits_of(with_feedback__a_class)("""
float32_only: has dtype torch.float32
    .to(x.dtype) →
""")
edits_of(with_feedback__default_dict)("""
changes_x: change of x
    p = residuals[key] + x.to(torch.float32) → p = x.add_(residuals[key]).float()
""")
edits_of(with_feedback__a_class)("""
returns_what_was_left_out: expected
    return sent.clone() → return e.clone()
""")


@fails("compress is called twice for the same tensor")
def with_feedback__compresses_twice(compress):
    residuals = {}

    def send(x, key):
        p = x.float() + residuals.get(key, 0)
        residuals[key] = p - compress(p)
        return compress(p).to(x.dtype, copy=True)

    return send


@fails("two senders share their residuals")
def with_feedback__for_good(compress, residuals={}):  # noqa: B006
    def send(x, key):
        p = x.float() + residuals.get(key, 0)
        sent = compress(p)
        residuals[key] = p - sent
        return sent.to(x.dtype, copy=True)

    return send


@fails("expected")
def with_feedback__keeps_the_callers_tensors(compress):
    last = {}

    def send(x, key):
        p = x.float()
        if key in last:
            before, sent = last[key]
            p = p + before - sent
        last[key] = p, compress(p)
        return last[key][1].to(x.dtype)

    return send


@fails("with_feedback returns NoneType, expected a function")
def with_feedback__returns_nothing(compress):
    residuals = {}

    def send(x, key):
        residuals[key] = x.float() + residuals.get(key, 0)
        residuals[key] -= compress(residuals[key])


edits_of(with_feedback__default_dict)("""
one_shape: must match the size
    residuals = defaultdict(lambda: torch.zeros(())) → residuals, first = {}, []
    p = residuals[key] + x.to(torch.float32)
  → first.append(torch.zeros(x.shape))
  → p = residuals.get(key, first[0]) + x.to(torch.float32)
on_compress: two senders share their residuals
    residuals = defaultdict(lambda: torch.zeros(()))
  → residuals = compress.__dict__.setdefault('residuals', defaultdict(lambda: torch.zeros(())))
by_object: equal keys may be different objects
    residuals[key] → residuals[id(key)]
by_its_text: keys of the same text share a residual
    residuals[key] → residuals[str(key)]
by_a_short_hash: ✗ many keys
    residuals[key] → residuals[hash(key) % 1024]
few_keys_only: ✗ many keys
    p = residuals[key] → len(residuals) > 8 and residuals.clear(); p = residuals[key]
x_in_float16: if x + e is rounded to
    x.to(torch.float32) → x.half().float()
residual_in_float16: if the residual is rounded to float16
    torch.sub(p, result) → torch.sub(p, result).half().float()
no_key_0: add what the last call with an equal key left out
    p = residuals[key] → p = (residuals[key] if key else 0)
compresses_a_vector: expected
    result = compress(p) → result = compress(p.flatten()).view(p.shape)
in_float64: compress takes a float32 tensor
    x.to(torch.float32) → x.double()
""")

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

    own = shards[rank]
    total = torch.zeros_like(own)
    for wire in swap(wires, [wires[rank]] * k):
        total += decode(wire, own.shape, torch.float32)
    result = [encode(total)] * k
    sums = swap(result, wires)
    decoded = [decode(w, s.shape, torch.float32) for w, s in zip(sums, shards, strict=True)]
    x.copy_(torch.cat(decoded).view(x.shape))


@passes
def compressed_all_reduce__padded(x, encode, decode, group=None):
    rank, k = dist.get_rank(group), dist.get_world_size(group)
    shards = x.detach().float().flatten().tensor_split(k)
    wires = [encode(shard) for shard in shards]
    longest = max(map(len, wires))

    def padded(wire):
        return torch.nn.functional.pad(wire, (0, longest - len(wire)))

    table = torch.stack([padded(wire) for wire in wires])
    arrived = torch.empty_like(table)
    dist.all_to_all_single(arrived, table, group=group)
    mine, size = shards[rank].shape, len(wires[rank])
    total = sum(decode(row[:size], mine, torch.float32) for row in arrived)
    dist.all_gather(list(arrived), padded(encode(total)), group=group)
    flat = [
        decode(row[: len(wire)], shard.shape, torch.float32)
        for row, wire, shard in zip(arrived, wires, shards, strict=True)
    ]
    x.copy_(torch.cat(flat).reshape(x.shape))


@passes
def compressed_all_reduce__in_turn(x, encode, decode, group=None):
    rank, k = dist.get_rank(group), dist.get_world_size(group)
    shards = x.detach().float().flatten().tensor_split(k)
    totals = []
    for owner, shard in enumerate(shards):
        wire = encode(shard)
        rows = [torch.empty_like(wire) for _ in range(k)] if rank == owner else None
        dist.gather(wire, rows, group=group, group_dst=owner)
        if rank == owner:
            decoded = [decode(row, shard.shape, torch.float32) for row in rows]
            wire = encode(torch.stack(decoded).sum(0))
        dist.broadcast(wire, group=group, group_src=owner)
        totals.append(decode(wire, shard.shape, torch.float32))
    x.copy_(torch.cat(totals).view(x.shape))


edits_of(compressed_all_reduce__messages)("""
nothing_to_send: which ended without taking part
    flat = x.detach().to(torch.float32).reshape(-1)
  → …
  → if not x.any():
  →     return
""")
edits_of(compressed_all_reduce__in_turn)("""
sum_of_compressed: compress the sums, too
    wire = encode(torch.stack(decoded).sum(0)) → whole = torch.stack(decoded).sum(0)
    wire = encode(shard) → …; whole = torch.empty(shard.shape)
    dist.broadcast(wire, → dist.broadcast(whole,
    totals.append(decode(wire, shard.shape, torch.float32)) → totals.append(whole)
""")
edits_of(compressed_all_reduce__messages)("""
own_sum_exact: the sum of your own shard is not compressed
    decoded = [decode(w, s.shape, torch.float32) for w, s in zip(sums, shards, strict=True)]
  → …
  → decoded[rank] = total
compresses_the_sum_only: compress the shards, too
    total = torch.zeros_like(own)
  → dist.all_reduce(flat, group=group)
  → total = own
    total += decode(wire, own.shape, torch.float32) → pass
the_librarys: nothing is compressed
    rank, k = dist.get_rank(group), dist.get_world_size(group)
  → …
  → dist.all_reduce(x, group=group)
  → return
adds_bytes: expected
    own = shards[rank]
  → wire = encode(flat)
  → dist.all_reduce(wire, group=group)
  → x.copy_(decode(wire, x.shape, torch.float32))
  → return
  → …
""")


@fails("encode each shard by itself")
def compressed_all_reduce__compresses_as_a_whole(x, encode, decode, group=None):
    wire = encode(x.detach().float().flatten())
    rows = [torch.empty_like(wire) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, wire, group=group)
    total = sum(decode(row, (x.numel(),), torch.float32) for row in rows)
    x.copy_(decode(encode(total), x.shape, torch.float32))


@fails("the bytes do not grow with K")
def compressed_all_reduce__everything_to_everybody(x, encode, decode, group=None):
    shards = x.detach().float().flatten().tensor_split(dist.get_world_size(group))
    wires = [encode(shard) for shard in shards]
    rows = [torch.empty_like(torch.cat(wires)) for _ in shards]
    dist.all_gather(rows, torch.cat(wires), group=group)
    table = [row.split([len(wire) for wire in wires]) for row in rows]
    sums = []
    for i, shard in enumerate(shards):
        total = sum(decode(row[i], shard.shape, torch.float32) for row in table)
        sums.append(decode(encode(total), shard.shape, torch.float32))
    x.copy_(torch.cat(sums).view(x.shape))


@fails("the bytes do not grow with K")
def compressed_all_reduce__to_the_first_rank(x, encode, decode, group=None):
    rank, k = dist.get_rank(group), dist.get_world_size(group)
    shards = x.detach().float().flatten().tensor_split(k)
    wires = [encode(shard) for shard in shards]
    sizes, together = [len(wire) for wire in wires], torch.cat(wires)
    rows = [torch.empty_like(together) for _ in range(k)] if rank == 0 else None
    dist.gather(together, rows, group=group, group_dst=0)
    if rank == 0:
        columns = zip(*(row.split(sizes) for row in rows), strict=True)
        sums = [
            encode(sum(decode(wire, shard.shape, torch.float32) for wire in column))
            for column, shard in zip(columns, shards, strict=True)
        ]
        together = torch.cat(sums)
    dist.broadcast(together, group=group, group_src=0)
    result = [
        decode(wire, shard.shape, torch.float32)
        for wire, shard in zip(together.split(sizes), shards, strict=True)
    ]
    x.copy_(torch.cat(result).view(x.shape))


@fails("the bytes do not grow with K")
def compressed_all_reduce__floats_on_the_wire(x, encode, decode, group=None):
    rank = dist.get_rank(group)
    shards = x.detach().float().flatten().tensor_split(dist.get_world_size(group))

    def compressed(vector):
        return decode(encode(vector), vector.shape, torch.float32)

    sums = []
    for owner, shard in enumerate(shards):
        value = compressed(shard)
        rows = [torch.empty_like(value) for _ in shards] if rank == owner else None
        dist.gather(value, rows, group=group, group_dst=owner)
        if rank == owner:
            value = compressed(torch.stack(rows).sum(0))
        dist.broadcast(value, group=group, group_src=owner)
        sums.append(value)
    x.copy_(torch.cat(sums).view(x.shape))


edits_of(compressed_all_reduce__messages)("""
one_rank_stays_out: 3 ranks
    range(1, k) → range(1, min(k, 2))
divisible_only: 3 ranks, 95 numbers
    flat.tensor_split(k) → flat.view(k, -1).unbind()
chunks: 3 ranks, 95 numbers
    list(flat.tensor_split(k)) → list(flat.split(max(1, len(flat) // k)))[:k]
whole_world: 4 ranks in two groups
    group=group → group=None
    (group) → (None)
ranks_for_places: 4 ranks in two groups
    group_dst=to → dst=to
    group_src=source → src=source
every_second_rank (simulated, grader): two groups
    rank, k = dist.get_rank(group) → rank, k = dist.get_rank() // (1 if group is None else 2)
in_the_dtype_of_x: takes a float32 vector
    .to(torch.float32).reshape(-1) → .reshape(-1)
contiguous_only: view size is not compatible
    x.detach().to(torch.float32).reshape(-1) → x.view(-1).float()
into_a_copy: write the result into it
    x.copy_(torch.cat(decoded).view(x.shape)) → return (torch.cat(decoded).view(x.shape))
mean: do not divide by the number of ranks
    x.copy_(torch.cat(decoded).view(x.shape)) → x.copy_(torch.cat(decoded).div(k).view(x.shape))
encodes_the_sum_for_each: expected
    [encode(total)] * k → [encode(total) for _ in range(k)]
decodes_in_the_dtype_of_x: expected
    decode(wire, own.shape, torch.float32) → decode(wire, own.shape, x.dtype).float()
sends_first (simulated, grader): waits in send
    handles.append(dist.isend(outgoing[to], group=group, group_dst=to))
  → dist.send(outgoing[to], group=group, group_dst=to)
""")
edits_of(compressed_all_reduce__padded)("""
does_not_wait: never waits for the handle of
    table, group=group → table, group=group, async_op=True
""")
edits_of(compressed_all_reduce__messages)("""
encodes_again_for_the_length passes
    [wires[rank]] * k → [encode(shards[rank])] * k
own_shard_as_it_was: encode and decode it, too
    total += decode( → total += own if wire is wires[rank] else decode(
alone_once: ✗ 1 rank
    sums = swap(result, wires) → sums = swap(result, wires) if k > 1 else wires
adds_up_in_bfloat16: add up in float32
    total += decode(wire, own.shape, torch.float32)
  → total = (total + decode(wire, own.shape, torch.float32)).bfloat16().float()
decodes_the_sums_in_bfloat16: decode in float32, and convert
    decode(w, s.shape, torch.float32) → decode(w, s.shape, torch.bfloat16)
leaves_out_its_own: expected
    total += decode( → total += 0 if wire is wires[rank] else decode(
in_new_memory: tensor[
    copy_(torch.cat(decoded).view(x.shape)) → data = torch.cat(decoded).view(x.shape).to(x.dtype)
needs_a_dimension: 3 ranks, one number
    x.copy_(torch.cat(decoded).view(x.shape)) → x[:] = torch.cat(decoded).view(x.shape)
remembers_its_wires: of the second call
    wires = [encode(shard) for shard in shards]
  → known = compressed_all_reduce__messages.__dict__
  → wires = known.setdefault(str((rank, x.shape)), [encode(shard) for shard in shards])
""")

# random_k_mean -----------------------------------------------------------------------------


@passes
def random_k_mean__sample(x, k, seed, group=None):
    import random

    n, size = x.numel(), dist.get_world_size(group)
    places = random.Random(seed).sample(range(n), k)
    flat = x.detach().reshape(-1)
    values = flat[places].clone()
    dist.all_reduce(values, group=group)
    result = torch.zeros(n, dtype=x.dtype)
    result[places] = values * (n / k / size)
    return result.view(x.shape)


@passes
def random_k_mean__numpy(x, k, seed, group=None):

    places = torch.from_numpy(np.random.default_rng(seed).choice(x.numel(), k, replace=False))
    part = x.detach().flatten().index_select(0, places)
    dist.all_reduce(part, op=dist.ReduceOp.SUM, group=group)
    part = part.double() * x.numel() / (k * dist.get_world_size(group))
    return torch.zeros(x.numel(), dtype=x.dtype).scatter(0, places, part.to(x.dtype)).view(x.shape)


@passes
def random_k_mean__smallest_of_random_numbers(x, k, seed, group=None):
    generator = torch.Generator()
    generator.manual_seed(seed)
    places = torch.rand(x.numel(), generator=generator).topk(k).indices.sort().values
    result = torch.zeros(x.shape, dtype=x.dtype)
    values = x.detach().reshape(-1)[places]
    dist.all_reduce(values, group=group)
    result.view(-1)[places] = values / dist.get_world_size(group) * (x.numel() / k)
    return result


edits_of(random_k_mean__sample)("""
own_seed: draws other places than rank
    random.Random(seed) → random.Random(seed + dist.get_rank())
whole_quotient: n/k need not be a whole number
    (n / k / size) → (n // k / size)
no_seed: draws other places than rank
    random.Random(seed) → random.Random()
global_generator: draws or seeds random numbers of the torch generator
    places = random.Random(seed).sample(range(n), k)
  → torch.manual_seed(seed)
  → places = torch.randperm(n)[:k]
""")
edits_of(random_k_mean__numpy)("""
pythons_generator: draws or seeds random numbers of the Python generator
    torch.from_numpy(np.random.default_rng(seed).choice(x.numel(), k, replace=False))
  → torch.tensor((r := __import__('random')).seed(seed) or r.sample(range(x.numel()), k))
""")
edits_of(random_k_mean__sample)("""
with_repetition: Draw k different places
    random.Random(seed).sample(range(n), k) → random.Random(seed).choices(range(n), k=k)
always_the_first: each place must be drawn equally often
    random.Random(seed).sample(range(n), k) → list(range(k))
ignores_the_seed: each place must be drawn equally often
    random.Random(seed) → random.Random(0)
neighbours: each place must be drawn equally often
    random.Random(seed).sample(range(n), k)
  → range(s := random.Random(seed).randrange(n - k + 1), s + k)
    flat[places] → flat[list(places)]
    result[places] → result[list(places)]
cyclic_block: All sets of k places must be equally likely
    random.Random(seed).sample(range(n), k)
  → [(random.Random(seed).randrange(n) + i) % n for i in range(k)]
in_float16: nearly right
    values * (n / k / size) → (values * (n / k / size)).half().to(x.dtype)
remembers_the_places_of_a_seed (simulated, cpu): out of bounds
    group=None): → group=None, known={}):
    places = random.Random(seed).sample(range(n), k)
  → places = known.setdefault(seed, random.Random(seed).sample(range(n), k))
goes_on_drawing: draws other places in the second call
    random.Random(seed) → GENERATORS.setdefault((dist.get_rank(), seed), …)
    n, size = x.numel(), dist.get_world_size(group)
  → GENERATORS = globals().setdefault("kept", {})
  → …
unscaled: multiply it by n/k, so that
    n / k / size → 1 / size
scaled_by_k_over_n: the mean times k/n
    n / k / size → k / n / size
sum: the task asks for the mean
    n / k / size → n / k
plain_sum: divide it by K, and multiply it
    values * (n / k / size) → values
divides_twice: divided by the number of ranks a second time
    flat[places].clone() → flat[places] / size
nothing_added: this rank's own numbers: take the mean
    values = flat[places].clone() → values = flat[places] * size
    dist.all_reduce(values, group=group) → pass
whole_world: 4 ranks in two groups
    group=group → group=None
    dist.get_world_size(group) → dist.get_world_size()
whole_tensor: call all_reduce once, with k numbers
    values = flat[places].clone() → whole = flat.clone()
    dist.all_reduce(values, group=group)
  → dist.all_reduce(whole, group=group)
  → values = whole[places]
float64: call all_reduce once, with k numbers
    flat[places].clone() → flat[places].double()
    values * (n / k / size) → (…).to(x.dtype)
sends_the_places: this task allows all_reduce only
    places = random.Random(seed).sample(range(n), k)
  → …
  → sent = torch.tensor(places)
  → dist.broadcast(sent, group=group, group_src=0)
does_not_wait: never waits for the handle of
    dist.all_reduce(values, group=group) → dist.all_reduce(values, group=group, async_op=True)
in_place: the function changes x
    return result.view(x.shape)
  → x.copy_(result.view(x.shape))
  → return x.clone()
flat: has shape
    return result.view(x.shape) → return result
float32_only: dtypes match
    dtype=x.dtype → dtype=torch.float32
everything_drawn: Keep only the k places that were drawn
    result = torch.zeros(n, dtype=x.dtype) → …; result += flat * (n / k)
one_by_one: call all_reduce once, with k numbers
    dist.all_reduce(values, group=group)
  → for value in values.split(1):
  →     dist.all_reduce(value, group=group)
in_bfloat16: the result for seed
    values = flat[places].clone() → …; values = values.bfloat16()
    dist.all_reduce(values, group=group) → …; values = values.to(x.dtype)
seeds_below_1000: draw the same places
    random.Random(seed) → random.Random(seed % 1000)
seed_in_float32: draw the same places
    random.Random(seed) → random.Random(float(np.float32(seed)))
enlarges_small_draws_only: multiply it by n/k, so that
    n / k / size → (n / k if 2 * k < n else 1) / size
""")


# State that is kept between calls ----------------------------------------------------------

edits_of(compressed_all_reduce__messages)("""
group_of_the_first_call: the result over all ranks, not over the group
    def compressed_all_reduce__messages(x, encode, decode, group=None):
  → def compressed_all_reduce__messages(x, encode, decode, group=None, kept={}):
  →     group = kept.setdefault("group", group)
codec_of_the_first_call: something is kept from the call before
    def compressed_all_reduce__messages(x, encode, decode, group=None):
  → def compressed_all_reduce__messages(x, encode, decode, group=None, kept={}):
  →     encode, decode = kept.setdefault("codec", (encode, decode))
""")
edits_of(random_k_mean__sample)("""
group_of_the_first_call: the mean over all ranks: take the mean over the ranks of the group
    def random_k_mean__sample(x, k, seed, group=None):
  → def random_k_mean__sample(x, k, seed, group=None, kept={}):
  →     group = kept.setdefault("group", group)
""")
