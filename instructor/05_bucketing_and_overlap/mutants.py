"""Wrong solutions that people write, and right ones that differ from ours."""

# ruff: noqa: B006 - people make the mistake of a default that is kept from call to call

import torch
import torch.distributed as dist

from course_lib.checking.mutants import VIRTUAL, Mutant, edits_of, fails, passes

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


assign_buckets__open_buckets_edited = edits_of(
    assign_buckets__open_buckets,
    Mutant(
        "forward_order", "not in reverse order", "reversed(range(len(params))", "range(len(params)"
    ),
    Mutant(
        "closes_after_the_cap",
        "has 32 B, but the first cap of each dtype is min(cap, first_cap) = 16 B",
        "+ param.nbytes >",
        ">",
    ),
    Mutant("all_are_small", "still has room", "[], 0, cap", "[], 0, limit"),
    Mutant(
        "includes_frozen", "is frozen, but a bucket holds it", "not param.requires_grad:", "False:"
    ),
    Mutant(
        "tied_at_its_last_use",
        "are the same tensor: expected only 0",
        ".setdefault(param, i)",
        "[param] = i",
    ),
    Mutant("mixes_dtypes", "has 2 dtypes, expected one", "param.dtype", "'any'"),
    Mutant(
        "in_order_of_opening",
        "not in the order in which they become complete",
        "sorted(buckets, key=min, reverse=True)",
        "buckets",
    ),
    Mutant("walks_twice", "no bucket has parameter", "params =", "len(list(params)); params ="),
    Mutant(
        "four_bytes",
        "two bytes each",
        "param.nbytes",
        "(8 if param.dtype == torch.float64 else 4) * param.numel()",
    ),
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


send_bucket__by_cat_edited = edits_of(
    send_bucket__by_cat,
    Mutant(
        "leaves_inf",
        "an inf on rank 0",
        "flat / dist.get_world_size(group)",
        "(flat / dist.get_world_size(group)).nan_to_num()",
    ),
    Mutant(
        "sum", "the sum over the ranks, not the mean", "flat / dist.get_world_size(group)", "flat"
    ),
    Mutant(
        "divides_what_is_under_way",
        "before its wait()",
        "async_op=True)",
        "async_op=True); flat /= dist.get_world_size(group)",
        ("simulated",),
        also=(("mean = flat / dist.get_world_size(group)", "mean = flat"),),
    ),
    Mutant("forgets_to_wait", "never waits for the handle", "work.wait()", "pass"),
    Mutant(
        "waits_at_once",
        "computes during 0 % of its time in all_reduce",
        "async_op=True)",
        "async_op=True); work.wait()",
        VIRTUAL,
    ),
    Mutant(
        "whole_world",
        "the result over all ranks, not over the group",
        "group=group",
        "group=None",
        also=(("get_world_size(group)", "get_world_size()"),),
    ),
    Mutant(
        "leaves_out_what_is_missing",
        "2 ranks, one without a gradient",
        "list(params)",
        "[p for p in params if p.grad is not None]",
    ),
    Mutant(
        "one_by_one",
        "Send each bucket as one tensor",
        "work = dist.all_reduce(flat, group=group, async_op=True)",
        """
        works = [
            dist.all_reduce(piece, group=group, async_op=True)
            for piece in flat.split([p.numel() for p in params])
        ]
        """,
        also=(("work.wait()", "[work.wait() for work in works]"),),
    ),
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


hook_buckets__one_order_edited = edits_of(
    hook_buckets__one_order,
    Mutant(
        "into_the_gradient_of_the_launch",
        ".grad is replaced",
        "param.grad = piece.view(param.shape)",
        "grads[param].copy_(piece.view(param.shape))",
        also=(
            ("ready, sent = set(), []", "ready, sent, grads = set(), [], {}"),
            (
                "grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]",
                "params[0].grad; [setattr(p, 'grad', torch.zeros_like(p)) for p in params if p.grad"
                " is None]; grads.update((p, p.grad) for p in params)",
            ),
            ("for grad in grads]", "for grad in map(grads.get, params)]"),
        ),
    ),
    Mutant(
        "before_accumulation",
        "gradient in step 0",
        "register_post_accumulate_grad_hook(hook",
        "register_hook(lambda _, p=param: hook(p)",
    ),
    Mutant(
        "all_in_finish",
        "must keep its own bucket",
        "param.register_post_accumulate_grad_hook(hook)",
        "pass",
        VIRTUAL,
    ),
    Mutant(
        "when_complete",
        "The ranks disagree about collective #1",
        "ready, sent = set(), []",
        "ready, sent, order = set(), [], []",
        also=(
            ("params = buckets[len(sent)]", "params = order[len(sent)]"),
            (
                "while len(sent) < len(buckets) and ready.issuperset(buckets[len(sent)]):",
                """
        bucket = buckets[bucket_of[param]]
        if ready.issuperset(bucket):
            order.append(bucket)
        """,
            ),
            (
                "while len(sent) < len(buckets):",
                """
        order.extend(b for b in buckets if all(b is not o for o in order))
        while len(sent) < len(buckets):
        """,
            ),
            ("zip(buckets, sent, strict=True)", "zip(order, sent, strict=True)"),
            ("ready.clear()", "ready.clear(); order.clear()"),
        ),
    ),
    Mutant(
        "unused_never_leaves",
        "waits in all_reduce",
        """
        while len(sent) < len(buckets):
            launch()
        for params, (flat, work) in zip(buckets, sent, strict=True):
        """,
        """
        while False:
            launch()
        for params, (flat, work) in zip(buckets, sent):
        """,
    ),
    Mutant(
        "forgets_what_is_ready",
        "Step 0 is right, but a later step is wrong",
        "ready.clear()",
        "pass",
    ),
    Mutant(
        "zeros_for_those_left_out",
        "leaves one out, .grad is not empty",
        "p.grad is None",
        "p not in ready",
    ),
    Mutant(
        "shares_its_state",
        "2 ranks, two models at once",
        "group=None):",
        "group=None, ready=set(), sent=[]):",
        also=(("ready, sent = set(), []", ""),),
    ),
)


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


data_parallel__all_in_one_edited = edits_of(
    data_parallel__all_in_one,
    Mutant(
        "cap_ignored",
        "but cap and dtypes allow",
        "bucket and filled + param.nbytes > limit",
        "False",
    ),
    Mutant("tied_twice", "a tied parameter in it only once", "dict.fromkeys(params)", "params"),
    Mutant("no_sync_ignored", "This equals the mean of the first micro-batch", "local:", "False:"),
    Mutant(
        "counts_inside_no_sync",
        "gradient in step 0",
        """
        if local:
            return
        ready.add(param)
        """,
        """
        ready.add(param)
        if local:
            return
        """,
    ),
    Mutant(
        "waits_in_the_hook",
        "Launch a bucket in the hook that completes it",
        "sent.append((flat, dist.all_reduce(flat, group=group, async_op=True)))",
        """
        sent.append((flat, dist.all_reduce(flat, group=group, async_op=True)))
        sent[-1][1].wait()
        """,
        VIRTUAL,
    ),
    Mutant(
        "swallows_exceptions",
        "no_sync swallows an exception",
        "finally:",
        """
        except Exception:
            pass
        finally:
        """,
    ),
    Mutant(
        "quiet_after_an_exception",
        "no_sync must also end after one",
        """
        try:
            yield
        finally:
            local.pop()
        """,
        """
        yield
        local.pop()
        """,
        VIRTUAL,
    ),
    Mutant(
        "ends_at_the_inner_no_sync",
        "even after an inner no_sync of the same model has ended",
        "pop",
        "clear",
    ),
    Mutant(
        "one_counter_for_all_models",
        "keep a separate count for each model",
        "group=None):",
        "group=None, local=[]):",
        VIRTUAL,
        also=(("ready, sent, local = set(), [], []", "ready, sent = set(), []"),),
    ),
)


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


hook_buckets__keeps_what_was_sent_edited = edits_of(
    hook_buckets__keeps_what_was_sent,
    Mutant("empties_its_list", None, "missing[:], launched", "sent.clear(); missing[:], launched"),
)
