"""Wrong solutions that people write, and right ones that differ from ours.

See `instructor/05_bucketing_and_overlap/mutants.py`. Time is exact only on a virtual clock, and
gloo keeps small messages. So a send without its receive is found only on a virtual clock.
"""

import math

import torch
import torch.distributed as dist

from course_lib.checking.mutants import edits_of, fails, passes

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


@passes
def metropolis_weights__as_lists(links, world_size):
    once = {frozenset(link) for link in links}
    degree = [sum(i in link for link in once) for i in range(world_size)]
    rows = [[0.0] * world_size for _ in range(world_size)]
    for i, j in map(tuple, once):
        rows[i][j] = rows[j][i] = 1 / (1 + max(degree[i], degree[j]))
    for i, row in enumerate(rows):
        row[i] = 1 - sum(row)
    return torch.tensor(rows, dtype=torch.float64)


edits_of(metropolis_weights__by_sets)("""
own_neighbours_only: The weight of a link is
    max(len(neighbours[i]), len(neighbours[j])) → len(neighbours[i])
smaller_number: The weight of a link is
    max(len(neighbours[i]), len(neighbours[j])) → min(len(neighbours[i]), len(neighbours[j]))
without_the_one: the larger number of neighbours
    1 / (1 + → 1 / (
by_the_largest_number: ✗ a star and a pair
    max(len(neighbours[i]), len(neighbours[j])) → max(map(len, neighbours))
by_world_size: the larger number of neighbours
    max(len(neighbours[i]), len(neighbours[j])) → world_size - 1
nothing_for_oneself: row 0 sums to 0.5, expected 1
    weights[i, i] = 1 - weights[i].sum() → pass
own_share_is_the_same: row 0 sums to
    weights[i, i] = 1 - weights[i].sum() → weights[i, i] = 1 / 3
one_direction: W[1, 0] is 0
    neighbours[j].add(i) → pass
counts_links_twice: The weight of a link is
    [set() for _ in range(world_size)] → [[] for _ in range(world_size)]
    .add( → .append(
in_float32: has dtype torch.float32
    world_size, dtype=torch.float64 → world_size
two_hops: are not linked
    return weights → … @ weights
counts_the_links_first: Your code goes through the links twice
    neighbours = [set() for _ in range(world_size)] → …; number = sum(1 for _ in links)
walks_twice: Your code goes through the links twice
    weights = torch.zeros(world_size, world_size, dtype=torch.float64)
  → degree = torch.zeros(world_size)
  → for i, j in links:
  →     degree[i] += 1
  →     degree[j] += 1
  → …
    max(len(neighbours[i]), len(neighbours[j])) → max(degree[i], degree[j]).item()
a_list: expected a float64 tensor of shape [4, 4]
    return weights → return weights.tolist()
""")


@fails("course_lib", only=("grader",))
def metropolis_weights__imports_the_reference(links, world_size):
    import importlib

    return importlib.import_module("course_lib.decentralized").ring_mixing(world_size)


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


@passes
def start_mixing__in_a_batch(tensor, weights, group=None):
    members = dist.get_process_group_ranks(group)
    me = members.index(dist.get_rank())
    flat = tensor.detach().reshape(-1).contiguous()
    heard = [j for j in range(len(members)) if weights[me, j] != 0 and j != me]
    hearing = [j for j in range(len(members)) if weights[j, me] != 0 and j != me]
    rows = flat.new_empty(len(heard), flat.numel())
    calls = [dist.P2POp(dist.isend, flat, members[j], group) for j in hearing]
    calls += [dist.P2POp(dist.irecv, rows[n], members[j], group) for n, j in enumerate(heard)]
    works = dist.batch_isend_irecv(calls) if calls else []

    def finish():
        for work in works:
            work.wait()
        share = weights[me, heard].to(flat.dtype)
        return (weights[me, me].to(flat.dtype) * flat + share @ rows).view(tensor.shape)

    return finish


edits_of(start_mixing__receives_first)("""
takes_the_column: rank i needs row i
    if j != rank and weights[rank, j] > 0} → if j != rank and weights[j, rank] > 0}
    if j != rank and weights[j, rank] > 0: → if j != rank and weights[rank, j] > 0:
    float(weights[rank, j]) * buffer → float(weights[j, rank]) * buffer
weights_of_the_column: with the right ranks, but with the weights of a column
    float(weights[rank, j]) * buffer → float(weights[j, rank]) * buffer
believes_in_symmetry (simulated, grader): waits in recv
    if j != rank and weights[j, rank] > 0: → if j != rank and weights[rank, j] > 0:
own_tensor_at_weight_1: its weight is W[i, i]
    total = float(weights[rank, rank]) * data → total = data
without_its_own_share: without this rank's own
    total = float(weights[rank, rank]) * data → total = torch.zeros_like(data)
plain_sum: the plain sum over the ranks that this rank hears
    float(weights[rank, rank]) → data.clone() if weights[rank, rank] else 0
    float(weights[rank, j]) * buffer → buffer
plain_mean: the plain mean over the ranks that this rank hears
    total = float(weights[rank, rank]) * data → total = data / (1 + len(buffers))
    float(weights[rank, j]) * buffer → buffer / (1 + len(buffers))
neighbours_alike: ✗ 5 ranks, whom it hears weighs differently
    float(weights[rank, j]) * buffer → (1 - float(weights[rank, rank])) / len(buffers) * buffer
little_is_nothing: without ranks of little weight
    rank, k = dist.get_rank(group), dist.get_world_size(group)
  → weights = torch.where(weights > 0.1, weights, 0)
  → …
tiny_is_nothing: without ranks of tiny weight
    rank, k = dist.get_rank(group), dist.get_world_size(group)
  → weights = torch.where(weights > 1e-6, weights, 0)
  → …
talks_to_itself (simulated, grader): sends a message to itself
    j != rank and weights → weights
    total = float(weights[rank, rank]) * data → total = torch.zeros_like(data)
buffers_for_all_calls (simulated): buffer of recv
    group=None): → group=None, kept={}):
    {j: torch.empty_like(data) for → {j: kept.setdefault(j, torch.empty_like(data)) for
adds_nothing: nothing was mixed
    total = float(weights[rank, rank]) * data → total = data.clone()
    float(weights[rank, j]) * buffer → 0 * buffer
ring_only (simulated, grader): may exchange messages only with
    if j != rank and weights[rank, j] > 0} → if k > 1 and j in ((rank + 1) % k, (rank - 1) % k)}
    if j != rank and weights[j, rank] > 0: → if k > 1 and j in ((rank + 1) % k, (rank - 1) % k):
hears_everybody (simulated, grader): may exchange messages only with
    if j != rank and weights[rank, j] > 0} → if j != rank}
    if j != rank and weights[j, rank] > 0: → if j != rank:
sends_before_it_receives (simulated, grader): waits in send
    works = [dist.irecv(b, group=group, group_src=j) for j, b in buffers.items()]
    for j in range(k):
        if j != rank and weights[j, rank] > 0:
            works.append(dist.isend(data, group=group, group_dst=j))
  → works = []
  → for j in range(k):
  →     if j != rank and weights[j, rank] > 0:
  →         dist.send(data, group=group, group_dst=j)
  → for j, b in buffers.items():
  →     dist.recv(b, group=group, group_src=j)
waits_at_once (simulated, grader): Begin all messages, then compute, then wait
    def finish():
  → for work in works:
  →     work.wait()
  → works = []
  → …
begins_in_finish (simulated, grader): Begin all messages, then compute, then wait
    works = [dist.irecv(b, group=group, group_src=j) for j, b in buffers.items()] → works = []
    works.append(dist.isend(data, group=group, group_dst=j)) → pass
    for work in works:
  → for j, b in buffers.items():
  →     works.append(dist.irecv(b, group=group, group_src=j))
  → for j in range(k):
  →     if j != rank and weights[j, rank] > 0:
  →         works.append(dist.isend(data, group=group, group_dst=j))
  → …
does_not_wait (simulated, grader): never waits for the handle
    work.wait() → pass
whole_world (simulated, grader): ✗ 5 ranks, two groups, a line
    get_rank(group) → get_rank()
    get_world_size(group) → get_world_size()
    group=group → group=None
numbers_for_ranks (simulated, grader): ✗ 5 ranks, two groups, a line
    group_src=j → src=j
    group_dst=j → dst=j
even_or_odd_ranks (simulated, grader): is not part of group
    group_src=j → src=j if group is None else 2 * j + dist.get_rank() % 2
    group_dst=j → dst=j if group is None else 2 * j + dist.get_rank() % 2
always_something_of_its_own: ✗ 5 ranks, nothing of its own
    total = float(weights[rank, rank]) * data → total = (float(weights[rank, rank]) or 1.0) * data
in_place: the function changes tensor
    return total → return tensor.copy_(total)
returns_its_input: shares memory with tensor
    total = float(weights[rank, rank]) * data
  → if not buffers and weights[rank, rank] == 1:
  →     return tensor
  → …
contiguous_only: view size is not compatible
    tensor.detach().clone(memory_format=torch.contiguous_format) → tensor.detach().view(-1)
    return total → return total.view(tensor.shape)
in_the_dtype_of_the_matrix: has dtype torch.float64
    return total → return total.to(weights.dtype)
matrix_times_tensors: RuntimeError
    total = float(weights[rank, rank]) * data
  → total = torch.tensordot(weights[rank, rank : rank + 1], data[None], 1)
rounds_to_float16: nearly right
    return total → return total.half().to(data.dtype)
through_float64: has dtype torch.float64
    tensor.detach() → tensor.detach().double()
returns_the_tensor: expected a function
    return finish → return finish()
row_by_row: send one message to each rank that hears this rank
    works = [dist.irecv(b, group=group, group_src=j) for j, b in buffers.items()]
  → works = [
  →     dist.irecv(piece, group=group, group_src=j)
  →     for j, b in buffers.items()
  →     for piece in b.view(-1).split(3)
  → ]
    works.append(dist.isend(data, group=group, group_dst=j))
  → works += [
  →     dist.isend(piece, group=group, group_dst=j) for piece in data.view(-1).split(3)
  → ]
""")


@fails("this task allows send and recv only")
def start_mixing__by_all_gather(tensor, weights, group=None):
    data = tensor.detach().contiguous()
    copies = [torch.empty_like(data) for _ in range(dist.get_world_size(group))]
    work = dist.all_gather(copies, data, group=group, async_op=True)

    def finish():
        work.wait()
        row = weights[dist.get_rank(group)]
        return sum(float(w) * copy for w, copy in zip(row, copies, strict=True))

    return finish


@fails("the mean over all ranks")
def start_mixing__by_all_reduce(tensor, weights, group=None):
    mean = tensor.detach().clone(memory_format=torch.contiguous_format)
    mean /= dist.get_world_size(group)
    work = dist.all_reduce(mean, group=group, async_op=True)

    def finish():
        work.wait()
        return mean

    return finish


# decentralized_step ------------------------------------------------------------------------


@passes
def decentralized_step__flat(params, loss, lr, weights, group=None):
    rank, k = dist.get_rank(group), dist.get_world_size(group)
    params = list(params)
    mine = torch.cat([p.detach().reshape(-1) for p in params])
    works, heard = [], {}
    for hop in range(1, k):
        to, source = (rank + hop) % k, (rank - hop) % k
        if weights[to, rank]:
            works.append(dist.isend(mine, group=group, group_dst=to))
        if weights[rank, source]:
            heard[source] = torch.empty_like(mine)
            works.append(dist.irecv(heard[source], group=group, group_src=source))
    for p in params:
        p.grad = None
    loss().backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
    g = torch.cat([each.reshape(-1) for each in grads])
    for work in works:
        work.wait()
    new = float(weights[rank, rank]) * mine - lr * g
    for source, theirs in heard.items():
        new = new + float(weights[rank, source]) * theirs
    with torch.no_grad():
        for p, piece in zip(params, new.split([p.numel() for p in params]), strict=True):
            p.copy_(piece.view(p.shape))


@passes
def decentralized_step__by_autograd(params, loss, lr, weights, group=None):
    rank, k = dist.get_rank(group), dist.get_world_size(group)
    params = tuple(params)
    vector = torch.cat([param.detach().flatten() for param in params])
    others = [j for j in range(k) if j != rank]
    works = [dist.isend(vector, group=group, group_dst=j) for j in others if weights[j, rank] != 0]
    buffers = {j: torch.empty_like(vector) for j in others if weights[rank, j] != 0}
    works += [dist.irecv(b, group=group, group_src=j) for j, b in buffers.items()]
    grads = torch.autograd.grad(loss(), params, allow_unused=True)
    for work in works:
        work.wait()
    mixed = weights[rank, rank].item() * vector
    for j, buffer in buffers.items():
        mixed += weights[rank, j].item() * buffer
    start = 0
    for param, grad in zip(params, grads, strict=True):
        param.data.copy_(mixed[start : start + param.numel()].view_as(param))
        if grad is not None:
            param.data.sub_(grad, alpha=lr)
        start += param.numel()


edits_of(decentralized_step__flat)("""
mixes_after_the_step: do not mix the gradient
    params = list(params) → …; [setattr(p, "grad", None) for p in params]; loss().backward()
    mine = torch.cat([p.detach().reshape(-1) for p in params])
  → …
  → grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
  → g = torch.cat([each.reshape(-1) for each in grads])
  → mine = mine - lr * g
    for p in params:
        p.grad = None
    loss().backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
    g = torch.cat([each.reshape(-1) for each in grads])
  →
    new = float(weights[rank, rank]) * mine - lr * g → new = float(weights[rank, rank]) * mine
gradient_at_the_mixed_weights: compute it at the weights before mixing
    for p in params:
  → for work in works:
  →     work.wait()
  → new = float(weights[rank, rank]) * mine
  → for source, theirs in heard.items():
  →     new = new + float(weights[rank, source]) * theirs
  → for p, piece in zip(params, new.split([p.numel() for p in params])):
  →     p.data.copy_(piece.view(p.shape))
    for work in works:
        work.wait()
    new = float(weights[rank, rank]) * mine - lr * g
    for source, theirs in heard.items():
        new = new + float(weights[rank, source]) * theirs
  → new = new - lr * g
little_is_nothing: without ranks of little weight
    rank, k = dist.get_rank(group), dist.get_world_size(group)
  → weights = torch.where(weights > 0.1, weights, 0)
  → …
does_not_mix: a step without mixing
    new = float(weights[rank, rank]) * mine - lr * g → new = mine - lr * g
    new = new + float(weights[rank, source]) * theirs → pass
no_gradient: mixing without a step
    - lr * g →
climbs: a step uphill
    - lr * g → + lr * g
matrix_times_tensors: RuntimeError
    float(weights[rank, rank]) * mine → (weights[rank, rank : rank + 1] @ mine[None])
rate_of_a_mean: gradients are not averaged here
    - lr * g → - lr / k * g
forgets_the_rate: with the learning rate 1
    - lr * g → - g
rate_before_the_mean: multiplies the mixing by η, too
    float(weights[rank, rank]) → mine - lr * (1 - float(weights[rank, rank]))
    new + float → new + lr * float
adds_to_old_gradients: clear .grad before backward
    for p in params:
        p.grad = None
  →
computes_first (simulated, grader): Begin all messages, then compute
    params = list(params)
  → …
  → for p in params:
  →     p.grad = None
  → loss().backward()
    for p in params:
        p.grad = None
    loss().backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
  → grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
waits_first (simulated, grader): Begin all messages, then compute
    loss().backward()
  → while works:
  →     works.pop().wait()
  → …
forward_before_the_messages: calls of loss()
    params = list(params) → …; value = loss()
    loss().backward() → value.backward(); …
calls_the_loss_twice: calls of loss()
    loss().backward() → float(loss()); …
unused_needs_a_gradient: ✗ 5 ranks, one parameter unused
    torch.zeros_like(p) if p.grad is None else p.grad → p.grad
leaves_out_the_unused: mix it like the others, with the gradient 0
    p.copy_(piece.view(p.shape)) → … if p.grad is not None else None
in_new_memory: expected 'kept', got 'replaced: write into the old memory
    p.copy_(piece.view(p.shape)) → p.data = piece.view(p.shape).clone()
weights_of_the_column: with the right ranks, but with the weights of a column
    float(weights[rank, source]) → float(weights[source, rank])
column: rank i needs row i
    weights[to, rank] → weights[rank, to]
    weights[rank, source] → weights[source, rank]
mixes_gradients: a step with mixed gradients: mix the weights
    mine = torch.cat([p.detach().reshape(-1) for p in params])
  → [setattr(p, "grad", None) for p in params]
  → loss().backward()
  → w = torch.cat([p.detach().reshape(-1) for p in params])
  → grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
  → g = torch.cat([each.reshape(-1) for each in grads])
  → mine = g
    for p in params:
        p.grad = None
    loss().backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
    g = torch.cat([each.reshape(-1) for each in grads])
  →
    new = float(weights[rank, rank]) * mine - lr * g → new = float(weights[rank, rank]) * mine
    with torch.no_grad():
  → new = w - lr * new
  → …
whole_world (simulated, grader): ✗ 4 ranks, two groups
    get_rank(group) → get_rank()
    get_world_size(group) → get_world_size()
    group=group → group=None
walks_twice: expected a non-empty list of Tensors
    params = list(params) →
does_not_wait (simulated, grader): never waits for the handle
    work.wait() → pass
""")


@fails("send one message to each rank that hears this rank")
def decentralized_step__one_message_per_parameter(params, loss, lr, weights, group=None):
    rank, k = dist.get_rank(group), dist.get_world_size(group)
    params, works, heard = list(params), [], []
    for p in params:
        data = p.detach().clone(memory_format=torch.contiguous_format)
        for j in range(k):
            if j != rank and weights[j, rank]:
                works.append(dist.isend(data, group=group, group_dst=j))
            if j != rank and weights[rank, j]:
                heard.append((p, j, torch.empty_like(data)))
                works.append(dist.irecv(heard[-1][2], group=group, group_src=j))
        p.grad = None
    loss().backward()
    for work in works:
        work.wait()
    with torch.no_grad():
        for p in params:
            p *= float(weights[rank, rank])
            if p.grad is not None:
                p -= lr * p.grad
        for p, j, buffer in heard:
            p += float(weights[rank, j]) * buffer


@fails("this task allows send and recv only")
def decentralized_step__by_all_gather(params, loss, lr, weights, group=None):
    params = list(params)
    for p in params:
        p.grad = None
    mine = torch.cat([p.detach().reshape(-1) for p in params])
    copies = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    work = dist.all_gather(copies, mine, group=group, async_op=True)
    loss().backward()
    work.wait()
    row = weights[dist.get_rank(group)]
    mixed = sum(float(w) * copy for w, copy in zip(row, copies, strict=True))
    with torch.no_grad():
        for p, piece in zip(params, mixed.split([p.numel() for p in params]), strict=True):
            p.copy_(piece.view(p.shape))
            if p.grad is not None:
                p -= lr * p.grad


# spectral_gap ------------------------------------------------------------------------------


@passes
def spectral_gap__from_the_mean(weights):
    k = len(weights)
    rest = weights.double() - torch.full((k, k), 1 / k, dtype=torch.float64)
    return 1 - torch.linalg.eigvals(rest).abs().max()


@passes
def spectral_gap__by_numpy(weights):
    import numpy

    found = sorted(abs(numpy.linalg.eigvals(weights.double().numpy())))
    return 1 - found[-2] if len(found) > 1 else 1


edits_of(spectral_gap__from_the_mean)("""
the_eigenvalue: the gap is 1 - |λ₂|
    1 - torch → torch
of_the_first: spectral gap: expected
    torch.linalg.eigvals(rest).abs().max() → torch.linalg.eigvals(weights.double()).abs().max()
with_its_sign: take the second largest absolute value
    torch.linalg.eigvals(rest).abs().max() → torch.linalg.eigvals(rest).real.max()
of_a_symmetric_matrix: which is for symmetric matrices only
    torch.linalg.eigvals(rest).abs().max() → torch.linalg.eigvalsh(rest).abs().max()
by_eigvalsh: which is for symmetric matrices only
    torch.linalg.eigvals(rest).abs().max()
  → (torch.linalg.eigvalsh(weights.double()).abs().sort().values[-2] if k > 1 else 0)
real_part: for a complex eigenvalue
    torch.linalg.eigvals(rest).abs().max() → torch.linalg.eigvals(rest).real.abs().max()
singular_values: the second singular value: take eigenvalues
    torch.linalg.eigvals(rest).abs().max() → torch.linalg.svdvals(rest).max()
in_the_order_of_torch: spectral gap: expected
    torch.linalg.eigvals(rest).abs().max()
  → (torch.linalg.eigvals(weights.double()).abs()[1] if k > 1 else 0)
needs_two_ranks: index 1 is out of bounds
    eigvals(rest).abs().max() → eigvals(weights.double()).abs().sort(descending=True).values[1]
in_float32: rounded to float32 on the way
    weights.double() → weights.float()
    (k, k), 1 / k, dtype=torch.float64 → (k, k), 1 / k
smallest: spectral gap: expected
    torch.linalg.eigvals(rest).abs().max() → torch.linalg.eigvals(weights.double()).abs().min()
complex: expected the number
    abs().max() → max() if k < 0 else torch.linalg.eigvals(rest)[0]
by_the_formula_of_a_ring: spectral gap: expected
    torch.linalg.eigvals(rest).abs().max() → (1 + 2 * math.cos(2 * math.pi / k)) / 3
clears_the_matrix: the function changes the matrix
    return 1 - torch.linalg.eigvals(rest).abs().max()
  → gap = 1 - torch.linalg.eigvals(rest).abs().max()
  → weights.zero_()
  → return gap
changes_the_matrix: changes the matrix
    k = len(weights) → …; weights = weights.fill_diagonal_(0)
""")

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


@passes
def choose_graph__with_a_dictionary(candidates, nbytes, latency, bandwidth, tolerance):
    found = {}
    for number, weights in enumerate(candidates):
        k = weights.shape[0]
        found.setdefault(None, 2 * (k - 1) * (latency + nbytes / (k * bandwidth)))
        rest = torch.linalg.eigvals(weights.double() - 1 / k).abs().max().item()
        links = weights.clone().fill_diagonal_(0) != 0
        step = latency + int(links.sum(dim=0).max()) * nbytes / bandwidth
        if rest < 1 - 1e-6:
            needed = math.log(tolerance) / math.log(rest) if rest > 1e-12 else 0
            found[number] = max(1, math.ceil(needed)) * step
    best = min(found, key=found.get)
    return best, found[best]


edits_of(choose_graph__all_times)("""
whole_tensors_in_the_ring: each has n/K
    nbytes / k / bandwidth → nbytes / bandwidth
one_step_for_all: seconds: expected
    while second**steps > tolerance:
        steps += 1
  →
always_one_less: subtract 1 for a rank's own weight
    int(weights[j, j] != 0) → 1
one_step_less: the time of one step less: round T up
    second**steps > → second ** (steps + 1) >
one_step_more: may be equal to tolerance
    while second**steps > tolerance:
        steps += 1
  → steps = int(math.log(tolerance) / math.log(max(second, 1e-99))) + 1
fraction_of_a_step: round T up to a whole number
    while second**steps > tolerance:
        steps += 1
  → steps = max(1, math.log(tolerance) / math.log(max(second, 1e-99)))
one_message: sends one message in a step
    max(int((weights[:, j] != 0).sum()) - int(weights[j, j] != 0) for j in range(k)) → 1
counts_itself: also sends a message to itself
    int((weights[:, j] != 0).sum()) - int(weights[j, j] != 0) → int((weights[:, j] != 0).sum())
first_column: if only the messages of rank 0 are counted
    for j in range(k)) → for j in range(1))
slow_is_never: ✗ forty in a line
    1 - 1e-6 → 1 - 1e-2
number_of_rank_0: ✗ a star in the middle
    for j in range(k)) → for j in (1,))
one_latency_per_message: seconds: expected
    (latency + sends * nbytes / bandwidth) → sends * (latency + nbytes / bandwidth)
rows_for_columns: the ranks that rank i hears: count column i
    (weights[:, j] != 0) → (weights[j] != 0)
singular_values: ✗ rows unlike columns
    torch.linalg.eigvals(weights.double()).abs() → torch.linalg.svdvals(weights.double())
whole_bytes: ✗ three bytes
    nbytes / k / bandwidth → nbytes // k / bandwidth
half_a_ring: it sends 2 (K - 1)
    2 * (k - 1) → (k - 1)
ring_of_whole_tensors: ✗ no time for gossip
    nbytes / k / bandwidth → nbytes / bandwidth
takes_the_largest_gap: seconds: expected 0.003, got 0.006
    times.append((steps → times.append((second, steps
    seconds, number = min(times, default=(math.inf, None)) → _, seconds, number = min(times)
never_the_all_reduce: ✗ many bytes
    if seconds < ring → if True
always_the_all_reduce: seconds: expected 0.0207
    if seconds < ring → if False
""")
edits_of(choose_graph__with_a_dictionary)("""
believes_in_agreement: ZeroDivisionError
    if rest < 1 - 1e-6: → if True:
    math.log(rest) if → math.log(round(rest, 9)) if
""")
edits_of(choose_graph__all_times)("""
position_from_1: which: expected 1, got 2
    return (number, seconds) → return (number + 1, seconds)
the_matrix: expected 1, got a tensor
    enumerate(candidates): → enumerate(candidates := list(candidates)):
    return (number, seconds) → return (candidates[number], seconds)
seconds_only: expected (which, seconds)
    return (number, seconds) if seconds < ring else (None, ring) → return min(seconds, ring)
everybody_hears_itself: ✗ nothing of its own
    int(weights[j, j] != 0) → 1
little_is_nothing: ✗ some hardly heard
    (weights[:, j] != 0) → (weights[:, j] > 0.1)
    int(weights[j, j] != 0) → int(weights[j, j] > 0.1)
no_step_at_all: ✗ any mean will do
    steps = 1 → steps = 0
""")


# State that is kept between calls ----------------------------------------------------------

edits_of(start_mixing__receives_first)("""
matrix_of_the_first_call: something is kept from the call before
    def start_mixing__receives_first(tensor, weights, group=None):
  → def start_mixing__receives_first(tensor, weights, group=None, kept={}):
  →     weights = kept.setdefault(weights.shape, weights)
into_the_same_memory: rank 0: tensor
    group=None): → group=None, kept={}):
    return total → return kept.setdefault(total.shape, total).copy_(total)
""")
edits_of(decentralized_step__flat)("""
matrix_of_the_first_call: rank 0: parameter 0
    def decentralized_step__flat(params, loss, lr, weights, group=None):
  → def decentralized_step__flat(params, loss, lr, weights, group=None, kept={}):
  →     weights = kept.setdefault(weights.shape, weights)
weights_of_the_last_step: ✗ 4 ranks in a ring, two steps
    group=None): → group=None, kept={}):
    for source, theirs in heard.items():
  → late, kept[mine.shape] = kept.get(mine.shape, heard), heard
  → for source, theirs in late.items():
""")
edits_of(spectral_gap__by_numpy)("""
of_the_first_matrix: something is kept from the call before
    def spectral_gap__by_numpy(weights):
  → def spectral_gap__by_numpy(weights, kept={}):
  →     weights = kept.setdefault(weights.shape, weights)
""")
edits_of(choose_graph__with_a_dictionary)("""
candidates_of_the_first_call: something is kept from the call before
    def choose_graph__with_a_dictionary(candidates, nbytes, latency, bandwidth, tolerance):
  → def choose_graph__with_a_dictionary(candidates, nbytes, latency, bandwidth, tolerance, kept={}):
  →     candidates = kept.setdefault(0, list(candidates))
""")
