"""An optimizer that several ranks share: inputs, program, and what one process gives.

Each rank has gradients of its own, some of them ``None``, and makes the optimizer of its part by a
function that it is given. So what an optimizer holds and updates can be counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.checking.answers import ANYTHING, WHOLE, ListOf, sees
from course_lib.checking.cases import Case
from course_lib.checking.judges import Judge, Oracle, equals, same_on_all_ranks
from course_lib.checking.on_ranks.given import Given

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any], int]] = {
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}, 1),
    "adamw": (torch.optim.AdamW, {"lr": 0.1}, 2),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01}, 1),
    "sgd": (torch.optim.SGD, {"lr": 0.5}, 0),
}
"""Class, options, and how many numbers of state it keeps for each number that it updates."""


def optimizer_inputs(case: Case, generator: torch.Generator) -> list[dict[str, Any]]:
    """Draw equal weights for each group, and gradients for each rank and step.

    A case has ``shapes``, ``steps`` and the name of the ``optimizer``; and, if it likes, positions
    of parameters that are ``frozen``, that come ``again`` because they are tied, or that are
    ``unused``, by the group's last rank in the first step, by its first rank in the next, and so
    on; ``alike``: of two of one shape that hold the same numbers; ``before``: whether ``.grad``
    holds something at first.
    """
    p = case.parameters

    def draw() -> list[Tensor]:
        return [torch.randn(s, generator=generator, dtype=torch.double) for s in p["shapes"]]

    found, frozen = [dict[str, Any]()] * case.world_size, p.get("frozen", ())
    for members in case.groups:
        weights = draw()
        for i in p.get("alike", ()):
            weights[i] = weights[p["alike"][0]].clone()
        for me, rank in enumerate(members):
            grads = []
            for step in range(p["steps"]):
                unused = me == (0 if step % 2 else len(members) - 1)
                missing = {*frozen, *(p.get("unused", ()) if unused else ())}
                grads.append([None if i in missing else g for i, g in enumerate(draw())])
            mine = {"weights": weights, "gradients": grads, "frozen": frozen}
            mine |= {"again": p.get("again", ()), "before": p.get("before", False)}
            found[rank] = {**mine, "optimizer": p["optimizer"]}
    return found


def optimizer_program(sharded_optimizer: Callable[..., Any], mine: Any, given: Given) -> Any:
    """Take the case's steps; return the weights, and what the optimizers update and hold."""
    params = [
        nn.Parameter(w.clone(), requires_grad=i not in mine["frozen"])
        for i, w in enumerate(mine["weights"])
    ]
    cls, options, _ = OPTIMIZERS[mine["optimizer"]]
    for param in params if mine["before"] else ():
        param.grad = torch.ones_like(param)  # of nothing that the steps below are about
    made: list[Any] = []

    def make_optimizer(tensors: Any) -> Any:
        made.append(cls(tensors, **options))
        return made[-1]

    make_optimizer.__qualname__ = mine["optimizer"]
    # Other models, one before and one after it, which are not trained meanwhile.
    others = [[nn.Parameter(torch.ones(size))] for size in (5, 6)]
    sharded_optimizer(others[0], lambda tensors: cls(tensors, **options), group=given.group)
    tied = given.iterable([*params, *(params[i] for i in mine["again"])])
    step = sharded_optimizer(tied, make_optimizer, group=given.group)
    sharded_optimizer(others[1], lambda tensors: cls(tensors, **options), group=given.group)
    if not callable(step):
        raise TypeError(f"what comes back is {type(step).__name__}, expected a function step()")
    for grads in mine["gradients"]:
        for param, grad in zip(params, grads, strict=True):
            param.grad = None if grad is None else grad.clone()
        step()
        if any(param.requires_grad == (i in mine["frozen"]) for i, param in enumerate(params)):
            raise RuntimeError("the function changes which parameters require a gradient")
    updated = [t for each in made for group in each.param_groups for t in group["params"]]
    state = [v for each in made for per in each.state.values() for v in per.values()]
    return {
        "parameter {}": [param.detach().clone() for param in params],
        "updates": sum(t.numel() for t in updated),
        "state": sum(v.numel() for v in state if isinstance(v, Tensor) and v.dim()),
    }


def _one_process(scale: Callable[[int], float] = lambda k: 1 / k, mine: bool = False) -> Oracle:
    """Return the oracle: K gradients added up, times `scale(K)`, in one optimizer."""

    def oracle(case: Case, inputs: Sequence[Any], me: int) -> dict[str, Any]:
        cls, options, _ = OPTIMIZERS[case.parameters["optimizer"]]
        params = [nn.Parameter(w.double().clone()) for w in inputs[0]["weights"]]
        trained = [p for i, p in enumerate(params) if i not in inputs[0]["frozen"]]
        optimizer = cls(trained, **options)
        for step in range(case.parameters["steps"]):
            for i, param in enumerate(params):
                terms = [each["gradients"][step][i] for each in ([inputs[me]] if mine else inputs)]
                grads = [torch.zeros_like(param) if g is None else g.double() for g in terms]
                param.grad = torch.stack(grads).sum(0) * scale(len(inputs))
            optimizer.step()
        dtype = inputs[0]["weights"][0].dtype
        return {"parameter {}": [param.detach().to(dtype) for param in params]}

    return oracle


def _without_counts(inner: Judge) -> Judge:
    @sees({"parameter {}": ListOf(ANYTHING), "updates": WHOLE, "state": WHOLE})
    def judge(case: Case, inputs: Sequence[Any], values: Sequence[Any]) -> None:
        inner(case, inputs, [{"parameter {}": value["parameter {}"]} for value in values])

    return judge


equals_one_optimizer = _without_counts(
    equals(
        _one_process(),
        {
            "the weights of a step with the sum over the ranks, not the mean": _one_process(
                lambda k: 1
            ),
            "the weights of a step with this rank's own gradients": _one_process(
                lambda k: 1, mine=True
            ),
            "the mean divided by the number of ranks once more": _one_process(lambda k: 1 / k**2),
        },
    )
)
"""Judge the weights after the steps by those of one process."""

same_weights_on_all_ranks = _without_counts(same_on_all_ranks)
