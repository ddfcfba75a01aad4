"""Wrong solutions that people write, and right ones that differ from ours.

See `instructor/05_bucketing_and_overlap/mutants.py`. Time is exact only on a virtual clock.
"""

import torch
import torch.distributed as dist

from course_lib.checking.mutants import edits_of, fails, passes

# staleness ---------------------------------------------------------------------------------


@passes
def staleness__by_positions(events):
    events = list(events)
    found = []
    for n, (kind, worker) in enumerate(events):
        if kind == "push":
            last = max(i for i in range(n) if events[i] == ("pull", worker))
            found.append(sum(event[0] == "push" for event in events[last:n]))
    return found


@passes
def staleness__counting_up(events):
    age, found = {}, []
    for kind, worker in events:
        if kind == "pull":
            age[worker] = 0
        else:
            found.append(age[worker])
            for other in age:
                age[other] += 1
    return found


edits_of(staleness__counting_up)("""
one_too_many: the right list plus 1
    found.append(age[worker]) → found.append(age[worker] + 1)
counts_its_own_push: expected staleness 0, got 1
    found.append(age[worker])
    for other in age:
        age[other] += 1
  → pass
  → for other in age:
  →     age[other] += 1
  → found.append(age[worker])
since_its_last_push: if each worker pulls right after its push
    age[worker] = 0 → age.setdefault(worker, 0)
        age[other] += 1
  →     age[other] += 1
  → age[worker] = 0
first_pull_counts: expected staleness
    age[worker] = 0 → age.setdefault(worker, 0)
counts_pulls: expected staleness
    age[worker] = 0 → age = {w: a + 1 for w, a in age.items()}; …
    age[other] += 1 → pass
others_only_if_fresh: expected staleness
    age[other] += 1 → age[other] = 1
a_tuple: expected a list of 2 ints
    return found → return tuple(found)
""")


@fails("expected staleness")
def staleness__of_others_only(events):
    events, last, found = list(events), {}, []
    for at, (kind, worker) in enumerate(events):
        if kind == "pull":
            last[worker] = at
        else:
            since = events[last[worker] : at]
            found.append(sum(each == "push" and other != worker for each, other in since))
    return found


@fails("IndexError")
def staleness__a_hundred_workers(events):
    version, pulled, found = 0, [0] * 100, []
    for kind, worker in events:
        if kind == "pull":
            pulled[worker] = version
        else:
            found.append(version - pulled[worker])
            version += 1
    return found


edits_of(staleness__counting_up)("""
one_per_event: one for each push
    age[worker] = 0 → …; found.append(0)
a_version: the versions that were pulled, not their staleness
    found.append(age[worker]) → found.append(len(found) - age[worker])
largest_only: expected staleness
    return found → return [max(found, default=0)] * len(found)
""")


@fails("course_lib", only=("grader",))
def staleness__imports_the_reference(events):
    import importlib

    update = importlib.import_module("course_lib.asynchronous").Update
    return [update(0, 0, True, 0.0).staleness for kind, _ in events if kind == "push"]


# async_server ------------------------------------------------------------------------------


@passes
def async_server__as_a_class(params, lr):
    class Server:
        def __init__(self):
            self.weights, self.updates, self.seen = list(params), 0, {}

        def pull(self, worker):
            self.seen[worker] = self.updates
            return [w.detach().clone() for w in self.weights]

        def push(self, worker, gradients):
            age = self.updates - self.seen[worker]
            self.updates += 1
            with torch.no_grad():
                for w, g in zip(self.weights, gradients, strict=True):
                    w.sub_(g, alpha=lr / (1 + age))
            return age

    server = Server()
    return server.pull, server.push


@passes
def async_server__with_an_optimizer(params, lr):
    weights = list(params)
    age, optimizer = {}, torch.optim.SGD(weights, lr)

    def pull(worker):
        age[worker] = 0
        return [w.clone() for w in weights]

    def push(worker, gradients):
        mine = age[worker]
        for w, g in zip(weights, gradients, strict=True):
            w.grad = (g / (1 + mine)).clone()
        optimizer.step()
        optimizer.zero_grad()
        for other in age:
            age[other] += 1
        return mine

    return pull, push


edits_of(async_server__as_a_class)("""
live_weights: pull must return copies
    [w.detach().clone() for w in self.weights] → self.weights
views: weights of pull 0
    [w.detach().clone() for w in self.weights] → [w.detach() for w in self.weights]
not_aware: a step that does not divide by 1 + τ
    alpha=lr / (1 + age) → alpha=lr
adds_the_staleness: take γ/(1 + τ)
    alpha=lr / (1 + age) → alpha=lr / 1 + age
divides_by_staleness: divide by 1 + τ, as τ may be 0
    alpha=lr / (1 + age) → alpha=lr / max(age, 1)
one_too_stale: staleness of push 0: expected 0, got 1
    age = self.updates - self.seen[worker]
    self.updates += 1
  → self.updates += 1
  → age = self.updates - self.seen[worker]
forgets_to_count: staleness of push 1: expected 1, got 0
    self.updates += 1 → pass
one_version_for_all: staleness of push
    self.seen[worker] → self.seen[0]
some_workers_share_a_place: staleness of push 2
    self.seen[worker] = self.updates → self.seen[worker % 1024] = self.updates
    self.seen[worker] → self.seen[worker % 1024]
gradients_in_bfloat16: nearly right
    w.sub_(g, → w.sub_(g.bfloat16().to(w.dtype),
pushes_refresh: staleness of push
    self.seen[worker] = self.updates → self.seen.setdefault(worker, 0)
    return age → self.seen[worker] = self.updates; …
climbs: a step uphill
    alpha=lr / (1 + age) → alpha=-lr / (1 + age)
forgets_the_rate: weights of pull
    alpha=lr / (1 + age) → alpha=1 / (1 + age)
drops_what_is_stale: steps that drop stale gradients
    alpha=lr / (1 + age) → alpha=lr * (age == 0)
in_new_memory: weight 0 of the server
    for w, g in zip(self.weights, gradients, strict=True):
        w.sub_(g, alpha=lr / (1 + age))
  → pairs = zip(self.weights, gradients, strict=True)
  → self.weights = [w - lr / (1 + age) * g for w, g in pairs]
scales_the_gradient: the function changes gradients
    w.sub_(g, alpha=lr / (1 + age)) → w.sub_(g.mul_(lr / (1 + age)))
returns_nothing: staleness of push 0
    return age → pass
one_memory_for_all_servers: staleness of push
    async_server__as_a_class(params, lr): → async_server__as_a_class(params, lr, seen={}):
    self.updates, self.seen = list(params), 0, {} → self.updates, self.seen = list(params), 0, seen
counts_the_pushes_of_all_servers: staleness of push
    async_server__as_a_class(params, lr): → async_server__as_a_class(params, lr, count=[0]):
    self.updates - self.seen → count[0] - self.seen
    self.updates += 1 → count[0] += 1
    self.seen[worker] = self.updates → self.seen[worker] = count[0]
through_float32: weights of pull
    w.sub_(g, alpha=lr / (1 + age)) → w.sub_(g.float(), alpha=lr / (1 + age))
one_function: expected two functions (pull, push)
    return server.pull, server.push → return server.push
first_weight_only: parameter 1
    zip(self.weights, gradients, strict=True) → zip(self.weights[:1], gradients)
""")

# work --------------------------------------------------------------------------------------


@passes
def work__with_autograd(params, loss, updates, server):
    params = tuple(params)
    for _ in range(updates):
        message = torch.cat([param.detach().reshape(-1) for param in params])
        dist.irecv(message, server).wait()
        at = 0
        with torch.no_grad():
            for param in params:
                param.copy_(message[at : at + param.numel()].view_as(param))
                at += param.numel()
        gradients = torch.autograd.grad(loss(), params)
        dist.isend(torch.cat([g.reshape(-1) for g in gradients]), server).wait()


@passes
def work__vector_functions(params, loss, updates, server):
    params = list(params)
    incoming = torch.cat([p.detach().reshape(-1) for p in params])
    for _ in range(updates):
        dist.recv(incoming, src=server)
        torch.nn.utils.vector_to_parameters(incoming.clone(), params)
        for p in params:
            p.grad = None
        loss().backward()
        dist.send(torch.cat([p.grad.reshape(-1) for p in params]), dst=server)


edits_of(work__vector_functions)("""
own_weights: this worker's own first weights
    torch.nn.utils.vector_to_parameters(incoming.clone(), params) →
adds_up: if a gradient is added to older ones
    for p in params:
        p.grad = None
  →
pushes_weights: if the workers push weights: push gradients
    grad.reshape → detach().reshape
computes_before_it_receives: weights at gradient 0
    dist.recv(incoming, src=server)
    torch.nn.utils.vector_to_parameters(incoming.clone(), params)
  →
    loss().backward()
  → …
  → dist.recv(incoming, src=server)
  → torch.nn.utils.vector_to_parameters(incoming.clone(), params)
a_barrier (simulated, grader): waits in barrier
    dist.recv(incoming, src=server) → dist.barrier(); …
averages_with_the_others (simulated, grader): waits in all_reduce
    loss().backward() → …; [dist.all_reduce(p.grad) for p in params]
sends_before_it_receives (simulated, grader): waits in send
    dist.recv(incoming, src=server) → dist.send(incoming, dst=server); …
one_round_too_many (simulated, grader): waits in recv
    range(updates) → range(updates + 1)
one_round_too_few (simulated, grader): waits in recv
    range(updates) → range(updates - 1)
server_is_rank_0 (simulated, grader): ✗ a straggler, server 3
    src=server → src=0
    dst=server → dst=0
one_message_per_parameter (simulated, grader): ✗ 2 workers
    dist.send(torch.cat([p.grad.reshape(-1) for p in params]), dst=server)
  → [dist.send(p.grad.clone(), dst=server) for p in params]
takes_the_step_itself (simulated, grader): server's weights
    p.grad.reshape → (p.detach() - p.grad).reshape
does_not_wait (simulated, grader): never waits for the handle of send
    dist.send( → dist.isend(
steps_down_itself: weights at the end (those received last)
    dist.send(torch.cat([p.grad.reshape(-1) for p in params]), dst=server)
  → …
  → for p in params:
  →     p.data -= p.grad
calls_the_loss_twice: loss() is called more than
    loss().backward() → loss(); …
walks_twice: ✗ 2 workers
    params = list(params) → params = params
keeps_the_message: rank 0: weights at gradient 0
    vector_to_parameters(incoming.clone(), params) → vector_to_parameters(incoming, params)
    loss().backward() → incoming.zero_(); …
""")

# backup_server -----------------------------------------------------------------------------


@passes
def backup_server__running_sum(params, lr, wait_for):
    weights = list(params)
    total = [torch.zeros_like(w) for w in weights]
    state = {"version": 0, "count": 0}
    versions = {}

    def pull(worker):
        versions[worker] = state["version"]
        return [w.clone() for w in weights]

    def push(worker, gradients):
        if versions[worker] < state["version"]:
            return False
        for each, g in zip(total, gradients, strict=True):
            each += g
        state["count"] += 1
        if state["count"] == wait_for:
            for w, each in zip(weights, total, strict=True):
                w -= lr * each / wait_for
                each.zero_()
            state["count"] = 0
            state["version"] += 1
        return True

    return pull, push


@passes
def backup_server__by_sets(params, lr, wait_for):
    weights, current, arrived = list(params), set(), []

    def pull(worker):
        current.add(worker)
        return [w.detach().clone() for w in weights]

    def push(worker, gradients):
        if worker not in current:
            return False
        arrived.append([g.clone() for g in gradients])
        if len(arrived) >= wait_for:
            means = [torch.stack(each).mean(0) for each in zip(*arrived, strict=True)]
            for w, mean in zip(weights, means, strict=True):
                w.sub_(mean, alpha=lr)
            arrived.clear()
            current.clear()
        return True

    return pull, push


edits_of(backup_server__by_sets)("""
keeps_references: that their owners have overwritten
    [g.clone() for g in gradients] → list(gradients)
mean_over_the_numbers: one mean over all numbers: take the mean with dim=0
    torch.stack(each).mean(0) → torch.stack(each).mean()
late_only_once: counts: expected False, got True
    return False → current.add(worker); …
""")


edits_of(backup_server__running_sum)("""
takes_what_is_late: expected False, got True
    versions[worker] < state["version"] → False
says_late_but_takes_it: a step with a late gradient: discard it
        return False
  →     late = True
  → else:
  →     late = False
    return True → return not late
sum: a step with the sum of the gradients
    / wait_for →
one_more: push 3 counts: expected True
    state["count"] == wait_for: → state["count"] == wait_for + 1:
every_gradient: push 1 counts: expected True
    state["count"] == wait_for: → True:
as_many_as_workers: a worker may push twice
    state["count"] == wait_for → state["count"] == min(wait_for, len(versions))
mean_of_what_is_pulled: weights of pull
    / wait_for → / len(versions)
never_clears: weights of pull
    each.zero_() → pass
never_counts_anew: weights of pull 4
    state["count"] = 0 → pass
no_new_version: expected False
    state["version"] += 1 → pass
version_per_push: push 1 counts: expected True
    state["count"] += 1 → …; state["version"] += 1
live_weights: weights of pull
    [w.clone() for w in weights] → weights
weights_at_once: a step with each gradient when it comes
    state["count"] += 1
    if state["count"] == wait_for:
        for w, each in zip(weights, total, strict=True):
            w -= lr * each / wait_for
  → for w, each in zip(weights, total, strict=True):
  →     w -= lr * each / wait_for
  →     each.zero_()
  → state["count"] += 1
  → if state["count"] == wait_for:
  →     for w, each in zip(weights, total, strict=True):
  →         pass
""")
edits_of(backup_server__by_sets)("""
one_gradient_of_each: a step with each worker's last gradient only
    arrived = list(params), set(), [] → arrived = list(params), set(), {}
    arrived.append([g.clone() for g in gradients])
  → arrived[worker] = [*map(torch.clone, gradients)]
    zip(*arrived, strict=True) → zip(*arrived.values(), strict=True)
""")
edits_of(backup_server__running_sum)("""
must_pull_again: expected True, got False
    state["count"] += 1 → versions[worker] = -1; …
one_memory_for_all_servers: push 1 counts: expected True
    wait_for): → wait_for, versions={}, state={"version": 0, "count": 0}):
    state = {"version": 0, "count": 0}
    versions = {}
  →
through_float32: weights of pull
    each += g → each += g.float()
forgets_the_rate: weights of pull
    lr * each → each
returns_nothing: push 0 counts
    return True → return None
staleness: push 0 counts: expected True, got int '0'
    return True → return state["version"] - versions[worker]
reuses_the_gradient: the function changes gradients
    each += g
  → each += g.div_(1)
  → g.zero_()
""")

# diloco ------------------------------------------------------------------------------------


@passes
def diloco__with_sgd(params, inner_step, every, outer_lr, momentum, group=None):
    params = list(params)
    held = torch.nn.Parameter(torch.cat([p.detach().reshape(-1) for p in params]))
    outer = torch.optim.SGD([held], outer_lr, momentum=momentum, nesterov=momentum > 0)
    count = [0]

    def step():
        inner_step()
        count[0] += 1
        if count[0] % every == 0:
            change = held.detach() - torch.cat([p.detach().reshape(-1) for p in params])
            dist.all_reduce(change, group=group)
            held.grad = change / dist.get_world_size(group)
            outer.step()
            pieces = held.detach().split([p.numel() for p in params])
            with torch.no_grad():
                for p, piece in zip(params, pieces, strict=True):
                    p.copy_(piece.view_as(p))

    return step


@passes
def diloco__by_hand(params, inner_step, every, outer_lr, momentum, group=None):
    params = list(params)
    start = [p.detach().clone() for p in params]
    buffers = [torch.zeros_like(p) for p in start]
    left = every

    def step():
        nonlocal left
        inner_step()
        left -= 1
        if left:
            return
        left = every
        moved = torch.cat([(s - p.detach()).flatten() for s, p in zip(start, params, strict=True)])
        dist.all_reduce(moved, group=group, async_op=True).wait()
        moved /= dist.get_world_size(group)
        deltas = moved.split([p.numel() for p in params])
        for s, b, p, flat in zip(start, buffers, params, deltas, strict=True):
            delta = flat.view(s.shape)
            b.mul_(momentum).add_(delta)
            s.sub_(delta + momentum * b, alpha=outer_lr)
            p.data.copy_(s)

    return step


edits_of(diloco__by_hand)("""
plain_mean: the plain mean of the weights
    s.sub_(delta + momentum * b, alpha=outer_lr) → s.sub_(delta)
m_of_the_round_before: Nesterov's step is Δ + μ m with the new m
    b.mul_(momentum).add_(delta)
    s.sub_(delta + momentum * b, alpha=outer_lr)
  → s.sub_(delta + momentum * b, alpha=outer_lr)
  → b.mul_(momentum).add_(delta)
remembers_late: weights that were copied after the first inner step
    buffers = [torch.zeros_like(p) for p in start] → …; begun = []
    inner_step()
  → inner_step()
  → if not begun:
  →     begun.append(True)
  →     start[:] = [p.detach().clone() for p in params]
no_momentum: Nesterov's step is
    s.sub_(delta + momentum * b, alpha=outer_lr) → s.sub_(delta, alpha=outer_lr)
not_nesterov: a step of m alone
    s.sub_(delta + momentum * b, alpha=outer_lr) → s.sub_(b, alpha=outer_lr)
sign_of_the_change: an outer step away from the mean
    (s - p.detach()) → (p.detach() - s)
adds_the_step: an outer step away from the mean
    s.sub_(delta + momentum * b, alpha=outer_lr) → s.add_(delta + momentum * b, alpha=outer_lr)
sum: the sum of the changes over the ranks, not their mean
    moved /= dist.get_world_size(group) → pass
rate_of_1: an outer learning rate of 1
    s.sub_(delta + momentum * b, alpha=outer_lr) → s.sub_(delta + momentum * b)
rate_in_float32: ✗ 4 ranks, H = 1
    params = list(params) → …; outer_lr = torch.tensor(outer_lr)
momentum_in_float32: ✗ 4 ranks, H = 1
    params = list(params) → …; momentum = torch.tensor(momentum)
momentum_starts_anew: parameter 0
    b.mul_(momentum) → b.mul_(0)
does_not_move_there: parameter 0
    p.data.copy_(s) → pass
from_the_last_step: parameter 0
    s.sub_(delta + momentum * b, alpha=outer_lr) → new = s - outer_lr * (delta + momentum * b)
    p.data.copy_(s) → p.data.copy_(new)
no_communication: weights after step
    dist.all_reduce(moved, group=group, async_op=True).wait() → pass
    moved /= dist.get_world_size(group) → pass
one_step_late: ✗ 2 ranks, 3 rounds
    buffers = [torch.zeros_like(p) for p in start]
    left = every
  → … + 1
only_once: parameter 0
        return
    left = every
  →     return
  → left = -1
before_the_inner_step: parameter 0
    inner_step()
    left -= 1
    if left:
        return
  → left -= 1
  → if left:
  →     inner_step()
  →     return
        p.data.copy_(s)
  →     p.data.copy_(s)
  → inner_step()
in_every_step: call all_reduce once, with all parameters together
    left -= 1 → …; dist.all_reduce(torch.zeros(1), group=group)
one_by_one: call all_reduce once, with all parameters together
    dist.all_reduce(moved, group=group, async_op=True).wait()
  → [dist.all_reduce(piece, group=group) for piece in moved.split(2)]
sends_the_momentum_too: call all_reduce once, with all parameters together
    dist.all_reduce(moved, group=group, async_op=True).wait()
  → …
  → [dist.all_reduce(b.clone(), group=group) for b in buffers]
whole_world: ✗ 4 ranks in two groups
    group=group → group=None
    get_world_size(group) → get_world_size()
world_size_of_all: divided by the number of all ranks
    get_world_size(group) → get_world_size()
averages_gradients: parameter 0
    (s - p.detach()) → (s - p.detach() if p.grad is None else p.grad)
does_not_wait: never waits for the handle
    .wait() →
two_inner_steps: inner steps: expected
    nonlocal left → …; inner_step()
globals: parameter 0
    buffers = [torch.zeros_like(p) for p in start]
    left = every
  → …
  → kept = diloco__by_hand.__dict__
  → kept[dist.get_rank()] = start, buffers, params
    moved = torch.cat([(s - p.detach()).flatten() for s, p in zip(start, params, strict=True)])
  → start, buffers, params = kept[dist.get_rank()]
  → …
in_new_memory: expected 'kept', got 'replaced: write into the old memory
    p.data.copy_(s) → p.data = s.clone()
aliases: parameter 0
    p.detach().clone() → p.detach()
one_momentum_for_all_models: must match the size
    momentum, group=None): → momentum, group=None, buffers=[]):
    buffers = [torch.zeros_like(p) for p in start] → buffers.extend(map(torch.zeros_like, start))
clears_the_gradients: each .grad: expected 'left alone'
    p.data.copy_(s) → …; p.grad = None
gathers: this task allows all_reduce only
    dist.all_reduce(moved, group=group, async_op=True).wait()
  → copies = [torch.empty_like(moved) for _ in range(dist.get_world_size(group))]
  → dist.all_gather(copies, moved, group=group)
  → moved = sum(copies)
takes_the_step_itself: diloco returns NoneType, expected a function
    return step → step()
""")


# State that is kept between calls ----------------------------------------------------------

edits_of(async_server__as_a_class)("""
rate_of_the_first_call: something is kept from the call before
    async_server__as_a_class(params, lr): → async_server__as_a_class(params, lr, kept={}):
    alpha=lr / (1 + age) → alpha=kept.setdefault(0, lr) / (1 + age)
""")
edits_of(backup_server__running_sum)("""
number_of_the_first_call: weights of pull
    def backup_server__running_sum(params, lr, wait_for):
  → def backup_server__running_sum(params, lr, wait_for, kept={}):
  →     wait_for = kept.setdefault("wait_for", wait_for)
who_completes_is_fresh: push 2 counts: expected False, got True
    state["version"] += 1 → …; versions[worker] += 1
""")
edits_of(diloco__by_hand)("""
group_of_the_first_call: the result over all ranks, not over the group
    def diloco__by_hand(params, inner_step, every, outer_lr, momentum, group=None):
  → def diloco__by_hand(params, inner_step, every, outer_lr, momentum, group=None, kept={}):
  →     group = kept.setdefault("group", group)
counts_the_steps_of_all_models: something is kept from the call before
    group=None): → group=None, count=[0]):
    nonlocal left
    inner_step()
    left -= 1
    if left:
        return
    left = every
  → inner_step()
  → count[0] += 1
  → if count[0] % every:
  →     return
""")
