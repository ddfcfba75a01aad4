"""Wrong solutions that people write, and right ones that differ from ours.

See `instructor/02_data_parallel_sgd/mutants.py`. What the virtual clock does not find is found
everywhere here: bytes and values are the same on all kinds of ranks.
"""

import numpy as np
import torch
import torch.distributed as dist

from course_lib.checking.mutants import edited, fails, passes

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


def quantize_with(*edits):
    return edited(quantize__numpy, *edits)


quantize__to_the_nearest = fails("rounded to the nearest: u decides")(
    quantize_with(("np.floor(scaled + u)", "np.round(scaled)"))
)
quantize__rounds_down = fails("every number is rounded down")(
    quantize_with(("scaled + u", "scaled"))
)
quantize__cuts_off = fails("cut off towards zero, whatever u is")(
    quantize_with(("np.floor(scaled + u)", "np.trunc(scaled)"))
)
quantize__cuts_off_after_adding = fails("numbers below zero are rounded up, and biased")(
    quantize_with(("np.floor(", "np.trunc("))
)
quantize__subtracts_u = fails("that u moves the wrong way")(
    quantize_with(
        ("np.minimum(np.floor(scaled + u), 127)", "np.maximum(np.ceil(scaled - u), -127)")
    )
)
quantize__lets_128_wrap = fails("128, which int8 does not have")(
    edited(quantize__into_the_wire, ("codes[codes > 127] = 127", "codes[codes > 127] = -128"))
)
quantize__floats_on_the_wire = fails("A code is one byte")(
    quantize_with((".astype(np.int8)", ".astype(np.float32)"))
)
quantize__returns_codes = fails("expected a vector of")(
    edited(quantize__into_the_wire, ("return wire", "return wire[4:].view(torch.int8)"))
)
quantize__returns_a_pair = fails("expected a vector of")(
    edited(quantize__into_the_wire, ("return wire", "return wire[:4], wire[4:]"))
)
quantize__without_the_scale = fails("Where is the scale?")(
    edited(quantize__into_the_wire, ("return wire", "return wire[4:]"))
)
quantize__a_scale_of_eight_bytes = fails("The scale is float32, 4 bytes")(
    quantize_with(("scale.tobytes()", "np.float64(scale).tobytes()"))
)
quantize__a_scale_above_zero = fails("scale[0]: expected 0")(
    quantize_with(("max(initial=0)", "max(initial=1e-6)"))
)
quantize__needs_numbers = fails("no numbers")(quantize_with((".max(initial=0)", ".max()")))
quantize__by_128 = fails("scale")(quantize_with(("np.float32(127)", "np.float32(128)")))
quantize__largest_not_absolute = fails("scale")(quantize_with(("np.abs(x).max", "x.max")))
quantize__own_noise = fails("codes")(
    quantize_with(("u.numpy().ravel()", "np.random.default_rng(0).random(x.numel())"))
)
quantize__contiguous_only = fails("view size is not compatible")(
    edited(quantize__into_the_wire, ("x.detach().reshape(-1)", "x.view(-1)"))
)
quantize__column_order = fails("codes[")(quantize_with(("ravel()", "ravel(order='A')")))


quantize__next_to_nothing_for_zero = fails("codes")(
    quantize_with(("x / scale if scale else x", "x / (scale + np.float32(1e-12))"))
)

quantize__rounds_u_to_half = fails("codes[")(
    quantize_with(("scaled + u", "scaled + u.astype(np.float16)"))
)
quantize__scale_in_the_dtype_of_x = fails("scale[0]: expected")(
    edited(
        quantize__into_the_wire,
        (
            'struct.pack("=f", largest / 127)',
            'struct.pack("=f", float((x.abs().max() / 127)) if largest else 0.0)',
        ),
    )
)
quantize__an_epsilon = fails("codes[")(
    quantize_with(("x / scale if scale else x", "x / (scale + np.float32(1e-30))"))
)


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


@fails("codes")
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


@fails("this call has changed what an earlier one returned")
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


def dequantize_with(*edits):
    return edited(dequantize__in_place, *edits)


dequantize__unsigned = fails("codes read as 0 to 255")(dequantize_with((".view(torch.int8)", "")))
dequantize__views_any_four_bytes = fails("divisible")(
    dequantize_with(("wire = wire.clone()", "pass"))
)
dequantize__float32_only = fails("has dtype torch.float32")(dequantize_with((".to(dtype)", "")))
dequantize__in_the_dtype_of_the_result = fails("numbers")(
    dequantize_with((".to(torch.float32)", ".to(dtype)"), ("[0]).to(dtype)", "[0].to(dtype))"))
)
dequantize__flat = fails("has shape")(dequantize_with(("reshape(shape)", "clone()")))
dequantize__divides = fails("numbers")(dequantize_with(("mul_", "div_")))
dequantize__reads_the_scale_at_the_end = fails("numbers")(
    dequantize_with(("wire[4:]", "wire[:-4]"), ("wire[:4]", "wire[-4:].clone()"))
)
dequantize__drops_the_scale = fails("numbers")(
    dequantize_with((".mul_(wire[:4].view(torch.float32)[0])", ""))
)
dequantize__writes_into_the_wire = fails("the function changes bytes")(
    dequantize_with(
        ("wire = wire.clone()", "wire, given = wire.clone(), wire"),
        ("return ", "given.zero_()\n    return "),
    )
)


@fails("this call has changed what an earlier one returned")
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


def top_k_with(*edits):
    return edited(encode_top_k__numpy, *edits)


encode_top_k__largest_numbers = fails("their absolute values count")(
    top_k_with(("-np.abs(x)", "-x"))
)
encode_top_k__smallest = fails("the k smallest")(top_k_with(("-np.abs(x)", "np.abs(x)")))
encode_top_k__without_signs = fails("without signs")(
    top_k_with(("x[places].tobytes()", "np.abs(x[places]).tobytes()"))
)
encode_top_k__int64_places = fails("int32 is enough")(
    top_k_with((".astype(np.int32)", ".astype(np.int64)"))
)
encode_top_k__always_a_list = fails("Here the bitmap")(
    top_k_with(("bitmap if len(bitmap) < len(listed) else listed", "listed"))
)
encode_top_k__always_a_bitmap = fails("Here k places of 4 bytes")(
    top_k_with(("bitmap if len(bitmap) < len(listed) else listed", "bitmap"))
)
encode_top_k__counts_whole_bytes_only = fails("61 bits take 8 whole bytes")(
    top_k_with(("len(bitmap) < len(listed)", "n // 8 < 4 * k"))
)
encode_top_k__counts_bits = fails("61 bits take 8 whole bytes")(
    top_k_with(("len(bitmap) < len(listed)", "n < 8 * 4 * k"))
)
encode_top_k__one_byte_too_many = fails("Here the bitmap")(
    top_k_with(("len(bitmap) < len(listed)", "n // 8 + 1 < 4 * k"))
)
encode_top_k__without_places = fails("Where were they?")(
    top_k_with((" + (bitmap if len(bitmap) < len(listed) else listed)", ""))
)
encode_top_k__bools = fails("A bool is a whole byte")(
    top_k_with(('np.packbits(bits, bitorder="little")', "bits"))
)
encode_top_k__highest_bit_first = fails("the first element has the highest bit")(
    top_k_with((', bitorder="little"', ""))
)
encode_top_k__last_byte_missing = fails("filled up with zeros, and not left out")(
    edited(
        encode_top_k__by_hand,
        ("bits = torch.zeros((n + 7) // 8 * 8", "bits = torch.zeros(n // 8 * 8"),
        ("bits[:n] = kept", "bits[:] = kept[: len(bits)]"),
    )
)
encode_top_k__padded_in_front = fails("the places in it are not")(
    edited(encode_top_k__by_hand, ("bits[:n] = kept", "bits[-n:] = kept"))
)
encode_top_k__in_order_of_size = fails("not in the same order")(
    top_k_with(("np.sort(np.argsort(-np.abs(x))[:k])", "np.argsort(-np.abs(x))[:k]"))
)
encode_top_k__zeros_left_in = fails("Zeros take as many bytes")(
    edited(
        encode_top_k__by_hand,
        ("wire = [", "return torch.where(kept, flat, 0).view(torch.uint8)\n    wire = ["),
    )
)
encode_top_k__values_in_the_dtype_of_x = fails("Values are float32 on the wire")(
    edited(encode_top_k__by_hand, ("reshape(-1).to(torch.float32)", "reshape(-1)"))
)
encode_top_k__two_tensors = fails("expected a vector of")(
    edited(encode_top_k__by_hand, ("return torch.cat(wire)", "return wire"))
)
encode_top_k__one_too_few = fails("expected")(top_k_with(("[:k])", "[: k - 1])")))
encode_top_k__contiguous_only = fails("view size is not compatible")(
    edited(encode_top_k__by_hand, ("x.detach().reshape(-1)", "x.view(-1)"))
)
encode_top_k__clears_what_it_sends = fails("the function changes x")(
    edited(
        encode_top_k__by_hand,
        ("wire = [", "x *= 1 - kept.view(x.shape).to(x.dtype)\n    wire = ["),
        ("x.detach().reshape(-1).to(torch.float32)", "x.detach().clone().reshape(-1).float()"),
    )
)

encode_top_k__drops_a_zero = fails("all of 9")(
    edited(
        encode_top_k__by_hand,
        (
            "kept[flat.abs().argsort(descending=True)[:k]] = True",
            "kept[flat.abs().argsort(descending=True)[:k]] = True\n    kept &= flat != 0",
        ),
    )
)
encode_top_k__at_least_one = fails("none of six")(top_k_with(("[:k])", "[: max(k, 1)])")))
encode_top_k__places_below_256 = fails("of 600")(
    edited(encode_top_k__by_hand, (".to(torch.int32)", ".to(torch.uint8).to(torch.int32)"))
)
encode_top_k__list_in_order_of_size = fails("not in the order of x")(
    edited(
        encode_top_k__by_threshold,
        (
            "    n = len(x)",
            "    n = len(x)\n"
            "    if 8 * 4 * k <= n:\n"
            "        places = places[x[places].abs().argsort(descending=True)]",
        ),
    )
)


@fails("this call has changed what an earlier one returned")
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


def feedback_with(*edits):
    return edited(with_feedback__a_class, *edits)


with_feedback__dropped = fails("what was left out is not added")(
    feedback_with(("sent = compress(e)", "sent = compress(x.float())"))
)
with_feedback__new_each_time = fails("what was left out is not added")(
    feedback_with(("self.left.setdefault(key, torch.zeros(x.shape))", "torch.zeros(x.shape)"))
)
with_feedback__added_twice = fails("the residual is added twice")(
    edited(
        with_feedback__default_dict,
        ("p = residuals[key]", "p = 2 * residuals[key]"),
        ("torch.sub(p, result)", "p - residuals[key] - result"),
    )
)
with_feedback__subtracted = fails("C(x - e)")(
    edited(
        with_feedback__default_dict,
        ("residuals[key] + x.to(torch.float32)", "x.float() - residuals[key]"),
        ("torch.sub(p, result)", "p + 2 * residuals[key] - result"),
    )
)
with_feedback__one_for_all_keys = fails("one residual for all keys")(
    feedback_with(("setdefault(key,", "setdefault(0,"))
)
with_feedback__by_shape = fails("one residual for all keys")(
    feedback_with(("setdefault(key,", "setdefault(x.shape,"))
)
with_feedback__of_x_alone = fails("what x - C(x + e) leaves")(
    edited(with_feedback__default_dict, ("torch.sub(p, result)", "x.float() - result"))
)
with_feedback__remembers_x = fails("also what was sent")(
    edited(with_feedback__default_dict, ("torch.sub(p, result)", "x.float().clone()"))
)
with_feedback__remembers_all = fails("also what was sent")(feedback_with(("e -= sent", "pass")))
with_feedback__in_the_dtype_of_x = fails("keep it in float32")(
    edited(
        with_feedback__default_dict,
        ("torch.sub(p, result)", "torch.sub(p, result).to(x.dtype).float()"),
    )
)
with_feedback__of_what_was_converted = fails("e is p - C(p) before C(p) is converted")(
    edited(
        with_feedback__default_dict,
        ("torch.sub(p, result)", "p - result.to(x.dtype).float()"),
    )
)
with_feedback__compresses_the_dtype_of_x = fails("compress takes a float32 tensor, not torch.")(
    feedback_with(("torch.zeros(x.shape)", "torch.zeros_like(x)"))
)
with_feedback__adds_in_the_dtype_of_x = fails("convert x before you add")(
    edited(
        with_feedback__default_dict,
        (
            "p = residuals[key] + x.to(torch.float32)",
            "p = (residuals[key].to(x.dtype) + x).to(torch.float32)",
        ),
    )
)
with_feedback__float32_only = fails("has dtype torch.float32")(feedback_with((".to(x.dtype)", "")))
with_feedback__changes_x = fails("x afterwards")(
    edited(
        with_feedback__default_dict,
        ("p = residuals[key] + x.to(torch.float32)", "p = x.add_(residuals[key]).float()"),
    )
)
with_feedback__returns_what_was_left_out = fails("expected")(
    feedback_with(("return sent.clone()", "return e.clone()"))
)


@fails("compress is called twice for one tensor")
def with_feedback__compresses_twice(compress):
    residuals = {}

    def send(x, key):
        p = x.float() + residuals.get(key, 0)
        residuals[key] = p - compress(p)
        return compress(p).to(x.dtype, copy=True)

    return send


@fails("that two senders share")
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


@fails("is NoneType")
def with_feedback__returns_nothing(compress):
    residuals = {}

    def send(x, key):
        residuals[key] = x.float() + residuals.get(key, 0)
        residuals[key] -= compress(residuals[key])


with_feedback__one_shape = fails("must match the size")(
    edited(
        with_feedback__default_dict,
        ("residuals = defaultdict(lambda: torch.zeros(()))", "residuals, first = {}, []"),
        (
            "p = residuals[key]",
            "first.append(torch.zeros(x.shape))\n        p = residuals.get(key, first[0])",
        ),
    )
)
with_feedback__on_compress = fails("that two senders share")(
    edited(
        with_feedback__default_dict,
        (
            "residuals = defaultdict(lambda: torch.zeros(()))",
            "residuals = compress.__dict__.setdefault('residuals', "
            "defaultdict(lambda: torch.zeros(())))",
        ),
    )
)
with_feedback__no_key_0 = fails("what was left out is not added")(
    edited(
        with_feedback__default_dict, ("p = residuals[key]", "p = (residuals[key] if key else 0)")
    )
)
with_feedback__compresses_a_vector = fails("expected")(
    edited(
        with_feedback__default_dict,
        ("result = compress(p)", "result = compress(p.flatten()).view(p.shape)"),
    )
)
with_feedback__in_float64 = fails("compress takes a float32 tensor")(
    edited(with_feedback__default_dict, ("x.to(torch.float32)", "x.double()"))
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


def all_reduce_with(*edits):
    return edited(compressed_all_reduce__messages, *edits)


compressed_all_reduce__nothing_to_send = fails("which ended without taking part")(
    all_reduce_with(
        ("    shards = list(", "    if not x.any():\n        return\n    shards = list(")
    )
)

compressed_all_reduce__sum_of_compressed = fails("the sums are sent as they are")(
    edited(
        compressed_all_reduce__in_turn,
        ("wire = encode(torch.stack(decoded).sum(0))", "whole = torch.stack(decoded).sum(0)"),
        ("rows = [", "whole = torch.empty(shard.shape)\n        rows = ["),
        ("dist.broadcast(wire,", "dist.broadcast(whole,"),
        ("totals.append(decode(wire, shard.shape, torch.float32))", "totals.append(whole)"),
    )
)
compressed_all_reduce__own_sum_exact = fails("the sums are sent as they are")(
    all_reduce_with(("x.copy_(", "decoded[rank] = total\n    x.copy_("))
)
compressed_all_reduce__compresses_the_sum_only = fails("what each rank sends at first is not")(
    all_reduce_with(
        ("total = torch.zeros_like(own)", "dist.all_reduce(flat, group=group)\n    total = own"),
        ("total += decode(wire, own.shape, torch.float32)", "pass"),
    )
)
compressed_all_reduce__the_librarys = fails("nothing is compressed")(
    all_reduce_with(
        ("flat = x.detach()", "dist.all_reduce(x, group=group)\n    return\n    flat = x.detach()")
    )
)
compressed_all_reduce__adds_bytes = fails("expected")(
    all_reduce_with(
        (
            "own = shards[rank]",
            "wire = encode(flat)\n    dist.all_reduce(wire, group=group)\n"
            "    x.copy_(decode(wire, x.shape, torch.float32))\n    return\n    own = shards[rank]",
        ),
    )
)


@fails("each shard is encoded by itself")
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


compressed_all_reduce__one_rank_stays_out = fails("3 ranks")(
    all_reduce_with(("range(1, k)", "range(1, min(k, 2))"))
)
compressed_all_reduce__divisible_only = fails("3 ranks, 95 numbers")(
    all_reduce_with(("flat.tensor_split(k)", "flat.view(k, -1).unbind()"))
)
compressed_all_reduce__chunks = fails("3 ranks, 95 numbers")(
    all_reduce_with(("list(flat.tensor_split(k))", "list(flat.split(max(1, len(flat) // k)))[:k]"))
)
compressed_all_reduce__whole_world = fails("4 ranks in two groups")(
    all_reduce_with(("group=group", "group=None"), ("(group)", "(None)"))
)
compressed_all_reduce__ranks_for_places = fails("4 ranks in two groups")(
    all_reduce_with(("group_dst=to", "dst=to"), ("group_src=source", "src=source"))
)
compressed_all_reduce__every_second_rank = fails("two groups", only=("simulated", "grader"))(
    all_reduce_with(
        (
            "rank, k = dist.get_rank(group)",
            "rank, k = dist.get_rank() // (1 if group is None else 2)",
        )
    )
)
compressed_all_reduce__in_the_dtype_of_x = fails("takes a float32 vector")(
    all_reduce_with((".to(torch.float32).reshape(-1)", ".reshape(-1)"))
)
compressed_all_reduce__contiguous_only = fails("view size is not compatible")(
    all_reduce_with(("x.detach().to(torch.float32).reshape(-1)", "x.view(-1).float()"))
)
compressed_all_reduce__into_a_copy = fails("nothing was written into it")(
    all_reduce_with(("x.copy_(torch", "return (torch"))
)
compressed_all_reduce__mean = fails("nobody asked to divide")(
    all_reduce_with(("x.copy_(torch.cat(decoded)", "x.copy_(torch.cat(decoded).div(k)"))
)
compressed_all_reduce__encodes_the_sum_for_each = fails("expected")(
    all_reduce_with(("[encode(total)] * k", "[encode(total) for _ in range(k)]"))
)
compressed_all_reduce__decodes_in_the_dtype_of_x = fails("expected")(
    all_reduce_with(
        ("decode(wire, own.shape, torch.float32)", "decode(wire, own.shape, x.dtype).float()")
    )
)
compressed_all_reduce__sends_first = fails("waits in send", only=("simulated", "grader"))(
    all_reduce_with(
        ("dist.isend(", "dist.send("),
        (
            "handles.append(dist.send(outgoing[to], group=group, group_dst=to))",
            "dist.send(outgoing[to], group=group, group_dst=to)",
        ),
    )
)
compressed_all_reduce__does_not_wait = fails("never waits for the handle of")(
    edited(
        compressed_all_reduce__padded,
        (
            "dist.all_to_all_single(arrived, table, group=group)",
            "dist.all_to_all_single(arrived, table, group=group, async_op=True)",
        ),
    )
)
compressed_all_reduce__leaves_out_its_own = fails("expected")(
    all_reduce_with(("total += decode(", "total += 0 if wire is wires[rank] else decode("))
)

compressed_all_reduce__in_new_memory = fails("tensor[")(
    all_reduce_with(
        (
            "x.copy_(torch.cat(decoded).view(x.shape))",
            "x.data = torch.cat(decoded).view(x.shape).to(x.dtype)",
        )
    )
)
compressed_all_reduce__needs_a_dimension = fails("3 ranks, one number")(
    all_reduce_with(
        ("x.copy_(torch.cat(decoded).view(x.shape))", "x[:] = torch.cat(decoded).view(x.shape)")
    )
)
compressed_all_reduce__remembers_its_wires = fails("of the second call")(
    all_reduce_with(
        (
            "wires = [encode(shard) for shard in shards]",
            "known = compressed_all_reduce__messages.__dict__\n"
            "    wires = known.setdefault(str((rank, x.shape)), "
            "[encode(shard) for shard in shards])",
        ),
    )
)

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


def random_k_with(*edits):
    return edited(random_k_mean__sample, *edits)


random_k_mean__own_seed = fails("draws other places than rank")(
    random_k_with(("random.Random(seed)", "random.Random(seed + dist.get_rank())"))
)
random_k_mean__no_seed = fails("draws other places than rank")(
    random_k_with(("random.Random(seed)", "random.Random()"))
)
random_k_mean__global_generator = fails("draws or seeds random numbers of the torch generator")(
    random_k_with(
        (
            "places = random.Random(seed).sample(range(n), k)",
            "torch.manual_seed(seed)\n    places = torch.randperm(n)[:k]",
        )
    )
)
random_k_mean__pythons_generator = fails("draws or seeds random numbers of the Python generator")(
    edited(
        random_k_mean__numpy,
        (
            "torch.from_numpy(np.random.default_rng(seed).choice(x.numel(), k, replace=False))",
            "torch.tensor((r := __import__('random')).seed(seed) or r.sample(range(x.numel()), k))",
        ),
    )
)
random_k_mean__with_repetition = fails("Draw k different places")(
    random_k_with(
        ("random.Random(seed).sample(range(n), k)", "random.Random(seed).choices(range(n), k=k)")
    )
)
random_k_mean__always_the_first = fails("each place equally often")(
    random_k_with(("random.Random(seed).sample(range(n), k)", "list(range(k))"))
)
random_k_mean__ignores_the_seed = fails("each place equally often")(
    random_k_with(("random.Random(seed)", "random.Random(0)"))
)
random_k_mean__neighbours = fails("each place equally often")(
    random_k_with(
        (
            "random.Random(seed).sample(range(n), k)",
            "range(s := random.Random(seed).randrange(n - k + 1), s + k)",
        ),
        ("flat[places]", "flat[list(places)]"),
        ("result[places]", "result[list(places)]"),
    )
)
random_k_mean__remembers_the_places_of_a_seed = fails("out of bounds", only=("simulated", "cpu"))(
    random_k_with(
        ("group=None):", "group=None, known={}):"),
        (
            "places = random.Random(seed).sample(range(n), k)",
            "places = known.setdefault(seed, random.Random(seed).sample(range(n), k))",
        ),
    )
)
random_k_mean__goes_on_drawing = fails("when it comes again")(
    random_k_with(
        (
            "random.Random(seed)",
            "GENERATORS.setdefault((dist.get_rank(), seed), random.Random(seed))",
        ),
        ("n, size =", "GENERATORS = globals().setdefault('kept', {})\n    n, size ="),
    )
)
random_k_mean__unscaled = fails("it must be scaled by n/k")(
    random_k_with(("n / k / size", "1 / size"))
)
random_k_mean__scaled_by_k_over_n = fails("scaled by k/n")(
    random_k_with(("n / k / size", "k / n / size"))
)
random_k_mean__sum = fails("the mean is asked for")(random_k_with(("n / k / size", "n / k")))
random_k_mean__plain_sum = fails("it must be divided by K, and scaled")(
    random_k_with(("values * (n / k / size)", "values"))
)
random_k_mean__divides_twice = fails("divided by the number of ranks once more")(
    random_k_with(("flat[places].clone()", "flat[places] / size"))
)
random_k_mean__nothing_added = fails("nothing was added")(
    random_k_with(
        ("values = flat[places].clone()", "values = flat[places] * size"),
        ("dist.all_reduce(values, group=group)", "pass"),
    )
)
random_k_mean__whole_world = fails("4 ranks in two groups")(
    random_k_with(("group=group", "group=None"), ("size(group)", "size()"))
)
random_k_mean__whole_tensor = fails("One all_reduce of k numbers")(
    random_k_with(
        ("values = flat[places].clone()", "whole = flat.clone()"),
        (
            "dist.all_reduce(values, group=group)",
            "dist.all_reduce(whole, group=group)\n    values = whole[places]",
        ),
    )
)
random_k_mean__float64 = fails("One all_reduce of k numbers")(
    random_k_with(
        ("flat[places].clone()", "flat[places].double()"),
        ("values * (n / k / size)", "(values * (n / k / size)).to(x.dtype)"),
    )
)
random_k_mean__sends_the_places = fails("this task allows all_reduce only")(
    random_k_with(
        (
            "flat = x.detach()",
            "sent = torch.tensor(places)\n    dist.broadcast(sent, group=group, group_src=0)\n"
            "    flat = x.detach()",
        ),
    )
)
random_k_mean__does_not_wait = fails("never waits for the handle of")(
    random_k_with(
        (
            "dist.all_reduce(values, group=group)",
            "dist.all_reduce(values, group=group, async_op=True)",
        )
    )
)
random_k_mean__in_place = fails("the function changes x")(
    random_k_with(
        ("return result.view(x.shape)", "x.copy_(result.view(x.shape))\n    return x.clone()")
    )
)
random_k_mean__flat = fails("has shape")(
    random_k_with(("return result.view(x.shape)", "return result"))
)
random_k_mean__float32_only = fails("dtypes match")(
    random_k_with(("dtype=x.dtype", "dtype=torch.float32"))
)
random_k_mean__everything_drawn = fails("Only what was drawn is sent")(
    random_k_with(("result[places] =", "result += flat * (n / k)\n    result[places] ="))
)
random_k_mean__one_by_one = fails("One all_reduce of k numbers")(
    random_k_with(
        (
            "dist.all_reduce(values, group=group)",
            "for value in values.split(1):\n        dist.all_reduce(value, group=group)",
        ),
    )
)
random_k_mean__in_bfloat16 = fails("the result for seed")(
    random_k_with(
        (
            "dist.all_reduce(values, group=group)",
            "values = values.bfloat16()\n"
            "    dist.all_reduce(values, group=group)\n"
            "    values = values.to(x.dtype)",
        ),
    )
)
random_k_mean__seeds_below_1000 = fails("draw the same places")(
    random_k_with(("random.Random(seed)", "random.Random(seed % 1000)"))
)
random_k_mean__seed_in_float32 = fails("draw the same places")(
    random_k_with(("random.Random(seed)", "random.Random(float(np.float32(seed)))"))
)
random_k_mean__enlarges_small_draws_only = fails("it must be scaled by n/k")(
    random_k_with(("n / k / size", "(n / k if 2 * k < n else 1) / size"))
)

# What is kept from one call to the next ----------------------------------------------------

OF_THE_FIRST_CALL = "group=None, kept={}):\n    group = kept.setdefault('group', group)"

compressed_all_reduce__group_of_the_first_call = fails("what all ranks together give")(
    all_reduce_with(("group=None):", OF_THE_FIRST_CALL))
)
compressed_all_reduce__codec_of_the_first_call = fails("something is kept from the call before")(
    all_reduce_with(
        (
            "group=None):",
            "group=None, kept={}):\n"
            "    encode, decode = kept.setdefault('codec', (encode, decode))",
        )
    )
)
random_k_mean__group_of_the_first_call = fails("the mean over all ranks: the group has fewer")(
    random_k_with(("group=None):", OF_THE_FIRST_CALL))
)
