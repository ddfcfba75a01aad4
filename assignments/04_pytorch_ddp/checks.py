"""The checks of this assignment. They are handed out: read them if a message is not enough.

What one process computes stands in `course_lib.checking.whole_runs`. A program gets only its rank's
input.
"""

import hashlib
import io
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from course_lib.checking import (
    Case,
    Expectation,
    Wrong,
    calls_at_most,
    equals,
    in_many_forms,
    only_calls,
    same_on_all_ranks,
    sends_at_most,
    task,
)
from course_lib.checking.answers import NUMBER, WHOLE, Kind, ListOf, sees
from course_lib.checking.training import CLASSES, FEATURES, NUMEL, SHAPES, make_model
from course_lib.checking.whole_runs import (
    EPOCHS_MISTAKES,
    STEPS_MISTAKES,
    batches_of,
    epochs_inputs,
    museum_inputs,
    museum_model,
    windows_of,
    with_batches,
    with_epochs,
)

EXACT = {"dtypes": ("float32", "float64")}  # many steps in bfloat16 would hide a wrong one
SMALL = 512  # bytes that a rank may send beside its gradients


# my_batches --------------------------------------------------------------------------------


def batches_program(my_batches, mine, given):
    """Ask for the batches of several epochs, as a training loop does."""
    length, size, seed = mine["length"], mine["batch_size"], mine["seed"]
    found = [my_batches(length, size, epoch, seed, group=given.group) for epoch in mine["epochs"]]
    listed = [[[int(row) for row in batch] for batch in batches] for batches in found]
    return {"epoch {}": dict(zip(map(str, mine["epochs"]), listed, strict=True))}


def sampled(**changes):
    def oracle(case, inputs, me):
        p = {**case.parameters, "k": len(inputs), "me": me, **changes}
        return [batches_of(p, epoch) for epoch in case.parameters["epochs"]]

    return oracle


@sees(
    lambda case, inputs, rank: {
        "epoch {}": {str(e): ListOf(ListOf(WHOLE)) for e in inputs[rank]["epochs"]}
    }
)
def right_batches(case, inputs, values):
    """Judge the batches of all ranks, one list after the other."""
    mistakes = {
        "the order of epoch 0: tell the sampler which epoch it is (set_epoch)": {"tell": False},
        "the rows in their order: shuffle them": {"shuffle": False},
        "an order from another seed: give the sampler `seed`": {"seed": 0},
        "what a sampler with drop_last=True gives: no row may be lost": {"drop_last": True},
        "the share of the group's first rank": {"me": 0},
        "batches without the last, short one": {"short": False},
        "all rows in one batch": {"batch_size": 10**9},
    }
    for members in case.groups:
        theirs = [inputs[rank] for rank in members]
        for me, rank in enumerate(members):
            got = [values[rank]["epoch {}"][str(epoch)] for epoch in inputs[rank]["epochs"]]
            right = sampled()(case, theirs, me)
            for epoch, mine, wanted in zip(inputs[rank]["epochs"], got, right, strict=True):
                if mine == wanted:
                    continue
                like = next(
                    (w for w, c in mistakes.items() if got == sampled(**c)(case, theirs, me)), ""
                )
                raise Wrong(
                    f"rank {rank}: epoch {epoch}: expected the batches {_short(wanted)}, "
                    f"got {_short(mine)}",
                    f"This equals {like}." if like else "",
                )


def _short(batches):
    text = str(batches)
    return text if len(text) < 120 else text[:117] + "…"


# train -------------------------------------------------------------------------------------


def train_program(train, mine, given):
    """Train once; what comes back are the replica's weights and the losses of the steps."""
    model = given.model(make_model(mine["weights"]))
    settings = [mine[key] for key in ("lr", "batch_size", "accumulate")]
    epochs = range(mine["first"], mine["first"] + mine["count"])
    losses = train(
        *(model, getattr(F, mine["loss"]), mine["x"], mine["y"], *settings),
        *(epochs, mine["seed"]),
        group=given.group,
    )
    weights = [param.detach() for param in model.parameters()]
    return {"parameter {} after training": weights, "loss of step {}": losses}


def steps(case, rank):
    """Return how many optimizer steps there are."""
    return len(windows_of(case.parameters, len(case.members(rank))))


def gradient_bytes(case, rank):
    """Return what a rank sends if its gradients travel once per optimizer step."""
    return steps(case, rank) * (NUMEL * case.itemsize + 64) + SMALL


# evaluate ----------------------------------------------------------------------------------


class Watched(nn.Module):
    """A classifier with BatchNorm and dropout, which counts the rows that it is given."""

    def __init__(self, weights):
        super().__init__()
        first, *_, last = make_model(weights)
        self.layers = nn.Sequential(first, nn.BatchNorm1d(first.out_features), last, nn.Dropout())
        self.to(weights[0].dtype)
        self.rows = []

    def forward(self, x):
        self.rows.append(len(x))
        return self.layers(x)


def evaluate_inputs(case, generator):
    """Draw the same model and the same rows for all ranks of a group."""
    p = case.parameters
    weights = [0.5 * torch.randn(shape, generator=generator) for shape in SHAPES]
    drawn = {}
    for members in case.groups:
        y = torch.randint(CLASSES, (p["length"],), generator=generator)
        own = {
            "weights": weights,
            "x": torch.randn(p["length"], FEATURES, generator=generator),
            "y": y.to(getattr(torch, p.get("labels", "int64"))),
            "loss": p.get("loss", "cross_entropy"),
            "batch_size": p["batch_size"],
        }
        drawn |= dict.fromkeys(members, own)
    return [drawn[rank] for rank in range(case.world_size)]


def evaluate_program(evaluate, mine, given):
    """Evaluate once, and count the rows that this rank's model was given."""
    model = given.model(Watched(mine["weights"]))
    loss_fn = getattr(F, mine["loss"])
    answer = evaluate(model, loss_fn, mine["x"], mine["y"], mine["batch_size"], group=given.group)
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise TypeError(f"evaluate returns {answer!r:.60}, not a pair (mean loss, accuracy)")
    loss, accuracy = answer
    return {"mean loss": loss, "accuracy": accuracy, "rows": [0, *model.rows]}


def evaluated(rows=lambda n, k, me: list(range(n)), parts=None, training=False):
    """Return the oracle of an evaluation over these rows, or of a mean over these parts of them."""

    def oracle(case, inputs, me):
        mine, k = inputs[me], len(inputs)
        n = len(mine["x"])
        model = Watched([w.double() for w in mine["weights"]]).eval()
        chosen = parts(n, k, mine["batch_size"]) if parts else [rows(n, k, me)]
        with torch.no_grad():
            results = []
            for part in filter(None, chosen):
                out, y = model(mine["x"].double()[part]), mine["y"][part]
                right = (out.argmax(1) == y).double().mean().item()
                results.append((getattr(F, mine["loss"])(out, y).item(), right))
        if not results:
            return {}
        loss, accuracy = (math.fsum(column) / len(results) for column in zip(*results, strict=True))
        return {"mean loss": loss, "accuracy": accuracy}

    return oracle


def padded(n, k, me):
    """Return all rows of a sampler that pads."""
    return [i % n for i in range(-(-n // k) * k)]


EVALUATION_MISTAKES = {
    "what you get when padded rows are counted: a sampler gives every rank equally many": evaluated(
        padded
    ),
    "the mean of the ranks' means, whatever their rows (strided shards)": evaluated(
        parts=lambda n, k, size: [list(range(n))[r::k] for r in range(k)]
    ),
    "the result of this rank's rows alone": evaluated(lambda n, k, me: list(range(n))[me::k]),
    "the result without the last rows, which no rank looked at": evaluated(
        lambda n, k, me: list(range(n - n % k))
    ),
    "the mean of the batches' means: a short batch counts as much as a full one": evaluated(
        parts=lambda n, k, size: [
            list(range(n))[r::k][at : at + size] for r in range(k) for at in range(0, n, size)
        ]
    ),
}


@sees({"mean loss": NUMBER, "accuracy": NUMBER, "rows": ListOf(WHOLE)})
def right_numbers(case, inputs, values):
    """Judge the two numbers, then who looked at how many rows."""
    only = [{k: v for k, v in value.items() if k != "rows"} for value in values]
    equals(evaluated(), EVALUATION_MISTAKES)(case, inputs, only)
    same_on_all_ranks(case, inputs, only)
    for members in case.groups:
        for rank in members:
            n, size = len(inputs[rank]["x"]), inputs[rank]["batch_size"]
            seen, most = sum(values[rank]["rows"]), max(values[rank]["rows"], default=0)
            if seen > -(-n // len(members)):
                raise Wrong(
                    f"rank {rank}: the model was given {seen} of the {n} rows, expected at most "
                    f"{-(-n // len(members))}",
                    "The ranks share the work: each looks at its own part only.",
                )
            if most > size:
                raise Wrong(
                    f"rank {rank}: the model was given {most} rows at once, expected at most {size}"
                )


# save_checkpoint, load_checkpoint ----------------------------------------------------------


def checkpoint_inputs(case, generator):
    """Draw what was trained, the same on all ranks, and fresh weights of each rank's own."""

    def draw():
        return [torch.randn(shape, generator=generator) for shape in SHAPES]

    p = case.parameters
    trained = {"weights": draw(), "momentum": draw(), "epoch": p["epoch"], "lr": p["lr"]}
    others = {
        "weights": [0 * w for w in trained["weights"]],
        "momentum": [],
        "epoch": -1,
        "lr": 0.0,
    }
    firsts = {members[0] for members in case.groups}
    return [
        # Loading: only the first rank of a group has a disk with the file on it.
        {**(trained if not p.get("loads") or r in firsts else others), "fresh": draw()}
        for r in range(case.world_size)
    ]


def trained_pair(mine):
    """Return the model and the optimizer of a run that has got this far."""
    model = make_model(mine["weights"])
    optimizer = torch.optim.SGD(model.parameters(), lr=mine["lr"], momentum=0.9)
    for param, momentum in zip(model.parameters(), mine["momentum"], strict=True):
        optimizer.state[param]["momentum_buffer"] = momentum.clone()
    return model, optimizer


def save_program(save_checkpoint, mine, given):
    """Save on all ranks, each to a disk of its own; return what is then on this rank's."""
    model, optimizer = trained_pair(mine)
    ddp = DistributedDataParallel(given.model(model), process_group=given.group)
    ddp.train(model.training)
    file = io.BytesIO()
    save_checkpoint(file, ddp, optimizer, mine["epoch"], group=given.group)
    if not file.getvalue():
        return {"what it wrote": None}
    found = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    if not isinstance(found, dict) or set(found) != {"model", "optimizer", "epoch"}:
        keys = sorted(map(str, found)) if isinstance(found, dict) else type(found).__name__
        raise ValueError(f"the file holds {keys}, not a dict of model, optimizer and epoch")
    state = found["optimizer"].get("state", {})
    return {
        "what it wrote": "a file",
        "model in the file": dict(found["model"]),
        "momentum {} in the file": [state[i].get("momentum_buffer") for i in sorted(state)],
        "epoch in the file": found["epoch"],
    }


def saved(case, inputs, me):
    """Return what is right: the group's first rank writes, the others do not."""
    if me:
        return {"what it wrote": None}
    names = make_model(inputs[me]["weights"]).state_dict().keys()
    return {
        "what it wrote": "a file",
        "model in the file": dict(zip(names, inputs[me]["weights"], strict=True)),
        "momentum {} in the file": inputs[me]["momentum"],
        "epoch in the file": inputs[me]["epoch"],
    }


def load_program(load_checkpoint, mine, given):
    """Load into a fresh model and optimizer; return what they then hold."""
    file = None
    if mine["momentum"]:
        model, optimizer = trained_pair(mine)
        file = io.BytesIO()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "epoch": mine["epoch"]}, file)
        file.seek(0)
    model = given.model(make_model(mine["fresh"]))
    optimizer = torch.optim.SGD(
        model.parameters(), lr=mine["epoch"] / 8 + 0.11 if file else 0.123, momentum=0.9
    )
    epoch = load_checkpoint(file, model, optimizer, group=given.group)
    held = [optimizer.state[param].get("momentum_buffer") for param in model.parameters()]
    return {
        "parameter {}": [param.detach().clone() for param in model.parameters()],
        "momentum {}": held,
        "learning rate": optimizer.param_groups[0]["lr"],
        "epoch to begin with": epoch,
    }


def loaded(case, inputs, me):
    """Return what is in the file of the group's first rank."""
    kept = inputs[0]
    return {
        "parameter {}": kept["weights"],
        "momentum {}": kept["momentum"],
        "learning rate": kept["lr"],
        "epoch to begin with": kept["epoch"],
    }


LOAD_MISTAKES = {
    "the fresh weights that this rank had before: nothing was loaded here": (
        lambda case, inputs, me: {"parameter {}": inputs[me]["fresh"]}
    )
}


# The museum --------------------------------------------------------------------------------


def exhibit_program(exhibit, mine, given):
    """Train with the script; what comes back are the replica's weights."""
    model = given.model(museum_model(mine["kind"], mine["weights"]))
    batches = given.iterable(list(zip(mine["x"], mine["y"], strict=True)))
    found = {}
    if mine["kind"] == "norm":
        loss_fn = getattr(F, mine["loss"])
        shown = exhibit(model, loss_fn, batches, mine["test"], mine["lr"], group=given.group)
        found["prediction"] = shown.detach() if isinstance(shown, torch.Tensor) else shown
    else:
        exhibit(model, getattr(F, mine["loss"]), batches, mine["lr"], group=given.group)
    weights = [param.detach() for param in model.parameters()]
    return {"parameter {} at the end": weights, **found}


def epochs_program(exhibit, mine, given):
    """Train with the script, which samples by itself; its weights come back."""
    model = given.model(make_model(mine["weights"]))
    exhibit(
        *(model, getattr(F, mine["loss"]), mine["x"], mine["y"], mine["lr"]),
        *(mine["batch_size"], mine["count"], mine["seed"]),
        group=given.group,
    )
    return {"parameter {} after training": [param.detach() for param in model.parameters()]}


def only_weights(oracle):
    def weights(case, inputs, me):
        found = oracle(case, inputs, me)
        return {key: value for key, value in found.items() if key.startswith("parameter")}

    return weights


def museum_cases(kind, *more, modes=(True, False)):
    """Return the cases of an exhibit whose batches are given."""
    return in_many_forms(
        Case("1 rank", 1, {"kind": kind, "steps": 2, "rows": 3, "lr": 0.2}),
        Case("2 ranks", 2, {"kind": kind, "steps": 3, "rows": 4, "lr": 0.1, "loss": "mse_loss"}),
        Case("3 ranks", 3, {"kind": kind, "steps": 3, "rows": 2, "lr": 0.3}),
        Case("4 ranks, in two groups", 4, {"kind": kind, "steps": 2, "rows": 3, "lr": 0.2}),
        *more,
        modes=modes,
        **EXACT,
    )


def mended(name, kind, **options):
    """Return the check of an exhibit whose batches are given."""
    tolerance = options.pop("tolerance", {})
    return task(
        name,
        inputs=museum_inputs,
        program=exhibit_program,
        judges=[equals(with_batches(), STEPS_MISTAKES, tolerance=tolerance)],
        cases=museum_cases(kind, **options),
    )


# diagnoses ---------------------------------------------------------------------------------

FAULTS = {
    "A": "padded rows are counted",
    "B": "every epoch has the same order",
    "C": "the replicas start from different weights",
    "D": "parameters are averaged, gradients are not",
    "E": "what is added up is not what arrived",
    "F": "a mean of means: unequal parts count the same",
    "G": "some parameters get no gradient on some ranks",
    "H": "gradients are never cleared",
    "I": "buffers come apart",
    "J": "a number is read as another type",
    "K": "the learning rate does not fit the number of ranks",
    "L": "gradients travel once per micro-batch",
}
EXHIBITS = [f"exhibit_{i}" for i in range(1, 7)]

# The right letters, as digests: to spare you their sight, not to keep a secret.
DIGESTS = {
    "exhibit_1": "55fdf21609f7",
    "exhibit_2": "5d8ad589108a",
    "exhibit_3": "45b8917a6c4f",
    "exhibit_4": "1b52851a649b",
    "exhibit_5": "de6d60b118f7",
    "exhibit_6": "e7ac149481f0",
}


def digest(exhibit, letter):
    """Return the digest of an answer."""
    return hashlib.sha256(f"diagnosis of {exhibit}: {letter}".encode()).hexdigest()[:12]


def diagnoses_program(diagnoses, mine, given):
    """Ask for the answers."""
    return {"answers": dict(diagnoses())}


def is_dict_of_texts(value):
    return isinstance(value, dict) and all(isinstance(letter, str) for letter in value.values())


@sees({"answers": Kind("a dict from exhibits to letters", is_dict_of_texts)})
def are_answers(case, inputs, values):
    """Judge that every exhibit has one of the letters."""
    for value in values:
        answers = value["answers"]
        if set(answers) != set(EXHIBITS):
            raise Wrong(
                f"the answers are for {', '.join(map(str, answers)) or 'nothing'}, expected "
                f"one for each of {', '.join(EXHIBITS)}"
            )
        for exhibit, letter in answers.items():
            if letter not in list(FAULTS):
                raise Wrong(f"{exhibit}: {letter!r:.40} is none of the letters A to L")


def is_right(exhibit):
    """Expect the right letter for an exhibit; its points are its own."""

    def test(case, observed, trace):
        letter = observed.outputs[0]["value"]["answers"][exhibit]
        if digest(exhibit, letter) != DIGESTS[exhibit]:
            raise Wrong(
                f"{exhibit}: not {letter} ({FAULTS[letter]})",
                "Which experiment tells it from the others? Watch the script on 1, 2 and 3 ranks.",
            )

    return Expectation(test, exhibit)


def epochs_case(name, k, **parameters):
    usual = {"length": 10, "batch_size": 2, "accumulate": 1, "first": 0, "count": 2, "lr": 0.2}
    return Case(name, k, {**usual, "seed": 0, **parameters})


def batches_case(name, k, length, batch_size, seed, epochs):
    return Case(
        name, k, {"length": length, "batch_size": batch_size, "seed": seed, "epochs": epochs}
    )


CHECKS = {
    "my_batches": task(
        "my_batches",
        inputs=lambda case, generator: [dict(case.parameters) for _ in range(case.world_size)],
        program=batches_program,
        judges=[right_batches],
        expects=[only_calls()],
        cases=in_many_forms(
            batches_case("1 rank, 5 rows", 1, 5, 2, 0, [0, 1]),
            batches_case("2 ranks, 12 rows", 2, 12, 3, 7, [0, 1, 2]),
            batches_case("3 ranks, 10 rows", 3, 10, 4, 0, [3, 0]),
            batches_case("4 ranks, 13 rows, in two groups", 4, 13, 2, 1, [0, 5]),
            batches_case("3 ranks, 2 rows", 3, 2, 2, 3, [1]),
        ),
    ),
    "train": task(
        "train",
        inputs=epochs_inputs,
        program=train_program,
        judges=[equals(with_epochs(), EPOCHS_MISTAKES, tolerance={"float64": 1e-6})],
        expects=[
            sends_at_most(
                gradient_bytes,
                kinds=["all_reduce"],
                hint="Gradients travel once per optimizer step, not once per micro-batch: forward "
                "and backward of all but a window's last micro-batch belong into no_sync().",
            ),
            sends_at_most(
                lambda case, rank: 4 * (NUMEL * case.itemsize + SMALL),
                besides=["all_reduce"],
                hint="Wrap the model once, before the first epoch.",
            ),
            calls_at_most(all_reduce=lambda case, rank: (len(SHAPES) + 2) * steps(case, rank)),
        ],
        worth={"values": 4, "communication": 2},
        cases=in_many_forms(
            epochs_case("1 rank, 7 rows", 1, length=7, accumulate=2),
            epochs_case("2 ranks, 16 rows, windows of 2", 2, length=16, accumulate=2, lr=0.1),
            epochs_case(
                "3 ranks, 14 rows, squared error",
                *(3,),
                **{"length": 14, "accumulate": 3, "first": 2, "seed": 5, "loss": "mse_loss"},
            ),
            epochs_case(
                "4 ranks, 21 rows, in two groups",
                4,
                length=21,
                batch_size=3,
                accumulate=3,
                loss="mse_loss",
            ),
            epochs_case("2 ranks, 9 rows, no accumulation", 2, length=9, count=3),
            **EXACT,
        ),
    ),
    "evaluate": task(
        "evaluate",
        inputs=evaluate_inputs,
        program=evaluate_program,
        judges=[right_numbers],
        expects=[
            sends_at_most(SMALL, hint="Three sums are all that the others need."),
        ],
        worth={"values": 2, "communication": 1},
        cases=in_many_forms(
            Case("1 rank, 7 rows", 1, {"length": 7, "batch_size": 3}),
            Case("2 ranks, 9 rows", 2, {"length": 9, "batch_size": 2, "labels": "uint8"}),
            Case("3 ranks, 20 rows", 3, {"length": 20, "batch_size": 4}),
            Case(
                "4 ranks, 11 rows, in two groups",
                *(4, {"length": 11, "batch_size": 3, "loss": "multi_margin_loss"}),
            ),
            Case("3 ranks, 2 rows", 3, {"length": 2, "batch_size": 8}),
            **EXACT,
        ),
    ),
    "save_checkpoint": task(
        "save_checkpoint",
        inputs=checkpoint_inputs,
        program=save_program,
        judges=[equals(saved)],
        cases=in_many_forms(
            Case("1 rank, epoch 1", 1, {"epoch": 1, "lr": 0.5}),
            Case("2 ranks, epoch 4", 2, {"epoch": 4, "lr": 0.1}),
            Case("3 ranks, epoch 2", 3, {"epoch": 2, "lr": 0.2}),
            Case("4 ranks, in two groups", 4, {"epoch": 7, "lr": 0.3}),
        ),
    ),
    "load_checkpoint": task(
        "load_checkpoint",
        inputs=checkpoint_inputs,
        program=load_program,
        judges=[equals(loaded, LOAD_MISTAKES)],
        cases=in_many_forms(
            Case("1 rank, epoch 1", 1, {"epoch": 1, "lr": 0.5, "loads": True}),
            Case("2 ranks, epoch 4", 2, {"epoch": 4, "lr": 0.1, "loads": True}),
            Case("3 ranks, epoch 2", 3, {"epoch": 2, "lr": 0.2, "loads": True}),
            Case("4 ranks, in two groups", 4, {"epoch": 7, "lr": 0.3, "loads": True}),
        ),
    ),
    "exhibit_1": mended("exhibit_1", "plain"),
    "exhibit_2": task(
        "exhibit_2",
        inputs=epochs_inputs,
        program=epochs_program,
        judges=[
            equals(
                only_weights(with_epochs()),
                {name: only_weights(oracle) for name, oracle in EPOCHS_MISTAKES.items()},
                tolerance={"float64": 1e-6},
            )
        ],
        cases=in_many_forms(
            epochs_case("1 rank, 6 rows", 1, length=6),
            epochs_case("2 ranks, 16 rows", 2, length=16, lr=0.1, seed=3),
            epochs_case("3 ranks, 11 rows, 3 epochs", 3, length=11, count=3, loss="mse_loss"),
            epochs_case("4 ranks, in two groups", 4, length=9, batch_size=3, loss="mse_loss"),
            **EXACT,
        ),
    ),
    "exhibit_3": mended("exhibit_3", "plain"),
    "exhibit_4": mended("exhibit_4", "experts"),
    "exhibit_5": mended("exhibit_5", "norm"),
    # Gradients may travel in bfloat16: 8 bits of precision.
    "exhibit_6": mended("exhibit_6", "plain", tolerance={"float32": 2e-2, "float64": 2e-2}),
    "diagnoses": task(
        "diagnoses",
        inputs=lambda case, generator: [{}],
        program=diagnoses_program,
        judges=[are_answers],
        expects=[is_right(exhibit) for exhibit in EXHIBITS],
        worth=dict.fromkeys(EXHIBITS, 1),
        cases=[Case("your answers", 1)],
    ),
}
