"""The checks of this assignment. They are handed out: read them if a message is not enough.

The mixing matrices of tasks 2 to 5 are in `judges.py`. They are not the ones that task 1 asks for.
"""

import math
from functools import partial

import torch

from course_lib.checking import Case, equals, in_many_forms, only_calls, task
from course_lib.ranks import compute

from .judges import (
    chosen,
    equals_steps,
    gap,
    matrices,
    mixed,
    one_message_each,
    second,
    second_eigenvalue,
    steps_computes,
    steps_inputs,
    steps_program,
    watched_weights,
    weighs_each_link,
    whole_numbers,
)

# Task 1: weights for a graph ---------------------------------------------------------------------


def links_program(metropolis_weights, mine, given):
    links, k = [tuple(link) for link in mine["links"]], mine["world_size"]
    metropolis_weights([(i, j) for j in range(k) for i in range(j)], k)  # must not affect the next
    return metropolis_weights(given.iterable(links), mine["world_size"])


def graph(name, k, *links):
    return Case(name, 1, {"world_size": k, "links": [list(link) for link in links]})


# Task 2: mixing ----------------------------------------------------------------------------------


def mixing_inputs(case, generator):
    made, p = [], case.parameters
    for rank in range(case.world_size):

        def draw(size=0 if rank == p["zeros"] else p["size"]):
            return size * torch.rand(p["shape"], generator=generator, dtype=torch.double)

        own = {"tensor": draw(), "second tensor": draw(), "seconds": case.parameters["seconds"]}
        made.append({**own, **matrices(case, rank)[0]})
    return made


def mixing_program(start_mixing, mine, given):
    """Mix two tensors at once: start the second before the first is finished."""
    [weights], finish = watched_weights(given, [mine], mine["tensor"]), {}
    for name in ("tensor", "second tensor"):
        finish[name] = start_mixing(mine[name], weights, group=given.group)
        if not callable(finish[name]):
            kind = type(finish[name]).__name__
            raise TypeError(f"start_mixing returns {kind}, expected a function")
        compute(mine["seconds"])
    return {name: each() for name, each in finish.items()}


def mixing_computes(own):
    return {own["seconds"]: 2}


MIXING_MISTAKES = {
    "mixing with a column of the matrix: rank i needs row i": mixed(lambda w: w.T),
    "mixing with this rank's own tensor at weight 1: its weight is W[i, i]": mixed(
        lambda w: w - w.diag().diag() + torch.eye(len(w)).double()
    ),
    "mixing without ranks of tiny weight: hear every rank whose weight is not 0": mixed(
        lambda w: torch.where(w > 1e-3, w, 0)
    ),
}


def mixing(name, k, graph, shape, size=1, zeros=None):
    own = {"graphs": [graph] * 2, "shape": shape, "seconds": 100e-6, "size": size, "zeros": zeros}
    return Case(name, k, own)


# Task 3: a step of D-PSGD ------------------------------------------------------------------------


def steps(name, k, graphs, shapes, lr, **options):
    plain = {"seconds": 0.0, "unused": None, "before": False, "size": 1, "zeros": None}
    own = {"graphs": graphs, "shapes": shapes, "lr": lr}
    return Case(name, k, {**plain, **own, **options})


# Tasks 4 and 5: how fast, and on which network ---------------------------------------------------


def gap_inputs(case, generator):
    graph, k = case.parameters["graph"], case.parameters["k"]
    numbers, denominator = whole_numbers(graph, k)
    return [{"numbers": numbers, "denominator": denominator, "one": torch.ones(1)}]


def gap_program(spectral_gap, mine, given):
    return {"spectral gap": spectral_gap(*watched_weights(given, [mine], mine["one"]))}


GAP_MISTAKES = {
    "|λ₂|, the second largest of the absolute values: the gap is 1 - |λ₂|": gap(second_eigenvalue),
    "1 minus a real part: for a complex eigenvalue, |λ| = √(re² + im²)": gap(
        lambda w: 1 - second(torch.linalg.eigvals(w).real.abs())
    ),
    "1 minus the second largest eigenvalue with its sign: take the second largest absolute value": (
        gap(lambda w: 1 - second(torch.linalg.eigvals(w).real))
    ),
}


def choice_inputs(case, generator):
    names, k = case.parameters["candidates"], case.parameters["k"]
    made = [whole_numbers(graph, k) for graph in names]
    options = {key: case.parameters[key] for key in ("nbytes", "latency", "bandwidth", "tolerance")}
    graphs = [{"numbers": numbers, "denominator": d} for numbers, d in made]
    return [{"candidates": graphs, "one": torch.ones(1), **options}]


def choice_program(choose_graph, mine, given):
    candidates = watched_weights(given, mine["candidates"], mine["one"])
    numbers = (mine[key] for key in ("nbytes", "latency", "bandwidth", "tolerance"))
    answer = choose_graph(given.iterable(candidates), *numbers)
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise TypeError(f"choose_graph returns {type(answer).__name__}, expected (which, seconds)")
    return {"seconds": answer[1], "which": answer[0]}


CHOICE_MISTAKES = {
    "the time of one step less: round T up": chosen(whole=math.floor),
    "the time if you count row i, the ranks that rank i hears: count column i, the ranks that it "
    "sends to": chosen(heard_in="rows"),
    "the time of a ring all-reduce with messages of n bytes: each has n/K bytes": chosen(pieces=1),
}


def choose(name, k, candidates, nbytes, latency, bandwidth, tolerance):
    own = {"k": k, "candidates": candidates, "nbytes": nbytes, "tolerance": tolerance}
    return Case(name, 1, {**own, "latency": latency, "bandwidth": bandwidth})


EXACT = {"float64": 1e-9, "float32": 1e-3}

# Two dtypes: in bfloat16 a difference of nearly equal numbers may be rounded away.
in_both_forms = partial(in_many_forms, dtypes=("float32", "float64"))

CHECKS = {
    "metropolis_weights": task(
        "metropolis_weights",
        inputs=lambda case, generator: [dict(case.parameters)],
        program=links_program,
        judges=[weighs_each_link],
        cases=in_both_forms(
            graph("a line of 4", 4, (0, 1), (1, 2), (2, 3)),
            graph("a star of 5", 5, (0, 1), (0, 2), (0, 3), (0, 4)),
            graph("a ring of 4, some links the other way", 4, (1, 0), (1, 2), (3, 2), (0, 3)),
            graph("links that are listed twice", 4, (0, 1), (1, 0), (1, 2), (1, 2), (2, 3)),
            graph("one rank is alone", 3, (0, 2)),
            graph("a star and a pair", 6, (0, 1), (0, 2), (0, 3), (4, 5)),
            graph("1 rank", 1),
            graph("the example", 3, (0, 1), (1, 2)),
        ),
    ),
    "start_mixing": task(
        "start_mixing",
        inputs=mixing_inputs,
        program=mixing_program,
        computes=mixing_computes,
        judges=[equals(mixed(), MIXING_MISTAKES)],
        expects=one_message_each(lambda case: torch.Size(case.parameters["shape"]).numel()),
        worth={"values": 2, "communication": 2},
        cases=in_both_forms(
            mixing("1 rank", 1, "ring", (3, 2)),
            mixing("2 ranks", 2, "line", (4,)),
            mixing("3 ranks in a star", 3, "star", (3, 4)),
            mixing("5 ranks, two groups, a line", 5, "line", (2, 3)),
            mixing("4 ranks, one way, zeros on one", 4, "one way", (5, 2), zeros=2),
            mixing("6 ranks, two groups, one way", 6, "one way", (4, 3)),
            mixing("5 ranks in a ring, large numbers", 5, "ring", (), size=300),
            mixing("4 ranks, two groups, nobody hears anybody", 4, "alone", (3,)),
            mixing("5 ranks, whom it hears weighs differently", 5, "one way * star * star", (3, 2)),
            mixing("5 ranks, nothing of its own", 5, "swap", (3, 2)),
            mixing("4 ranks, hardly heard", 4, "hardly", (2, 3)),
            mixing("2 ranks, no numbers", 2, "line", (0, 3)),
        ),
        in_turn=[(6, 3), (6, 6), (8, 6)],
    ),
    "decentralized_step": task(
        "decentralized_step",
        inputs=steps_inputs,
        program=steps_program,
        computes=steps_computes,
        judges=[equals_steps],
        expects=one_message_each(
            lambda case: sum(torch.Size(shape).numel() for shape in case.parameters["shapes"])
        ),
        worth={"values": 2, "communication": 2},
        cases=in_both_forms(
            steps("1 rank", 1, ["ring"], [(3, 2)], 0.5),
            steps("2 ranks", 2, ["line"], [(3, 2), (4,), (0,)], 0.1),
            steps("3 ranks, .grad is not empty", 3, ["line"], [(2, 2)], 0.5, before=True),
            steps("4 ranks, two groups", 4, ["line"], [(2, 3), (1,)], 0.2, zeros=2),
            steps("4 ranks in a ring, two steps", 4, ["ring"] * 2, [(4,), (2, 2)], 0.003, size=300),
            steps("6 ranks, two groups, one way", 6, ["one way"] * 2, [(3,)], 0.3, before=True),
            steps(
                *("5 ranks, one parameter unused", 5, ["star * star"], [(3, 2), (2,)], 0.4),
                unused=1,
            ),
            steps("6 ranks, two groups, two matrices", *(6, ["star", "one way"], [(2, 3)], 0.25)),
            steps("4 ranks, 100 µs of gradient", *(4, ["ring"] * 3, [(8,)], 0.1), seconds=100e-6),
            steps("3 ranks, nothing of its own", 3, ["turn", "swap"], [(2, 2)], 0.5),
        ),
        in_turn=[(4, 3)],
    ),
    "spectral_gap": task(
        "spectral_gap",
        inputs=gap_inputs,
        program=gap_program,
        judges=[equals(gap(lambda w: 1 - second_eigenvalue(w)), GAP_MISTAKES, tolerance=EXACT)],
        expects=[only_calls()],
        cases=in_both_forms(
            *(
                Case(f"{k} × {k}, {graph}", 1, {"graph": graph, "k": k})
                for graph, k in (
                    *(("ring", 8), ("swap", 6), ("star", 5), ("one way", 4), ("complete", 3)),
                    *(("pairs", 4), ("hops 0, 1, 3", 7), ("alone", 1), ("star * one way", 4)),
                )
            ),
        ),
        in_turn=[(3, 5)],
    ),
    "choose_graph": task(
        "choose_graph",
        inputs=choice_inputs,
        program=choice_program,
        judges=[equals(chosen(), CHOICE_MISTAKES, tolerance=EXACT)],
        expects=[only_calls()],
        cases=in_both_forms(
            choose("far apart", 8, ["ring", "complete"], 10**4, 20e-3, 1e8, 1e-3),
            choose("many bytes", 8, ["ring", "complete", "one way"], 10**8, 20e-6, 1e9, 1e-2),
            choose("a rough mean", 6, ["ring", "hops 0, 1, 3"], 10**6, 2e-3, 1e9, 0.2),
            choose("one that never agrees", 6, ["swap", "pairs", "ring"], 10**5, 1e-3, 1e9, 0.1),
            choose("no time for gossip", 4, ["line", "one way"], 10**7, 1e-4, 1e8, 1e-6),
            choose("hardly a mean", 6, ["complete", "ring"], 10**6, 1e-3, 1e9, 0.7),
            choose("rows unlike columns", 4, ["line", "pairs * one way"], 10**5, 1e-3, 1e9, 0.1),
            choose("three bytes", 4, ["line"], 3, 1e-6, 1e6, 1e-6),
            choose("nothing of its own", 5, ["line", "swap"], 10**5, 1e-3, 1e9, 0.5),
            choose("any mean will do", 5, ["complete", "ring"], 10**5, 1e-3, 1e9, 1.0),
            choose("some hardly heard", 8, ["line", "ring * ring * ring"], 10**5, 1e-3, 1e9, 0.1),
            choose("a star in the middle", 7, ["line", "star"], 10**5, 1e-3, 1e9, 0.9),
            choose("forty in a line", 40, ["line"], 10**5, 1e-3, 1e9, 0.9),
            choose("half after one step", 2, ["half"], 10**5, 1e-3, 1e9, 0.5),
            choose("a quarter after two steps", 2, ["half"], 10**5, 1e-3, 1e9, 0.25),
            choose("the race", 16, ["ring", "hypercube", "complete"], 4000, 10e-3, 1e8, 0.1),
        ),
        in_turn=[(4, 6)],
    ),
}
