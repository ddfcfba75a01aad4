"""The training loop puts the course's parts together, on every rank.

    for each epoch            the sampler shuffles, the same on all ranks; each takes its share
      for each step           batch_size examples, batch_size / K of them here
        for each micro-batch  forward, backward; only the last one averages over the ranks
        clip, AdamW           the same step on all ranks

The host reads a loss only when it is shown, because reading waits for the GPU.

I. Loshchilov and F. Hutter, "Decoupled Weight Decay Regularization", 2019 (AdamW).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.collectives import place_in
from course_lib.sharding import ShardedSampler, shard
from course_lib.train.config import ConfigError, TrainConfig
from course_lib.train.datasets import Examples, load_dataset
from course_lib.train.models import mean_loss
from course_lib.train.progress import Progress, say
from course_lib.train.trainer import Trainer

# The smallest batch for tests. Without backward, memory is no problem, and a smaller batch is slow.
_TEST_BATCH = 64


@dataclass(frozen=True)
class TrainResult:
    """The result of a training run, the same on all ranks.

    Attributes:
        losses: one number per step since the first, including steps before a restart: the mean loss
            over the batch of all ranks before the step, in nats.
        test_loss: mean over the test set, in nats.
        test_accuracy: share of the test set's labels, or bytes, that are predicted right.
        resumed_at: the step of the checkpoint from which this run continued; 0 without one.
        weights: the parameters by name, on the CPU.

    """

    losses: list[float]
    test_loss: float
    test_accuracy: float
    resumed_at: int
    weights: dict[str, Tensor]


def train(config: TrainConfig) -> TrainResult:
    """Train as `config` says on the ranks of the default process group; return the result.

    All ranks must call, as in `Ranks(4).run(train, config)` and `python -m course_lib.train`. On
    CPU ranks the same K gives the same bits, even across restarts. With a different K, the result
    differs by rounding. The state of PyTorch's random numbers is restored.

    Raises:
        ConfigError: the options are invalid, or do not match the checkpoint.
        FloatingPointError: the training or test loss is not finite.
        ValueError: there is no process group.

    """
    rank, world_size = place_in(None)
    device = rank_device()
    micro_batch = config.micro_batch_size(world_size)
    dataset = load_dataset(config, device)
    steps_per_epoch = len(dataset.train[0]) // config.batch_size
    if steps_per_epoch == 0:
        raise ConfigError(
            f"--batch-size {config.batch_size} is too large: the training set has "
            f"{len(dataset.train[0])} examples"
        )
    total = config.epochs * steps_per_epoch if config.steps is None else config.steps
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        trainer = Trainer(config, dataset, device)
        start = trainer.step
        progress = None
        if rank == 0 and config.log_every:
            say(_headline(config, trainer, world_size, device))
            if start:
                say(f"continuing from {config.checkpoint} at step {start} of {total}")
            units = config.batch_size * dataset.units_per_example
            progress = Progress(start, total, steps_per_epoch, dataset.unit, units)
        sampler = ShardedSampler(dataset.train[0], seed=config.seed, drop_last=True)
        shape = (steps_per_epoch, config.accumulate, micro_batch)
        for micro_batches in _batches(sampler, shape, start, total, device):
            trainer.take_step(micro_batches)
            step, ends = trainer.step, trainer.step == total
            if step % config.checkpoint_every == 0 or ends:
                trainer.save()
            trainer.stages.end("update")
            if config.log_every and (step % config.log_every == 0 or step == start + 1 or ends):
                trainer.read_losses()
                where = trainer.stages.report()
                if progress is not None:
                    progress.report(step, trainer.losses[-1], where)
        test_loss, test_accuracy = _evaluate(trainer, dataset.test, max(micro_batch, _TEST_BATCH))
        # The last step's loss was computed before its update. The test loss checks the weights
        # after it.
        trainer.require_finite(test_loss, f"the test loss is {test_loss} after step {trainer.step}")
    if progress is not None:
        steps = trainer.step - start
        say(
            f"{steps} step{'s' * (steps != 1)} in {progress.seconds():.1f} s · "
            f"test loss {test_loss:.4f}, {100 * test_accuracy:.1f} % right"
        )
    weights = {n: p.detach().cpu().clone() for n, p in trainer.model.named_parameters()}
    return TrainResult(trainer.losses, test_loss, test_accuracy, start, weights)


def rank_device() -> torch.device:
    """Return this rank's GPU if it has one and its group accepts GPU tensors, else the CPU."""
    if torch.cuda.is_initialized() and "cuda" in dist.get_backend_config():  # type: ignore[no-untyped-call]
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _batches(
    sampler: ShardedSampler,
    shape: tuple[int, int, int],
    start: int,
    total: int,
    device: torch.device,
) -> Iterator[Tensor]:
    """Yield this rank's indices for the steps from `start` to `total`, each of shape `shape[1:]`.

    Rank k takes positions k, k + K, … of the shuffled order. So for every K, batch i of all ranks
    together is the i-th block of batch_size positions of that order, and any K can continue at any
    step.
    """
    steps_per_epoch, accumulate, micro_batch = shape
    step = start
    while step < total:
        epoch, position = divmod(step, steps_per_epoch)
        sampler.set_epoch(epoch)
        share = list(sampler)[: steps_per_epoch * accumulate * micro_batch]
        order = torch.tensor(share).view(shape).to(device)  # one copy per epoch
        for batch in order[position : position + total - step]:
            yield batch
            step += 1


@torch.no_grad()
def _evaluate(trainer: Trainer, test: Examples, batch_size: int) -> tuple[float, float]:
    """Return mean loss and accuracy over the test set; each rank evaluates its shard."""
    rank, world_size = place_in(None)
    inputs, targets = (shard(tensor, world_size, rank) for tensor in test)
    loss, right = torch.zeros(2, dtype=torch.float64, device=inputs.device)
    trainer.model.eval()
    for x, y in zip(*(torch.split(t, batch_size) for t in (inputs, targets)), strict=True):
        if y.numel() == 0:
            continue  # more ranks than examples
        with trainer.precision.autocast():
            logits = trainer.model(x)
        loss += mean_loss(logits, y) * y.numel()
        right += (logits.argmax(-1) == y).sum()
    trainer.model.train()
    sums = torch.stack([loss, right, torch.full_like(loss, targets.numel())])
    dist.all_reduce(sums)
    total_loss, total_right, count = sums.tolist()
    return total_loss / count, total_right / count


def _headline(config: TrainConfig, trainer: Trainer, world_size: int, device: torch.device) -> str:
    size = sum(param.numel() for param in trainer.model.parameters())
    parts = f"{world_size} × {config.accumulate} × {config.micro_batch_size(world_size)}"
    return (
        f"{config.model} with {size:,} parameters on {device.type} ({dist.get_backend()}), "
        f"DDP: {config.ddp}, {config.precision}, batch {config.batch_size} = {parts} (ranks × "
        "micro-batches × examples)"
    )
