"""1-bit Adam: exact steps of AdamW first, then momenta in one bit, with sizes kept from then on.

AdamW divides each number of its momentum m by √v, the recent size of that gradient. After
compression all numbers of a message have one size, so v would no longer tell them apart. So v is
kept from the first, exact steps, and what is compressed is the momentum:

    m_k = β₁ m + (1 - β₁) g_k          on rank k, with its own gradient
    m   = C(Σ C(m_k)) / K              one bit for a number, with error feedback
    w   = w - α (m̂ / (√v̂ + ε) + λ w)   m̂ and v̂ are m and v without the bias of their first steps

H. Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence
Speed", ICML 2021.
"""

import math

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from course_lib.compression import ErrorFeedback, OneBit, compressed_all_reduce
from course_lib.gradient_sync import sync_flat
from course_lib.local_sgd import flatten, trained


class OneBitAdam:
    """Takes the steps of an AdamW with one group of parameters, the same on all ranks.

    Args:
        optimizer: AdamW, before its first step.
        exact_steps: how many steps, at least one, send the whole gradient.

    """

    def __init__(self, optimizer: Optimizer, exact_steps: int) -> None:
        self.optimizer = optimizer
        self.exact_steps = exact_steps
        self.params = trained(optimizer)
        self.steps = 0
        self._compressor = ErrorFeedback(OneBit())

    @torch.no_grad()
    def step(self) -> None:
        """Average this step's gradients or momenta over the ranks, and update the weights."""
        self.steps += 1
        if self.steps <= self.exact_steps:
            sync_flat(self.params)
            self.optimizer.step()
            if self.steps == self.exact_steps:
                self._keep_sizes()
            return
        (options,) = self.optimizer.param_groups
        beta, lr = options["betas"][0], options["lr"]
        gradients = [param.grad for param in self.params if param.grad is not None]
        self._momentum.lerp_(flatten(gradients), 1 - beta)
        compressed_all_reduce(self._momentum, self._compressor)
        self._momentum /= dist.get_world_size()
        rate = lr / (1 - beta**self.steps)
        update = self._momentum / self._sizes
        for param, piece in zip(self.params, update.split_with_sizes(self._lengths), strict=True):
            param.mul_(1 - lr * options["weight_decay"]).sub_(piece.view_as(param), alpha=rate)

    def _keep_sizes(self) -> None:
        """Keep m, and √v̂ + ε. A number that has not had a gradient does not move any more."""
        (options,) = self.optimizer.param_groups
        states = [self.optimizer.state[param] for param in self.params]
        self._lengths = [param.numel() for param in self.params]
        self._momentum = flatten([state["exp_avg"] for state in states])
        sizes = flatten([state["exp_avg_sq"] for state in states]).sqrt()
        sizes /= math.sqrt(1 - options["betas"][1] ** self.exact_steps)
        self._sizes = torch.where(sizes > 0, sizes + options["eps"], math.inf)
