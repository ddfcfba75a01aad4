"""Cases that are never handed out and never enter a sandbox."""

import torch
import torch.distributed as dist

from course_lib.checking import Case, in_many_forms
from course_lib.checking.testing import Candidate

from .checks import batches_case, epochs_case, script_case, tokens_case

EXACT = {"dtypes": ("float64", "float32")}


def sums_over_n(model, micro_batches, group=None):
    labels = torch.tensor(sum(int((y != -100).sum()) for _, y in micro_batches))
    dist.all_reduce(labels, group=group)
    total = torch.zeros(1)
    for x, y in micro_batches:
        loss = torch.nn.functional.cross_entropy(model(x), y, reduction="sum") / labels
        loss.backward()
        total += loss.detach()
    for param in model.parameters():
        dist.all_reduce(param.grad, group=group)
    dist.all_reduce(total, group=group)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return total.item()


SUM = "dist.all_reduce(param.grad, group=group)"
SUMS = f"""
for param in model.parameters():
    {SUM}
dist.all_reduce(total, group=group)
"""
IN_ONE_MESSAGE = """
params = list(model.parameters())
flat = torch.cat([*(param.grad.flatten() for param in params), total])
dist.all_reduce(flat, group=group)
*pieces, total = flat.split([*(param.numel() for param in params), 1])
for param, piece in zip(params, pieces, strict=True):
    param.grad = piece.view_as(param)
"""
OVER_K = f"{SUM}\nparam.grad /= dist.get_world_size(group)"
OVER_N = 'reduction="sum") / labels'
LOOP = "for param in model.parameters():"
CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
NORM = "norm = torch.stack([param.grad.norm() for param in model.parameters()]).norm()"


def wrong(kind, part, *edits):
    return Candidate(sums_over_n, kind, part, edits=edits)


def right(kind, part, *edits):
    return Candidate(sums_over_n, kind, part, right=True, edits=edits)


# Every part of the points has right solutions, or a test that refuses everything would get it.
CANDIDATES = [
    right("adds up losses and divides by N", "every label"),
    right("sends one message", "labels only", (SUMS, IN_ONE_MESSAGE)),
    right(
        *("clips by hand", "the clipping"),
        (CLIP, f"{NORM}\n{LOOP}\n    param.grad *= min(1.0, 1.0 / float(norm + 1e-12))"),
    ),
    right(
        *("multiplies by K, and divides by K", "every call"),
        ("loss.backward()", "(dist.get_world_size(group) * loss).backward()"),
        (SUM, OVER_K),
    ),
    wrong("divides by the number of ranks once more", "every label", (SUM, OVER_K)),
    wrong(
        *("takes the mean of micro-batches' means", "every label"),
        (
            OVER_N,
            'reduction="sum") / max(1, int((y != -100).sum())) / len(micro_batches)'
            " / dist.get_world_size(group)",
        ),
    ),
    wrong(
        *("leaves out the last micro-batch", "every label"),
        ("x, y in micro_batches:", "x, y in micro_batches[: max(1, len(micro_batches) - 1)]:"),
    ),
    wrong("counts tokens without a label", "labels only", ("int((y != -100).sum())", "len(y)")),
    wrong(
        *("returns the rank's own part of the loss", "labels only"),
        ("dist.all_reduce(total, group=group)", ""),
    ),
    wrong(
        *("fails for a micro-batch without labels", "labels only"),
        (OVER_N, 'reduction="mean") * (y != -100).sum() / labels'),
    ),
    wrong("never clips", "the clipping", (CLIP, "")),
    wrong(
        *("clips before the ranks' gradients are added", "the clipping"),
        (CLIP, ""),
        (LOOP, f"{CLIP}\n{LOOP}"),
    ),
    wrong(
        *("clips each parameter by itself", "the clipping"),
        (CLIP, f"{LOOP}\n    torch.nn.utils.clip_grad_norm_([param], 1.0)"),
    ),
    wrong(
        *("changes small gradients too", "the clipping"),
        (CLIP, f"{NORM}\n{LOOP}\n    param.grad /= norm"),
    ),
    wrong(
        *("keeps the N of its first call", "every call"),
        ("group=None):", "group=None, kept=[]):"),
        ("total = torch.zeros(1)", "kept.append(labels)\nlabels = kept[0]\ntotal = torch.zeros(1)"),
    ),
    wrong(
        *("adds the gradients of the call before", "every call"),
        ("group=None):", "group=None, kept={}):"),
        (
            CLIP,
            f"{CLIP}\nfor i, param in enumerate(model.parameters()):\n"
            "    last, kept[i] = kept.get(i, 0), param.grad.clone()\n    param.grad += last",
        ),
    ),
]


def museum(kind, modes=(True, False)):
    return in_many_forms(
        script_case("5 ranks", 5, kind, 2, 3, 0.25),
        script_case("6 ranks, in two groups", 6, kind, 3, 4, 0.15),
        modes=modes,
        **EXACT,
    )


HIDDEN = {
    "my_batches": in_many_forms(
        batches_case("5 ranks", 5, 33, 3, 11, [2, 4]),
        batches_case("6 ranks in two groups", 6, 8, 5, 2, [1]),
    ),
    "train": in_many_forms(
        epochs_case("5 ranks", 5, length=37, accumulate=3, lr=0.15, seed=4, frozen=[2]),
        epochs_case(
            "3 ranks, one long window", 3, length=17, accumulate=50, epochs=[4, 1], loss="mse_loss"
        ),
        epochs_case("6 ranks, in two groups", 6, length=25, accumulate=2, batch_size=4),
        **EXACT,
    ),
    "evaluate": in_many_forms(
        Case("5 ranks, 23 rows", 5, {"length": 23, "batch_size": 2}),
        Case("5 ranks, 1 row", 5, {"length": 1, "batch_size": 1, "loss": "multi_margin_loss"}),
        Case("6 ranks, 40 rows, in two groups", 6, {"length": 40, "batch_size": 5}),
        **EXACT,
    ),
    "save_checkpoint": in_many_forms(
        Case("5 ranks", 5, {"epoch": 9, "lr": 0.4, "optimizer": "AdamW"}),
        Case("3 ranks, in two groups, epoch 0", 3, {"epoch": 0, "lr": 0.6, "optimizer": "AdamW"}),
        Case("6 ranks, in two groups", 6, {"epoch": 3, "lr": 0.6, "optimizer": "SGD"}),
    ),
    "load_checkpoint": in_many_forms(
        Case("5 ranks", 5, {"epoch": 9, "lr": 0.4, "optimizer": "AdamW", "loads": True}),
        Case(
            "3 ranks, in two groups, epoch 0",
            3,
            {"epoch": 0, "lr": 0.6, "optimizer": "AdamW", "loads": True},
        ),
    ),
    "token_mean_step": in_many_forms(
        tokens_case("5 ranks", 5, [(7, 3)], [(2, 2), (9, 8)], [(4, 0)], [(1, 1)], [(6, 6), (0, 0)]),
        tokens_case(
            "6 ranks, in two groups, large gradients",
            *(6, [(7, 3)], [(2, 2), (9, 8)], [(4, 0)], [(1, 1)], [(6, 6)], [(3, 2), (3, 3)]),
            size=20,
        ),
        iterables=("list", "tuple"),
        **EXACT,
    ),
    "exhibit_1": museum("plain"),
    "exhibit_2": museum("experts"),
    "exhibit_3": museum("norm", modes=(True,)),
    "is_token_mean": tuple(each.case() for each in CANDIDATES),
}

# Modules with the course's own solutions: they cannot be imported while this is graded.
MASKED = ("course_lib.sharding", "course_lib.replicas", "course_lib.train")
