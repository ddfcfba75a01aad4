"""Wrong solutions that people write, and right ones that differ from ours."""

import torch
import torch.distributed as dist

from course_lib.checking.mutants import VIRTUAL, Mutant, edits_of, passes

# staleness ---------------------------------------------------------------------------------


@passes
def staleness__counting_up(events):
    age, ages = {}, []
    for kind, worker in events:
        if kind == "pull":
            age[worker] = 0
        else:
            ages.append(age[worker])
            for other in age:
                age[other] += 1
    return ages


staleness__counting_up_edited = edits_of(
    staleness__counting_up,
    Mutant("counts_its_own_push", "a gradient's own push", "(age[worker])", "(age[worker] + 1)"),
    Mutant(
        "since_its_last_push",
        "if each worker pulls right after its push",
        "age[worker] = 0",
        "age.setdefault(worker, 0)",
        also=(("ages.append(age[worker])", "ages.append(age[worker]); age[worker] = -1"),),
    ),
    Mutant("one_per_event", "was not asked for", "[worker] = 0", "[worker] = 0; ages.append(0)"),
    Mutant("a_version", "the versions that were pulled", "(age", "(len(ages) - age"),
    Mutant("leaves_out_its_own", "pushes by other workers", "+= 1", "+= other != worker"),
    Mutant(
        "in_a_table",
        "workers with large numbers",
        "for kind, worker in events:",
        "for kind, worker in ((kind, worker % 4096) for kind, worker in events):",
    ),
)


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


async_server__as_a_class_edited = edits_of(
    async_server__as_a_class,
    Mutant("live_weights", "pull must return copies", "w.detach().clone()", "w"),
    Mutant("not_aware", "a step that does not divide by 1 + τ", "alpha=lr / (1 + age)", "alpha=lr"),
    Mutant("divides_by_staleness", "divide by 1 + τ, as τ may be 0", "/ (1 + age", "/ max(age, 1"),
    Mutant("in_new_memory", "weights at the start", "list(params)", "[p.clone() for p in params]"),
    Mutant("for_all_servers", "staleness of push", "0, {}", "0, globals().setdefault(0, {})"),
    Mutant(
        "leaves_out_zeros",
        "staleness of push",
        "self.updates += 1",
        "gradients = list(gradients); self.updates += any(g.any() for g in gradients)",
    ),
    Mutant("leaves_out_nan", "an inf or a NaN", "w.sub_(g,", "w.sub_(g.nan_to_num(),"),
    Mutant("clips", "large gradients", "w.sub_(g,", "w.sub_(g.clamp(-100, 100),"),
    Mutant("clips_inf", "an inf or a NaN", "w.sub_(g,", "w.sub_(g.clamp(-1e4, 1e4),"),
    Mutant(
        "a_push_counts_as_a_pull",
        "staleness of push",
        "self.updates += 1",
        "self.updates += 1; self.seen[worker] = self.updates",
    ),
    Mutant(
        "the_first_pull_counts",
        "staleness of push",
        "self.seen[worker] = self.updates",
        "self.seen.setdefault(worker, self.updates)",
    ),
    Mutant("replaces_the_weights", "replaced", "w.sub_(g, alpha=", "w.data = w.sub(g, alpha="),
)


# work --------------------------------------------------------------------------------------


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


work__vector_functions_edited = edits_of(
    work__vector_functions,
    Mutant("own_weights", "own first weights", "incoming.clone(), params", "incoming, []"),
    Mutant("adds_up", "if a gradient is added to older ones", "p.grad = None", "pass"),
    Mutant("pushes_weights", "if the workers push weights: push gradients", "grad.", "detach()."),
    Mutant("server_is_rank_0", "the server is rank", "=server", "=0", VIRTUAL),
    Mutant("skips_zeros", "in recv", "dist.send", "params[0].grad.any() and dist.send", VIRTUAL),
    Mutant(
        "takes_a_step",
        "weights at the end",
        "dst=server)",
        "dst=server); [p.data.sub_(p.grad) for p in params]",
    ),
)


# backup_server -----------------------------------------------------------------------------


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
            means = [torch.stack(column).mean(0) for column in zip(*arrived, strict=True)]
            for w, mean in zip(weights, means, strict=True):
                w.sub_(mean, alpha=lr)
            arrived.clear()
            current.clear()
        return True

    return pull, push


backup_server__by_sets_edited = edits_of(
    backup_server__by_sets,
    Mutant("keeps_references", "owners have overwritten", "g.clone() for g", "g for g"),
    Mutant("takes_what_is_late", "got True", "if worker not in current", "if False"),
    Mutant("sum", "a step with the sum of the gradients", "mean(0)", "sum(0)"),
    Mutant(
        "who_completes_is_fresh",
        "counts: expected False, got True",
        "current.clear()",
        "current.intersection_update([worker])",
    ),
    Mutant(
        "in_every_push",
        "a part of the step in every push",
        "arrived.append([g.clone() for g in gradients])",
        "arrived.append([g.clone() for g in gradients]); "
        "[w.sub_(g, alpha=lr / wait_for) for w, g in zip(weights, arrived[-1], strict=True)]",
        also=(("w.sub_(mean, alpha=lr)", "pass"),),
    ),
)


# diloco ------------------------------------------------------------------------------------


@passes
def diloco__by_hand(params, inner_step, every, outer_lr, momentum, group=None):
    params = list(params)
    start = [p.detach().clone() for p in params]
    buffers = [torch.zeros_like(p) for p in start]
    count = [0]

    def step():
        inner_step()
        count[0] += 1
        if count[0] % every:
            return
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


diloco__by_hand_edited = edits_of(
    diloco__by_hand,
    Mutant("plain_mean", "the plain mean", "delta + momentum * b, alpha=outer_lr", "delta"),
    Mutant("not_nesterov", "a step of m alone", "(delta + momentum * b, alpha=", "(b, alpha="),
    Mutant("adds_the_step", "weights after step", "s.sub_(delta +", "s.add_(delta +"),
    Mutant("sum", "the sum of the changes", "moved /= dist.get_world_size(group)", "pass"),
    Mutant(
        "in_every_step",
        "call all_reduce once, with all parameters together",
        "inner_step()",
        "inner_step(); dist.all_reduce(torch.zeros(1), group=group)",
    ),
    Mutant("does_not_wait", "never waits for the handle", ".wait()", ""),
    Mutant("clears_the_gradients", ".grad of parameter", "(s)", "(s); p.grad = None"),
    Mutant("one_count_for_all", "other models train", "= [0]", "= globals().setdefault(0, [0])"),
    Mutant("drops_nan", "has a NaN", "moved /= dist", "moved.nan_to_num_(); moved /= dist"),
    Mutant(
        "nothing_to_do",
        "nobody moves in round 2",
        "b.mul_(momentum).add_(delta)",
        "b.mul_(momentum if delta.any() else 0).add_(delta)",
    ),
    Mutant(
        "one_momentum_for_a_shape",
        "weights after step",
        "buffers = [torch.zeros_like(p) for p in start]",
        "m = {p.shape: torch.zeros_like(p) for p in start}; buffers = [m[p.shape] for p in start]",
    ),
)
