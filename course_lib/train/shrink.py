"""Three of four continue: a rank dies during training, and the others train on without it.

    $ python -m course_lib.train.shrink --kill 2 --at-step 10

Data parallelism keeps K copies of the weights. When a rank dies, only its share of one batch is
lost: no checkpoint is needed, and no step is taken twice. The survivors must

1. notice it: their all-reduce fails, because a connection was closed;
2. agree on who is left: a *supervisor* started the ranks and sees that one has ended. It writes the
   members of the next *generation* to a store that no rank holds;
3. meet again: the survivors destroy their process group and make a new one of three;
4. agree on the step: a rank that got the sum just before the other died has taken one more step.
   All take over the newest state: weights and momentum;
5. keep the batch: its rows are now cut into three parts. The gradient is the sum over all rows
   divided by the number of rows, so the step is the one that four ranks would have taken.

Here, the supervisor is the process that starts the ranks. On a cluster it is an agent such as
torchrun's, or a separate service (as in torchft), and must not die either.

`simulate.failures` computes how much this saves on 100,000 GPUs. It was done at that scale in 2026:
fault-tolerant HSDP, arXiv 2602.00277.
"""

import argparse
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import FileStore, PrefixStore, Store  # type: ignore[attr-defined]

from course_lib.data import linear_regression
from course_lib.sharding import shard

_MEETING = timedelta(seconds=60)
"""How long ranks wait for one another, and for the supervisor."""
ROWS = 50
"""Rows of a batch: not a multiple of three or four."""


class State(NamedTuple):
    """The state from which a rank continues: steps taken, weights, and momentum."""

    steps: int
    weights: dict[str, Tensor]
    optimizer: dict[str, Any]


class Training:
    """A regression, with SGD and momentum, in float64. Step s has the same batch on all ranks."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.inputs, self.targets, _ = linear_regression(400, 16, seed=seed)
        self.steps, self.seed = 0, seed

    def step(self, part: int = 0, parts: int = 1) -> None:
        """Take one step, with part `part` of the batch; the sum over the ranks is the gradient."""
        draw = torch.Generator().manual_seed(1_000_000 * self.seed + self.steps)
        rows = torch.randint(len(self.inputs), (ROWS,), generator=draw)
        mine = shard(rows, parts, part)
        outputs = self.model(self.inputs[mine]).squeeze(1)
        loss = (outputs - self.targets[mine]).square().sum() / ROWS
        self.optimizer.zero_grad()
        loss.backward()
        if parts > 1:
            for param in self.model.parameters():
                dist.all_reduce(param.grad)
        self.optimizer.step()
        self.steps += 1

    def state(self) -> State:
        """Return the state: steps, weights and momentum."""
        return State(self.steps, self.model.state_dict(), self.optimizer.state_dict())

    def take_over(self, state: State) -> None:
        """Go on from `state`."""
        self.steps = state.steps
        self.model.load_state_dict(state.weights)
        self.optimizer.load_state_dict(state.optimizer)


# --- on each rank -------------------------------------------------------------------------------


def train_on(rank: int, members: Sequence[int], training: Training, store: Store,
             steps: int, tell: Callable[..., object]) -> None:  # fmt: skip
    """Train up to `steps` with the ranks that are left; `tell` the supervisor every step."""
    generation = 0
    while training.steps < steps:
        try:
            _meet(store, generation, members.index(rank), len(members))
            _agree(training)
            while training.steps < steps:
                training.step(members.index(rank), len(members))
                tell("step", training.steps, len(members))
        except RuntimeError as error:  # a collective failed; the reason is unknown
            tell("lost", str(error).partition("\n")[0])
            generation += 1
            members = _members(store, generation)
        finally:
            # Closing the connections also informs ranks that still wait for this one.
            if dist.is_initialized():
                dist.destroy_process_group()


def _meet(store: Store, generation: int, place: int, count: int) -> None:
    own = PrefixStore(f"generation {generation}", store)
    dist.init_process_group("gloo", store=own, rank=place, world_size=count, timeout=_MEETING)


def _agree(training: Training) -> None:
    """Take over the state of the member that has taken the most steps."""
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.tensor([training.steps]))
    newest = max(range(len(counts)), key=lambda member: int(counts[member]))
    box = [training.state() if dist.get_rank() == newest else None]
    dist.broadcast_object_list(box, src=newest)
    assert box[0] is not None
    training.take_over(box[0])


def _members(store: Store, generation: int) -> list[int]:
    """Wait until the supervisor says which ranks are left; return them."""
    key = f"members {generation}"
    store.wait([key], _MEETING)
    return [int(rank) for rank in store.get(key).decode().split()]


def _process(rank: int, path: str, members: list[int], steps: int, seed: int,
             pipe: Connection) -> None:  # fmt: skip
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    store = FileStore(path, -1)
    training = Training(seed)
    train_on(rank, members, training, store, steps, lambda *news: pipe.send(news))
    pipe.send(("weights", {name: w.numpy() for name, w in training.model.state_dict().items()}))


# --- the supervisor -----------------------------------------------------------------------------


@dataclass
class Outcome:
    """The supervisor's observations.

    Attributes:
        steps: for each rank, pairs (step, number of ranks in it), in the order of its reports.
        died: ranks that ended before training did, in that order.
        weights: the weights of each rank that is left, by name.

    """

    steps: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    died: list[int] = field(default_factory=list)
    weights: dict[int, dict[str, Tensor]] = field(default_factory=dict)


def supervise(
    world_size: int, steps: int, seed: int = 0,
    on_step: Callable[[int, int, int], object] = lambda rank, pid, step: None,
) -> Outcome:  # fmt: skip
    """Start the ranks, and keep the surviving ones together until training is over.

    `on_step(rank, pid, step)` is called in this process for every step of every rank. Raises
    RuntimeError if all ranks have died.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    folder = tempfile.mkdtemp()
    path = os.path.join(folder, "store")  # a file needs no port
    store = FileStore(path, -1)
    outcome, living, pipes = Outcome({rank: [] for rank in range(world_size)}), {}, {}
    members, generation = list(range(world_size)), 0
    try:
        for rank in members:
            ours, theirs = context.Pipe(duplex=False)
            given = (rank, path, members, steps, seed, theirs)
            process = context.Process(target=_process, args=given, daemon=True)
            process.start()
            theirs.close()
            living[rank], pipes[rank] = process, ours
        while living:
            wait(list(pipes.values()))
            for rank, pipe in list(pipes.items()):
                if pipe.poll() and not _listen(rank, pipe, living[rank], outcome, on_step):
                    living.pop(rank).join()
                    del pipes[rank]
                    if rank not in outcome.weights:
                        outcome.died.append(rank)
                        members, generation = [r for r in members if r != rank], generation + 1
                        store.set(f"members {generation}", " ".join(map(str, members)))
    finally:
        for process in living.values():
            process.kill()
        shutil.rmtree(folder, ignore_errors=True)
    if not outcome.weights:
        raise RuntimeError(f"all {world_size} ranks died")
    return outcome


def _listen(rank: int, pipe: Connection, process: Any, outcome: Outcome,
            on_step: Callable[[int, int, int], object]) -> bool:  # fmt: skip
    """Receive one message; return False if the rank has ended."""
    try:
        kind, *news = pipe.recv()
    except (EOFError, ConnectionResetError):
        return False
    if kind == "step":
        outcome.steps[rank].append((news[0], news[1]))
        on_step(rank, process.pid, news[0])
    elif kind == "weights":
        outcome.weights[rank] = {name: torch.from_numpy(w) for name, w in news[0].items()}
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description="Kill a rank; the others train on.")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--kill", type=int, default=2, help="the rank to kill (%(default)s)")
    parser.add_argument(
        "--at-step", type=int, default=10, help="kill the rank after this step (%(default)s)"
    )
    options = parser.parse_args(arguments)

    def kill(rank: int, pid: int, step: int) -> None:
        if rank == options.kill and step == options.at_step:
            print(f"rank {rank} has taken step {step}, and is now killed with SIGKILL")
            os.kill(pid, signal.SIGKILL)

    outcome = supervise(options.ranks, options.steps, on_step=kill)
    for rank, taken in outcome.steps.items():
        each = {count: [step for step, of in taken if of == count] for count in (options.ranks,)}
        alone = [step for step, of in taken if of < options.ranks]
        first = each[options.ranks]
        said = f"steps {first[0]} to {first[-1]} with {options.ranks} ranks" if first else "nothing"
        if alone:
            said += f", steps {alone[0]} to {alone[-1]} with fewer ranks"
        print(f"rank {rank}: {said}{', then died' if rank in outcome.died else ''}")
    print(
        "largest difference between the survivors' weights and those of one process: "
        f"{off(outcome):.1e}"
    )
    return 0


def off(outcome: Outcome, seed: int = 0) -> float:
    """Return the largest difference between the survivors' weights and one process's."""
    alone = Training(seed)
    for _ in range(max(step for taken in outcome.steps.values() for step, _ in taken)):
        alone.step()
    return max(
        float((weights[name] - value).abs().max())
        for weights in outcome.weights.values()
        for name, value in alone.model.state_dict().items()
    )


if __name__ == "__main__":
    sys.exit(main())
