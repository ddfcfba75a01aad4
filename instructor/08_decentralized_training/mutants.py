"""Wrong solutions that people write, and right ones that differ from ours.

gloo keeps small messages, so a send without its receive is found only on a virtual clock.
"""

import math

import torch
import torch.distributed as dist

from course_lib.checking.mutants import VIRTUAL, Mutant, edits_of, passes

# metropolis_weights ------------------------------------------------------------------------


@passes
def metropolis_weights__by_sets(links, world_size):
    neighbours = [set() for _ in range(world_size)]
    for i, j in links:
        neighbours[i].add(j)
        neighbours[j].add(i)
    weights = torch.zeros(world_size, world_size, dtype=torch.float64)
    for i in range(world_size):
        for j in neighbours[i]:
            weights[i, j] = 1 / (1 + max(len(neighbours[i]), len(neighbours[j])))
        weights[i, i] = 1 - weights[i].sum()
    return weights


metropolis_weights__by_sets_edited = edits_of(
    metropolis_weights__by_sets,
    Mutant("own_neighbours_only", "with the row's own d", "len(neighbours[j])", "0"),
    Mutant(
        "most_of_all",
        "W[",
        "max(len(neighbours[i]), len(neighbours[j]))",
        "max(map(len, neighbours))",
    ),
    Mutant("without_the_one", "weights of 1/d", "1 / (1 +", "1 / ("),
    Mutant("nothing_for_oneself", "the weights of the links alone", "1 - weights[i].sum()", "0"),
    Mutant("one_direction", "W[", "neighbours[j].add(i)", "pass"),
    Mutant("two_hops", "W[", "return weights", "return weights @ weights"),
    Mutant(
        "counts_a_link_twice",
        "links that are listed twice",
        "[set() for _",
        "[[] for _",
        also=((".add(", ".append("),),
    ),
    Mutant("walks_twice", "a second loop", "neighbours = [", "list(links); neighbours = ["),
)


# start_mixing ------------------------------------------------------------------------------


@passes
def start_mixing__receives_first(tensor, weights, group=None):
    rank, k = dist.get_rank(group), dist.get_world_size(group)
    data = tensor.detach().clone(memory_format=torch.contiguous_format)
    buffers = {j: torch.empty_like(data) for j in range(k) if j != rank and weights[rank, j] > 0}
    works = [dist.irecv(b, group=group, group_src=j) for j, b in buffers.items()]
    for j in range(k):
        if j != rank and weights[j, rank] > 0:
            works.append(dist.isend(data, group=group, group_dst=j))

    def finish():
        for work in works:
            work.wait()
        total = float(weights[rank, rank]) * data
        for j, buffer in buffers.items():
            total = total + float(weights[rank, j]) * buffer
        return total

    return finish


start_mixing__receives_first_edited = edits_of(
    start_mixing__receives_first,
    Mutant("takes_the_column", "rank i needs row i", "rank, k =", "weights = weights.T; rank, k ="),
    Mutant("believes_in_symmetry", "waits in recv", "weights[j, rank", "weights[rank, j", VIRTUAL),
    Mutant("own_tensor_at_weight_1", "its weight is W[i, i]", "float(weights[rank, rank]) * ", ""),
    Mutant("tiny_is_nothing", "without ranks of tiny weight", "> 0", "> 1e-6"),
    Mutant(
        "matrix_of_the_first_call",
        "second tensor",
        "rank, k =",
        "weights = globals().setdefault(weights.shape, weights); rank, k =",
    ),
    Mutant("drops_inf", "an inf or a NaN", "return total", "return total.nan_to_num(0, 0, 0)"),
    Mutant("own_share_of_a_fifth", "expected", "rank, rank]", "rank, rank].clamp(0.2)"),
    Mutant("hears_everybody", "may exchange messages only with", "> 0", ">= 0", VIRTUAL),
    Mutant(
        "waits_at_once",
        "Begin all messages, then compute, then wait",
        "return finish",
        "mean = finish(); return lambda: mean",
        VIRTUAL,
    ),
    Mutant("numbers_for_ranks", "pass group=group to every call", "group_", "", VIRTUAL),
    Mutant(
        "skips_zeros",
        "waits in recv",
        "if j != rank and weights[j, rank] > 0:",
        "if data.any() and j != rank and weights[j, rank] > 0:",
        VIRTUAL,
    ),
)


# decentralized_step ------------------------------------------------------------------------


@passes
def decentralized_step__flat(params, loss, lr, weights, group=None):
    rank, k = dist.get_rank(group), dist.get_world_size(group)
    params = list(params)
    own_vector = torch.cat([p.detach().reshape(-1) for p in params])
    works, heard = [], {}
    for hop in range(1, k):
        to, source = (rank + hop) % k, (rank - hop) % k
        if weights[to, rank]:
            works.append(dist.isend(own_vector, group=group, group_dst=to))
        if weights[rank, source]:
            heard[source] = torch.empty_like(own_vector)
            works.append(dist.irecv(heard[source], group=group, group_src=source))
    for p in params:
        p.grad = None
    loss().backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
    g = torch.cat([gradient.reshape(-1) for gradient in grads])
    for work in works:
        work.wait()
    new = float(weights[rank, rank]) * own_vector - lr * g
    for source, vector in heard.items():
        new = new + float(weights[rank, source]) * vector
    with torch.no_grad():
        for p, piece in zip(params, new.split([p.numel() for p in params]), strict=True):
            p.copy_(piece.view(p.shape))


decentralized_step__flat_edited = edits_of(
    decentralized_step__flat,
    Mutant(
        "mixes_after_the_step",
        "do not mix the gradient",
        "own_vector = torch.cat([p.detach().reshape(-1) for p in params])",
        """
        steps = torch.autograd.grad(loss(), params, materialize_grads=True, allow_unused=True)
        pairs = zip(params, steps, strict=True)
        own_vector = torch.cat([(p - lr * step).detach().reshape(-1) for p, step in pairs])
        """,
        also=(("loss().backward()", "pass"),),
    ),
    Mutant(
        "gradient_at_the_mixed_weights",
        "compute it at the weights before mixing",
        "with torch.no_grad():",
        """
        for p, piece in zip(params, new.split([p.numel() for p in params]), strict=True):
            p.data.copy_(piece.view(p.shape))
        steps = torch.autograd.grad(loss(), params, materialize_grads=True, allow_unused=True)
        new = new - lr * torch.cat([step.reshape(-1) for step in steps])
        with torch.no_grad():
        """,
        also=(("loss().backward()", "pass"),),
    ),
    Mutant("adds_to_old_gradients", "clear .grad before backward", "p.grad = None", "pass"),
    Mutant("calls_the_loss_twice", "calls of loss()", "loss().", "float(loss()); loss()."),
    Mutant("leaves_out_unused", "expected", "shape))", "shape)) if p.grad is not None else None"),
    Mutant("clips_its_gradient", "expected", "lr * g", "lr * g.clamp(-50, 50)"),
    Mutant(
        "in_new_memory",
        "expected 'kept', got 'replaced: write into the old memory",
        "copy_(piece.view(p.shape)",
        "data = piece.view(p.shape).clone(",
    ),
)


# spectral_gap ------------------------------------------------------------------------------


@passes
def spectral_gap__from_the_mean(weights):
    k = len(weights)
    deflated = weights.double() - torch.full((k, k), 1 / k, dtype=torch.float64)
    return 1 - torch.linalg.eigvals(deflated).abs().max()


@passes
def spectral_gap__in_the_dtype_of_the_matrix(weights):
    if len(weights) == 1:
        return torch.tensor(1.0)
    return 1 - torch.linalg.eigvals(weights).abs().sort().values[-2]


spectral_gap__from_the_mean_edited = edits_of(
    spectral_gap__from_the_mean,
    Mutant("the_eigenvalue", "the gap is 1 - |λ₂|", "1 - torch", "torch"),
    Mutant("with_its_sign", "second largest absolute value", "deflated).abs()", "deflated).real"),
    Mutant("singular_values", "gap of matrix", "linalg.eigvals", "linalg.svdvals"),
    Mutant("real_part", "for a complex eigenvalue", ".abs().max()", ".real.abs().max()"),
    Mutant(
        "needs_two_ranks",
        "index 1 is out of bounds",
        "deflated).abs().max()",
        "weights.double()).abs().sort(descending=True).values[1]",
    ),
    Mutant(
        "in_float32",
        "rounded to float32 on the way",
        "double() - torch.full((k, k), 1 / k, dtype=torch.float64",
        "float() - torch.full((k, k), 1 / k",
    ),
    Mutant(
        "of_the_first_matrix",
        "keep nothing between calls",
        "weights.double()",
        "globals().setdefault(len(weights), weights).double()",
    ),
)


# choose_graph ------------------------------------------------------------------------------


@passes
def choose_graph__all_times(candidates, nbytes, latency, bandwidth, tolerance):
    times = []
    for number, weights in enumerate(candidates):
        k = len(weights)
        second = sorted([*torch.linalg.eigvals(weights.double()).abs().tolist(), 0.0])[-2]
        if second >= 1 - 1e-6:
            continue
        steps = 1
        while second**steps > tolerance:
            steps += 1
        sends = max(int((weights[:, j] != 0).sum()) - int(weights[j, j] != 0) for j in range(k))
        times.append((steps * (latency + sends * nbytes / bandwidth), number))
    ring = 2 * (k - 1) * (latency + nbytes / k / bandwidth)
    seconds, number = min(times, default=(math.inf, None))
    return (number, seconds) if seconds < ring else (None, ring)


choose_graph__all_times_edited = edits_of(
    choose_graph__all_times,
    Mutant("whole_tensors_in_the_ring", "each has n/K", "/ k / bandwidth", "/ bandwidth"),
    Mutant("rows_for_columns", "the ranks that rank i hears: count column i", "[:, j] !", "[j] !"),
    Mutant("a_step_less", "round T up", "steps * (lat", "max(1, steps - 1) * (lat"),
    Mutant("below_the_tolerance", "equals the tolerance", "**steps >", "**steps >="),
    Mutant("no_step_at_all", "✗ any mean will do", "steps = 1", "steps = 0"),
    Mutant("sends_to_itself", "seconds", "- int(weights[j, j] != 0)", "+ 0"),
    Mutant("hears_itself_always", "seconds", "int(weights[j, j] != 0)", "1"),
    Mutant("never_the_all_reduce", "seconds: expected", "if seconds < ring", "if True"),
    Mutant(
        "believes_in_agreement",
        "seconds: expected",
        "second >= 1 - 1e-6",
        "False",
        also=(("second**steps > tolerance", "1 - 1e-6 > second**steps > tolerance"),),
    ),
)
