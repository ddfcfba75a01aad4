"""Decentralized SGD: every rank averages with its neighbours only.

    >>> from course_lib.decentralized import Gossip, ring_mixing
    >>> gossip = Gossip(optimizer, ring_mixing(2))
    >>> with gossip:  # the weights travel while the gradient is computed
    ...     loss_fn(model(x), y).backward()
    >>> optimizer.step()

There is no all-reduce and no server. Rank i keeps its own weights w_i. In every step it takes a
weighted mean of its own and its neighbours' weights, and subtracts its own gradient:

    w_{t+1,i} = Σ_j W_ij w_{t,j} - γ ∇f(w_{t,i}; b_i)

The mixing matrix W defines which rank receives from which, and with what weight. It is *doubly
stochastic*. Its rows sum to 1, so equal weights stay equal. Its columns sum to 1, so mixing does
not change the mean over the ranks, w̄: it takes the step of SGD with the mean gradient.

The gradient is computed at w_{t,i}, the weights *before* mixing. So mixing does not have to wait
for the gradient, and backward hides the communication.

One number of the matrix determines how fast differences disappear: λ₂, its second largest absolute
eigenvalue. Without gradients, the consensus distance shrinks at least as fast as

    Σ_i ‖w_{t+1,i} - w̄‖² ≤ λ₂² Σ_i ‖w_{t,i} - w̄‖²        spectral gap 1 - λ₂

    matrix        neighbours   λ₂ for 4, 8, 16 ranks     time of a step (n bytes)
    ring          2            .333  .805  .949          α + 2n/β, however many ranks there are
    torus         4            .6    .6    .6            α + 4n/β (2 × 2, 2 × 4, 4 × 4)
    exponential   log₂ K       .333  .5    .6            α + log₂ K · n/β
    complete      K - 1        0     0     0             α + (K-1) n/β
    random pairs  1            1 in any one step         α + n/β

These times assume that messages leave at once and ports are never idle. If each send waits for its
receive and a port carries one message at a time (a simulated `Network` with eager_below=0),
neighbours delay one another along the whole ring.

X. Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms? A Case Study for
Decentralized Parallel Stochastic Gradient Descent", NeurIPS 2017; exponential graphs: B. Ying et
al., "Exponential Graph is Provably Efficient for Decentralized Deep Training", NeurIPS 2021; pairs:
S. Boyd et al., "Randomized Gossip Algorithms", 2006.
"""

import math
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.collectives import Group, library_all_reduce, place_in
from course_lib.local_sgd import flatten, trained, unflatten

Mixing = Tensor | Callable[[int], Tensor]
"""A matrix of shape (K, K), or a function that returns the matrix of a step."""


def ring_mixing(world_size: int) -> Tensor:
    """Return the matrix of a ring: a third for each neighbour, a third for the rank itself."""
    return _circulant(world_size, [0, 1, -1])


def torus_mixing(rows: int, columns: int) -> Tensor:
    """Return the matrix of a grid of ranks: a fifth for the rank itself and for each neighbour.

    Rank r is in row r // columns. The grid wraps around at its edges, so all have four neighbours.
    """
    world_size = rows * columns
    matrix = torch.zeros(world_size, world_size, dtype=torch.float64)
    for rank in range(world_size):
        row, column = divmod(rank, columns)
        for down, right in ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)):
            other = (row + down) % rows * columns + (column + right) % columns
            matrix[rank, other] += 1 / 5
    return matrix


def exponential_mixing(world_size: int) -> Tensor:
    """Return the matrix in which rank i receives from i + 1, i + 2, i + 4, …: log₂ K others.

    All weights are equal. The graph is directed: j may not receive from i if i receives from j.
    """
    hops = [0]
    while (hop := 1 << (len(hops) - 1)) < world_size:
        hops.append(hop)
    return _circulant(world_size, hops)


def one_peer_mixing(world_size: int) -> Callable[[int], Tensor]:
    """Return a function from a step to its matrix: rank i hears i + 1, then i + 2, i + 4, … .

    After log₂ K steps, rounded up, it begins again. If K is a power of two, all are then equal.
    """
    rounds = max(1, (world_size - 1).bit_length())
    return lambda step: _circulant(world_size, [0, 1 << step % rounds])


def complete_mixing(world_size: int) -> Tensor:
    """Return the matrix in which all ranks receive from all: one step makes them equal."""
    return _circulant(world_size, list(range(world_size)))


def random_pairs(world_size: int, seed: int = 0) -> Callable[[int], Tensor]:
    """Return a function from a step to its matrix: random pairs of ranks, with weights 1/2.

    If the number of ranks is odd, one stays alone. All ranks must give the same seed, so that they
    get the same pairs.
    """

    def matrix_of(step: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        order = torch.randperm(world_size, generator=generator)
        matrix = torch.eye(world_size, dtype=torch.float64)
        for pair in order[: world_size // 2 * 2].view(-1, 2):
            matrix[pair[:, None], pair] = 1 / 2
        return matrix

    return matrix_of


def metropolis_weights(links: Iterable[tuple[int, int]], world_size: int) -> Tensor:
    """Return a mixing matrix for any network, float64, K × K. Each link is a pair of ranks.

        W_ij = W_ji = 1 / (1 + max(d_i, d_j))        if i and j are linked; d_i: neighbours of i

    Rank i's own share W_ii fills its row up to 1. Links count once, in either order.
    """
    linked = torch.zeros(world_size, world_size, dtype=torch.float64)
    for i, j in links:
        linked[i, j] = linked[j, i] = 1
    neighbours = linked.sum(1)
    weights = linked / (1 + torch.maximum(neighbours[:, None], neighbours))
    return weights + torch.diag(1 - weights.sum(1))


def check_mixing(matrix: Tensor, world_size: int) -> Tensor:
    """Return `matrix` as float64 if it is a mixing matrix for K ranks.

    Raises ValueError if it is not K × K, has an element that is negative or not finite, or has a
    row or column whose sum differs from 1 by more than 1e-6. The message names this row or column.
    """
    matrix = torch.as_tensor(matrix, dtype=torch.float64)
    if matrix.shape != (world_size, world_size):
        raise ValueError(
            f"{world_size} ranks need a mixing matrix of {world_size} × {world_size}, not of "
            f"{' × '.join(map(str, matrix.shape)) or 'no dimension'}"
        )
    if not matrix.isfinite().all() or (matrix < 0).any():
        raise ValueError(
            "the elements of a mixing matrix must be finite numbers that are 0 or more"
        )
    for name, dim, consequence in (
        ("row", 1, "mixing would change values that are equal on all ranks"),
        ("column", 0, "mixing would change the mean over the ranks"),
    ):
        sums = matrix.sum(dim)
        off = (sums - 1).abs() > 1e-6
        if off.any():
            index = int(off.nonzero()[0])
            raise ValueError(
                f"the mixing matrix is not doubly stochastic: {name} {index} sums to "
                f"{sums[index]:.6g}, not 1, so {consequence}"
            )
    return matrix


def second_eigenvalue(matrix: Tensor) -> float:
    """Return λ₂, the factor by which one step shrinks the distance to the mean in the worst case.

    For a symmetric matrix it is the second largest absolute eigenvalue. In general it is the second
    largest singular value, which is the same number for the matrices here.
    """
    world_size = len(matrix)
    mean = torch.full((world_size, world_size), 1 / world_size, dtype=torch.float64)
    return float(torch.linalg.matrix_norm(check_mixing(matrix, world_size) - mean, 2))


def spectral_gap(weights: Tensor) -> float:
    """Return 1 - |λ₂|; |λ₂| is the second largest absolute value of the eigenvalues, 0 for K = 1.

    In the end a step shrinks the distance to the mean by |λ₂|, also if the matrix is not symmetric.
    `second_eigenvalue` is larger for some such matrices: it is the worst case of a single step.
    """
    eigenvalues = torch.linalg.eigvals(weights.double()).abs().sort(descending=True).values
    return 1 - float(eigenvalues[1]) if len(weights) > 1 else 1.0


def choose_graph(
    candidates: Iterable[Tensor], nbytes: int, latency: float, bandwidth: float, tolerance: float
) -> tuple[int | None, float]:
    """Return which mixing matrix first makes K tensors of `nbytes` nearly equal, and the time.

    Mixing takes T steps: T is the smallest number, at least 1, with |λ₂|^T ≤ `tolerance`. In a step
    a rank sends to d others at most. If a ring all-reduce is faster than all matrices, it is None.

        T (α + d n/β)          mixing; never if the gap is below 10⁻⁶
        2(K-1) (α + n/(Kβ))    ring all-reduce

    `latency` α and the time are in seconds, `bandwidth` β in bytes per second.
    """
    candidates = list(candidates)
    k = len(candidates[0])
    best: tuple[int | None, float] = None, 2 * (k - 1) * (latency + nbytes / (k * bandwidth))
    for index, weights in enumerate(candidates):
        gap = spectral_gap(weights)
        if gap < 1e-6:
            continue
        # The eigenvalue is rounded, so a power may be a little above a tolerance that it equals.
        powers = math.log(tolerance) / math.log(1 - gap) if gap < 1 - tolerance else 1
        steps = math.ceil(powers * (1 - 1e-12))
        receivers = (weights != 0).sum(0) - (weights.diag() != 0).long()
        seconds = steps * (latency + int(receivers.max()) * nbytes / bandwidth)
        if seconds < best[1]:
            best = index, seconds
    return best


@torch.no_grad()
def consensus_distance(params: Iterable[Tensor], group: Group = None) -> float:
    """Return √(1/K Σ_i ‖w_i - w̄‖²), how far the ranks' weights are from their mean.

    All ranks must call, and all get the same number. It costs one all-reduce of the weights.
    """
    _, world_size = place_in(group)
    own_weights = torch.cat([param.reshape(-1).double() for param in params])
    mean = own_weights / world_size
    library_all_reduce(mean, group)
    squared = (own_weights - mean).square().sum().view(1) / world_size
    library_all_reduce(squared, group)
    return float(squared.sqrt())


@torch.no_grad()
def start_mixing(tensor: Tensor, weights: Tensor, group: Group = None) -> Callable[[], Tensor]:
    """Begin to exchange `tensor` with the neighbours; return a function that gives the mean.

    Rank i sends its w_i to all ranks j with W_ji ≠ 0, and receives w_j if W_ij ≠ 0. So its row of W
    says whom it hears, and its column says who hears it. The returned function waits for these
    messages and returns a new tensor,

        Σ_j W_ij w_j        of the shape and dtype of `tensor`

    All members call with the same shape and dtype, and nobody changes `tensor` before the end.
    `weights` is K × K, of any floating-point dtype. Raises ValueError on a rank outside `group`.
    """
    rank, world_size = place_in(group)
    own_tensor, row = tensor.detach().contiguous(), weights[rank].tolist()
    received: dict[int, Tensor] = {}

    def messages() -> Iterator[dist.P2POp]:
        # Each rank begins with its right neighbour, so that not all send to the same rank first.
        for hop in range(1, world_size):
            to, source = (rank + hop) % world_size, (rank - hop) % world_size
            if weights[to, rank]:
                yield dist.P2POp(dist.isend, own_tensor, group=group, group_peer=to)
            if row[source]:
                received[source] = torch.empty_like(own_tensor)
                yield dist.P2POp(dist.irecv, received[source], group=group, group_peer=source)

    # With NCCL, a message that waits would delay all later ones, so send them as one batch. Else
    # each is on its way before the next one is made: messages of one moment would queue up.
    batches = [list(messages())] if own_tensor.is_cuda else ([message] for message in messages())
    works = [work for batch in batches if batch for work in dist.batch_isend_irecv(batch)]

    def finish() -> Tensor:
        for work in works:
            work.wait()
        mixed: Tensor = own_tensor * row[rank]
        for source in sorted(received):
            mixed.add_(received[source], alpha=row[source])
        return mixed

    return finish


def decentralized_step(
    params: Iterable[Tensor],
    loss: Callable[[], Tensor],
    lr: float,
    weights: Tensor,
    group: Group = None,
) -> None:
    """Take one step of decentralized SGD: mix the parameters, and subtract this rank's gradient.

        w_i ← Σ_j W_ij w_j - lr ∇f_i(w_i)        the gradient at the weights before mixing

    `loss()` computes f_i at the parameters as they are. They travel in one message to each
    neighbour, while the loss and its gradient are computed. All have the same dtype. A parameter
    that the loss does not use is only mixed. The new numbers are written into the old memory.
    """
    params = list(params)
    for param in params:
        param.grad = None
    finish = start_mixing(flatten(params), weights, group)
    loss().backward()  # type: ignore[no-untyped-call]
    unflatten(finish(), params)
    with torch.no_grad():
        for param in params:
            if param.grad is not None:
                param.sub_(param.grad, alpha=lr)


class Gossip:
    """Mixes the weights that an optimizer trains, while the gradient is computed.

    Args:
        optimizer: any optimizer. Take its step after mixing, with the gradient at the old weights.
        mixing: a matrix for all steps, or a function of the step's number. Equal on all ranks.
        group: None for all ranks. Matrix row i is for number i in the group.

    Raises ValueError as `check_mixing`, and on a rank outside `group`.

    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, mixing: Mixing, group: Group = None
    ) -> None:
        self.rank, self.world_size = place_in(group)
        self.group = group
        self.optimizer = optimizer
        self.mixing = mixing
        self.steps = 0
        if isinstance(mixing, Tensor):
            check_mixing(mixing, self.world_size)
        self._finish: Callable[[], Tensor] | None = None

    def __enter__(self) -> "Gossip":
        """Begin to send the current weights and to receive the neighbours' weights.

        Raises RuntimeError if the last exchange was not finished.
        """
        if self._finish is not None:
            raise RuntimeError(
                "an exception ended the last exchange, which the neighbours may have finished: "
                "make a new Gossip, on all ranks"
            )
        matrix = self.mixing if isinstance(self.mixing, Tensor) else self.mixing(self.steps)
        matrix = check_mixing(matrix, self.world_size)
        self._finish = start_mixing(flatten(trained(self.optimizer)), matrix, self.group)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Replace the weights by Σ_j W_ij w_j, unless there was an exception."""
        if kind is None and self._finish is not None:
            unflatten(self._finish(), trained(self.optimizer))
            self._finish = None
            self.steps += 1


def _circulant(world_size: int, hops: list[int]) -> Tensor:
    """Return the matrix in which each rank receives from those `hops` ahead, equally weighted."""
    matrix = torch.zeros(world_size, world_size, dtype=torch.float64)
    for rank in range(world_size):
        for hop in hops:
            matrix[rank, (rank + hop) % world_size] += 1 / len(hops)
    return matrix
