"""Wrong solutions that people write, and right ones that differ from ours.

Each wrong one must fail for its own reason, each right one must pass. A function is named
``task__mistake``; ``@fails(part)`` says what the report must contain. Most mistakes are one line of
a right solution: ``edited`` writes it in place of another.
"""

# ruff: noqa: B006 - a default that is kept from call to call is a mistake that people make

import torch
import torch.distributed as dist

from course_lib.checking.mutants import edited, fails, passes

TIMED = ("simulated", "grader")
"""Where time is exact: what only takes too long is not found elsewhere."""
HIDDEN_TOO = ("simulated", "grader")
"""Where the hidden cases run."""

# assign_buckets ----------------------------------------------------------------------------


@passes
def assign_buckets__by_dtype(params, cap, first_cap):
    params, seen, by_kind = list(params), set(), {}
    for i, param in enumerate(params):
        if param.requires_grad and id(param) not in seen:
            seen.add(id(param))
            by_kind.setdefault(param.dtype, []).insert(0, i)
    buckets = []
    for indices in by_kind.values():
        room = None
        for i in indices:
            size = params[i].numel() * params[i].element_size()
            if room is None or room < size:
                room = min(cap, first_cap) if room is None else cap
                buckets.append([])
            buckets[-1].append(i)
            room -= size
    return sorted(buckets, key=lambda bucket: -bucket[-1])


@passes
def assign_buckets__open_buckets(params, cap, first_cap):
    params = list(params)
    first = {}
    for i, param in enumerate(params):
        first.setdefault(param, i)
    still_open, buckets = {}, []
    for i in reversed(range(len(params))):
        param = params[i]
        if not param.requires_grad:
            continue
        if first[param] != i:
            continue
        bucket, filled, limit = still_open.get(param.dtype, ([], 0, min(cap, first_cap)))
        if bucket and filled + param.nbytes > limit:
            bucket, filled, limit = [], 0, cap
        if not bucket:
            buckets.append(bucket)
        bucket.append(i)
        still_open[param.dtype] = bucket, filled + param.nbytes, limit
    return sorted(buckets, key=min, reverse=True)


def assign_with(*edits):
    return edited(assign_buckets__open_buckets, *edits)


FULL = "if bucket and filled + param.nbytes > limit:"

assign_buckets__forward_order = fails("not in reverse order")(
    assign_with(("reversed(range(len(params)))", "range(len(params))"))
)
assign_buckets__forward_inside = fails("not in reverse order")(
    assign_with(("sorted(buckets, key=min, reverse=True)", "[sorted(b) for b in buckets]"))
)
assign_buckets__cap_ignored = fails("first_cap is 16 B")(assign_with((FULL, "if False:")))
assign_buckets__closes_after_the_cap = fails(
    "[[5, 4], [3, 2, 1], [0]] has 32 B, first_cap is 16 B"
)(assign_with((FULL, "if bucket and filled > limit:")))
assign_buckets__first_is_not_small = fails("first_cap is 16 B")(
    assign_with(("min(cap, first_cap)", "cap"))
)
assign_buckets__all_are_small = fails("still has room")(assign_with(("[], 0, cap", "[], 0, limit")))
assign_buckets__first_above_the_cap = fails("first_cap is 8 B")(
    assign_with(("min(cap, first_cap)", "first_cap"))
)
assign_buckets__counts_elements = fails("first_cap is 16 B")(
    assign_with(("param.nbytes", "param.numel()"))
)
assign_buckets__one_each = fails("still has room")(assign_with((FULL, "if bucket:")))
assign_buckets__includes_frozen = fails("is frozen, and in a bucket")(
    assign_with(("if not param.requires_grad:", "if False:"))
)
assign_buckets__tied_twice = fails("are one tensor, expected only 0")(
    assign_with(("if first[param] != i:", "if False:"))
)
assign_buckets__tied_at_its_last_use = fails("are one tensor, expected only 0")(
    assign_with(("first.setdefault(param, i)", "first[param] = i"))
)
assign_buckets__mixes_dtypes = fails("has 2 dtypes, expected one")(
    assign_with(("param.dtype", "'any'"))
)
assign_buckets__in_order_of_opening = fails("not in the order in which they are complete")(
    assign_with(("sorted(buckets, key=min, reverse=True)", "buckets"))
)
assign_buckets__drops_what_is_too_large = fails("are in no bucket")(
    assign_with(
        ("if not param.requires_grad:", "if not param.requires_grad or param.nbytes > cap:")
    )
)
assign_buckets__parameters = fails("not made of indices")(
    assign_with(("bucket.append(i)", "bucket.append(param.numel() + 100)"))
)
assign_buckets__walks_twice = fails("are in no bucket")(
    assign_with(("params = list(params)", "len(list(params)); params = list(params)"))
)
assign_buckets__four_bytes = fails("two bytes each")(
    assign_with(("param.nbytes", "(8 if param.dtype == torch.float64 else 4) * param.numel()"))
)
assign_buckets__counts_the_memory = fails("still has room")(
    assign_with(("param.nbytes", "param.untyped_storage().nbytes()"))
)
assign_buckets__empty_ones_are_one = fails("are in no bucket")(
    assign_with(
        ("first.setdefault(param, i)", "first.setdefault(param.data_ptr(), i)"),
        ("first[param] != i", "first[param.data_ptr()] != i"),
    )
)
assign_buckets__large_one_is_not_the_first = fails("the last is larger than the cap")(
    assign_with(("[], 0, cap", "[], 0, limit if filled > limit else cap"))
)
assign_buckets__large_one_aside = fails("one larger than the cap")(
    assign_with(
        (FULL, FULL.replace("limit:", "limit and param.nbytes <= cap:")),
        (
            "if not bucket:",
            "if bucket and param.nbytes > cap:\n            buckets.append([i])\n"
            "            continue\n        if not bucket:",
        ),
    )
)
assign_buckets__tied_counts_twice = fails("still has room")(
    assign_with(
        (
            "if first[param] != i:",
            "if first[param] != i:\n"
            "            bucket, filled, limit = still_open.get(param.dtype, ([], 0, 0))\n"
            "            if bucket:\n"
            "                still_open[param.dtype] = bucket, filled + param.nbytes, limit",
        )
    )
)
assign_buckets__clears_gradients = fails("assign_buckets changes .grad")(
    assign_with(("bucket.append(i)", "bucket.append(i); param.grad = None"))
)
assign_buckets__unfreezes = fails("it keeps something from one call to the next")(
    assign_with(("return sorted", "[p.requires_grad_() for p in params]\n    return sorted"))
)
assign_buckets__keeps_buckets = fails("keeps something from one call to the next")(
    assign_with(
        ("cap, first_cap):", "cap, first_cap, still_open={}):"),
        ("still_open, buckets = {}, []", "buckets = []"),
    )
)
assign_buckets__a_little_over_the_cap = fails("two bytes each")(
    assign_with((FULL, "if bucket and filled + param.nbytes >= limit + 4:"))
)


# send_bucket -------------------------------------------------------------------------------


@passes
def send_bucket__by_cat(params, group=None):
    params = list(params)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
    flat = torch.cat([grad.detach().flatten() for grad in grads])
    work = dist.all_reduce(flat, group=group, async_op=True)

    def finish():
        work.wait()
        mean = flat / dist.get_world_size(group)
        for param, piece in zip(params, mean.split([p.numel() for p in params]), strict=True):
            param.grad = piece.view(param.shape)

    return finish


@passes
def send_bucket__views(params, group=None):
    params = list(params)
    buffer = params[0].new_zeros(sum(param.numel() for param in params)).detach()
    views = [
        piece.view(param.shape)
        for param, piece in zip(params, buffer.split([p.numel() for p in params]), strict=True)
    ]
    for param, view in zip(params, views, strict=True):
        if param.grad is not None:
            torch.div(param.grad, dist.get_world_size(group), out=view)
        param.grad = view
    return dist.all_reduce(buffer, group=group, async_op=True).wait


def send_with(*edits):
    return edited(send_bucket__by_cat, *edits)


START = "work = dist.all_reduce(flat, group=group, async_op=True)"
MEAN = "mean = flat / dist.get_world_size(group)"
GRADS = "[torch.zeros_like(p) if p.grad is None else p.grad for p in params]"

send_bucket__sum = fails("the sum over the ranks, not the mean")(send_with((MEAN, "mean = flat")))
IN_FLIGHT = send_with(
    (START, START + "\n    flat /= dist.get_world_size(group)"), (MEAN, "mean = flat")
)
send_bucket__divides_what_is_under_way = fails("before its wait()", only=["simulated"])(
    edited(IN_FLIGHT)
)
send_bucket__divides_what_is_overwritten = fails("the sum over the ranks", only=["grader"])(
    edited(IN_FLIGHT)
)
send_bucket__divides_twice = fails("divided by the number of ranks once more")(
    send_with((MEAN, MEAN + " / dist.get_world_size(group)"))
)
send_bucket__parameters = fails("a hook gets the parameter")(send_with((GRADS, "params")))
send_bucket__forgets_to_wait = fails("never waits for the handle")(
    send_with(("work.wait()", "pass"))
)
send_bucket__waits_at_once = fails(
    "0 % of the time in all_reduce passes while it computes", only=TIMED
)(send_with((START, START + "; work.wait()")))
send_bucket__starts_in_finish = fails(
    "0 % of the time in all_reduce passes while it computes", only=TIMED
)(send_with((START, "pass"), ("work.wait()", "dist.all_reduce(flat, group=group)")))
send_bucket__whole_world = fails("the mean over all 4 ranks, expected the mean over its group")(
    send_with(("group=group", "group=None"), ("get_world_size(group)", "get_world_size()"))
)
send_bucket__world_size_of_all = fails("4 ranks, in two groups")(
    send_with(("get_world_size(group)", "get_world_size()"))
)
send_bucket__leaves_out_what_is_missing = fails("2 ranks, one without a gradient")(
    send_with(("params = list(params)", "params = [p for p in params if p.grad is not None]"))
)
send_bucket__does_not_write_back = fails("nothing was averaged")(
    send_with(("param.grad = piece.view(param.shape)", "pass"))
)
send_bucket__needs_contiguous_gradients = fails("view size is not compatible")(
    send_with(("grad.detach().flatten()", "grad.detach().view(-1)"))
)
send_bucket__one_by_one = fails("A bucket is one tensor")(
    send_with(
        (
            START,
            "works = [dist.all_reduce(piece, group=group, async_op=True) "
            "for piece in flat.split([p.numel() for p in params])]",
        ),
        ("work.wait()", "[work.wait() for work in works]"),
    )
)
send_bucket__returns_nothing = fails("is NoneType, expected a function")(
    send_with(("return finish", "finish()"))
)
send_bucket__by_all_gather = fails("this task allows all_reduce only")(
    send_with(
        (
            START,
            "copies = [torch.empty_like(flat) for _ in range(dist.get_world_size(group))]; "
            "work = dist.all_gather(copies, flat, group=group, async_op=True)",
        ),
        (MEAN, "mean = sum(copies) / len(copies)"),
    )
)


@fails("2 ranks, two at once")
def send_bucket__one_at_a_time(params, group=None, kept={}):
    params = list(params)
    flat = torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in params]
    )
    kept["params"], kept["flat"] = params, flat.detach()
    kept["work"] = dist.all_reduce(kept["flat"], group=group, async_op=True)

    def finish():
        kept["work"].wait()
        mean = kept["flat"] / dist.get_world_size(group)
        at = 0
        for param in kept["params"]:
            param.grad = mean[at : at + param.numel()].view(param.shape)
            at += param.numel()

    return finish


send_bucket__freezes = fails("changes which parameters require a gradient")(
    send_with(("work.wait()", "work.wait(); [p.requires_grad_(False) for p in params]"))
)

# hook_buckets ------------------------------------------------------------------------------


@passes
def hook_buckets__one_order(buckets, group=None):
    bucket_of = {param: number for number, params in enumerate(buckets) for param in params}
    ready, sent = set(), []

    def launch():
        params = buckets[len(sent)]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
        flat = torch.cat([grad.detach().flatten() for grad in grads])
        sent.append((flat, dist.all_reduce(flat, group=group, async_op=True)))

    def hook(param):
        ready.add(param)
        while len(sent) < len(buckets) and ready.issuperset(buckets[len(sent)]):
            launch()

    def finish():
        while len(sent) < len(buckets):
            launch()
        for params, (flat, work) in zip(buckets, sent, strict=True):
            work.wait()
            mean = flat / dist.get_world_size(group)
            for param, piece in zip(params, mean.split([p.numel() for p in params]), strict=True):
                param.grad = piece.view(param.shape)
        ready.clear()
        sent.clear()

    for param in bucket_of:
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(hook)
    return finish


@passes
def hook_buckets__buffers(buckets, group=None):
    world_size = dist.get_world_size(group)
    state = {"next": 0, "missing": [len(bucket) for bucket in buckets], "works": []}

    def pack(bucket):
        parts = []
        for param in bucket:
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            parts.append((grad / world_size).reshape(-1).detach())
        return torch.cat(parts)

    def advance(all_of_them=False):
        while state["next"] < len(buckets):
            if state["missing"][state["next"]] and not all_of_them:
                return
            flat = pack(buckets[state["next"]])
            state["works"].append((flat, dist.all_reduce(flat, group=group, async_op=True)))
            state["next"] += 1

    def hook_for(number):
        def hook(_):
            state["missing"][number] -= 1
            advance()

        return hook

    def finish():
        advance(all_of_them=True)
        for bucket, (flat, work) in zip(buckets, state["works"], strict=True):
            work.wait()
            start = 0
            for param in bucket:
                param.grad = flat[start : start + param.numel()].reshape(param.shape).clone()
                start += param.numel()
        state.update(next=0, missing=[len(bucket) for bucket in buckets], works=[])

    for number, bucket in enumerate(buckets):
        for param in bucket:
            param.register_post_accumulate_grad_hook(hook_for(number))
    return finish


def hooks_with(*edits):
    return edited(hook_buckets__one_order, *edits)


PUT = "sent.append((flat, dist.all_reduce(flat, group=group, async_op=True)))"
HOOKED = "param.register_post_accumulate_grad_hook(hook)"
AS_FAR = "while len(sent) < len(buckets) and ready.issuperset(buckets[len(sent)]):"
REST = "while len(sent) < len(buckets):"
MEANS = "mean = flat / dist.get_world_size(group)"

hook_buckets__sends_parameters = fails("a hook gets the parameter")(
    hooks_with(("else p.grad for p in params", "else p for p in params"))
)
hook_buckets__before_accumulation = fails("there was no gradient yet in what was sent")(
    hooks_with((HOOKED, "param.register_hook(lambda _, p=param: hook(p))"))
)
hook_buckets__takes_what_is_added = fails("what .grad held before is lost")(
    hooks_with(
        (HOOKED, "param.register_hook(lambda g, p=param: (added.__setitem__(p, g), hook(p))[1])"),
        ("ready, sent = set(), []", "ready, sent, added = set(), [], {}"),
        ("torch.zeros_like(p) if p.grad is None else p.grad", "added.get(p, torch.zeros_like(p))"),
    )
)
hook_buckets__forgets_to_wait = fails("never waits for the handle")(
    hooks_with(("work.wait()", "pass"))
)
hook_buckets__waits_in_the_hook = fails(
    "Launch a bucket in the hook that completes it", only=TIMED
)(hooks_with((PUT, PUT + "; sent[-1][1].wait()")))
hook_buckets__all_in_finish = fails("Launch a bucket in the hook that completes it", only=TIMED)(
    hooks_with((HOOKED, "pass"))
)
hook_buckets__one_for_each_hook = fails(
    "Launch a bucket in the hook that completes it", only=TIMED
)(hooks_with((AS_FAR, AS_FAR.replace("while", "if"))))
hook_buckets__when_complete = fails("The ranks disagree about collective #1")(
    hooks_with(
        ("ready, sent = set(), []", "ready, sent, order = set(), [], []"),
        ("params = buckets[len(sent)]", "params = order[len(sent)]"),
        (
            AS_FAR,
            "bucket = buckets[bucket_of[param]]\n"
            "        if ready.issuperset(bucket):\n"
            "            order.append(bucket)",
        ),
        (
            REST,
            "order.extend(b for b in buckets if all(b is not o for o in order))\n"
            "        while len(sent) < len(buckets):",
        ),
        ("zip(buckets, sent", "zip(order, sent"),
        ("ready.clear()", "ready.clear(); order.clear()"),
    )
)
hook_buckets__sum = fails("the sum over the ranks, not the mean")(
    hooks_with((MEANS, "mean = flat"))
)
hook_buckets__divides_twice = fails("divided by the number of ranks once more")(
    hooks_with((MEANS, MEANS + " / dist.get_world_size(group)"))
)
hook_buckets__whole_world = fails("the mean over all 4 ranks, expected the mean over its group")(
    hooks_with(("group=group", "group=None"), ("get_world_size(group)", "get_world_size()"))
)
hook_buckets__unused_never_leaves = fails("waits in all_reduce")(
    hooks_with((REST, "while False:"), ("zip(buckets, sent, strict=True)", "zip(buckets, sent)"))
)
hook_buckets__does_not_write_back = fails("nothing was averaged")(
    hooks_with(("param.grad = piece.view(param.shape)", "pass"))
)
hook_buckets__forward_order = fails("Buckets leave in one order")(
    hooks_with(("bucket_of = {", "buckets = buckets[::-1]; bucket_of = {"))
)
hook_buckets__never_begins_anew = fails("gradient in step 1 of parameter 0")(
    hooks_with(
        ("        sent.clear()\n", ""),
        ("zip(buckets, sent, strict", "zip(buckets, sent[-len(buckets):], strict"),
    )
)
hook_buckets__forgets_what_is_ready = fails("there was no gradient yet in what was sent")(
    hooks_with(("ready.clear()", "pass"))
)
hook_buckets__per_parameter = fails("Each bucket leaves once per step")(
    hooks_with(
        ("bucket_of = {", "buckets = [[p] for bucket in buckets for p in bucket]; bucket_of = {")
    )
)
hook_buckets__asks_who_used_what = fails("Each bucket leaves once per step")(
    hooks_with(
        (
            "ready.clear()",
            "dist.all_reduce(torch.tensor([float(p in ready) for p in bucket_of]), group=group); "
            "ready.clear()",
        )
    )
)
hook_buckets__in_one_bucket = fails("Buckets leave in one order")(
    hooks_with(("bucket_of = {", "buckets = [sum(buckets, [])]; bucket_of = {"))
)
hook_buckets__returns_nothing = fails("is NoneType, expected a function")(
    hooks_with(("return finish", "pass"))
)
hook_buckets__skips_empty_buckets = fails("The ranks disagree about collective")(
    hooks_with(
        (
            REST + "\n            launch()",
            "for bucket in buckets[len(sent):]:\n"
            "            if all(p.grad is None for p in bucket):\n"
            "                break\n"
            "            launch()",
        ),
        ("zip(buckets, sent, strict=True)", "zip(buckets, sent)"),
    )
)
hook_buckets__zeros_for_those_left_out = fails("leaves one out, .grad is not empty")(
    hooks_with(("if p.grad is None else", "if p not in ready else"))
)
hook_buckets__divides_in_the_hook = fails("leaves one out, .grad is not empty")(
    hooks_with(
        ("ready.add(param)", "ready.add(param); param.grad /= dist.get_world_size(group)"),
        (MEANS, "mean = flat"),
    )
)
hook_buckets__last_member_completes = fails("there was no gradient yet in what was sent")(
    hooks_with((AS_FAR, "while len(sent) < len(buckets) and buckets[len(sent)][-1] in ready:"))
)
hook_buckets__counts_calls = fails("each its own order")(
    hooks_with(
        (
            AS_FAR,
            "while len(sent) < len(buckets) and "
            "len(ready) >= sum(map(len, buckets[: len(sent) + 1])):",
        )
    )
)
hook_buckets__two_steps_only = fails("Launch a bucket in the hook that completes it", only=TIMED)(
    hooks_with(
        ("ready.clear()", "ready.clear(); done.append(1)"),
        ("ready, sent = set(), []", "ready, sent, done = set(), [], []"),
        (AS_FAR, AS_FAR.replace("while ", "while len(done) < 2 and ")),
    )
)
hook_buckets__up_to_four_ranks = fails("gradient in step 0", only=HIDDEN_TOO)(
    hooks_with((MEANS, "mean = flat / min(4, dist.get_world_size(group))"))
)
hook_buckets__shares_its_state = fails("2 ranks, two models at once")(
    hooks_with(
        ("(buckets, group=None):", "(buckets, group=None, ready=set(), sent=[]):"),
        ("    ready, sent = set(), []\n", ""),
    )
)


@fails("3 ranks, nobody uses one, then one rank a bucket")
def hook_buckets__stale_buffers(buckets, group=None):
    flats = [torch.zeros(sum(p.numel() for p in b), dtype=b[0].dtype) for b in buckets]
    views, ready, works = {}, set(), []
    for flat, bucket in zip(flats, buckets, strict=True):
        pieces = flat.split([p.numel() for p in bucket])
        views |= {p: v.view(p.shape) for p, v in zip(bucket, pieces, strict=True)}

    def launch(everything):
        while len(works) < len(buckets) and (everything or ready.issuperset(buckets[len(works)])):
            works.append(dist.all_reduce(flats[len(works)], group=group, async_op=True))

    def hook(param):
        views[param].copy_(param.grad)
        ready.add(param)
        launch(everything=False)

    def finish():
        for param, view in views.items():
            if param not in ready and param.grad is not None:
                view.copy_(param.grad)
        launch(everything=True)
        for work, flat in zip(works, flats, strict=True):
            work.wait()
            flat.div_(dist.get_world_size(group))
        for param, view in views.items():
            param.grad = view.clone()
        ready.clear()
        works.clear()

    for param in views:
        param.register_post_accumulate_grad_hook(hook)
    return finish


# data_parallel -----------------------------------------------------------------------------


@passes
def data_parallel__all_in_one(params, cap, first_cap, group=None):
    from contextlib import contextmanager

    params = [p for p in dict.fromkeys(params) if p.requires_grad]
    still_open, buckets = {}, []
    for param in params[::-1]:
        bucket, filled, limit = still_open.get(param.dtype, ([], 0, min(cap, first_cap)))
        if bucket and filled + param.nbytes > limit:
            bucket, filled, limit = [], 0, cap
        if not bucket:
            buckets.append(bucket)
        bucket.append(param)
        still_open[param.dtype] = bucket, filled + param.nbytes, limit
    place = {param: i for i, param in enumerate(params)}
    buckets.sort(key=lambda bucket: -place[bucket[-1]])
    ready, sent, local = set(), [], []

    def launch():
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in buckets[len(sent)]]
        flat = torch.cat([grad.detach().flatten() for grad in grads])
        sent.append((flat, dist.all_reduce(flat, group=group, async_op=True)))

    def hook(param):
        if local:
            return
        ready.add(param)
        while len(sent) < len(buckets) and ready.issuperset(buckets[len(sent)]):
            launch()

    def finish():
        while len(sent) < len(buckets):
            launch()
        for bucket, (flat, work) in zip(buckets, sent, strict=True):
            work.wait()
            mean = flat / dist.get_world_size(group)
            for param, piece in zip(bucket, mean.split([p.numel() for p in bucket]), strict=True):
                param.grad = piece.view(param.shape)
        ready.clear()
        sent.clear()

    @contextmanager
    def no_sync():
        local.append(True)
        try:
            yield
        finally:
            local.pop()

    for param in params:
        param.register_post_accumulate_grad_hook(hook)
    return finish, no_sync


@passes
def data_parallel__as_a_class(params, cap, first_cap, group=None):
    params = list(params)

    class Bucket:
        def __init__(self, dtype, limit):
            self.dtype, self.limit, self.params, self.nbytes = dtype, limit, [], 0
            self.waiting, self.work, self.flat = set(), None, None

    class Averager:
        def __init__(self):
            self.on, self.buckets, self.number = True, [], {}
            seen = []
            for i, param in enumerate(params):
                if param.requires_grad and not any(param is other for _, other in seen):
                    seen.append((i, param))
            for i, param in reversed(seen):
                self.add(i, param)
            self.buckets.sort(key=lambda bucket: self.number[bucket.params[-1]], reverse=True)
            self.reset()
            for bucket in self.buckets:
                for param in bucket.params:
                    param.register_post_accumulate_grad_hook(
                        lambda p, bucket=bucket: self.arrived(p, bucket)
                    )

        def add(self, i, param):
            mine = [bucket for bucket in self.buckets if bucket.dtype == param.dtype]
            if not mine:
                self.buckets.append(Bucket(param.dtype, min(cap, first_cap)))
            elif mine[-1].nbytes + param.nbytes > mine[-1].limit:
                self.buckets.append(Bucket(param.dtype, cap))
            bucket = [bucket for bucket in self.buckets if bucket.dtype == param.dtype][-1]
            bucket.params.append(param)
            bucket.nbytes += param.nbytes
            self.number[param] = i

        def reset(self):
            for bucket in self.buckets:
                bucket.waiting, bucket.work = set(bucket.params), None

        def arrived(self, param, bucket):
            if self.on:
                bucket.waiting.discard(param)
                self.launch(complete_only=True)

        def launch(self, complete_only):
            for bucket in self.buckets:
                if bucket.work is not None:
                    continue
                if complete_only and bucket.waiting:
                    break
                bucket.flat = torch.cat([self.share(p) for p in bucket.params])
                bucket.work = dist.all_reduce(bucket.flat, group=group, async_op=True)

        def share(self, param):
            if param.grad is None:
                return torch.zeros_like(param).flatten().detach()
            return param.grad.flatten() / dist.get_world_size(group)

        def finish(self):
            self.launch(complete_only=False)
            for bucket in self.buckets:
                bucket.work.wait()
                at = 0
                for param in bucket.params:
                    param.grad = bucket.flat[at : at + param.numel()].view(param.shape)
                    at += param.numel()
            self.reset()

        def no_sync(self):
            averager = self

            class Context:
                def __enter__(self):
                    self.before, averager.on = averager.on, False

                def __exit__(self, *_):
                    averager.on = self.before

            return Context()

    averager = Averager()
    return averager.finish, averager.no_sync


def parallel_with(*edits):
    return edited(data_parallel__all_in_one, *edits)


CLOSES = "if bucket and filled + param.nbytes > limit:"
QUIET = "if local:"
PARAMS = "[p for p in dict.fromkeys(params) if p.requires_grad]"
LAUNCHES = "sent.append((flat, dist.all_reduce(flat, group=group, async_op=True)))"

data_parallel__cap_ignored = fails("where cap and dtypes allow")(
    parallel_with((CLOSES, "if False:"))
)
data_parallel__first_is_not_small = fails("Buckets leave in one order")(
    parallel_with(("min(cap, first_cap)", "cap"))
)
data_parallel__one_bucket_each = fails("Each bucket leaves once per step")(
    parallel_with((CLOSES, "if bucket:"))
)
data_parallel__forward_order = fails("Buckets leave in one order")(
    parallel_with(("params[::-1]", "params"), ("-place[bucket[-1]]", "place[bucket[-1]]"))
)
data_parallel__counts_elements = fails("where cap and dtypes allow")(
    parallel_with(("param.nbytes", "param.numel()"))
)
data_parallel__mixes_dtypes = fails("3 ranks, in two groups, two dtypes")(
    parallel_with(("param.dtype", "'any'"))
)
data_parallel__includes_frozen = fails("RuntimeError")(
    parallel_with((PARAMS, "list(dict.fromkeys(params))"))
)
data_parallel__gives_frozen_a_gradient = fails("expected None")(
    parallel_with(
        (PARAMS, "list(dict.fromkeys(params))"),
        (
            "    for param in params:\n",
            "    for param in (p for p in params if p.requires_grad):\n",
        ),
    )
)
data_parallel__tied_twice = fails("a tied parameter is in it once")(
    parallel_with((PARAMS, "[p for p in params if p.requires_grad]"))
)
data_parallel__tied_at_its_last_use = fails("Buckets leave in one order")(
    parallel_with(("dict.fromkeys(params)", "list(dict.fromkeys(list(params)[::-1]))[::-1]"))
)
data_parallel__no_sync_ignored = fails("This equals the mean of the first micro-batch")(
    parallel_with((QUIET, "if False:"))
)
data_parallel__no_sync_loses_gradients = fails("what .grad held before is lost")(
    parallel_with(("local.pop()", "local.pop(); [setattr(p, 'grad', None) for p in params]"))
)
data_parallel__no_sync_for_ever = fails(
    "Launch a bucket in the hook that completes it", only=TIMED
)(
    parallel_with(
        ("local.pop()", "pass"),
        ("ready, sent, local = set(), [], []", "ready, sent, local = set(), [], [True]"),
    )
)
data_parallel__zeros_for_those_that_are_not_ready = fails(
    "there was no gradient yet in what was sent"
)(parallel_with(("if p.grad is None else p.grad", "if p not in ready else p.grad")))
data_parallel__waits_in_the_hook = fails(
    "Launch a bucket in the hook that completes it", only=TIMED
)(parallel_with((LAUNCHES, LAUNCHES + "; sent[-1][1].wait()")))
data_parallel__sum = fails("the sum over the ranks, not the mean")(
    parallel_with(("mean = flat / dist.get_world_size(group)", "mean = flat"))
)
data_parallel__divides_twice = fails("divided by the number of ranks once more")(
    parallel_with(("get_world_size(group)\n", "get_world_size(group) ** 2\n"))
)
data_parallel__whole_world = fails("the mean over all 4 ranks, expected the mean over its group")(
    parallel_with(("group=group", "group=None"), ("get_world_size(group)", "get_world_size()"))
)
data_parallel__forgets_to_wait = fails("never waits for the handle")(
    parallel_with(("work.wait()", "pass"))
)
data_parallel__divides_what_is_under_way = fails("before its wait()", only=["simulated"])(
    parallel_with(
        (LAUNCHES, LAUNCHES + "\n        flat /= dist.get_world_size(group)"),
        ("mean = flat / dist.get_world_size(group)", "mean = flat"),
    )
)
data_parallel__loses_what_no_sync_gathered = fails("two steps with no_sync")(
    parallel_with(("if p.grad is None else p.grad", "if p not in ready else p.grad"))
)
data_parallel__unused_never_leaves = fails("nothing was averaged")(
    parallel_with(
        (
            "        while len(sent) < len(buckets):\n            launch()\n        for",
            "        for",
        ),
        ("zip(buckets, sent, strict=True)", "zip(buckets, sent)"),
    )
)
data_parallel__returns_finish_only = fails("expected (finish, no_sync)")(
    parallel_with(("return finish, no_sync", "return finish"))
)
data_parallel__no_sync_is_missing = fails("no_sync is NoneType, expected a function")(
    parallel_with(("return finish, no_sync", "return finish, None"))
)
data_parallel__stays_quiet = fails("Launch a bucket in the hook that completes it", only=TIMED)(
    parallel_with(("local.pop()", "pass"))
)
data_parallel__swallows_exceptions = fails("no_sync swallows an exception")(
    parallel_with(
        (
            "            yield\n        finally:",
            "            yield\n        except Exception:\n            pass\n        finally:",
        )
    )
)
data_parallel__quiet_after_an_exception = fails(
    "Launch a bucket in the hook that completes it", only=TIMED
)(
    parallel_with(
        (
            "        try:\n            yield\n        finally:\n            local.pop()",
            "        yield\n        local.pop()",
        )
    )
)
data_parallel__ends_at_the_inner_no_sync = fails("3 ranks, no_sync for two of three")(
    parallel_with(("local.pop()", "local.clear()"))
)
data_parallel__one_flag_for_all_models = fails("two steps with no_sync")(
    parallel_with(
        ("group=None):", "group=None, flag=[False]):"),
        (QUIET, "if flag[0]:"),
        ("local.append(True)", "flag[0] = True"),
        ("local.pop()", "flag[0] = False"),
    )
)
data_parallel__one_counter_for_all_models = fails("another model in no_sync", only=TIMED)(
    parallel_with(
        ("group=None):", "group=None, local=[]):"),
        ("ready, sent, local = set(), [], []", "ready, sent = set(), []"),
    )
)
data_parallel__caps_of_the_first_call = fails("Each bucket leaves once per step")(
    parallel_with(
        (
            "group=None):",
            "group=None, kept={}):\n    cap, first_cap = kept.setdefault('caps', (cap, first_cap))",
        )
    )
)
data_parallel__one_first_bucket = fails("2 ranks, two dtypes, small first buckets")(
    parallel_with(("min(cap, first_cap)))", "cap if still_open else min(cap, first_cap)))"))
)
data_parallel__in_order_of_opening = fails("Buckets leave in one order")(
    parallel_with(("    buckets.sort(key=lambda bucket: -place[bucket[-1]])\n", ""))
)
data_parallel__none_stays_none = fails("some are left out")(
    parallel_with(
        (
            "param.grad = piece.view(param.shape)",
            "param.grad = None if param.grad is None else piece.view(param.shape)",
        )
    )
)
data_parallel__clears_first = fails("two steps with no_sync")(
    parallel_with(
        ("ready, sent, local =", "[setattr(p, 'grad', None) for p in params]; ready, sent, local =")
    )
)
data_parallel__shares_its_state = fails("2 ranks, two models at once")(
    parallel_with(
        ("group=None):", "group=None, ready=set(), sent=[], local=[]):"),
        ("    ready, sent, local = set(), [], []\n", ""),
    )
)


# What is kept from one call to the next ----------------------------------------------------


@fails("expected the mean over its group")
def send_bucket__group_of_the_first_call(params, group=None, kept={}):
    params, group = list(params), kept.setdefault("group", group)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
    flat = torch.cat([grad.detach().reshape(-1) for grad in grads])
    handle = dist.all_reduce(flat, group=group, async_op=True)

    def finish():
        handle.wait()
        mean = flat / dist.get_world_size(group)
        for param, piece in zip(params, mean.split([p.numel() for p in params]), strict=True):
            param.grad = piece.view(param.shape).clone()

    return finish
