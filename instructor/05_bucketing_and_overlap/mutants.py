"""Wrong solutions that people write, and right ones that differ from ours.

Each wrong one must fail for its own reason, each right one must pass. A function is named
``task__mistake``; ``@fails(part)`` says what the report must contain. Most mistakes change one
line of a right solution: ``edits_of`` gives that line and its replacement.
"""

# ruff: noqa: B006 - people make the mistake of a default that is kept from call to call

import torch
import torch.distributed as dist

from course_lib.checking.mutants import edits_of, fails, passes

"""Where time is exact: what only takes too long is not found elsewhere."""
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


edits_of(assign_buckets__open_buckets)("""
forward_order: not in reverse order
    reversed(range(len(params))) → range(len(params))
forward_inside: not in reverse order
    sorted(buckets, key=min, reverse=True) → [sorted(b) for b in buckets]
cap_ignored: min(cap, first_cap) = 16 B
    if bucket and filled + param.nbytes > limit: → if False:
closes_after_the_cap: has 32 B, but the first cap of each dtype is min(cap, first_cap) = 16 B
    if bucket and filled + param.nbytes > limit: → if bucket and filled > limit:
first_is_not_small: min(cap, first_cap) = 16 B
    min(cap, first_cap) → cap
all_are_small: still has room
    [], 0, cap → [], 0, limit
first_above_the_cap: min(cap, first_cap) = 8 B
    min(cap, first_cap) → first_cap
counts_elements: min(cap, first_cap) = 16 B
    param.nbytes → param.numel()
one_each: still has room
    if bucket and filled + param.nbytes > limit: → if bucket:
includes_frozen: is frozen, but a bucket holds it
    if not param.requires_grad: → if False:
tied_twice: are the same tensor: expected only 0
    if first[param] != i: → if False:
tied_at_its_last_use: are the same tensor: expected only 0
    first.setdefault(param, i) → first[param] = i
mixes_dtypes: has 2 dtypes, expected one
    param.dtype → 'any'
in_order_of_opening: not in the order in which they become complete
    sorted(buckets, key=min, reverse=True) → buckets
drops_what_is_too_large: no bucket has parameter
    if not param.requires_grad: → if not param.requires_grad or param.nbytes > cap:
parameters: expected only indices
    bucket.append(i) → bucket.append(param.numel() + 100)
walks_twice: no bucket has parameter
    params = list(params) → len(list(params)); …
four_bytes: two bytes each
    param.nbytes → (8 if param.dtype == torch.float64 else 4) * param.numel()
counts_the_memory: still has room
    param.nbytes → param.untyped_storage().nbytes()
empty_ones_are_one: no bucket has parameter
    first.setdefault(param, i) → first.setdefault(param.data_ptr(), i)
    first[param] != i → first[param.data_ptr()] != i
large_one_is_not_the_first: the last is larger than the cap
    [], 0, cap → [], 0, limit if filled > limit else cap
large_one_aside: one larger than the cap
    nbytes > limit → nbytes > limit and param.nbytes <= cap
    if not bucket:
  → if bucket and param.nbytes > cap:
  →     buckets.append([i])
  →     continue
  → …
tied_counts_twice: still has room
    if first[param] != i:
  → …
  →     bucket, filled, limit = still_open.get(param.dtype, ([], 0, 0))
  →     if bucket:
  →         still_open[param.dtype] = bucket, filled + param.nbytes, limit
clears_gradients: assign_buckets changes .grad
    bucket.append(i) → …; param.grad = None
unfreezes: it keeps something from one call to the next
    return sorted(buckets, key=min, reverse=True) → [p.requires_grad_() for p in params]; …
keeps_buckets: keeps something from one call to the next
    cap, first_cap): → cap, first_cap, still_open={}):
    still_open, buckets = {}, [] → buckets = []
a_little_over_the_cap: two bytes each
    if bucket and filled + param.nbytes > limit: → if bucket and filled + param.nbytes >= limit + 4:
""")


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


edits_of(send_bucket__by_cat)("""
sum: the sum over the ranks, not the mean
    mean = flat / dist.get_world_size(group) → mean = flat
divides_what_is_under_way (simulated): before its wait()
divides_what_is_overwritten (grader): the sum over the ranks
    work = dist.all_reduce(flat, group=group, async_op=True) → …; flat /= dist.get_world_size(group)
    mean = flat / dist.get_world_size(group) → mean = flat
divides_twice: divided by the number of ranks a second time
    get_world_size(group) → get_world_size(group) / dist.get_world_size(group)
parameters: a hook gets the parameter
    [torch.zeros_like(p) if p.grad is None else p.grad for p in params] → params
forgets_to_wait: never waits for the handle
    work.wait() → pass
waits_at_once (simulated, grader): computes during 0 % of its time in all_reduce
    all_reduce(flat, group=group, async_op=True) → …; work.wait()
starts_in_finish (simulated, grader): computes during 0 % of its time in all_reduce
    work = dist.all_reduce(flat, group=group, async_op=True) → pass
    work.wait() → dist.all_reduce(flat, group=group)
whole_world: the mean over all 4 ranks, expected the mean over its group
    group=group → group=None
    get_world_size(group) → get_world_size()
world_size_of_all: 4 ranks, in two groups
    get_world_size(group) → get_world_size()
leaves_out_what_is_missing: 2 ranks, one without a gradient
    params = list(params) → params = [p for p in params if p.grad is not None]
does_not_write_back: nothing was averaged
    param.grad = piece.view(param.shape) → pass
needs_contiguous_gradients: view size is not compatible
    grad.detach().flatten() → grad.detach().view(-1)
one_by_one: Send each bucket as one tensor
    work = dist.all_reduce(flat, group=group, async_op=True)
  → works = [
  →     dist.all_reduce(piece, group=group, async_op=True)
  →     for piece in flat.split([p.numel() for p in params])
  → ]
    work.wait() → [work.wait() for work in works]
returns_nothing: is NoneType, expected a function
    return finish → finish()
by_all_gather: this task allows all_reduce only
    work = dist.all_reduce(flat, group=group, async_op=True)
  → copies = [torch.empty_like(flat) for _ in range(dist.get_world_size(group))]
  → work = dist.all_gather(copies, flat, group=group, async_op=True)
    mean = flat / dist.get_world_size(group) → mean = sum(copies) / len(copies)
""")


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


edits_of(send_bucket__by_cat)("""
freezes: changes which parameters require a gradient
    work.wait() → …; [p.requires_grad_(False) for p in params]
""")

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


edits_of(hook_buckets__one_order)("""
sends_parameters: a hook gets the parameter
    else p.grad for p in params → else p for p in params
before_accumulation: the bucket was sent before the gradient was in it
    param.register_post_accumulate_grad_hook(hook) → param.register_hook(lambda _, p=param: hook(p))
takes_what_is_added: the earlier numbers in .grad are lost
    param.register_post_accumulate_grad_hook(hook)
  → param.register_hook(lambda g, p=param: (added.__setitem__(p, g), hook(p))[1])
    ready, sent = set(), [] → ready, sent, added = set(), [], {}
    torch.zeros_like(p) if p.grad is None else p.grad → added.get(p, torch.zeros_like(p))
forgets_to_wait: never waits for the handle
    work.wait() → pass
waits_in_the_hook (simulated, grader): Launch a bucket in the hook that completes it
    sent.append((flat, dist.all_reduce(flat, group=group, async_op=True))) → …; sent[-1][1].wait()
all_in_finish (simulated, grader): must keep its own bucket
    param.register_post_accumulate_grad_hook(hook) → pass
one_for_each_hook (simulated, grader): must send all of them, one after the other
    while len(sent) < len(buckets) and → if len(sent) < len(buckets) and
when_complete: The ranks disagree about collective #1
    ready, sent = set(), [] → ready, sent, order = set(), [], []
    params = buckets[len(sent)] → params = order[len(sent)]
    while len(sent) < len(buckets) and ready.issuperset(buckets[len(sent)]):
  → bucket = buckets[bucket_of[param]]
  → if ready.issuperset(bucket):
  →     order.append(bucket)
    while len(sent) < len(buckets):
  → order.extend(b for b in buckets if all(b is not o for o in order))
  → …
    zip(buckets, sent, strict=True) → zip(order, sent, strict=True)
    ready.clear() → …; order.clear()
sum: the sum over the ranks, not the mean
    mean = flat / dist.get_world_size(group) → mean = flat
divides_twice: divided by the number of ranks a second time
    get_world_size(group) → get_world_size(group) / dist.get_world_size(group)
whole_world: the mean over all 4 ranks, expected the mean over its group
    group=group → group=None
    get_world_size(group) → get_world_size()
unused_never_leaves: waits in all_reduce
    while len(sent) < len(buckets): → while False:
    zip(buckets, sent, strict=True) → zip(buckets, sent)
does_not_write_back: nothing was averaged
    param.grad = piece.view(param.shape) → pass
forward_order: Launch the buckets in their order
    bucket_of = { → buckets = buckets[::-1]; …
never_begins_anew: gradient in step 1 of parameter 0
    sent.clear() →
    zip(buckets, sent, strict=True) → zip(buckets, sent[-len(buckets):], strict=True)
forgets_what_is_ready: Step 0 is right, but a later step is wrong
    ready.clear() → pass
per_parameter: Send each bucket only once per step
    bucket_of = { → buckets = [[p] for bucket in buckets for p in bucket]; …
asks_who_used_what: Send each bucket only once per step
    ready.clear()
  → dist.all_reduce(torch.tensor([float(p in ready) for p in bucket_of]), group=group); …
in_one_bucket: Launch the buckets in their order
    bucket_of = { → buckets = [sum(buckets, [])]; …
returns_nothing: is NoneType, expected a function
    return finish → pass
skips_empty_buckets: The ranks disagree about collective
    while len(sent) < len(buckets):
  → for bucket in buckets[len(sent) :]:
  →     if all(p.grad is None for p in bucket):
  →         break
    zip(buckets, sent, strict=True) → zip(buckets, sent)
zeros_for_those_left_out: leaves one out, .grad is not empty
    if p.grad is None else → if p not in ready else
divides_in_the_hook: leaves one out, .grad is not empty
    ready.add(param) → …; param.grad /= dist.get_world_size(group)
    mean = flat / dist.get_world_size(group) → mean = flat
last_member_completes: the bucket was sent before the gradient was in it
    ready.issuperset(buckets[len(sent)]) → buckets[len(sent)][-1] in ready
counts_calls: each its own order
    ready.issuperset(buckets[len(sent)]) → len(ready) >= sum(map(len, buckets[: len(sent) + 1]))
two_steps_only (simulated, grader): Launch a bucket in the hook that completes it
    ready.clear() → …; done.append(1)
    ready, sent = set(), [] → ready, sent, done = set(), [], []
    len(sent) < len(buckets) and → len(done) < 2 and …
up_to_four_ranks (simulated, grader): gradient in step 0
    mean = flat / dist.get_world_size(group) → mean = flat / min(4, dist.get_world_size(group))
shares_its_state: 2 ranks, two models at once
    (buckets, group=None): → (buckets, group=None, ready=set(), sent=[]):
    ready, sent = set(), [] →
""")


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


edits_of(data_parallel__all_in_one)("""
cap_ignored: but cap and dtypes allow
    if bucket and filled + param.nbytes > limit: → if False:
first_is_not_small: Launch the buckets in their order
    min(cap, first_cap) → cap
one_bucket_each: Send each bucket only once per step
    if bucket and filled + param.nbytes > limit: → if bucket:
forward_order: Launch the buckets in their order
    params[::-1] → params
    -place[bucket[-1]] → place[bucket[-1]]
counts_elements: but cap and dtypes allow
    param.nbytes → param.numel()
mixes_dtypes: 3 ranks, in two groups, two dtypes
    param.dtype → 'any'
includes_frozen: RuntimeError
    [p for p in dict.fromkeys(params) if p.requires_grad] → list(dict.fromkeys(params))
gives_frozen_a_gradient: expected None
    [p for p in dict.fromkeys(params) if p.requires_grad] → list(dict.fromkeys(params))
    for param in params: → for param in (p for p in params if p.requires_grad):
tied_twice: a tied parameter in it only once
    [p for p in dict.fromkeys(params) if p.requires_grad] → [p for p in params if p.requires_grad]
tied_at_its_last_use: Launch the buckets in their order
    dict.fromkeys(params) → list(dict.fromkeys(list(params)[::-1]))[::-1]
no_sync_ignored: This equals the mean of the first micro-batch
    if local: → if False:
counts_inside_no_sync: a hook inside no_sync must not count a gradient as complete
    if local:
        return
    ready.add(param)
  → ready.add(param)
  → if local:
  →     return
no_sync_loses_gradients: the earlier numbers in .grad are lost
    local.pop() → …; [setattr(p, 'grad', None) for p in params]
no_sync_for_ever (simulated, grader): must keep its own bucket
    local.pop() → pass
    ready, sent, local = set(), [], [] → ready, sent, local = set(), [], [True]
zeros_for_those_that_are_not_ready: the bucket was sent before the gradient was in it
    if p.grad is None else p.grad → if p not in ready else p.grad
waits_in_the_hook (simulated, grader): Launch a bucket in the hook that completes it
    sent.append((flat, dist.all_reduce(flat, group=group, async_op=True))) → …; sent[-1][1].wait()
sum: the sum over the ranks, not the mean
    mean = flat / dist.get_world_size(group) → mean = flat
divides_twice: divided by the number of ranks a second time
    get_world_size(group) → … ** 2
whole_world: the mean over all 4 ranks, expected the mean over its group
    group=group → group=None
    get_world_size(group) → get_world_size()
forgets_to_wait: never waits for the handle
    work.wait() → pass
divides_what_is_under_way (simulated): before its wait()
    sent.append((flat, dist.all_reduce(flat, group=group, async_op=True)))
  → …
  → flat /= dist.get_world_size(group)
    mean = flat / dist.get_world_size(group) → mean = flat
loses_what_no_sync_gathered: two steps with no_sync
    if p.grad is None else p.grad → if p not in ready else p.grad
unused_never_leaves: nothing was averaged
    while len(sent) < len(buckets):
        launch()
  →
    zip(buckets, sent, strict=True) → zip(buckets, sent)
returns_finish_only: expected (finish, no_sync)
    return finish, no_sync → return finish
no_sync_is_missing: no_sync is NoneType, expected a function
    return finish, no_sync → return finish, None
stays_quiet (simulated, grader): no_sync must also end after one
    local.pop() → pass
swallows_exceptions: no_sync swallows an exception
    finally:
  → except Exception:
  →     pass
  → finally:
quiet_after_an_exception (simulated, grader): no_sync must also end after one
    try:
        yield
    finally:
        local.pop()
  → yield
  → local.pop()
ends_at_the_inner_no_sync: even after an inner no_sync of the same model has ended
    local.pop() → local.clear()
one_flag_for_all_models: two steps with no_sync
    group=None): → group=None, flag=[False]):
    if local: → if flag[0]:
    local.append(True) → flag[0] = True
    local.pop() → flag[0] = False
one_counter_for_all_models (simulated, grader): keep a separate count for each model
    group=None): → group=None, local=[]):
    ready, sent, local = set(), [], [] → ready, sent = set(), []
caps_of_the_first_call: Send each bucket only once per step
    def data_parallel__all_in_one(params, cap, first_cap, group=None):
  → def data_parallel__all_in_one(params, cap, first_cap, group=None, kept={}):
  →     cap, first_cap = kept.setdefault("caps", (cap, first_cap))
one_first_bucket: 2 ranks, two dtypes, small first buckets
    min(cap, first_cap))) → cap if still_open else …
in_order_of_opening: Launch the buckets in their order
    buckets.sort(key=lambda bucket: -place[bucket[-1]]) →
none_stays_none: some are left out
    piece.view → None if param.grad is None else piece.view
clears_first: two steps with no_sync
    ready, sent, local = → [setattr(p, 'grad', None) for p in params]; …
shares_its_state: 2 ranks, two models at once
    group=None): → group=None, ready=set(), sent=[], local=[]):
    ready, sent, local = set(), [], [] →
""")


# State that is kept between calls ----------------------------------------------------------


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


# Lists that are never emptied ------------------------------------------------------------------


@fails("it still works on the buckets of earlier steps")
def hook_buckets__keeps_what_was_sent(buckets, group=None):
    buckets, k = [list(bucket) for bucket in buckets], dist.get_world_size(group)
    number_of = {param: n for n, bucket in enumerate(buckets) for param in bucket}
    missing, launched, sent = [len(bucket) for bucket in buckets], [0], []

    def launch():
        bucket = buckets[launched[0]]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        sent.append((bucket, flat, dist.all_reduce(flat, group=group, async_op=True)))
        launched[0] += 1

    def hook(param):
        missing[number_of[param]] -= 1
        while launched[0] < len(buckets) and missing[launched[0]] == 0:
            launch()

    def finish():
        while launched[0] < len(buckets):
            launch()
        for bucket, flat, handle in sent:
            handle.wait()
            for param, piece in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                param.grad = piece.view(param.shape) / k
        missing[:], launched[0] = [len(bucket) for bucket in buckets], 0

    for param in number_of:
        param.register_post_accumulate_grad_hook(hook)
    return finish


edits_of(hook_buckets__keeps_what_was_sent)("""
empties_its_list passes
    missing[:], launched[0] = → sent.clear(); …
counts_on: Step 0 is right, but a later step is wrong
    missing[:], launched[0] = [len(bucket) for bucket in buckets], 0
  → launched[0] = 0
  → sent.clear()
adds_the_mean: added to this rank's own gradient
    missing[:], launched[0] = → sent.clear(); …
    param.grad = piece.view(param.shape) / k
  → mean = piece.view(param.shape) / k
  → param.grad = mean if param.grad is None else param.grad + mean
""")
