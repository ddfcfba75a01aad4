"""Wrong solutions that people write, and right ones that differ from ours."""

import torch
import torch.distributed as dist

from course_lib.checking.mutants import VIRTUAL, Mutant, edits_of, passes

# assign_buckets ----------------------------------------------------------------------------


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
    Mutant("forward_order", "in which the parameters were put in", "reversed(", "("),
    Mutant("closes_after_the_cap", "position bytes dtype", "+ param.nbytes >", ">"),
    Mutant("empty_by_bytes", "some are empty", "if bucket and", "if filled and"),
    Mutant("includes_frozen", "some are frozen", "not param.requires_grad:", "False:"),
    Mutant("tied_at_its_last_use", "some are there twice", ".setdefault(param, i)", "[param] = i"),
    Mutant("mixes_dtypes", "two dtypes", "param.dtype", "'any'"),
    Mutant("in_order_of_opening", "their last members", "key=min, reverse=True", "key=bool"),
    Mutant("walks_twice", "a second loop over a generator", "params =", "list(params); params ="),
    Mutant("four_bytes", "two bytes", "param.nbytes", "max(4, param.itemsize) * param.numel()"),
    Mutant("first_cap_above_cap", "the buckets are", "min(cap, first_cap)", "first_cap"),
    Mutant("one_first_bucket", "two dtypes", "first_cap))", "first_cap) if not buckets else cap)"),
    Mutant(
        "remembers_caps",
        "the buckets are",
        "first_cap):",
        "first_cap, kept={}):",
        also=(("min(cap, first_cap)", "min(cap, kept.setdefault(params[-1].shape, first_cap))"),),
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


send_bucket__by_cat_edited = edits_of(
    send_bucket__by_cat,
    Mutant("leaves_inf", "an inf or NaN", "piece.view", "piece.nan_to_num().view"),
    Mutant("sum", "the sum over the ranks", "flat / dist.get_world_size(group)", "flat"),
    Mutant("forgets_to_wait", "never waits for the handle", "work.wait()", "pass"),
    Mutant("waits_at_once", "finish waits", "op=True)", "op=True); work.wait()", VIRTUAL),
    Mutant("whole_world", "over all ranks", "=group", "=None", also=(("size(group)", "size()"),)),
    Mutant("leaves_out", "lacks a", "list(params)", "[p for p in params if p.grad is not None]"),
    Mutant(
        "one_by_one",
        "Send each bucket as one tensor",
        "work = dist.all_reduce(flat, group=group, async_op=True)",
        """
        pieces = flat.split([p.numel() for p in params])
        works = [dist.all_reduce(piece, group=group, async_op=True) for piece in pieces]
        """,
        also=(("work.wait()", "[work.wait() for work in works]"),),
    ),
    Mutant(
        "nothing_to_send_alone",
        None,
        "dist.all_reduce",
        "size > 1 and dist.all_reduce",
        also=(
            ("work.wait()", "work and work.wait()"),
            ("list(params)", "list(params); size = dist.get_world_size(group)"),
        ),
    ),
    Mutant(
        "buffer_by_size",
        "two buckets at once",
        "group=None):",
        "group=None, kept={}):",
        also=(("work =", "flat = kept.setdefault(len(flat), flat.clone()).copy_(flat); work ="),),
    ),
)


# hook_buckets ------------------------------------------------------------------------------


@passes
def hook_buckets__one_order(buckets, group=None):
    number_of = {param: number for number, params in enumerate(buckets) for param in params}
    ready, sent = set(), {}

    def launch(number):
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in buckets[number]]
        flat = torch.cat([grad.detach().flatten() for grad in grads])
        sent[number] = flat, dist.all_reduce(flat, group=group, async_op=True)

    def hook(param):
        ready.add(param)
        while len(sent) < len(buckets) and ready.issuperset(buckets[len(sent)]):
            launch(len(sent))

    def finish():
        for number in range(len(buckets)):
            if number not in sent:
                launch(number)
        for number, (flat, work) in sent.items():
            work.wait()
            params, mean = buckets[number], flat / dist.get_world_size(group)
            for param, piece in zip(params, mean.split([p.numel() for p in params]), strict=True):
                param.grad = piece.view(param.shape)
        ready.clear()
        sent.clear()

    for param in number_of:
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(hook)
    return finish


hook_buckets__one_order_edited = edits_of(
    hook_buckets__one_order,
    Mutant(
        "into_the_gradient_of_the_launch",
        ".grad is replaced",
        "param.grad = piece.view(param.shape)",
        "launched[param].copy_(piece.view(param.shape))",
        also=(
            ("ready, sent = set(), {}", "ready, sent, launched = set(), {}, {}"),
            ("flat = torch.cat", "launched.update(zip(buckets[number], grads)); flat = torch.cat"),
        ),
    ),
    Mutant(
        "too_early",
        "gradient in",
        "post_accumulate_grad_hook(hook)",
        "hook(lambda _, p=param: hook(p))",
    ),
    Mutant("all_in_finish", "in the hook that completes it", "(hook)", "(ready.add)", VIRTUAL),
    Mutant(
        "when_complete",
        "The ranks disagree about collective",
        """
        while len(sent) < len(buckets) and ready.issuperset(buckets[len(sent)]):
            launch(len(sent))
        """,
        """
        if ready.issuperset(buckets[number_of[param]]):
            launch(number_of[param])
        """,
    ),
    Mutant("unused_never_leaves", "waits in all_reduce", "if number not in sent:", "if False:"),
    Mutant("zeros_for_those_left_out", ".grad is not empty", "p.grad is None", "p not in ready"),
    Mutant(
        "shares_its_state",
        "two models at once",
        "group=None):",
        "group=None, ready=set(), sent={}):",
        also=(("ready, sent = set(), {}", ""),),
    ),
    Mutant("keeps_what_was_sent", "the result of the step before", "sent.clear()", "pass"),
    Mutant("drops_inf", "an inf or NaN", "piece.view", "piece.nan_to_num(0, 0, 0).view"),
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
        work = dist.all_reduce(flat, group=group, async_op=True)
        sent.append((flat, work))

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
    Mutant("cap_ignored", "expected in this order", "bucket and filled + param.nbytes", "0"),
    Mutant(
        "only_the_last_backward",
        "the mean of the last micro-batch",
        "local.pop()",
        """
        local.pop()
        for param in params:
            param.grad = None
        """,
    ),
    Mutant("tied_twice", "A tied parameter is in one bucket", "dict.fromkeys(params)", "params"),
    Mutant("no_sync_ignored", "This equals the mean of the first micro-batch", "local:", "False:"),
    Mutant("counts_inside_no_sync", "gradient in", "if local:", "if ready.add(param) or local:"),
    Mutant("waits_in_the_hook", "completes it", "work))", "work)); work.wait()", VIRTUAL),
    Mutant("swallows_exceptions", "swallows an exception", "local.pop()", "local.pop(); return"),
    Mutant("no_finally", "leave no_sync", "try:", "if True:", VIRTUAL, (("finally:", "if True:"),)),
    Mutant("ends_at_the_inner_no_sync", "even after an inner no_sync", "pop", "clear"),
    Mutant(
        "one_counter_for_all_models",
        "one of them always in no_sync",
        "group=None):",
        "group=None, local=[]):",
        VIRTUAL,
        also=(("ready, sent, local = set(), [], []", "ready, sent = set(), []"),),
    ),
)


# frontier ----------------------------------------------------------------------------------


@passes
def frontier__by_sums(durations):
    ends = durations.cumsum(dim=1)
    last = ends.max(dim=0).values
    leaders = ends.argmax(dim=0)
    before = torch.cat([torch.zeros_like(last[:1]), last[:-1]])
    return last - before, leaders


frontier__by_sums_edited = edits_of(
    frontier__by_sums,
    Mutant("mean", "increments", "ends.max(dim=0).values", "ends.mean(dim=0)"),
    Mutant("mean_of_stages", "the means over the ranks", "last - before", "durations.mean(dim=0)"),
    Mutant("longest_of_stages", "the longest duration", "last - before", "durations.amax(dim=0)"),
    Mutant("no_difference", "the frontier itself", "last - before", "last"),
    Mutant("leader_of_the_stage", "leaders", "ends.argmax", "durations.argmax"),
    Mutant("last_rank_on_ties", "leaders", "ends.argmax", "len(ends) - 1 - ends.flip(0).argmax"),
    Mutant("first_to_end", "leaders", "ends.argmax", "ends.argmin"),
    Mutant("sums_over_ranks", "increments", "cumsum(dim=1)", "cumsum(dim=0)"),
    Mutant("one_leader", "leaders", "ends.argmax(dim=0)", "ends[:, -1].argmax().expand(len(last))"),
    Mutant("frontier_without_first", "increments", "last - before", "last.diff()"),
    Mutant("adds_in_place", "durations", "durations.cumsum", "durations.cumsum_"),
)


@passes
def frontier__by_loops(durations):
    ends, increments, leaders, before = [0.0] * len(durations), [], [], 0.0
    for stage in durations.double().T.tolist():
        ends = [end + seconds for end, seconds in zip(ends, stage, strict=True)]
        increments.append(max(ends) - before)
        leaders.append(ends.index(max(ends)))
        before = max(ends)
    return torch.tensor(increments, dtype=durations.dtype), torch.tensor(leaders)


@passes
def frontier__in_memory_of_the_frontier(durations):
    latest, leaders = durations.new_zeros(durations.shape[1]), []
    total = durations.new_zeros(len(durations))
    for s in range(durations.shape[1]):
        total = total + durations[:, s]
        latest[s] = total.max()
        leaders.append(min(r for r in range(len(total)) if total[r] == latest[s]))
    return torch.diff(latest, prepend=latest.new_zeros(1)), torch.tensor(leaders)
