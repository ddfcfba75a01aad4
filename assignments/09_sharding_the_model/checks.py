"""The checks of this assignment. They are handed out: read them if a message is not enough."""

from math import ceil, prod

import torch

from course_lib.checking import (
    Case,
    Expectation,
    Wrong,
    calls_at_most,
    equals,
    in_many_forms,
    only_calls,
    sends_at_most,
    task,
)
from course_lib.checking.defence import defence, drawn_network, one_of

from .judges import (
    AS_SCHEDULED,
    FEW_ACTIVATIONS,
    IN_TIME,
    NEAR,
    OPTIMIZERS,
    equals_one_optimizer,
    equals_one_process,
    layer_bytes,
    layer_inputs,
    layer_program,
    layer_values,
    optimizer_inputs,
    optimizer_program,
    pipeline_computes,
    pipeline_inputs,
    pipeline_program,
    same_weights_on_all_ranks,
    whole_schedule,
)

# --- tasks 1 and 2: a linear layer over K ranks ---------------------------------------------------


def layer(out, inp, *rows, bias=True, before=False, **more):
    return {"out": out, "in": inp, "rows": rows, "bias": bias, "before": before, **more}


OWN = "this rank's term alone: dX is the sum over the ranks of dY_r A_r"
RESIDUAL = (
    "a sum that also contains the gradient from other uses of x, which every rank has in full: sum "
    "only the gradient that comes back through your layer"
)
TWICE = "K times the right gradient: do not sum dY in backward, since it is equal on all ranks"
PARTS_OF_A_BIAS = (
    "a K-th of the bias's gradient: add the whole bias after the sum, not a K-th of it before"
)
BIASES = "the output with the bias added once by each rank: add it after the sum"


LAYERS = (
    Case("1 rank", 1, layer(4, 3, 2)),
    Case("2 ranks, no bias", 2, layer(6, 4, 3, bias=False)),
    Case("3 ranks, uneven", 3, layer(5, 7, 2, 2)),
    Case("4 ranks, in two groups", 4, layer(5, 3, 4)),
    Case("3 ranks, zeros on one", 3, layer(6, 6, 3, zeros=1)),
    Case("3 ranks, fewer than one each", 3, layer(2, 2, 3)),
    Case("3 ranks, in two groups, no bias", 3, layer(7, 5, 2, 3, bias=False)),
    Case("4 ranks, uneven", 4, layer(6, 9, 2, before=True)),
    Case("2 ranks, x is one row", 2, layer(5, 3, before=True)),
)

# --- task 3: a sharded optimizer ------------------------------------------------------------------


def trained_numbers(case):
    p = case.parameters
    return sum(prod(s) for i, s in enumerate(p["shapes"]) if i not in p.get("frozen", ()))


def its_share(case, observed, trace):
    copies = OPTIMIZERS[case.parameters["optimizer"]][2]
    for rank, output in enumerate(observed.outputs):
        most = ceil(trained_numbers(case) / len(case.members(rank)))
        for what, limit in (("updates", most), ("state", copies * most)):
            if (held := output["value"][what]) > limit:
                words = {"updates": "updates {} numbers", "state": "keeps {} numbers of state"}
                raise Wrong(
                    f"rank {rank}'s optimizer {words[what].format(held)}, expected at most {limit}",
                    f"There are n = {trained_numbers(case)} numbers to train. A rank may update "
                    "⌈n/K⌉ of them, and keep state for these only."
                    + (" A tied parameter counts once." if "again" in case.parameters else ""),
                )


def step_bytes(case, rank):
    chunk = ceil(trained_numbers(case) / len(case.members(rank)))
    return case.parameters["steps"] * case.itemsize * chunk * (len(case.members(rank)) + 1)


ONE_OF_EACH = (
    "In each step, call one reduce-scatter for all gradients, and one all-gather for the weights."
)


def steps_of(case, rank):
    return case.parameters["steps"]


def training(optimizer, *shapes, steps=2, **options):
    return {"optimizer": optimizer, "shapes": shapes, "steps": steps, **options}


BUBBLES = (
    *((1, 0.0), (2, 0.25), (3, 0.3), (4, 0.61), (4, 0.27)),
    *((2, 0.7), (3, 0.125), (2, 1.0), (4, 0.2)),
)

# --- the four checks ------------------------------------------------------------------------------


def drawn_weights(generator: torch.Generator) -> Case:
    """Draw a case of task 3 for one student: ranks, parameters and a network."""
    k, layers = one_of(generator, 2, 3, 4), one_of(generator, 3, 4, 5)
    sizes = [one_of(generator, *range(40, 300)) for _ in range(layers)]
    frozen = one_of(generator, *range(layers))
    network, words = drawn_network(generator)
    name = (
        f"{k} ranks, three steps. Parameters 0 to {layers - 1} have "
        f"{', '.join(map(str, sizes))} numbers of 4 bytes. Parameter {frozen} is frozen.\n{words}; "
        "reduce_scatter and all_gather are rings."
    )
    parameters = training("momentum", *((size,) for size in sizes), steps=3, frozen=[frozen])
    return Case(name, k, parameters, network=network)


CHECKS = {
    "column_parallel": task(
        "column_parallel",
        inputs=layer_inputs("out"),
        program=layer_program,
        judges=[
            equals(
                layer_values("out"),
                {
                    OWN: layer_values("out", "own term"),
                    RESIDUAL: layer_values("out", "residual"),
                },
            )
        ],
        expects=[
            only_calls("all_reduce"),
            calls_at_most("Send nothing in forward, and one sum in backward.", all_reduce=1),
            sends_at_most(
                lambda case, rank: layer_bytes(case, "in"),
                hint="Sum only the gradient of x.",
            ),
        ],
        worth={"values": 3, "communication": 1},
        cases=in_many_forms(*LAYERS),
        in_turn=[(5, 6)],
    ),
    "row_parallel": task(
        "row_parallel",
        inputs=layer_inputs("in"),
        program=layer_program,
        judges=[
            equals(
                layer_values("in"),
                {
                    BIASES: layer_values("in", "K biases"),
                    TWICE: layer_values("in", "K times"),
                    PARTS_OF_A_BIAS: layer_values("in", "bias/K"),
                },
            )
        ],
        expects=[
            only_calls("all_reduce"),
            calls_at_most("Send one sum in each forward, and nothing in backward.", all_reduce=2),
            sends_at_most(
                lambda case, rank: 2 * layer_bytes(case, "out"),
                hint="Sum only the output, once in each of the two forwards.",
            ),
        ],
        worth={"values": 3, "communication": 1},
        cases=in_many_forms(*LAYERS),
        in_turn=[(5, 6)],
    ),
    "sharded_optimizer": task(
        "sharded_optimizer",
        inputs=optimizer_inputs,
        program=optimizer_program,
        judges=[
            equals_one_optimizer,
            same_weights_on_all_ranks,
        ],
        expects=[
            Expectation(its_share, part="memory"),
            only_calls("reduce_scatter", "all_gather"),
            calls_at_most(ONE_OF_EACH, reduce_scatter=steps_of, all_gather=steps_of),
            sends_at_most(
                step_bytes,
                hint="Pad with fewer than K numbers, and do not send frozen parameters.",
            ),
        ],
        worth={"values": 3, "memory": 2, "communication": 1},
        cases=in_many_forms(
            Case("1 rank", 1, training("momentum", (3, 2), (5,), (2,), frozen=[1], again=[2, 0])),
            Case("2 ranks", 2, training("momentum", (3, 2), (4,), (0,), before=True, halved=True)),
            Case(
                "3 ranks, uneven, large gradients",
                *(3, training("adamw", (2, 3), (), (6,), steps=3, before=True, size=300)),
            ),
            Case(
                "4 ranks, in two groups",
                *(4, training("momentum", (4, 3), (3,), (3,), steps=3, alike=[1, 2], zeros=1)),
            ),
            Case("2 ranks, frozen", 2, training("rmsprop", (3, 3), (4,), (1,), frozen=[1])),
            Case("3 ranks, tied", 3, training("adamw", (3, 2), (7,), again=[0, 1])),
            Case("3 ranks, fewer than one each", 3, training("momentum", (2,))),
            Case(
                "2 ranks, one without gradients", 2, training("adamw", (3, 2), unused=[0], steps=3)
            ),
            Case(
                "2 ranks, frozen, tied, one unused on a rank",
                2,
                training(
                    "sgd", (2, 2), (9,), (2,), frozen=[0], again=[1, 0], unused=[1], before=True
                ),
            ),
            Case(
                "3 ranks, one that nobody uses",
                *(3, training("momentum", (3, 2), (4,), steps=3, nobody=[1])),
            ),
            dtypes=("float32", "float64"),
        ),
        in_turn=[(5, 6)],
    ),
    "pipeline_schedule": task(
        "pipeline_schedule",
        inputs=pipeline_inputs,
        program=pipeline_program,
        computes=pipeline_computes,
        judges=[whole_schedule, equals_one_process()],
        expects=[FEW_ACTIVATIONS, *AS_SCHEDULED, IN_TIME],
        worth={"values": 2, "memory": 1, "time": 1},
        cases=in_many_forms(
            *(
                Case(f"p = {p}, bubble {bubble}", p, {"bubble": bubble}, network=NEAR)
                for p, bubble in BUBBLES
            ),
            dtypes=("float32", "float64"),
            groups=False,
        ),
        in_turn=[(4, 3)],
    ),
    "defend_sharded_optimizer": defence("sharded_optimizer", drawn_weights),
}
