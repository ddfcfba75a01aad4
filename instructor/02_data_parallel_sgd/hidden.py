"""Cases that are never handed out and never enter a sandbox."""

import torch.distributed as dist

from course_lib.checking.testing import Candidate


def new_tensors(params, group=None):
    for param in params:
        if param.grad is not None:
            total = param.grad.clone()
            dist.all_reduce(total, group=group)
            param.grad = total / dist.get_world_size(group)


EACH, K = "for param in params:", "dist.get_world_size(group)"
MEAN, SET = f"total / {K}", "param.grad = "
WRONG = {
    "the mean": {
        "always divides by 2": [(K, "2")],
        "divides twice": [(MEAN, f"{MEAN} ** 2")],
    },
    "every rank": {
        "changes nothing": [(SET, "total = ")],
        "gives the mean to one rank only": [("all_reduce(total", "reduce(total, group_dst=0")],
        "gives all ranks the gradients of one of them": [
            ("all_reduce(total", "broadcast(total, group_src=0"),
            (MEAN, "total"),
        ],
    },
    "every gradient": {
        "leaves gradients alone that are all zero": [(SET, f"if param.grad.any(): {SET}")],
        "cuts off large gradients": [(MEAN, f"({MEAN}).clamp(-10, 10)")],
        "gives frozen parameters a gradient": [
            (EACH, f"{EACH}\n    if param.grad is None: param.grad = torch.zeros_like(param)"),
        ],
        "confuses gradients of the same shape": [
            (EACH, f"means = {{}}\n{EACH}"),
            (MEAN, f"means.setdefault(param.shape, {MEAN}).clone()"),
        ],
    },
    "every call": {
        "keeps something from the call before": [
            ("group=None):", "group=None, state={}):"),
            (EACH, "for i, param in enumerate(params):"),
            (SET, f"{SET}state[i, param.shape] = state.get((i, param.shape), 0) + "),
        ],
        "works only in its first call": [
            ("group=None):", "group=None, calls=[]):"),
            (EACH, f"calls.append(True)\n{EACH}"),
            (SET, f"if len(calls) == 1: {SET}"),
        ],
    },
}
"""Part of the points → what a wrong solution does → the edits that make it."""
# Every part has a right solution, here or in checks.py, or a test that refuses everything would
# get it.
CANDIDATES = [
    Candidate(new_tensors, "makes new tensors", "every call", right=True),
    Candidate(
        *(new_tensors, "multiplies by 1/K", "every rank"),
        right=True,
        edits=((MEAN, f"total * (1 / {K})"),),
    ),
    *(
        Candidate(new_tensors, kind, part, edits=tuple(edits))
        for part, wrong in WRONG.items()
        for kind, edits in wrong.items()
    ),
]

# The other tasks draw their hidden cases from the class's secret seed.
HIDDEN = {"is_right": tuple(candidate.case() for candidate in CANDIDATES)}

# Modules with the answers to this assignment: they cannot be imported while it is graded.
MASKED = ("course_lib.sharding",)
