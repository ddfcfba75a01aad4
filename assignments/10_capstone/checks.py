"""The checks of assignment 10."""

import math
import types

import torch

from course_lib.capstone import Race, answer, inputs, loss_of, run_rank, score_of
from course_lib.checking import Case, Expectation, Wrong, equals, in_many_forms, task

# speed_of_light: ranks' counts, drawn; the bound in seconds --------------------------------------


def counts(case, generator):
    def whole(scale):
        numbers = torch.rand(case.parameters["k"], generator=generator, dtype=torch.float64)
        return [int(each) for each in scale * numbers]

    given = case.parameters
    own = {"flops": whole(given["flops"]), "sent": whole(given["sent"])}
    own["received"] = whole(given["received"])
    return [{**own, "rate": given["rate"], "bandwidth": given["bandwidth"]}]


def light_program(speed_of_light, mine, given):
    lists = [given.iterable(mine[key]) for key in KEYS]
    try:
        return {"seconds": speed_of_light(*lists, mine["rate"], mine["bandwidth"])}
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(lists[0], types.GeneratorType):
            error.add_note(ONCE)
        raise


def light(of_rank=max, of_all=max):
    def oracle(case, inputs, me):
        own = inputs[0]
        rows = zip(*(own[key] for key in KEYS), strict=True)
        rate, bandwidth = own["rate"], own["bandwidth"]
        return {
            "seconds": of_all(of_rank(f / rate, s / bandwidth, r / bandwidth) for f, s, r in rows)
        }

    return oracle


KEYS = ("flops", "sent", "received")
ONCE = (
    "Here flops, sent and received are generators: you can go through each of them only once, and "
    "they have no length and no [k]. Use zip(), or begin with flops = list(flops)."
)


def mean(numbers):
    numbers = list(numbers)
    return sum(numbers) / len(numbers)


LIGHT_MISTAKES = {
    "the sum of computation and messages: perfect overlap hides the shorter one": light(
        lambda f, s, r: f + max(s, r)
    ),
    "sending plus receiving: a rank does both at once": light(lambda f, s, r: max(f, s + r)),
    "the bound without the bytes that are received": light(lambda f, s, r: max(f, s)),
    "the mean over the ranks: the slowest rank sets the time": light(of_all=mean),
}


def bound(name, k, flops, sent, received, rate, bandwidth):
    scales = {"flops": flops, "sent": sent, "received": received}
    return Case(name, 1, {"k": k, **scales, "rate": rate, "bandwidth": bandwidth})


# train: the ranks ask for gradients, which the examiner computes ----------------------------------


def race_inputs(case, generator):
    seed = str(torch.randint(2**62, (), generator=generator).item())
    return inputs(Race.of(case.parameters), seed)


def race_program(train, mine, given):
    result = run_rank(train, mine, given.ask)
    return {"weights": result["weights"], "bytes": result["bytes"]}


def reaches_the_target(case, inputs, values):
    """Raise `Wrong` unless the ranks agree and reach the target on rows that no rank has."""
    race = Race.of(case.parameters)
    seed, trained = inputs[0]["seed"], [value["weights"] for value in values]
    shapes = [tuple(each.shape) for each in inputs[0]["weights"]]
    for rank, weights in enumerate(trained):
        if [tuple(each.shape) for each in weights] != shapes:
            raise Wrong(
                f"the parameters of rank {rank} no longer have the shapes of the model",
                "Train job.model in place.",
            )
    loss = loss_of(race, seed, trained[0])
    if loss == math.inf:
        raise Wrong(
            "the loss with the trained weights of rank 0 is not finite",
            "Training diverges. Is the learning rate too large? Do you divide sums over the ranks "
            "by K?",
        )
    if not all(
        torch.equal(a, b) for each in trained for a, b in zip(each, trained[0], strict=True)
    ):
        raise Wrong(
            "the ranks end with different weights",
            "After the last step, average all parameters over the ranks, also the biases.",
        )
    if loss > race.target:
        found = f"the loss on test rows, which no rank has, is {in_digits(loss)}"
        hint = (
            "The model trains, but not far enough: take more steps, average more often, or change "
            "the learning rate. rehearse(train, Race()) tells you the loss quickly."
            if loss < math.log(race.classes)
            else "This is no better than guessing. Do you train job.model itself? Do you divide "
            "sums over the ranks by K? Is the learning rate too large?"
        )
        raise Wrong(f"{found}, expected at most {race.target:g}", hint)


def in_digits(loss):
    return f"{loss:.3f}" if loss < 100 else f"{loss:.1e}"


def in_time(part, hint=""):
    """Expect at most as many seconds as the case's ``limits`` have for this part, if any."""

    def test(case, observed, trace):
        if observed.network is None:
            return  # on real ranks there is no virtual clock
        score, limits = score_of(trace, Race.of(case.parameters)), case.parameters["limits"]
        limit = limits.get(part, math.inf)
        missed = [each for each in limits if score.seconds > limits[each]]
        if part in missed[1:]:
            words = f"training may take at most {1e3 * limit:g} ms for the points of ‘{part}’"
            raise Wrong(words, hint)
        if part in missed:
            raise Wrong(
                f"training takes {1e3 * score.seconds:.1f} ms on the virtual clock, expected at "
                f"most {1e3 * limit:g} ms for the points of ‘{part}’",
                f"{1e3 * score.computed:.1f} ms of this is for gradients. {bounded(score, limit)} "
                f"{hint}".rstrip(),
            )

    return Expectation(test, part)


def bounded(score, limit):
    """Return a sentence on the speed of light for this run's own operations and bytes."""
    light = f"{1e3 * score.light:.1f} ms"
    if score.light > limit:
        return (
            f"Even with a perfect schedule your bytes and operations take {light}: use fewer of "
            "them."
        )
    return (
        f"With a perfect schedule your bytes and operations take {light}: the rest is latency, "
        "overhead and waiting."
    )


def says_its_bytes(case, observed, trace):
    for rank, value in enumerate(observed.outputs):
        says, sent = value["value"]["bytes"], trace.bytes_sent(rank)
        if says < 0:
            raise Wrong(
                f"rank {rank} does not return a number of bytes, expected {sent:,}",
                "Count the bytes while you send, and return the sum as an int, not as a tensor.",
            )
        if abs(says - sent) > 0.01 * sent:
            raise Wrong(
                f"rank {rank} says that it sent {says:,} bytes, but it sent {sent:,}",
                "A ring all-reduce of n bytes sends 2 (K - 1)/K n from each rank.",
            )


def race(name, limits, **parameters):
    it = Race(**parameters)
    return Case(name, it.world_size, {**parameters, "limits": limits}, network=it.network)


# Each technique alone reaches a limit; a test measures them.
LADDER = {
    "bucketing": "Send all gradients of a step in one message: join them with torch.cat.",
    "overlap or compression": (
        "Send all gradients of a step in one message. In addition, compute the next gradient while "
        "this message travels, or send half its bytes."
    ),
    "fewer rounds": (
        "Let the ranks communicate less often, or take an optimizer that needs fewer steps."
    ),
    "all together": (
        "In addition to fewer rounds, send fewer bytes, or compute while messages travel."
    ),
}
LIMITS = dict(zip(LADDER, (0.2, 0.175, 0.07, 0.017), strict=True))
RACE = race("4 ranks, 1 Gb/s: the race", LIMITS)

CHECKS = {
    "speed_of_light": task(
        "speed_of_light",
        inputs=counts,
        program=light_program,
        # The arguments are integers in every form. Code that divides float32 tensors is right, too.
        judges=[equals(light(), LIGHT_MISTAKES, tolerance={"float64": 1e-6})],
        cases=in_many_forms(
            bound("bound by operations", 4, 1e12, 1e6, 1e6, 1e12, 1e9),
            bound("bound by what is sent", 3, 1e9, 1e9, 1e8, 1e12, 1e8),
            bound("bound by what is received", 5, 1e9, 1e8, 1e9, 1e12, 1e8),
            bound("all alike", 4, 1e10, 1e8, 1e8, 1e11, 1e9),
            bound("1 rank, no messages", 1, 1e10, 0, 0, 1e11, 1e9),
        ),
    ),
    "train": task(
        "train",
        inputs=race_inputs,
        program=race_program,
        judges=[reaches_the_target],
        answers=answer,
        withheld=("seed",),
        expects=[
            *(in_time(part, hint) for part, hint in LADDER.items()),
            Expectation(says_its_bytes, "bytes"),
        ],
        worth={
            "values": 4,
            "bucketing": 1,
            "overlap or compression": 1,
            "fewer rounds": 2,
            "all together": 1,
            "bytes": 2,
        },
        cases=(
            race(
                *("2 ranks, a small model", {"fewer rounds": 0.1}),
                **{"world_size": 2, "hidden": 32, "latency": 1e-3, "target": 0.4},
            ),
            RACE,
        ),
        seconds=60,
    ),
}
