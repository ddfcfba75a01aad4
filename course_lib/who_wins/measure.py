"""Compute the virtual seconds in which an algorithm reaches the target on a network.

If ranks wait for one another in a fixed pattern, the weights after step s do not depend on the
network. Only the clock does. So the training runs once for each seed (`train`). For each network a
few more steps run (`time_steps`), until the time of a step, or of a period of steps, repeats. From
then on time grows linearly with the steps (`Pace`). The seconds to the target are *derived* from
these two runs. A test trains to the end under some networks, and finds the same virtual time to
nine digits.

With a server, the order in which gradients arrive depends on the network, and so do the weights. So
every cell is trained to the end (`train_with_server`). The cost of computation comes from
`lumps_of`, which counts it once: counting every operator would take four times as long.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist

from course_lib.asynchronous import ParameterServer, serve
from course_lib.ranks import Network, Ranks, clock, compute
from course_lib.who_wins.algorithms import ALGORITHMS, setting_of
from course_lib.who_wins.problem import (
    Look,
    Problem,
    backward,
    batches,
    look_at,
    mean_of,
    network_of,
    new_model,
    steps_to,
    training_rows,
)
from course_lib.who_wins.settings import Setting

FREE = network_of(0.0, 1e30)
_REPEATS = 1e-9
_FIRST_TRY, _LAST_TRY = 6, 24
"""How many steps run before we look for a repetition, in the first and in the last try."""


def _read_rows() -> None:
    """Let the process of simulated ranks read the rows, in a run that counts no operator."""
    Ranks(1, on="simulated").run(_read_on_a_rank)


def _read_on_a_rank() -> None:
    training_rows()  # kept there, and not sent back


# --- in step ------------------------------------------------------------------------------------


def _run_steps(
    problem: Problem, name: str, setting: Setting, seed: int, steps: int, looking: str
) -> tuple[list[float], list[Look]]:
    """Take steps on a rank; return the clock after each step, and the weights if `looking`.

    The clock starts with the first step.
    """
    algorithm, rank = ALGORITHMS[name], dist.get_rank()
    assert algorithm.prepare is not None
    model = new_model(seed)
    step = algorithm.prepare(model, setting.optimizer_of, backward)
    own_batches = batches(problem, seed, rank)
    times, looks, start = [], [], clock()
    for _ in range(steps):
        step(next(own_batches))
        times.append(clock() - start)
        if looking == "all" or (looking == "first" and rank == 0):
            looks.append(look_at(model))
    return times, looks


def run_steps(
    problem: Problem, name: str, setting: Setting, seed: int, steps: int, network: Network | None
) -> tuple[list[float], list[Look]]:
    """Train for `steps`; return the last rank's virtual seconds after each, and the weights.

    Without a network nothing costs time: use this if you need only the weights. With a network,
    operators are counted.
    """
    _read_rows()
    device = None if network is None else problem.device
    ranks = Ranks(problem.workers, on="simulated", network=network or FREE, device=device)
    looking = "all" if ALGORITHMS[name].differ else "first"
    results = ranks.run(_run_steps, problem, name, setting, seed, steps, looking)
    times_of_ranks, looks_of_ranks = zip(*results, strict=True)
    times = [max(of_ranks) for of_ranks in zip(*times_of_ranks, strict=True)]
    if looking == "first":
        return times, looks_of_ranks[0]
    return times, [mean_of(of_ranks) for of_ranks in zip(*looks_of_ranks, strict=True)]


def train(problem: Problem, name: str, seed: int, setting: Setting | None = None) -> int | None:
    """Return the steps until the ranks' mean weights reach the target; None if they do not.

    `setting` is the tuned one by default.
    """
    torch.set_num_threads(1)
    _, looks = run_steps(problem, name, setting or setting_of(name), seed, problem.steps, None)
    return steps_to(problem.target, looks)


class Pace(NamedTuple):
    """The times at which steps end under one network.

    Attributes:
        times: virtual seconds after each of the steps that were executed.
        period: steps after which the pattern repeats.
        seconds: the duration of one period.
        exact: whether the period repeats to nine digits; else `seconds` comes from the last half.

    """

    times: list[float]
    period: int
    seconds: float
    exact: bool

    def after(self, steps: int) -> float:
        """Return the virtual seconds after `steps` steps, executed or derived."""
        if steps <= len(self.times):
            return self.times[steps - 1]
        periods = -(-(steps - len(self.times)) // self.period)
        return self.times[steps - periods * self.period - 1] + periods * self.seconds


def pace_of(times: Sequence[float], multiple: int) -> Pace | None:
    """Return the pace, if the steps repeat after a multiple of `multiple`; else None.

    They repeat after q steps if, in the last half, any q steps in a row took equally long. The
    times of ranks that wait for one another become periodic. A period can be several steps long,
    because the first rank is not always the same one.
    """
    for period in range(multiple, len(times) // 3 + 1, multiple):
        ends = range(max(period + 1, len(times) // 2))  # few steps: three equal ones suffice
        last = [times[-1 - i] - times[-1 - i - period] for i in ends]
        if max(last) - min(last) <= _REPEATS * max(last):
            return Pace(list(times), period, last[0], exact=True)
    return None


def time_steps(problem: Problem, name: str, network: Network) -> Pace:
    """Run steps on `network` until they repeat, or until there are enough for a mean.

    If the algorithm may use several all-reduces, the one with which `problem.steps` steps take
    shortest counts.
    """
    paces = (
        _time_steps(problem, name, replace(network, all_reduce=way))
        for way in ALGORITHMS[name].all_reduce
    )
    return min(paces, key=lambda pace: pace.after(problem.steps))


def _time_steps(problem: Problem, name: str, network: Network) -> Pace:
    multiple = ALGORITHMS[name].period
    tries, limit = max(_FIRST_TRY, 3 * multiple), max(_LAST_TRY, 6 * multiple)
    while True:
        times, _ = run_steps(problem, name, setting_of(name), 0, tries, network)
        pace = pace_of(times, multiple)
        if pace is not None:
            return pace
        if tries >= limit:
            half = tries // 2 // multiple * multiple
            return Pace(times, half, times[-1] - times[-1 - half], exact=False)
        tries *= 2


# --- with a server ------------------------------------------------------------------------------


class Lumps(NamedTuple):
    """Seconds of computation between two messages: of a gradient (worker), an update (server)."""

    worker: float
    server: float


class Served(NamedTuple):
    """The result of a training with a server: updates and virtual seconds to the target."""

    updates: int | None
    seconds: float | None


def _work(problem: Problem, seed: int, seconds: float) -> None:
    """Compute gradients on a worker until training is over.

    The first worker gets the batches that rank 0 gets without a server.
    """
    model, rank = new_model(seed), dist.get_rank()
    own_batches = batches(problem, seed, rank - 1)
    with ParameterServer(model.parameters()) as server:
        while server.pull():
            backward(model, next(own_batches))
            compute(seconds)
            server.push()


def _served(
    problem: Problem, options: Mapping[str, int], setting: Setting, seed: int, updates: int,
    lumps: Lumps,
) -> tuple[list[float], list[Look]]:  # fmt: skip
    if dist.get_rank():
        slow = problem.straggler if dist.get_rank() == 1 else 1.0
        _work(problem, seed, slow * lumps.worker)
        return [], []
    model = new_model(seed)
    times, looks = [], []

    def look(_: int) -> None:
        compute(lumps.server)
        times.append(clock())
        looks.append(look_at(model))

    serve(setting.optimizer_of(model.parameters()), updates, after_update=look, **options)  # type: ignore[arg-type]
    return times, looks


def run_server(
    problem: Problem, name: str, setting: Setting, seed: int, updates: int, network: Network,
    lumps: Lumps, counted: bool = False, options: Mapping[str, int] | None = None,
) -> tuple[list[float], list[Look]]:  # fmt: skip
    """Train with a server for `updates`; return virtual seconds and weights after each update.

    `options`, of `serve`, are those of the algorithm by default. With `counted`, operators are
    counted in addition to the declared lumps.
    """
    _read_rows()
    device = problem.device if counted else None
    served = ALGORITHMS[name].server or {} if options is None else options
    ranks = Ranks(problem.workers + 1, on="simulated", network=network, device=device)
    result: tuple[list[float], list[Look]] = ranks.run(
        _served, problem, served, setting, seed, updates, lumps
    )[0]
    return result


@cache
def lumps_of(problem: Problem, optimizer: str) -> Lumps:
    """Count, on two ranks, the computation between an incoming and an outgoing message."""
    two = Problem(2, problem.rows, problem.target)
    short, long = 2, 6
    setting = Setting(optimizer, 0.01)

    def spent(updates: int) -> list[float]:
        ranks = Ranks(2, on="simulated", network=FREE, device=two.device)
        ranks.run(_served, two, {}, setting, 0, updates, Lumps(0.0, 0.0))
        computed = [event for event in ranks.trace.events if event.kind == "compute"]
        return [sum(e.end - e.start for e in computed if e.rank == rank) for rank in (1, 0)]

    _read_rows()
    # The difference excludes what is computed only once, such as the first weights.
    rises = [(b - a) / (long - short) for a, b in zip(spent(short), spent(long), strict=True)]
    return Lumps(*rises)


def train_with_server(
    problem: Problem, name: str, seed: int, network: Network, setting: Setting | None = None,
    options: Mapping[str, int] | None = None,
) -> Served:  # fmt: skip
    """Train to the target under `network`; the algorithm's setting and options by default."""
    chosen = setting or setting_of(name)
    updates = problem.steps * problem.workers
    lumps = lumps_of(problem, chosen.optimizer)
    times, looks = run_server(problem, name, chosen, seed, updates, network, lumps, options=options)
    reached = steps_to(problem.target, looks)
    return Served(reached, None if reached is None else times[reached - 1])
