"""When a rank dies, the others train on, and a new process replaces it; no rank starts over.

    $ python -m course_lib.train.elastic --ranks 4 --kill 2 --at-step 10
    $ torchrun --nproc-per-node 4 -m course_lib.train.elastic --kill 2 --at-step 10

Data parallelism keeps K copies of the weights. When a rank dies, only its share of one batch is
lost: no checkpoint is needed, and no step is taken twice.

1. *Members*: a store outside the ranks holds a list of events: ``gone 2.0`` (rank 2, its first
   process), ``join 2.1`` (its second one). The first n events decide the members, so ranks that
   agree on n agree on the members. A *supervisor* started the ranks, and writes ``gone`` when one
   has ended. A new process writes ``join`` when it is ready.
2. *Boundary*: before each step, the members all-reduce the largest number of events that any of
   them has seen. If their group was made from fewer events, they leave it and meet again.
3. *Death*: the all-reduce fails, because a connection was closed. Then the members meet at once.
4. *Meeting*: each member writes that it is here. If all are here, they make a new process group. If
   the list has grown, they try again with the new members. A member that does not come within
   `LIMIT` is ``gone``.
5. *State*: the member with the most steps broadcasts parameters, buffers, optimizer state and
   losses. So a new process gets them, and also a rank that missed the last sum because of a death.
6. *Rows*: step s has the same batch for any members. The rows are divided into n contiguous
   parts for n members, in the order of their ranks (`shares`). The gradient is the sum over all
   rows divided by their number. This is the step that K ranks would have taken, except for
   rounding.

Under torchrun, each of its workers is the supervisor of one rank, so that torchrun does not notice
a death. (torchrun's only reaction would be to end all workers and start all of them again.)
torchrun's store must not die. torchft does the same with its own service, and also agrees on the
members at each step.

`simulate.failures` computes how much this saves on 100,000 GPUs. It was done at that scale in 2026:
fault-tolerant HSDP, arXiv 2602.00277.
"""

import argparse
import math
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]
    FileStore,
    PrefixStore,
    Store,
    TCPStore,
)
from torch.distributed.rendezvous import rendezvous

from course_lib.sharding import ShardedSampler, shard
from course_lib.train.config import ConfigError, ModelName, TrainConfig
from course_lib.train.datasets import load_dataset
from course_lib.train.meeting import agree_on_name
from course_lib.train.models import build_model, mean_loss
from course_lib.train.progress import say as print_line

LIMIT = 30.0
"""Seconds that ranks wait for one another, in a meeting and in a collective."""
_PATIENCE = 10  # ranks wait this many times as long for processes that start
_PAUSE = 0.005  # seconds between two looks of a rank at the store
_LOOK = 0.1  # seconds between two looks of a supervisor
_ATTEMPTS = 10  # number of groups in a row that may fail before a step is taken
_REPLACEMENTS = 3  # new processes for one rank
_OVER = "over"  # the key that says how the run ended

Address = str | tuple[str, int, str]
"""The address of a store: a file; or host, port and prefix."""


class State(NamedTuple):
    """The state from which a rank continues: losses of the steps so far, model, optimizer."""

    losses: list[float]
    model: dict[str, Tensor]
    optimizer: dict[str, Any]


class Training:
    """One replica, with AdamW, in float64. Step s has the same batch on all ranks.

    It uses the model, sizes, batch, steps, learning rate and seed of `config`. Other options must
    have their defaults, or it raises ConfigError.
    """

    def __init__(self, config: TrainConfig) -> None:
        for name in ("dropout", "accumulate", "clip_norm", "precision", "checkpoint"):
            if getattr(config, name) != getattr(TrainConfig(), name):
                option = name.replace("_", "-")
                raise ConfigError(f"elastic training does not support --{option}: leave it out")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.model = build_model(config).double()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), config.lr, weight_decay=config.weight_decay
        )
        self.losses: list[float] = []
        self._inputs, self._targets = load_dataset(config, torch.device("cpu")).train
        if self._inputs.is_floating_point():
            self._inputs = self._inputs.double()
        self._batch_size = config.batch_size
        self._per_epoch = len(self._inputs) // config.batch_size
        if self._per_epoch == 0:
            raise ConfigError(
                f"--batch-size must be at most {len(self._inputs)}, the size of the training set"
            )
        self.total = config.steps or config.epochs * self._per_epoch
        self._order = ShardedSampler(self._inputs, 1, 0, seed=config.seed, drop_last=True)

    @property
    def steps(self) -> int:
        """Steps that have been taken."""
        return len(self.losses)

    def rows(self) -> list[int]:
        """Return the rows of the next batch; they depend only on the seed and the step."""
        epoch, position = divmod(self.steps, self._per_epoch)
        self._order.set_epoch(epoch)
        return list(self._order)[position * self._batch_size :][: self._batch_size]

    def step(self, mine: Sequence[int], of: int) -> None:
        """Take one step with this rank's rows, `mine`; sum the gradients over the ranks.

        `of` is the number of rows of all ranks in this step. Raises Lost if the sum fails. Then no
        weight has changed.
        """
        loss = mean_loss(self.model(self._inputs[mine]), self._targets[mine]) * (len(mine) / of)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        loss = loss.detach()
        if len(mine) < of:
            with _collective():
                for sum_of in (loss, *(param.grad for param in self.model.parameters())):
                    dist.all_reduce(sum_of)
        self.optimizer.step()
        self.losses.append(float(loss))

    def state(self) -> State:
        """Return the state from which a rank can continue."""
        return State(self.losses, self.model.state_dict(), self.optimizer.state_dict())

    def take_over(self, state: State) -> None:
        """Continue from `state`."""
        self.losses = list(state.losses)
        self.model.load_state_dict(state.model)
        self.optimizer.load_state_dict(state.optimizer)


def shares(
    rows: Sequence[int], members: Sequence[int], world_size: int, take_over: bool = True
) -> dict[int, Sequence[int]]:
    """Return which rows each of the members takes.

    The p-th of n members takes the p-th of n contiguous parts. Without `take_over`, each member
    takes the part that it has if no rank is missing, and the rows of missing ranks are left out.
    """
    if take_over:
        return {rank: shard(rows, len(members), place) for place, rank in enumerate(members)}
    return {rank: shard(rows, world_size, rank) for rank in members}


# --- the members --------------------------------------------------------------------------------


class Lost(RuntimeError):
    """A collective failed, probably because a rank has died."""


@contextmanager
def _collective() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise Lost(str(error).partition("\n")[0]) from error


class Roll:
    """The list of events in the store, and the members that follow from it.

    Names are ``rank.process``: ``2.1`` is the second process of rank 2.
    """

    def __init__(self, store: Store, world_size: int, limit: float = LIMIT) -> None:
        self.store, self.world_size, self.limit = store, world_size, limit

    def write(self, event: str) -> None:
        """Add an event, unless the list already has it."""
        number = 1
        while self.store.compare_set(f"event {number}", "", event).decode() != event:
            number += 1

    def again(self, seen: int) -> None:
        """Let the members meet again through a new event, unless there are more than `seen` now."""
        self.store.compare_set(f"event {seen + 1}", "", "again")

    def count(self, seen: int = 0) -> int:
        """Return how many events there are, at least `seen`."""
        while self.store.check([f"event {seen + 1}"]):
            seen += 1
        return seen

    def events(self, seen: int) -> list[str]:
        """Return the first `seen` events."""
        return [self.store.get(f"event {number}").decode() for number in range(1, seen + 1)]

    def members(self, seen: int) -> dict[int, str]:
        """Return the members after `seen` events, by rank, in the order of ranks."""
        there = {rank: f"{rank}.0" for rank in range(self.world_size)}
        for event in self.events(seen):
            kind, _, name = event.partition(" ")
            rank = int(name.partition(".")[0] or -1)
            if kind == "join":
                there[rank] = name
            elif kind == "gone" and there.get(rank) == name:
                del there[rank]
        return dict(sorted(there.items()))

    def end(self, how: str) -> None:
        """Record how the run has ended. Only the first call counts."""
        self.store.compare_set(_OVER, "", how)

    def ended(self) -> str | None:
        """Return how the run has ended, or None."""
        return self.store.get(_OVER).decode() if self.store.check([_OVER]) else None

    def meet(self, name: str, seen: int) -> tuple[int, dict[int, str]] | None:
        """Wait until all members are here; return the number of events, and the members.

        It returns None if the run has ended. All members return the same number of events, because
        only the first decision about a number counts. Raises RuntimeError if `name` is not, or no
        longer, a member.
        """
        while True:
            seen = self.count(seen)
            members = self.members(seen)
            if name not in members.values():
                raise RuntimeError(
                    f"process {name} (rank.process) is no longer a member: the other ranks did not "
                    f"hear of it for {self.limit:g} s"
                )
            self.store.set(f"{name} is here {seen}", "")
            deadline = time.monotonic() + self.limit * (1 if seen else _PATIENCE)
            decision = f"meeting {seen}"
            while not self.store.check([decision]):
                if self.ended():
                    return None
                missing = [
                    other
                    for other in members.values()
                    if not self.store.check([f"{other} is here {seen}"])
                ]
                if self.count(seen) > seen:
                    self.store.compare_set(decision, "", "skip")
                elif not missing:
                    self.store.compare_set(decision, "", "go")
                elif time.monotonic() > deadline:
                    for other in missing:
                        self.write(f"gone {other}")
                time.sleep(_PAUSE)
            if self.store.get(decision) == b"go":
                return seen, members


# --- on each rank -------------------------------------------------------------------------------


def train_on(rank: int, process: int, training: Training, roll: Roll, tell: Callable[..., object],
             take_over: bool = True, whole_at: Sequence[int] = ()) -> bool:  # fmt: skip
    """Train to the end with the ranks that are there; report every step through `tell`.

    Returns whether this process has the trained weights. It has not if it came after the end. After
    the steps `whole_at`, the members wait for missing ranks. Raises Lost if `_ATTEMPTS` groups in a
    row cannot take a step.
    """
    name, seen, attempts = f"{rank}.{process}", 0, 0
    if process > 0:
        roll.write(f"join {name}")
    while True:
        met = roll.meet(name, seen)
        if met is None:
            return training.steps == training.total
        seen, members = met
        try:
            place = list(members).index(rank)
            own = PrefixStore(f"group {seen}", roll.store)
            with _collective():
                dist.init_process_group("gloo", store=own, rank=place, world_size=len(members),
                                        timeout=timedelta(seconds=roll.limit))  # fmt: skip
                newest = _agree(training)
            if training.steps == 0 and not any(who.endswith(".0") for who in members.values()):
                roll.end("no process with the weights is left")
                return False
            tell("group", training.steps, list(members), list(members)[newest])
            while _boundary(roll, seen, training.steps in whole_at) == seen:
                if training.steps == training.total:
                    roll.end("done")
                    return True
                of = shares(training.rows(), list(members), roll.world_size, take_over)
                training.step(of[rank], sum(map(len, of.values())))
                attempts = 0
                tell("step", training.steps, len(members), of[rank])
        except Lost:
            attempts += 1
            if attempts == _ATTEMPTS:
                raise
            roll.again(seen)
        finally:
            # Closing the connections also informs ranks that still wait for this one.
            if dist.is_initialized():
                dist.destroy_process_group()


def _agree(training: Training) -> int:
    """Take over the state of the member with the most steps; return its rank in the group."""
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.tensor([training.steps]))
    newest = max(range(len(counts)), key=lambda member: int(counts[member]))
    box = [training.state() if dist.get_rank() == newest else None]
    dist.broadcast_object_list(box, src=newest)
    assert box[0] is not None
    if dist.get_rank() != newest:
        training.take_over(box[0])
    return newest


def _boundary(roll: Roll, seen: int, wait_for_all: bool) -> int:
    """Return the largest number of events that any member has seen; all return the same number."""
    if wait_for_all and len(roll.members(seen)) < roll.world_size:
        deadline = time.monotonic() + roll.limit * _PATIENCE
        while roll.count(seen) == seen and time.monotonic() < deadline:
            time.sleep(_PAUSE)
    largest = torch.tensor([roll.count(seen)])
    with _collective():
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)


def _process(rank: int, process: int, world_size: int, address: Address, config: TrainConfig,
             take_over: bool, whole_at: Sequence[int], limit: float,
             pipe: Connection) -> None:  # fmt: skip
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    training, roll = Training(config), Roll(_open(address), world_size, limit)
    if train_on(rank, process, training, roll, lambda *news: pipe.send(news), take_over, whole_at):
        weights = {name: w.numpy() for name, w in training.model.state_dict().items()}
        pipe.send(("weights", weights, training.losses))


def _open(address: Address) -> Store:
    if isinstance(address, str):
        return FileStore(address, -1)
    host, port, name = address
    return PrefixStore(name, TCPStore(host, port, is_master=False))


# --- the supervisor -----------------------------------------------------------------------------


class Step(NamedTuple):
    """A step of one rank: its number, the number of ranks in it, and this rank's rows."""

    step: int
    members: int
    rows: Sequence[int]


@dataclass
class Outcome:
    """The supervisor's observations of its ranks.

    Attributes:
        steps: each rank's steps, in the order of its reports.
        died: ranks that ended before the training did, in the order of their ends.
        pids: the processes of each rank; more than one if it was replaced.
        weights: the weights of each rank that was there at the end, by name.
        losses: the losses of all steps.

    """

    steps: dict[int, list[Step]] = field(default_factory=dict)
    died: list[int] = field(default_factory=list)
    pids: dict[int, list[int]] = field(default_factory=dict)
    weights: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)


def supervise(
    world_size: int,
    config: TrainConfig,
    *,
    replace: bool = True,
    take_over: bool = True,
    whole_at: Sequence[int] = (),
    limit: float = LIMIT,
    on_step: Callable[[int, int, int], object] = lambda rank, pid, step: None,
    say: Callable[[str], object] = lambda text: None,
    ranks: Sequence[int] | None = None,
    address: Address | None = None,
) -> Outcome:
    """Start the ranks, keep the surviving ones together, and replace the others.

    Args:
        world_size: K.
        config: what to train; see `Training`.
        replace: whether to start a new process for a rank that has died, at most three times.
        take_over: whether the others take the rows of a missing rank. If not, these rows are left
            out.
        whole_at: after these steps, wait until all ranks are there, if dead ranks are replaced.
            This is for demonstrations: here a step takes milliseconds, but a new process takes
            longer to start.
        limit: seconds after which a silent rank counts as dead.
        on_step: `on_step(rank, pid, step)` is called in this process for every step of every rank.
        say: called with a sentence when a rank has died, and when the group has changed.
        ranks: the ranks that this process supervises; all by default.
        address: the store, if other processes supervise the other ranks.

    Raises:
        RuntimeError: no process with the weights is left.
        ConfigError: the options are not for elastic training.

    """
    if not 1 <= world_size <= config.batch_size:
        raise ConfigError(
            f"--ranks must be at least 1, and at most --batch-size {config.batch_size}"
        )
    Training(config)  # report a wrong option here, and not in each rank
    context = multiprocessing.get_context("forkserver")
    # Preload modules, because importing takes longer than training. Do not preload this file: a
    # process may also run it as __main__.
    context.set_forkserver_preload(["course_lib.train", "sklearn.datasets"])
    mine = range(world_size) if ranks is None else ranks
    whole_at = whole_at if replace else ()
    outcome = Outcome({rank: [] for rank in mine}, pids={rank: [] for rank in mine})
    folder = tempfile.mkdtemp()
    where = os.path.join(folder, "store") if address is None else address  # a file needs no port
    roll = Roll(_open(where), world_size, limit)
    seen, closes = 0, math.inf
    living: dict[int, Any] = {}
    pipes: dict[int, Connection] = {}

    def start(rank: int) -> None:
        ours, theirs = context.Pipe(duplex=False)
        number = len(outcome.pids[rank])
        given = (rank, number, world_size, where, config, take_over, whole_at, limit, theirs)
        process = context.Process(target=_process, args=given, daemon=True)
        process.start()
        theirs.close()
        living[rank], pipes[rank] = process, ours
        outcome.pids[rank].append(process.pid or 0)

    def ended(rank: int) -> None:
        process = living.pop(rank)
        process.join()
        del pipes[rank]
        if rank in outcome.weights or roll.ended():
            return
        outcome.died.append(rank)
        roll.write(f"gone {rank}.{len(outcome.pids[rank]) - 1}")
        last = outcome.steps[rank][-1].step if outcome.steps[rank] else 0
        then = "It is not replaced"
        if replace and len(outcome.pids[rank]) <= _REPLACEMENTS:
            start(rank)
            then = f"Process {outcome.pids[rank][-1]} will take its place"
        say(f"Rank {rank} has ended after its step {last} ({_why(process.exitcode)}). {then}.")

    try:
        for rank in mine:
            start(rank)
        while living or not roll.ended():
            wait(list(pipes.values()), _LOOK)
            for rank, pipe in list(pipes.items()):
                if pipe.poll() and not _listen(rank, pipe, living[rank], outcome, on_step, say):
                    ended(rank)
            seen = roll.count(seen)
            closed = roll.ended() is not None
            closes = closes if closed else time.monotonic() + limit
            given_up = roll.events(seen)  # the list may name a process that is stopped or stuck
            for rank, process in living.items():
                name = f"{rank}.{len(outcome.pids[rank]) - 1}"
                if f"gone {name}" in given_up or time.monotonic() > closes:
                    process.kill()
            if not living and not roll.members(seen):
                roll.end("no rank is replaced any more")
        how = roll.ended()
    finally:
        for process in living.values():
            process.kill()
        shutil.rmtree(folder, ignore_errors=True)
    if how != "done":
        raise RuntimeError(f"all {world_size} ranks died: {how}. Start again.")
    return outcome


def _why(exitcode: int) -> str:
    return signal.Signals(-exitcode).name if exitcode < 0 else f"exit status {exitcode}"


def _listen(rank: int, pipe: Connection, process: Any, outcome: Outcome,
            on_step: Callable[[int, int, int], object],
            say: Callable[[str], object]) -> bool:  # fmt: skip
    """Receive one message; return False if the rank has ended."""
    try:
        kind, *news = pipe.recv()
    except (EOFError, ConnectionResetError):
        return False
    if kind == "step":
        outcome.steps[rank].append(Step(*news))
        on_step(rank, process.pid, news[0])
    elif kind == "group":
        steps, members, newest = news
        if rank == members[0]:
            said = f"From step {steps + 1} on: rank{'s' * (len(members) > 1)} "
            said += ", ".join(map(str, members))
            say(f"{said}, with the weights of rank {newest}." if steps else f"{said}.")
    elif kind == "weights":
        outcome.weights[rank] = {name: torch.from_numpy(w) for name, w in news[0].items()}
        outcome.losses = news[1]
    return True


def alone(config: TrainConfig) -> Training:
    """Return the training of one process on the same batches, without any failure."""
    training = Training(config)
    while training.steps < training.total:
        rows = training.rows()
        training.step(rows, len(rows))
    return training


def off(outcome: Outcome, undisturbed: Training) -> float:
    """Return the largest difference between the ranks' weights and the weights of one process."""
    expected = undisturbed.model.state_dict()
    return max(
        float((value - expected[name]).abs().max())
        for weights in outcome.weights.values()
        for name, value in weights.items()
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    default = TrainConfig(steps=30)
    parser = argparse.ArgumentParser(
        prog="python -m course_lib.train.elastic",
        description="Kill ranks in training: the others go on, and new processes replace them.",
    )
    add = parser.add_argument
    add("--ranks", type=int, default=4, help="ranks, if not set by torchrun (default: %(default)s)")
    add(
        "--model", choices=get_args(ModelName), default=default.model, help="(default: %(default)s)"
    )
    add("--steps", type=int, default=default.steps, help="steps (default: %(default)s)")
    add("--batch-size", type=int, default=default.batch_size, help="rows (default: %(default)s)")
    add("--seed", type=int, default=default.seed, help="seed (default: %(default)s)")
    text = "ranks to kill (default: 2)"
    add("--kill", type=int, nargs="*", default=[2], help=text, metavar="RANK")
    add("--at-step", type=int, default=10, help="kill them after this step (default: %(default)s)")
    text = "after these steps, wait until the killed ranks are replaced (default: 20)"
    add("--whole-at", type=int, nargs="*", default=[20], help=text, metavar="STEP")
    add("--no-replacement", action="store_true", help="do not replace the killed ranks")
    add("--leave-rows", action="store_true", help="do not give a missing rank's rows to the others")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    to_kill = set(options.kill)

    def kill(rank: int, pid: int, step: int) -> None:
        if step == options.at_step and rank in to_kill:
            to_kill.remove(rank)
            print_line(f"SIGKILL to rank {rank}, process {pid}, after its step {step}.")
            os.kill(pid, signal.SIGKILL)

    ranks, address, world_size = None, None, options.ranks
    if "RANK" in os.environ:  # under torchrun, each worker supervises one rank
        store, rank, world_size = next(rendezvous("env://"))
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        ranks, address = [rank], (host, port, agree_on_name(store, rank, world_size))
    try:
        config = TrainConfig(model=options.model, steps=options.steps,
                             batch_size=options.batch_size, seed=options.seed)  # fmt: skip
        outcome = supervise(
            world_size, config, replace=not options.no_replacement,
            take_over=not options.leave_rows, whole_at=options.whole_at, on_step=kill,
            say=print_line, ranks=ranks, address=address,
        )  # fmt: skip
    except (ConfigError, RuntimeError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    undisturbed = alone(config)
    for rank, taken in outcome.steps.items():
        fewer = sum(step.members < world_size for step in taken)
        print_line(
            f"rank {rank}: processes {', '.join(map(str, outcome.pids[rank]))}; "
            f"{len(taken)} steps, {fewer} of them with fewer than {world_size} ranks"
        )
    if outcome.losses:
        print_line(
            f"last loss {outcome.losses[-1]:.12f}, without a kill {undisturbed.losses[-1]:.12f}; "
            f"largest difference of a weight {off(outcome, undisturbed):.1e}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
