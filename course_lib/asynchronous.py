"""Asynchronous SGD: a server that keeps the weights, and workers that do not wait for one another.

Rank 0 serves, the others work:

    >>> from course_lib.asynchronous import ParameterServer, serve
    >>> if dist.get_rank() == 0:
    ...     history = serve(optimizer, updates=6)
    ... else:
    ...     with ParameterServer(model.parameters()) as server:
    ...         while server.pull():  # the newest weights; False when training is over
    ...             loss_fn(model(x), y).backward()
    ...             server.push()  # the gradient, which is cleared

While a worker computes a gradient, gradients of other workers arrive at the server. So when the
server applies this gradient, its weights are τ updates newer than the weights at which the gradient
was computed. τ is the *staleness* of the gradient:

    w_{t+1} = w_t - γ ∇f(w_{t-τ}; b)

No worker waits, so a slow worker slows down only itself. If worker i needs t_i seconds per
gradient, the server gets Σ_i 1/t_i updates per second. A synchronous step takes max_i t_i and uses
K gradients at once, which is K / max_i t_i gradients per second. The price of asynchrony is τ; with
K equal workers it is K - 1 on average. There are three ways to limit it:

- *bounded staleness* (`bound` = s): a worker that is more than s gradients ahead of the slowest
  waits. No gradient is then staler than (K - 1)(2s + 1): while a worker computes its gradient c,
  each other worker goes at most from c - s to c + s + 1.
- *synchronous with backup workers* (`wait_for` = N < K): each step takes the mean of the first N
  gradients. Later ones are stale and are dropped. N = K is synchronous SGD.
- *a staleness-aware step* (`staleness_aware`): the gradient is divided by 1 + τ.

The history records the updates in the order in which they were applied, so a run can be replayed in
one process. On simulated ranks the history is the same in every run.

The rules alone, without messages, are at the end: `staleness_of`, `async_server`, `backup_server`.

M. Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014; Q. Ho et
al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NeurIPS
2013; J. Chen et al., "Revisiting Distributed Synchronous SGD", 2016 (arXiv 1604.00981); W. Zhang et
al., "Staleness-aware Async-SGD for Distributed Deep Learning", IJCAI 2016, which divides by τ.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.collectives import place_in, start_recv, start_send
from course_lib.local_sgd import flatten, give_gradients, gradients_of, trained, unflatten

_SERVER = 0  # its rank
_JOIN, _PUSH, _LEAVE = range(3)
_OVER = -1  # sent instead of a version: there are no more weights
_HEADER = 2  # numbers before the gradient: what the message is, and the version it is for


class Update(NamedTuple):
    """One gradient that arrived at the server: from which rank, and how stale.

    `applied` is False if it came too late and was dropped; `seconds` count from the server's start.
    """

    worker: int
    staleness: int
    applied: bool
    seconds: float


class ParameterServer:
    """A worker's side, on any rank but 0: `pull` weights, compute a gradient, `push` it.

    Args:
        params: the parameters of this worker's model, with the shapes and dtypes of the server's.

    As a context manager it tells the server when training ends early, also because of an error. The
    server then does not wait for this worker.

    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        self.params = list(params)
        self.version = 0
        self._asked = self._over = self._has_weights = False

    def pull(self) -> bool:
        """Copy the server's newest weights and return True, or return False if training is over.

        This call may wait, because the server can hold a worker back: see `serve`.
        """
        if self._over:
            return False
        if not self._asked:
            self._send(_JOIN)
        answer = torch.empty_like(_message(self.params))
        dist.recv(answer, _SERVER)
        self._asked = False
        self.version = int(answer[1])
        self._over = self.version == _OVER
        self._has_weights = not self._over
        if self._has_weights:
            unflatten(answer[_HEADER:], self.params)
        return self._has_weights

    def push(self) -> None:
        """Send the gradients, set them to None, and ask for the next weights.

        Raises RuntimeError before a `pull`, because the gradients then belong to no known weights.
        """
        if not self._has_weights:
            raise RuntimeError(
                "call pull() before each push(): a gradient belongs to the weights that were pulled"
            )
        self._send(_PUSH)
        self._has_weights = False
        for param in self.params:
            param.grad = None

    def _send(self, kind: int) -> None:
        message = _message(self.params)
        message[0], message[1] = kind, self.version
        if kind == _PUSH:
            message[_HEADER:] = flatten(gradients_of(self.params))
        dist.send(message, _SERVER)
        self._asked = kind != _LEAVE

    def __enter__(self) -> "ParameterServer":
        return self

    def __exit__(self, *_: object) -> None:
        if self._asked:  # the answer is on its way, and the server waits until it is received
            self.pull()
        if not self._over:
            self._send(_LEAVE)
            self._over = True


def serve(
    optimizer: torch.optim.Optimizer,
    updates: int,
    *,
    bound: int | None = None,
    wait_for: int | None = None,
    staleness_aware: bool = False,
    after_update: Callable[[int], None] | None = None,
) -> list[Update]:
    """Serve all other ranks until the optimizer has taken `updates` steps; return the history.

    Rank 0 calls it, and no other rank.

    Args:
        optimizer: the optimizer of the server's model, which holds the current weights.
        updates: steps to take.
        bound: s, how many gradients a worker may be ahead of the slowest; None for any number.
        wait_for: N, how many gradients of the same weights make a step; None: one makes a step.
        staleness_aware: whether a gradient is divided by 1 + τ.
        after_update: called after each step, with the number of steps so far.

    Returns an `Update` for each gradient, in the order in which the gradients arrived.

    Raises ValueError for arguments that do not fit, and RuntimeError if so many workers have left
    that training cannot go on.

    """
    _, world_size = place_in(None)
    workers = range(1, world_size)
    if bound is not None and bound < 0:
        raise ValueError(f"bound={bound} must be 0 or more")
    if bound is not None and wait_for is not None:
        raise ValueError("bound and wait_for cannot be used together: give only one of them")
    if wait_for is not None and not 1 <= wait_for <= len(workers):
        raise ValueError(
            f"wait_for must be 1 to {len(workers)}, the number of workers; got {wait_for}"
        )
    server = _Server(optimizer, updates, workers, bound, wait_for, staleness_aware, after_update)
    return server.run()


@dataclass
class _Server:
    optimizer: torch.optim.Optimizer
    updates: int
    workers: Sequence[int]
    bound: int | None
    wait_for: int | None
    staleness_aware: bool
    after_update: Callable[[int], None] | None

    def __post_init__(self) -> None:
        self.params = trained(self.optimizer)
        self.version = 0
        self.history: list[Update] = []
        self.done = dict.fromkeys(self.workers, 0)  # worker that has not left → its gradients
        self.waiting: list[int] = []  # for weights, in the order of their requests
        self.collected: dict[int, Tensor] = {}  # worker → its gradient for this step
        self.replies: dict[int, tuple[dist.Work, Tensor]] = {}
        self.expected: dict[int, tuple[dist.Work, Tensor]] = {}  # only without any_source
        self.any_source = True
        self.start = time.perf_counter()

    def run(self) -> list[Update]:
        while self.done:
            worker, message = self._next_message()
            kind, version = int(message[0]), int(message[1])
            if kind == _LEAVE:
                self._left(worker)
            else:
                self.waiting.append(worker)
            if kind == _PUSH:
                self.done[worker] += 1
                self._arrived(worker, self.version - version, message[_HEADER:])
            self._answer()
        for work, _ in self.replies.values():
            work.wait()
        if self.version < self.updates:
            raise RuntimeError(f"all workers left after {self.version} of {self.updates} updates")
        return self.history

    def _next_message(self) -> tuple[int, Tensor]:
        """Return the next message that arrives from any worker, and the worker."""
        if self.any_source:
            message = _message(self.params)
            try:
                return dist.recv(message), message
            except NotImplementedError:  # this backend cannot receive from any source
                self.any_source = False
        for worker in self.done:
            if worker not in self.waiting and worker not in self.expected:
                message = _message(self.params)
                self.expected[worker] = start_recv(message, worker), message
        while True:
            for worker, (work, message) in self.expected.items():
                if work.is_completed():  # it then needs no wait()
                    del self.expected[worker]  # its next message is added after the other workers'
                    return worker, message
            time.sleep(1e-4)

    def _arrived(self, worker: int, staleness: int, gradient: Tensor) -> None:
        if self.version >= self.updates:
            return
        fresh = self.wait_for is None or staleness == 0
        now = time.perf_counter() - self.start
        self.history.append(Update(worker, staleness, fresh, now))
        if self.wait_for is None:
            self._step(gradient / (1 + staleness) if self.staleness_aware else gradient)
        elif fresh:
            self.collected[worker] = gradient
            if len(self.collected) == self.wait_for:
                # In the order of the ranks, so that the sum does not depend on who came first.
                parts = [self.collected[rank] for rank in sorted(self.collected)]
                self.collected.clear()
                self._step(torch.stack(parts).mean(0))

    def _step(self, gradient: Tensor) -> None:
        give_gradients(self.params, gradient)
        self.optimizer.step()
        self.version += 1
        if self.after_update is not None:
            self.after_update(self.version)

    def _left(self, worker: int) -> None:
        del self.done[worker]
        needed, remaining = self.wait_for or 0, len(self.done)
        if remaining < needed and self.version < self.updates:
            raise RuntimeError(
                f"worker {worker} left: a step takes the gradients of {needed} workers, and only "
                f"{remaining} are still there"
            )

    def _answer(self) -> None:
        """Send weights to waiting workers that may go on, or tell them that training is over."""
        for worker in list(self.waiting):
            if not (over := self.version >= self.updates) and not self._may_go(worker):
                continue
            self.waiting.remove(worker)
            if over:
                del self.done[worker]
            reply = _message(self.params)
            reply[1] = _OVER if over else self.version
            reply[_HEADER:] = flatten(self.params)
            if worker in self.replies:
                self.replies[worker][0].wait()
            # Do not wait here: a worker that is slow to receive must not stop the others.
            self.replies[worker] = start_send(reply, worker), reply

    def _may_go(self, worker: int) -> bool:
        if self.wait_for is not None:
            return worker not in self.collected
        return self.bound is None or self.done[worker] - min(self.done.values()) <= self.bound


def _message(params: list[Tensor]) -> Tensor:
    """Return an empty message, in float32 or wider: float32 holds versions up to 2²⁴ exactly."""
    dtype = torch.float32
    for param in params:
        dtype = torch.promote_types(dtype, param.dtype)
    length = sum(param.numel() for param in params)
    return torch.zeros(_HEADER + length, dtype=dtype, device=params[0].device)


# The rules of a server without messages, and a worker of so many updates --------------------------

Pull = Callable[[Any], list[Tensor]]
"""``pull(worker)`` returns copies of the weights as they are now, for a worker of any number."""


def staleness_of(events: Iterable[tuple[str, Any]]) -> list[int]:
    """Return τ of every push: the updates since the worker's last pull, without the push itself.

    Args:
        events: in order, ``("pull", worker)`` when a worker takes the weights, and
            ``("push", worker)`` when its gradient arrives and is applied.

    """
    version, pulled, ages = 0, {}, []
    for kind, worker in events:
        if kind == "pull":
            pulled[worker] = version
        else:
            ages.append(version - pulled[worker])
            version += 1
    return ages


def async_server(
    params: Iterable[Tensor], lr: float
) -> tuple[Pull, Callable[[Any, Iterable[Tensor]], int]]:
    """Return (pull, push) of a server that applies every gradient at once.

    ``push(worker, gradients)`` takes the staleness-aware step w ← w - γ/(1 + τ) · g in the weights'
    own memory, and returns τ.

    Args:
        params: the server's weights.
        lr: γ, the learning rate.

    """
    params, version = list(params), 0
    pulled: dict[Any, int] = {}

    def pull(worker: Any) -> list[Tensor]:
        pulled[worker] = version
        return [param.detach().clone() for param in params]

    @torch.no_grad()
    def push(worker: Any, gradients: Iterable[Tensor]) -> int:
        nonlocal version
        age = version - pulled[worker]
        for param, gradient in zip(params, gradients, strict=True):
            param.sub_(gradient, alpha=lr / (1 + age))
        version += 1
        return age

    return pull, push


def backup_server(
    params: Iterable[Tensor], lr: float, wait_for: int
) -> tuple[Pull, Callable[[Any, Iterable[Tensor]], bool]]:
    """Return (pull, push) of a server that steps with the first N gradients and drops later ones.

    ``push(worker, gradients)`` returns whether the gradient counts: whether the weights that this
    worker pulled last are still the current ones. The N-th one that counts makes the step
    w ← w - γ/N Σ g_n, in the weights' own memory. The caller may overwrite its gradients.

    Args:
        params: the server's weights.
        lr: γ, the learning rate.
        wait_for: N, how many gradients make a step.

    """
    params, version = list(params), 0
    pulled: dict[Any, int] = {}
    collected: list[list[Tensor]] = []

    def pull(worker: Any) -> list[Tensor]:
        pulled[worker] = version
        return [param.detach().clone() for param in params]

    @torch.no_grad()
    def push(worker: Any, gradients: Iterable[Tensor]) -> bool:
        nonlocal version
        if pulled[worker] != version:
            return False
        collected.append([gradient.clone() for gradient in gradients])
        if len(collected) == wait_for:
            for param, *parts in zip(params, *collected, strict=True):
                param.sub_(torch.stack(parts).sum(0), alpha=lr / wait_for)
            collected.clear()
            version += 1
        return True

    return pull, push


def push_gradients(
    params: Iterable[Tensor], loss: Callable[[], Tensor], updates: int, server: int
) -> None:
    """Work for a server that sends weights without being asked: at first, and for each gradient.

    Weights and gradients travel as one vector of all parameters. After the last gradient nothing
    comes back, so the worker ends with the weights that it received last.

    Args:
        params: the worker's parameters. Their ``.grad`` may hold old numbers.
        loss: computes the loss at the parameters as they are now; called once for each gradient.
        updates: gradients to push.
        server: the server's rank.

    """
    params = list(params)
    for _ in range(updates):
        weights = flatten(params)
        dist.recv(weights, server)
        unflatten(weights, params)
        gradients = torch.autograd.grad(loss(), params)
        dist.send(flatten(gradients), server)
