"""The options of a training run, and which of them must match a checkpoint."""

from dataclasses import dataclass
from typing import Literal, get_args

ModelName = Literal["mlp", "cnn", "transformer"]
PrecisionName = Literal["fp32", "bf16", "fp16"]
DDPName = Literal["ours", "torch"]

RESULT = (
    *("model", "width", "layers", "heads", "context"),
    *("batch_size", "lr", "weight_decay", "clip_norm", "precision", "seed"),
)
"""The options that decide the resulting numbers. The others may change from run to run: the number
of ranks and micro-batches, and the choice of DDP, change the numbers only by rounding."""


class ConfigError(ValueError):
    """The options are invalid, or do not match the checkpoint. The message says what to change.

    All ranks raise it, so none waits for another.
    """


@dataclass(frozen=True)
class TrainConfig:
    """The options of a run; on the command line, each is `--name` with dashes.

    Attributes:
        model: `mlp` or `cnn` on the digits, `transformer` on the text of Python's documentation.
        width: units of a hidden layer, channels, or size of the residual stream.
        layers: hidden layers, convolutions, or transformer blocks.
        heads: attention heads; they divide `width`.
        context: bytes of text that the transformer sees at once.
        batch_size: examples per step over *all ranks together*. Each of K ranks takes batch_size /
            K of them, so that the result does not depend on K.
        accumulate: micro-batches into which a rank cuts its share. It computes them one after the
            other: this takes less memory for activations and gives the same step.
        epochs: passes over the training set; an incomplete last batch is left out.
        steps: optimizer steps in total, instead of `epochs`. After a restart, steps before it count
            too.
        lr: learning rate α of AdamW.
        weight_decay: decay per unit of α, decoupled from the gradient.
        clip_norm: largest Euclidean norm of a step's gradient; None leaves it as it is.
        precision: `fp32`, or the format in which matrix products are computed.
        ddp: which DistributedDataParallel to use: `ours` or `torch`.
        seed: seed of the initial weights and the order of the examples, at least 0. The order of
            an epoch is drawn from seed + epoch.
        checkpoint: a folder. Rank 0 writes the state there, and all ranks continue from the newest
            checkpoint in it. None: write no checkpoints.
        checkpoint_every: steps between two checkpoints. One is always written at the end.
        log_every: steps between two progress lines on rank 0; 0 for no lines.

    Raises:
        ConfigError: a value is invalid; the message names the option.

    """

    model: ModelName = "mlp"
    width: int = 128
    layers: int = 2
    heads: int = 4
    context: int = 128
    batch_size: int = 48
    accumulate: int = 1
    epochs: int = 5
    steps: int | None = None
    lr: float = 1e-3
    weight_decay: float = 0.01
    clip_norm: float | None = None
    precision: PrecisionName = "fp32"
    ddp: DDPName = "ours"
    seed: int = 0
    checkpoint: str | None = None
    checkpoint_every: int = 100
    log_every: int = 10

    def __post_init__(self) -> None:
        choices = {"model": ModelName, "precision": PrecisionName, "ddp": DDPName}
        for name, choice in choices.items():
            names = get_args(choice)
            _require(self, name, getattr(self, name) in names, f"one of {', '.join(names)}")
        at_least_one = ("width", "layers", "heads", "context", "batch_size", "accumulate")
        for name in (*at_least_one, "epochs", "checkpoint_every"):
            _require(self, name, getattr(self, name) >= 1, "1 or more")
        for name in ("weight_decay", "log_every", "seed"):
            _require(self, name, getattr(self, name) >= 0, "0 or more")
        _require(self, "steps", self.steps is None or self.steps >= 1, "1 or more")
        _require(self, "lr", self.lr > 0, "above 0")
        _require(self, "clip_norm", self.clip_norm is None or self.clip_norm > 0, "above 0")
        _require(self, "checkpoint", self.checkpoint != "", "the name of a folder")
        if self.model == "transformer":
            divides = self.width % self.heads == 0
            _require(self, "width", divides, f"a multiple of heads={self.heads}")

    def micro_batch_size(self, world_size: int) -> int:
        """Return how many examples one of `world_size` ranks computes on at a time.

        Raises ConfigError if the batch cannot be divided equally: then the mean over the ranks
        would not be the mean over the examples (see `gradient_sync`).
        """
        parts = world_size * self.accumulate
        if self.batch_size % parts:
            raise ConfigError(
                f"--batch-size {self.batch_size} (over all ranks) cannot be divided equally: "
                f"{world_size} ranks × accumulate={self.accumulate} micro-batches need a "
                f"multiple of {parts}."
            )
        return self.batch_size // parts


def _require(config: TrainConfig, name: str, right: bool, expected: str) -> None:
    if not right:
        option = name.replace("_", "-")
        raise ConfigError(f"--{option} is {getattr(config, name)!r}: it must be {expected}")
