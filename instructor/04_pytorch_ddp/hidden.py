"""Cases that are never handed out and never enter a sandbox."""

# ruff: noqa: B006 - a default that is kept from call to call is one of the mistakes

import torch
import torch.distributed as dist

from course_lib.checking import Case, in_many_forms
from course_lib.checking.testing import Candidate


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


def in_one_message(model, micro_batches, group=None):
    labels = torch.tensor(sum(int((y != -100).sum()) for _, y in micro_batches))
    dist.all_reduce(labels, group=group)
    total = torch.zeros(1)
    for x, y in micro_batches:
        loss = torch.nn.functional.cross_entropy(model(x), y, reduction="sum") / labels
        loss.backward()
        total += loss.detach()
    params = list(model.parameters())
    flat = torch.cat([*(param.grad.flatten() for param in params), total])
    dist.all_reduce(flat, group=group)
    *pieces, total = flat.split([*(param.numel() for param in params), 1])
    for param, piece in zip(params, pieces, strict=True):
        param.grad = piece.view_as(param)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return total.item()


def scaled_for_ddp(model, micro_batches, group=None):
    labels = torch.tensor(sum(int((y != -100).sum()) for _, y in micro_batches))
    dist.all_reduce(labels, group=group)
    total = torch.zeros(1)
    for x, y in micro_batches:
        loss = torch.nn.functional.cross_entropy(model(x), y, reduction="sum") / labels
        (dist.get_world_size(group) * loss).backward()
        total += loss.detach()
    for param in model.parameters():
        dist.all_reduce(param.grad, group=group)
        param.grad /= dist.get_world_size(group)
    dist.all_reduce(total, group=group)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return total.item()


def clips_by_hand(model, micro_batches, group=None):
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
    norm = torch.stack([param.grad.norm() for param in model.parameters()]).norm()
    for param in model.parameters():
        param.grad *= min(1.0, 1.0 / float(norm + 1e-12))
    return total.item()


def divides_by_k_again(model, micro_batches, group=None):
    labels = torch.tensor(sum(int((y != -100).sum()) for _, y in micro_batches))
    dist.all_reduce(labels, group=group)
    total = torch.zeros(1)
    for x, y in micro_batches:
        loss = torch.nn.functional.cross_entropy(model(x), y, reduction="sum") / labels
        loss.backward()
        total += loss.detach()
    for param in model.parameters():
        dist.all_reduce(param.grad, group=group)
        param.grad /= dist.get_world_size(group)
    dist.all_reduce(total, group=group)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return total.item()


def mean_of_micro_batches(model, micro_batches, group=None):
    labels = torch.tensor(sum(int((y != -100).sum()) for _, y in micro_batches))
    dist.all_reduce(labels, group=group)
    total = torch.zeros(1)
    for x, y in micro_batches:
        loss = torch.nn.functional.cross_entropy(model(x), y, reduction="sum")
        loss = loss / max(1, int((y != -100).sum())) / len(micro_batches)
        loss = loss / dist.get_world_size(group)
        loss.backward()
        total += loss.detach()
    for param in model.parameters():
        dist.all_reduce(param.grad, group=group)
    dist.all_reduce(total, group=group)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return total.item()


def leaves_out_the_last(model, micro_batches, group=None):
    labels = torch.tensor(sum(int((y != -100).sum()) for _, y in micro_batches))
    dist.all_reduce(labels, group=group)
    total = torch.zeros(1)
    for x, y in micro_batches[: max(1, len(micro_batches) - 1)]:
        loss = torch.nn.functional.cross_entropy(model(x), y, reduction="sum") / labels
        loss.backward()
        total += loss.detach()
    for param in model.parameters():
        dist.all_reduce(param.grad, group=group)
    dist.all_reduce(total, group=group)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return total.item()


def counts_all_tokens(model, micro_batches, group=None):
    labels = torch.tensor(sum(len(y) for _, y in micro_batches))
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


def own_loss(model, micro_batches, group=None):
    labels = torch.tensor(sum(int((y != -100).sum()) for _, y in micro_batches))
    dist.all_reduce(labels, group=group)
    total = torch.zeros(1)
    for x, y in micro_batches:
        loss = torch.nn.functional.cross_entropy(model(x), y, reduction="sum") / labels
        loss.backward()
        total += loss.detach()
    for param in model.parameters():
        dist.all_reduce(param.grad, group=group)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return total.item()


def nan_without_labels(model, micro_batches, group=None):
    labels = torch.tensor(sum(int((y != -100).sum()) for _, y in micro_batches))
    dist.all_reduce(labels, group=group)
    total = torch.zeros(1)
    for x, y in micro_batches:
        loss = torch.nn.functional.cross_entropy(model(x), y, reduction="mean")
        loss = loss * (y != -100).sum() / labels
        loss.backward()
        total += loss.detach()
    for param in model.parameters():
        dist.all_reduce(param.grad, group=group)
    dist.all_reduce(total, group=group)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return total.item()


def never_clips(model, micro_batches, group=None):
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
    return total.item()


def clips_before(model, micro_batches, group=None):
    labels = torch.tensor(sum(int((y != -100).sum()) for _, y in micro_batches))
    dist.all_reduce(labels, group=group)
    total = torch.zeros(1)
    for x, y in micro_batches:
        loss = torch.nn.functional.cross_entropy(model(x), y, reduction="sum") / labels
        loss.backward()
        total += loss.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for param in model.parameters():
        dist.all_reduce(param.grad, group=group)
    dist.all_reduce(total, group=group)
    return total.item()


def clips_each(model, micro_batches, group=None):
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
    for param in model.parameters():
        torch.nn.utils.clip_grad_norm_([param], 1.0)
    return total.item()


def always_norm_1(model, micro_batches, group=None):
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
    norm = torch.stack([param.grad.norm() for param in model.parameters()]).norm()
    for param in model.parameters():
        param.grad /= norm
    return total.item()


def keeps_the_first_n(model, micro_batches, group=None, kept=[]):
    labels = torch.tensor(sum(int((y != -100).sum()) for _, y in micro_batches))
    dist.all_reduce(labels, group=group)
    kept.append(labels)
    labels = kept[0]
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


def adds_to_the_last_call(model, micro_batches, group=None, kept={}):
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
    for i, param in enumerate(model.parameters()):
        last, kept[i] = kept.get(i, 0), param.grad.clone()
        param.grad += last
    return total.item()


CANDIDATES = [
    Candidate(sums_over_n, "adds up losses and divides by N", "every label", right=True),
    Candidate(in_one_message, "sends one message", "labels only", right=True),
    Candidate(clips_by_hand, "clips by hand", "the clipping", right=True),
    Candidate(scaled_for_ddp, "multiplies by K, and divides by K", "every call", right=True),
    Candidate(divides_by_k_again, "divides by the number of ranks once more", "every label"),
    Candidate(mean_of_micro_batches, "takes the mean of micro-batches' means", "every label"),
    Candidate(leaves_out_the_last, "leaves out the last micro-batch", "every label"),
    Candidate(counts_all_tokens, "counts tokens without a label", "labels only"),
    Candidate(own_loss, "returns the rank's own part of the loss", "labels only"),
    Candidate(nan_without_labels, "fails for a micro-batch without labels", "labels only"),
    Candidate(never_clips, "never clips", "the clipping"),
    Candidate(clips_before, "clips before the ranks' gradients are added", "the clipping"),
    Candidate(clips_each, "clips each parameter by itself", "the clipping"),
    Candidate(always_norm_1, "changes small gradients too", "the clipping"),
    Candidate(keeps_the_first_n, "keeps the N of its first call", "every call"),
    Candidate(adds_to_the_last_call, "adds the gradients of the call before", "every call"),
]


EXACT = {"dtypes": ("float64", "float32")}


def epochs(name, k, **parameters):
    usual = {"length": 10, "batch_size": 2, "accumulate": 1, "epochs": [0, 1], "lr": 0.2}
    return Case(name, k, {**usual, "seed": 0, **parameters})


def museum(kind, modes=(True, False)):
    return in_many_forms(
        Case("5 ranks", 5, {"kind": kind, "steps": 2, "rows": 3, "lr": 0.25}),
        Case("6 ranks, in two groups", 6, {"kind": kind, "steps": 3, "rows": 4, "lr": 0.15}),
        modes=modes,
        **EXACT,
    )


def tokens(name, k, *tokens, **more):
    return Case(name, k, {"tokens": tokens, **more})


HIDDEN = {
    "my_batches": in_many_forms(
        Case("5 ranks", 5, {"length": 33, "batch_size": 3, "seed": 11, "epochs": [2, 4]}),
        Case("6 ranks in two groups", 6, {"length": 8, "batch_size": 5, "seed": 2, "epochs": [1]}),
    ),
    "train": in_many_forms(
        epochs("5 ranks", 5, length=37, accumulate=3, lr=0.15, seed=4, frozen=[2]),
        epochs(
            "3 ranks, one long window", 3, length=17, accumulate=50, epochs=[4, 1], loss="mse_loss"
        ),
        epochs("6 ranks, in two groups", 6, length=25, accumulate=2, batch_size=4),
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
        tokens("5 ranks", 5, [(7, 3)], [(2, 2), (9, 8)], [(4, 0)], [(1, 1)], [(6, 6), (0, 0)]),
        tokens(
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
    "exhibit_4": museum("plain"),
    "diagnoses": (Case("your answers, once more", 1, {"again": True}),),
    "is_token_mean": tuple(each.case() for each in CANDIDATES),
}

# Modules with the course's own solutions: they cannot be imported while this is graded.
MASKED = ("course_lib.sharding", "course_lib.replicas", "course_lib.train")
