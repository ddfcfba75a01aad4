"""Wrong solutions that people write, and right ones that differ from ours.

See `instructor/05_bucketing_and_overlap/mutants.py`. Time is exact on a virtual clock alone.
"""

import torch
import torch.distributed as dist

from course_lib.checking.mutants import VIRTUAL, edited, fails, passes

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


def staleness_with(*edits):
    return edited(staleness__counting_up, *edits)


FOUND = "found.append(age[worker])"

staleness__one_too_many = fails("the right list plus 1")(
    staleness_with((FOUND, "found.append(age[worker] + 1)"))
)
staleness__counts_its_own_push = fails("expected staleness 0, got 1")(
    staleness_with((FOUND, "pass"), ("age[other] += 1", "age[other] += 1\n            " + FOUND))
)
staleness__since_its_last_push = fails("if each worker pulls right after its push")(
    staleness_with(
        ("age[worker] = 0", "age.setdefault(worker, 0)"),
        ("age[other] += 1", "age[other] += 1\n            age[worker] = 0"),
    )
)
staleness__first_pull_counts = fails("expected staleness")(
    staleness_with(("age[worker] = 0", "age.setdefault(worker, 0)"))
)
staleness__counts_pulls = fails("expected staleness")(
    staleness_with(
        (
            "            age[worker] = 0\n",
            "            age = {w: a + 1 for w, a in age.items()}\n            age[worker] = 0\n",
        ),
        ("                age[other] += 1", "                pass"),
    )
)
staleness__others_only_if_fresh = fails("expected staleness")(
    staleness_with(("age[other] += 1", "age[other] = 1"))
)
staleness__a_tuple = fails("expected a list of 2 ints")(
    staleness_with(("return found", "return tuple(found)"))
)


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


staleness__one_per_event = fails("one for each push")(
    staleness_with(("age[worker] = 0", "age[worker] = 0\n            found.append(0)"))
)
staleness__a_version = fails("the version that was pulled, not how old it is")(
    staleness_with((FOUND, "found.append(len(found) - age[worker])"))
)
staleness__largest_only = fails("expected staleness")(
    staleness_with(("return found", "return [max(found, default=0)] * len(found)"))
)


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


def server_with(*edits):
    return edited(async_server__as_a_class, *edits)


COPY = "[w.detach().clone() for w in self.weights]"
SHARE = "alpha=lr / (1 + age)"
WHEN = "self.updates += 1\n"

async_server__live_weights = fails("weights of pull 0")(server_with((COPY, "self.weights")))
async_server__views = fails("weights of pull 0")(
    server_with((COPY, "[w.detach() for w in self.weights]"))
)
async_server__not_aware = fails("a step that does not divide by 1 + τ")(
    server_with((SHARE, "alpha=lr"))
)
async_server__divides_by_staleness = fails("a fresh gradient has τ = 0")(
    server_with((SHARE, "alpha=lr / max(age, 1)"))
)
async_server__one_too_stale = fails("staleness of push 0: expected 0, got 1")(
    server_with(
        (
            "            age = self.updates - self.seen[worker]\n            self.updates += 1\n",
            "            self.updates += 1\n            age = self.updates - self.seen[worker]\n",
        )
    )
)
async_server__forgets_to_count = fails("staleness of push 1: expected 1, got 0")(
    server_with(("self.updates += 1", "pass"))
)
async_server__one_version_for_all = fails("staleness of push")(
    server_with(("self.seen[worker]", "self.seen[0]"))
)
async_server__pushes_refresh = fails("staleness of push")(
    server_with(
        ("return age", "self.seen[worker] = self.updates\n            return age"),
        (
            "self.seen[worker] = self.updates\n            return [",
            "self.seen.setdefault(worker, 0)\n            return [",
        ),
    )
)
async_server__climbs = fails("a step uphill")(server_with((SHARE, "alpha=-lr / (1 + age)")))
async_server__forgets_the_rate = fails("weights of pull")(
    server_with((SHARE, "alpha=1 / (1 + age)"))
)
async_server__drops_what_is_stale = fails("steps that drop what is stale")(
    server_with((SHARE, "alpha=lr * (age == 0)"))
)
async_server__in_new_memory = fails("weight 0 of the server")(
    server_with(
        (
            "                for w, g in zip(self.weights, gradients, strict=True):\n"
            "                    w.sub_(g, alpha=lr / (1 + age))",
            "                pairs = zip(self.weights, gradients, strict=True)\n"
            "                self.weights = [w - lr / (1 + age) * g for w, g in pairs]",
        )
    )
)
async_server__scales_the_gradient = fails("the function changes gradients")(
    server_with(("w.sub_(g, alpha=lr / (1 + age))", "w.sub_(g.mul_(lr / (1 + age)))"))
)
async_server__returns_nothing = fails("staleness of push 0")(server_with(("return age", "pass")))
async_server__one_memory_for_all_servers = fails("staleness of push")(
    server_with(
        ("(params, lr):", "(params, lr, seen={}):"),
        (
            "self.updates, self.seen = list(params), 0, {}",
            "self.updates, self.seen = list(params), 0, seen",
        ),
    )
)
async_server__counts_the_pushes_of_all_servers = fails("staleness of push")(
    server_with(
        ("(params, lr):", "(params, lr, count=[0]):"),
        ("self.updates - self.seen", "count[0] - self.seen"),
        (WHEN, "count[0] += 1\n"),
        ("self.seen[worker] = self.updates", "self.seen[worker] = count[0]"),
    )
)
async_server__through_float32 = fails("weights of pull")(
    server_with(("w.sub_(g, alpha=", "w.sub_(g.float(), alpha="))
)
async_server__one_function = fails("expected two functions (pull, push)")(
    server_with(("return server.pull, server.push", "return server.push"))
)
async_server__first_weight_only = fails("parameter 1")(
    server_with(("zip(self.weights, gradients, strict=True)", "zip(self.weights[:1], gradients)"))
)

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


def work_with(*edits):
    return edited(work__vector_functions, *edits)


GET = "        dist.recv(incoming, src=server)\n"
PUT = "        torch.nn.utils.vector_to_parameters(incoming.clone(), params)\n"
CLEAR = "        for p in params:\n            p.grad = None\n"
SEND = "dist.send(torch.cat([p.grad.reshape(-1) for p in params]), dst=server)"
BACK = "        loss().backward()\n"

work__own_weights = fails("this worker's own weights from the start")(work_with((PUT, "")))
work__adds_up = fails("a gradient that was added to older ones")(work_with((CLEAR, "")))
work__pushes_weights = fails("weights that were pushed, not of gradients")(
    work_with((SEND, SEND.replace("p.grad.", "p.detach().")))
)
work__computes_before_it_receives = fails("weights at gradient 0")(
    work_with((GET + PUT + CLEAR + BACK, CLEAR + BACK + GET + PUT))
)
work__a_barrier = fails("waits in barrier", only=VIRTUAL)(
    work_with((GET, "        dist.barrier()\n" + GET))
)
work__averages_with_the_others = fails("waits in all_reduce", only=VIRTUAL)(
    work_with((BACK, BACK + "        [dist.all_reduce(p.grad) for p in params]\n"))
)
work__sends_before_it_receives = fails("waits in send", only=VIRTUAL)(
    work_with((GET, "        dist.send(incoming, dst=server)\n" + GET))
)
work__one_round_too_many = fails("waits in recv", only=VIRTUAL)(
    work_with(("range(updates)", "range(updates + 1)"))
)
work__one_round_too_few = fails("waits in recv", only=VIRTUAL)(
    work_with(("range(updates)", "range(updates - 1)"))
)
work__server_is_rank_0 = fails("✗ a straggler, server 3", only=VIRTUAL)(
    work_with(("src=server", "src=0"), ("dst=server", "dst=0"))
)
work__one_message_per_parameter = fails("✗ 2 workers", only=VIRTUAL)(
    work_with((SEND, "[dist.send(p.grad.clone(), dst=server) for p in params]"))
)
work__takes_the_step_itself = fails("server's weights", only=VIRTUAL)(
    work_with((SEND, SEND.replace("p.grad", "(p.detach() - p.grad)")))
)
work__does_not_wait = fails("never waits for the handle of send", only=VIRTUAL)(
    work_with(("dist.send(", "dist.isend("))
)
work__calls_the_loss_twice = fails("loss() is called more than")(
    work_with((BACK, "        loss()\n" + BACK))
)
work__walks_twice = fails("✗ 2 workers")(work_with(("params = list(params)", "params = params")))
work__keeps_the_message = fails("rank 0: weights at gradient 0")(
    work_with(
        (".clone(), params)", ", params)"),
        (BACK, "        incoming.zero_()\n" + BACK),
    )
)

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


backup_server__keeps_references = fails("weights of pull")(
    edited(backup_server__by_sets, ("[g.clone() for g in gradients]", "list(gradients)"))
)
backup_server__late_only_once = fails("counts: expected False, got True")(
    edited(
        backup_server__by_sets,
        ("            return False", "            current.add(worker)\n            return False"),
    )
)


def backup_with(*edits):
    return edited(backup_server__running_sum, *edits)


LATE = 'versions[worker] < state["version"]'
FULL = 'state["count"] == wait_for:'

backup_server__takes_what_is_late = fails("expected False, got True")(backup_with((LATE, "False")))
backup_server__says_late_but_takes_it = fails("a step with a late gradient: discard it")(
    backup_with(
        (
            "            return False\n",
            "            late = True\n        else:\n            late = False\n",
        ),
        ("        return True\n", "        return not late\n"),
    )
)
backup_server__sum = fails("a step with the sum of the gradients")(backup_with((" / wait_for", "")))
backup_server__one_more = fails("waiting for one gradient more")(
    backup_with((FULL, 'state["count"] == wait_for + 1:'))
)
backup_server__every_gradient = fails("push 1 counts: expected True")(backup_with((FULL, "True:")))
backup_server__mean_of_what_is_pulled = fails("weights of pull")(
    backup_with(("/ wait_for", "/ len(versions)"))
)
backup_server__never_clears = fails("weights of pull")(backup_with(("each.zero_()", "pass")))
backup_server__never_counts_anew = fails("weights of pull 4")(
    backup_with(('state["count"] = 0', "pass"))
)
backup_server__no_new_version = fails("expected False")(
    backup_with(('state["version"] += 1', "pass"))
)
backup_server__version_per_push = fails("push 1 counts: expected True")(
    backup_with(('state["count"] += 1', 'state["count"] += 1\n        state["version"] += 1'))
)
backup_server__live_weights = fails("weights of pull")(
    backup_with(("[w.clone() for w in weights]", "weights"))
)
backup_server__weights_at_once = fails("weights of pull")(
    backup_with(
        (
            "            each += g\n",
            "            each += g\n        for w, each in zip(weights, total"
            ", strict=True):\n            w -= lr * each / wait_for\n            each.zero_()\n",
        ),
        ("                w -= lr * each / wait_for\n", "                pass\n"),
    )
)
backup_server__one_gradient_of_each = fails("counts: expected False, got True")(
    edited(
        backup_server__by_sets,
        ("arrived = list(params), set(), []", "arrived = list(params), set(), {}"),
        (
            "arrived.append([g.clone() for g in gradients])",
            "arrived[worker] = [*map(torch.clone, gradients)]",
        ),
        ("zip(*arrived, strict=True)", "zip(*arrived.values(), strict=True)"),
    )
)
backup_server__must_pull_again = fails("expected True, got False")(
    backup_with(('state["count"] += 1', 'versions[worker] = -1; state["count"] += 1'))
)
backup_server__one_memory_for_all_servers = fails("push 1 counts: expected True")(
    backup_with(
        ("wait_for):", 'wait_for, versions={}, state={"version": 0, "count": 0}):'),
        ('    state = {"version": 0, "count": 0}\n    versions = {}\n', ""),
    )
)
backup_server__through_float32 = fails("weights of pull")(
    backup_with(("each += g", "each += g.float()"))
)
backup_server__forgets_the_rate = fails("weights of pull")(backup_with(("lr * each", "each")))
backup_server__returns_nothing = fails("push 0 counts")(backup_with(("return True", "return None")))
backup_server__staleness = fails("push 0 counts: expected True, got int '0'")(
    backup_with(("return True", 'return state["version"] - versions[worker]'))
)
backup_server__reuses_the_gradient = fails("the function changes gradients")(
    backup_with(
        ("            each += g\n", "            each += g.div_(1)\n            g.zero_()\n")
    )
)

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


def diloco_with(*edits):
    return edited(diloco__by_hand, *edits)


MOVED = "(s - p.detach())"
MEAN = "moved /= dist.get_world_size(group)"
OUTER = "s.sub_(delta + momentum * b, alpha=outer_lr)"
REDUCE = "dist.all_reduce(moved, group=group, async_op=True).wait()"

diloco__plain_mean = fails("the plain mean of the weights")(diloco_with((OUTER, "s.sub_(delta)")))
diloco__no_momentum = fails("Nesterov's looks ahead")(
    diloco_with((OUTER, "s.sub_(delta, alpha=outer_lr)"))
)
diloco__not_nesterov = fails("Nesterov's looks ahead")(
    diloco_with((OUTER, "s.sub_(b, alpha=outer_lr)"))
)
diloco__sign_of_the_change = fails("an outer step away from the mean")(
    diloco_with((MOVED, "(p.detach() - s)"))
)
diloco__adds_the_step = fails("an outer step away from the mean")(
    diloco_with((OUTER, "s.add_(delta + momentum * b, alpha=outer_lr)"))
)
diloco__sum = fails("the sum of the changes over the ranks, not their mean")(
    diloco_with((MEAN, "pass"))
)
diloco__rate_of_1 = fails("an outer learning rate of 1")(
    diloco_with((OUTER, "s.sub_(delta + momentum * b)"))
)
diloco__momentum_starts_anew = fails("parameter 0")(diloco_with(("b.mul_(momentum)", "b.mul_(0)")))
diloco__does_not_move_there = fails("parameter 0")(diloco_with(("p.data.copy_(s)", "pass")))
diloco__from_the_last_step = fails("parameter 0")(
    diloco_with(
        (OUTER, "new = s - outer_lr * (delta + momentum * b)"),
        ("p.data.copy_(s)", "p.data.copy_(new)"),
    )
)
diloco__no_communication = fails("after look")(diloco_with((REDUCE, "pass"), (MEAN, "pass")))
diloco__one_step_late = fails("✗ 2 ranks, 3 rounds")(
    diloco_with(("left = every\n\n", "left = every + 1\n\n"))
)
diloco__only_once = fails("parameter 0")(
    diloco_with(("        left = every\n", "        left = -1\n"))
)
diloco__before_the_inner_step = fails("parameter 0")(
    diloco_with(
        (
            "        inner_step()\n        left -= 1\n        if left:\n            return\n",
            "        left -= 1\n        if left:\n            inner_step()\n            return\n",
        ),
        ("            p.data.copy_(s)\n", "            p.data.copy_(s)\n        inner_step()\n"),
    )
)
diloco__in_every_step = fails("Nothing is sent in between")(
    diloco_with(
        (
            "        if left:\n            return\n",
            "        dist.all_reduce(torch.zeros(1), "
            "group=group)\n        if left:\n            return\n",
        )
    )
)
diloco__one_by_one = fails("Nothing is sent in between")(
    diloco_with((REDUCE, "[dist.all_reduce(piece, group=group) for piece in moved.split(2)]"))
)
diloco__sends_the_momentum_too = fails("Nothing is sent in between")(
    diloco_with(
        (REDUCE, REDUCE + "\n        [dist.all_reduce(b.clone(), group=group) for b in buffers]")
    )
)
diloco__whole_world = fails("✗ 4 ranks in two groups")(
    diloco_with(("group=group", "group=None"), ("get_world_size(group)", "get_world_size()"))
)
diloco__world_size_of_all = fails("✗ 4 ranks in two groups")(
    diloco_with(("get_world_size(group)", "get_world_size()"))
)
diloco__averages_gradients = fails("parameter 0")(
    diloco_with((MOVED, "(s - p.detach() if p.grad is None else p.grad)"))
)
diloco__does_not_wait = fails("never waits for the handle")(diloco_with((".wait()", "")))
diloco__two_inner_steps = fails("inner steps: expected")(
    diloco_with(("inner_step()\n", "inner_step()\n        inner_step()\n"))
)
diloco__globals = fails("parameter 0")(
    diloco_with(
        (
            "    left = every\n\n",
            "    left = every\n"
            "    kept = diloco__by_hand.__dict__\n"
            "    kept[dist.get_rank()] = start, buffers, params\n"
            "\n"
            "",
        ),
        (
            "        moved = torch",
            "        start, buffers, params = kept[dist.get_rank()]\n        moved = torch",
        ),
    )
)
diloco__in_new_memory = fails("the parameters' own memory")(
    diloco_with(("p.data.copy_(s)", "p.data = s.clone()"))
)
diloco__aliases = fails("parameter 0")(diloco_with(("p.detach().clone()", "p.detach()")))
diloco__one_momentum_for_all_models = fails("must match the size")(
    diloco_with(
        ("momentum, group=None):", "momentum, group=None, buffers=[]):"),
        (
            "buffers = [torch.zeros_like(p) for p in start]",
            "buffers.extend(map(torch.zeros_like, start))",
        ),
    )
)
diloco__clears_the_gradients = fails("gradients are as they were")(
    diloco_with(("p.data.copy_(s)", "p.data.copy_(s); p.grad = None"))
)
diloco__gathers = fails("this task allows all_reduce only")(
    diloco_with(
        (
            REDUCE,
            "copies = [torch.empty_like(moved) for _ in range(dist.get_world_size(group))]"
            "; dist.all_gather(copies, moved, group=group); moved = sum(copies)",
        )
    )
)
diloco__takes_the_step_itself = fails("diloco returns NoneType, expected a function")(
    diloco_with(("    return step", "    step()"))
)

# What is kept from one call to the next ----------------------------------------------------

async_server__rate_of_the_first_call = fails("something is kept from the call before")(
    server_with(
        ("params, lr):", "params, lr, kept={}):"),
        (SHARE, "alpha=kept.setdefault(0, lr) / (1 + age)"),
    )
)
backup_server__number_of_the_first_call = fails("weights of pull")(
    edited(
        backup_server__running_sum,
        (
            "wait_for):",
            "wait_for, kept={}):\n    wait_for = kept.setdefault('wait_for', wait_for)",
        ),
    )
)
backup_server__who_completes_is_fresh = fails("push 2 counts: expected False, got True")(
    edited(
        backup_server__running_sum,
        ('state["version"] += 1', 'state["version"] += 1\n            versions[worker] += 1'),
    )
)
diloco__group_of_the_first_call = fails("what all ranks together give")(
    diloco_with(
        ("group=None):", "group=None, kept={}):\n    group = kept.setdefault('group', group)")
    )
)
diloco__counts_the_steps_of_all_models = fails("something is kept from the call before")(
    diloco_with(
        ("group=None):", "group=None, count=[0]):"),
        ("        nonlocal left\n", ""),
        (
            "        left -= 1\n        if left:",
            "        count[0] += 1\n        if count[0] % every:",
        ),
        ("        left = every\n        moved", "        moved"),
    )
)
