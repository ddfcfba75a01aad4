"""Wrong solutions that people write, and right ones that differ from ours.

See `instructor/05_bucketing_and_overlap/mutants.py`. Time is exact on a virtual clock alone, and
gloo keeps small messages, so that a send without its receive is found there only.
"""

import math

import torch
import torch.distributed as dist

from course_lib.checking.mutants import VIRTUAL, edited, fails, passes

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


def weights_with(*edits):
    return edited(metropolis_weights__by_sets, *edits)


MAX = "max(len(neighbours[i]), len(neighbours[j]))"

metropolis_weights__own_neighbours_only = fails("Both ends of a link give it the same weight")(
    weights_with((MAX, "len(neighbours[i])"))
)
metropolis_weights__smaller_number = fails("Both ends of a link give it the same weight")(
    weights_with((MAX, MAX.replace("max", "min")))
)
metropolis_weights__without_the_one = fails("1 over 1 plus the larger number")(
    weights_with(("1 / (1 + ", "1 / ("))
)
metropolis_weights__by_world_size = fails("1 over 1 plus the larger number")(
    weights_with((MAX, "world_size - 1"))
)
metropolis_weights__nothing_for_oneself = fails("row 0 sums to 0.5, expected 1")(
    weights_with(("weights[i, i] = 1 - weights[i].sum()", "pass"))
)
metropolis_weights__own_share_is_the_same = fails("row 0 sums to")(
    weights_with(("weights[i, i] = 1 - weights[i].sum()", "weights[i, i] = 1 / 3"))
)
metropolis_weights__one_direction = fails("W[1, 0] is 0")(
    weights_with(("neighbours[j].add(i)", "pass"))
)
metropolis_weights__counts_links_twice = fails("Both ends of a link give it the same weight")(
    weights_with(("[set() for", "[[] for"), (".add(", ".append("))
)
metropolis_weights__in_float32 = fails("has dtype torch.float32")(
    weights_with((", dtype=torch.float64", ""))
)
metropolis_weights__two_hops = fails("are not linked")(
    weights_with(("return weights", "return weights @ weights"))
)
metropolis_weights__walks_twice = fails("Both ends of a link")(
    weights_with(
        (
            "    weights = torch",
            "    degree = torch.zeros(world_size)\n"
            "    for i, j in links:\n"
            "        degree[i] += 1\n"
            "        degree[j] += 1\n"
            "    weights = torch",
        ),
        (MAX, "max(degree[i], degree[j]).item()"),
    )
)
metropolis_weights__a_list = fails("expected a matrix of 4 × 4")(
    weights_with(("return weights", "return weights.tolist()"))
)


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


def mixing_with(*edits):
    return edited(start_mixing__receives_first, *edits)


BUFFERS = "if j != rank and weights[rank, j] > 0}"
RECEIVES = "works = [dist.irecv(b, group=group, group_src=j) for j, b in buffers.items()]"
SENDS = "works.append(dist.isend(data, group=group, group_dst=j))"
HEARS = "if j != rank and weights[j, rank] > 0:"
OWN = "total = float(weights[rank, rank]) * data"
SHARE = "float(weights[rank, j]) * buffer"

start_mixing__takes_the_column = fails("row i is what rank i hears")(
    mixing_with(
        (BUFFERS, "if j != rank and weights[j, rank] > 0}"),
        (HEARS, "if j != rank and weights[rank, j] > 0:"),
        (SHARE, "float(weights[j, rank]) * buffer"),
    )
)
start_mixing__believes_in_symmetry = fails("waits in recv", only=VIRTUAL)(
    mixing_with((HEARS, "if j != rank and weights[rank, j] > 0:"))
)
start_mixing__without_its_own_share = fails("without this rank's own")(
    mixing_with((OWN, "total = torch.zeros_like(data)"))
)
start_mixing__plain_sum = fails("the plain sum over whom it hears")(
    mixing_with(
        (OWN, "total = data.clone() if weights[rank, rank] else 0 * data"), (SHARE, "buffer")
    )
)
start_mixing__plain_mean = fails("the plain mean over whom it hears")(
    mixing_with((OWN, "total = data / (1 + len(buffers))"), (SHARE, "buffer / (1 + len(buffers))"))
)
start_mixing__neighbours_alike = fails("✗ 5 ranks, whom it hears weighs differently")(
    mixing_with((SHARE, "(1 - float(weights[rank, rank])) / len(buffers) * buffer"))
)
LITTLE = (
    "group=None):",
    "group=None):\n    weights = torch.where(weights > 0.1, weights, 0)",
)
start_mixing__little_is_nothing = fails("without those of little weight")(mixing_with(LITTLE))
start_mixing__buffers_for_all_calls = fails("buffer of recv", only=("simulated",))(
    mixing_with(
        ("group=None):", "group=None, kept={}):"),
        ("{j: torch.empty_like(data) for", "{j: kept.setdefault(j, torch.empty_like(data)) for"),
    )
)
start_mixing__adds_nothing = fails("nothing was mixed")(
    mixing_with((OWN, "total = data.clone()"), (SHARE, "0 * buffer"))
)
start_mixing__ring_only = fails("may talk to", only=VIRTUAL)(
    mixing_with(
        (BUFFERS, "if k > 1 and j in ((rank + 1) % k, (rank - 1) % k)}"),
        (HEARS, "if k > 1 and j in ((rank + 1) % k, (rank - 1) % k):"),
    )
)
start_mixing__hears_everybody = fails("may talk to", only=VIRTUAL)(
    mixing_with((BUFFERS, "if j != rank}"), (HEARS, "if j != rank:"))
)
start_mixing__sends_before_it_receives = fails("waits in send", only=VIRTUAL)(
    mixing_with(
        (RECEIVES, "works = []"),
        (SENDS, "dist.send(data, group=group, group_dst=j)"),
        (
            "    def finish():",
            "    for j, b in buffers.items():\n"
            "        dist.recv(b, group=group, group_src=j)\n\n    def finish():",
        ),
    )
)
start_mixing__waits_at_once = fails("Begin all messages, then compute, then wait", only=VIRTUAL)(
    mixing_with(
        (
            "    def finish():",
            "    for work in works:\n        work.wait()\n    works = []\n\n    def finish():",
        )
    )
)
start_mixing__begins_in_finish = fails("Begin all messages, then compute, then wait", only=VIRTUAL)(
    mixing_with(
        (RECEIVES, "works = []"),
        (SENDS, "pass"),
        (
            "    def finish():\n",
            "    def finish():\n"
            "        for j, b in buffers.items():\n"
            "            works.append(dist.irecv(b, group=group, group_src=j))\n"
            "        for j in range(k):\n"
            "            if j != rank and weights[j, rank] > 0:\n"
            "                works.append(dist.isend(data, group=group, group_dst=j))\n",
        ),
    )
)
start_mixing__does_not_wait = fails("never waits for the handle", only=VIRTUAL)(
    mixing_with(("work.wait()", "pass"))
)
start_mixing__whole_world = fails("✗ 5 ranks, two groups, a line", only=VIRTUAL)(
    mixing_with(
        ("get_rank(group)", "get_rank()"),
        ("get_world_size(group)", "get_world_size()"),
        ("group=group", "group=None"),
    )
)
start_mixing__numbers_for_ranks = fails("✗ 5 ranks, two groups, a line", only=VIRTUAL)(
    mixing_with(("group_src=", "src="), ("group_dst=", "dst="))
)
start_mixing__even_or_odd_ranks = fails("is not part of group", only=VIRTUAL)(
    mixing_with(
        ("group_src=j", "src=j if group is None else 2 * j + dist.get_rank() % 2"),
        ("group_dst=j", "dst=j if group is None else 2 * j + dist.get_rank() % 2"),
    )
)
start_mixing__always_something_of_its_own = fails("✗ 5 ranks, nothing of its own")(
    mixing_with((OWN, "total = (float(weights[rank, rank]) or 1.0) * data"))
)
start_mixing__in_place = fails("the function changes tensor")(
    mixing_with(("return total", "return tensor.copy_(total)"))
)
start_mixing__returns_its_input = fails("shares memory with tensor")(
    mixing_with(
        (
            OWN,
            "if not buffers and weights[rank, rank] == 1:\n            return tensor\n"
            "        " + OWN,
        )
    )
)
start_mixing__contiguous_only = fails("view size is not compatible")(
    mixing_with(
        (
            "tensor.detach().clone(memory_format=torch.contiguous_format)",
            "tensor.detach().view(-1)",
        ),
        ("return total", "return total.view(tensor.shape)"),
    )
)
start_mixing__through_float64 = fails("has dtype torch.float64")(
    mixing_with(("tensor.detach()", "tensor.detach().double()"))
)
start_mixing__returns_the_tensor = fails("expected a function")(
    mixing_with(("return finish", "return finish()"))
)
start_mixing__row_by_row = fails("one message to each who hears this rank")(
    mixing_with(
        (
            RECEIVES,
            "works = [dist.irecv(piece, group=group, group_src=j) "
            "for j, b in buffers.items() for piece in b.view(-1).split(3)]",
        ),
        (
            SENDS,
            "works += [dist.isend(piece, group=group, group_dst=j) "
            "for piece in data.view(-1).split(3)]",
        ),
    )
)


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


def step_with(*edits):
    return edited(decentralized_step__flat, *edits)


CLEAR = "        p.grad = None\n"
BACKWARD = "    loss().backward()\n"
NEW = "new = float(weights[rank, rank]) * mine - lr * g"
ADD = "new = new + float(weights[rank, source]) * theirs"
G = (
    "    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]\n"
    "    g = torch.cat([each.reshape(-1) for each in grads])\n"
)
MINE = "mine = torch.cat([p.detach().reshape(-1) for p in params])"
WRITE = "p.copy_(piece.view(p.shape))"

decentralized_step__mixes_after_the_step = fails("the gradient must not be mixed")(
    step_with(
        (
            MINE,
            "[setattr(p, 'grad', None) for p in params]; loss().backward(); "
            + MINE
            + "\n"
            + G
            + "    mine = mine - lr * g",
        ),
        ("    for p in params:\n" + CLEAR + BACKWARD + G, ""),
        (NEW, "new = float(weights[rank, rank]) * mine"),
    )
)
decentralized_step__gradient_at_the_mixed_weights = fails("take it before mixing")(
    step_with(
        ("    for p in params:\n" + CLEAR + BACKWARD + G, ""),
        (NEW, "new = float(weights[rank, rank]) * mine"),
        (
            "    with torch.no_grad():",
            "    for p, piece in zip(params, new.split([p.numel() for p in params])):\n"
            "        p.data.copy_(piece.view(p.shape))\n"
            "        p.grad = None\n"
            "    loss().backward()\n" + G + "    new = new - lr * g\n"
            "    with torch.no_grad():",
        ),
    )
)
decentralized_step__little_is_nothing = fails("without those of little weight")(step_with(LITTLE))
decentralized_step__does_not_mix = fails("a step without mixing")(
    step_with((NEW, "new = mine - lr * g"), (ADD, "pass"))
)
decentralized_step__no_gradient = fails("mixing without a step")(step_with((" - lr * g", "")))
decentralized_step__climbs = fails("a step uphill")(step_with((" - lr * g", " + lr * g")))
decentralized_step__forgets_the_rate = fails("with the learning rate 1")(
    step_with((" - lr * g", " - g"))
)
decentralized_step__rate_before_the_mean = fails("γ before the mean as well")(
    step_with(
        (NEW, "new = mine - lr * (1 - float(weights[rank, rank])) * mine - lr * g"),
        (ADD, "new = new + lr * float(weights[rank, source]) * theirs"),
    )
)
decentralized_step__adds_to_old_gradients = fails("clear .grad before backward")(
    step_with(("    for p in params:\n" + CLEAR, ""))
)
decentralized_step__computes_first = fails("Begin all messages, then compute", only=VIRTUAL)(
    step_with(
        (
            "    params = list(params)\n",
            "    params = list(params)\n    for p in params:\n" + CLEAR + BACKWARD,
        ),
        ("    for p in params:\n" + CLEAR + BACKWARD + G, G),
    )
)
decentralized_step__waits_first = fails("Begin all messages, then compute", only=VIRTUAL)(
    step_with((BACKWARD, "    while works:\n        works.pop().wait()\n" + BACKWARD))
)
decentralized_step__forward_before_the_messages = fails("calls of loss()")(
    step_with(
        (MINE, "value = loss(); " + MINE),
        (BACKWARD, "    value.backward()\n    loss().backward()\n"),
    )
)
decentralized_step__calls_the_loss_twice = fails("calls of loss()")(
    step_with((BACKWARD, "    float(loss())\n" + BACKWARD))
)
decentralized_step__unused_needs_a_gradient = fails("✗ 5 ranks, one parameter unused")(
    step_with(("torch.zeros_like(p) if p.grad is None else p.grad", "p.grad"))
)
decentralized_step__leaves_out_the_unused = fails("✗ 5 ranks, one parameter unused")(
    step_with((WRITE, "p.copy_(piece.view(p.shape)) if p.grad is not None else None"))
)
decentralized_step__in_new_memory = fails("the parameters' own memory")(
    step_with((WRITE, "p.data = piece.view(p.shape).clone()"))
)
decentralized_step__column = fails("row i is what rank i hears")(
    step_with(
        ("weights[to, rank]", "weights[rank, to]"),
        ("weights[rank, source]", "weights[source, rank]"),
    )
)
decentralized_step__mixes_gradients = fails("mixed gradients and the rank's own weights")(
    step_with(
        (
            MINE,
            "[setattr(p, 'grad', None) for p in params]; loss().backward(); w = torch.cat("
            "[p.detach().reshape(-1) for p in params])\n" + G + "    mine = g",
        ),
        ("    for p in params:\n" + CLEAR + BACKWARD + G, ""),
        (NEW, "new = float(weights[rank, rank]) * mine"),
        ("    with torch.no_grad():", "    new = w - lr * new\n    with torch.no_grad():"),
    )
)
decentralized_step__whole_world = fails("✗ 4 ranks, two groups", only=VIRTUAL)(
    step_with(
        ("get_rank(group)", "get_rank()"),
        ("get_world_size(group)", "get_world_size()"),
        ("group=group", "group=None"),
    )
)
decentralized_step__walks_twice = fails("expected a non-empty list of Tensors")(
    step_with(("    params = list(params)\n", ""))
)
decentralized_step__does_not_wait = fails("never waits for the handle", only=VIRTUAL)(
    step_with(("work.wait()", "pass"))
)


@fails("one message to each who hears this rank")
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


def gap_with(*edits):
    return edited(spectral_gap__from_the_mean, *edits)


LARGEST = "torch.linalg.eigvals(rest).abs().max()"
ALL = "torch.linalg.eigvals(weights.double())"

spectral_gap__the_eigenvalue = fails("the gap is what it lacks to 1")(
    gap_with(("1 - torch", "torch"))
)
spectral_gap__of_the_first = fails("spectral gap: expected")(
    gap_with((LARGEST, ALL + ".abs().max()"))
)
spectral_gap__with_its_sign = fails("-1 is as far from 0 as 1")(
    gap_with((LARGEST, "torch.linalg.eigvals(rest).real.max()"))
)
spectral_gap__of_a_symmetric_matrix = fails("spectral gap: expected")(
    gap_with((LARGEST, "torch.linalg.eigvalsh(rest).abs().max()"))
)
spectral_gap__singular_values = fails("the gap of singular values")(
    gap_with((LARGEST, "torch.linalg.svdvals(rest).max()"))
)
spectral_gap__in_the_order_of_torch = fails("spectral gap: expected")(
    gap_with((LARGEST, "(" + ALL + ".abs()[1] if k > 1 else 0)"))
)
spectral_gap__needs_two_ranks = fails("index 1 is out of bounds")(
    gap_with((LARGEST, ALL + ".abs().sort(descending=True).values[1]"))
)
spectral_gap__smallest = fails("spectral gap: expected")(gap_with((LARGEST, ALL + ".abs().min()")))
spectral_gap__complex = fails("expected the number")(
    gap_with(
        (LARGEST, "torch.linalg.eigvals(rest).max() if k < 0 else torch.linalg.eigvals(rest)[0]")
    )
)
spectral_gap__by_the_formula_of_a_ring = fails("spectral gap: expected")(
    gap_with((LARGEST, "(1 + 2 * math.cos(2 * math.pi / k)) / 3"))
)
spectral_gap__clears_the_matrix = fails("the function changes the matrix")(
    gap_with((f"return 1 - {LARGEST}", f"gap = 1 - {LARGEST}\n    weights.zero_()\n    return gap"))
)
spectral_gap__changes_the_matrix = fails("spectral gap: expected")(
    gap_with(("    rest =", "    weights = weights.fill_diagonal_(0)\n    rest ="))
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


def choice_with(*edits):
    return edited(choose_graph__all_times, *edits)


STEPS = "        while second**steps > tolerance:\n            steps += 1\n"
SENT = "max(int((weights[:, j] != 0).sum()) - int(weights[j, j] != 0) for j in range(k))"

choose_graph__one_step_for_all = fails("seconds: expected")(choice_with((STEPS, "")))
choose_graph__one_step_less = fails("with a step less: the last one must be done")(
    choice_with(("second**steps >", "second ** (steps + 1) >"))
)
choose_graph__fraction_of_a_step = fails("if steps were no whole number")(
    choice_with(
        (STEPS, "        steps = max(1, math.log(tolerance) / math.log(max(second, 1e-99)))\n")
    )
)
choose_graph__one_message = fails("sends only one message in a step")(choice_with((SENT, "1")))
choose_graph__counts_itself = fails("sends to itself as well")(
    choice_with((" - int(weights[j, j] != 0)", ""))
)
choose_graph__number_of_rank_0 = fails("✗ a star in the middle")(
    choice_with(("for j in range(k))", "for j in (1,))"))
)
choose_graph__one_latency_per_message = fails("seconds: expected")(
    choice_with(
        ("(latency + sends * nbytes / bandwidth)", "sends * (latency + nbytes / bandwidth)")
    )
)
choose_graph__rows_for_columns = fails("✗ rows unlike columns")(
    choice_with(("(weights[:, j] != 0)", "(weights[j] != 0)"))
)
choose_graph__singular_values = fails("✗ rows unlike columns")(
    choice_with(
        ("torch.linalg.eigvals(weights.double()).abs()", "torch.linalg.svdvals(weights.double())")
    )
)
choose_graph__whole_bytes = fails("✗ three bytes")(
    choice_with(("nbytes / k / bandwidth", "nbytes // k / bandwidth"))
)
choose_graph__half_a_ring = fails("a ring needs K - 1 messages only")(choice_with(("2 * (k", "(k")))
choose_graph__ring_of_whole_tensors = fails("✗ no time for gossip")(
    choice_with(("nbytes / k / bandwidth", "nbytes / bandwidth"))
)
choose_graph__takes_the_largest_gap = fails("seconds: expected 0.003, got 0.006")(
    choice_with(
        ("times.append((steps", "times.append((second, steps"),
        (
            "seconds, number = min(times, default=(math.inf, None))",
            "_, seconds, number = min(times)",
        ),
    )
)
choose_graph__never_the_all_reduce = fails("✗ many bytes")(
    choice_with(("if seconds < ring", "if True"))
)
choose_graph__always_the_all_reduce = fails("seconds: expected 0.0207")(
    choice_with(("if seconds < ring", "if False"))
)
choose_graph__believes_in_agreement = fails("ZeroDivisionError")(
    edited(
        choose_graph__with_a_dictionary,
        ("if rest < 1 - 1e-6:", "if True:"),
        ("math.log(rest) if", "math.log(round(rest, 9)) if"),
    )
)
choose_graph__position_from_1 = fails("which: expected 1, got 2")(
    choice_with(("return (number, seconds)", "return (number + 1, seconds)"))
)
choose_graph__the_matrix = fails("expected 1, got a tensor")(
    choice_with(
        ("candidates):", "candidates := list(candidates)):"),
        ("return (number, seconds)", "return (candidates[number], seconds)"),
    )
)
choose_graph__seconds_only = fails("expected (which, seconds)")(
    choice_with(
        (
            "return (number, seconds) if seconds < ring else (None, ring)",
            "return min(seconds, ring)",
        )
    )
)
choose_graph__everybody_hears_itself = fails("✗ nothing of its own")(
    choice_with((SENT, "max(int((weights[:, j] != 0).sum()) - 1 for j in range(k))"))
)
choose_graph__little_is_nothing = fails("✗ some hardly heard")(choice_with(("!= 0", "> 0.1")))
choose_graph__no_step_at_all = fails("✗ any mean will do")(choice_with(("steps = 1", "steps = 0")))

# What is kept from one call to the next ----------------------------------------------------

OF_THIS_SIZE = (
    "group=None):",
    "group=None, kept={}):\n    weights = kept.setdefault(weights.shape, weights)",
)

start_mixing__matrix_of_the_first_call = fails("something is kept from the call before")(
    edited(start_mixing__receives_first, OF_THIS_SIZE)
)
start_mixing__into_the_same_memory = fails("rank 0: tensor")(
    edited(
        start_mixing__receives_first,
        ("group=None):", "group=None, kept={}):"),
        ("return total", "return kept.setdefault(total.shape, total).copy_(total)"),
    )
)
decentralized_step__matrix_of_the_first_call = fails("rank 0: parameter 0")(step_with(OF_THIS_SIZE))
decentralized_step__weights_of_the_last_step = fails("✗ 4 ranks in a ring, two steps")(
    step_with(
        ("group=None):", "group=None, kept={}):"),
        (
            "for source, theirs in heard.items():",
            "late, kept[mine.shape] = kept.get(mine.shape, heard), heard\n"
            "    for source, theirs in late.items():",
        ),
    )
)
spectral_gap__of_the_first_matrix = fails("something is kept from the call before")(
    edited(
        spectral_gap__by_numpy,
        (
            "(weights):",
            "(weights, kept={}):\n    weights = kept.setdefault(weights.shape, weights)",
        ),
    )
)
choose_graph__candidates_of_the_first_call = fails("something is kept from the call before")(
    edited(
        choose_graph__with_a_dictionary,
        (
            "tolerance):",
            "tolerance, kept={}):\n    candidates = kept.setdefault(0, list(candidates))",
        ),
    )
)
