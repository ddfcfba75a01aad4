"""One rank's part of a run: its replica, its optimizer, its progress, and one step."""

import math
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from course_lib.collectives import place_in
from course_lib.ddp import DistributedDataParallel
from course_lib.train.checkpoint import load_checkpoint, save_checkpoint
from course_lib.train.config import RESULT, ConfigError, TrainConfig
from course_lib.train.datasets import Dataset
from course_lib.train.models import build_model, mean_loss
from course_lib.train.precision import Precision
from course_lib.train.progress import say
from course_lib.train.stages import StageClock


class Trainer:
    """A replica that takes AdamW steps together with the other ranks' replicas.

    All ranks must construct it, and call its methods in the same order.

    Attributes:
        model: the replica, without the wrapper.
        precision: the precision of matrix products.
        step: optimizer steps so far, including those before a restart.
        losses: the losses of these steps, as far as `read_losses` has read them.
        stages: the times of the stages of the steps.

    """

    def __init__(self, config: TrainConfig, dataset: Dataset, device: torch.device) -> None:
        """Build the replica; continue from the newest checkpoint, if there is one.

        Raises ConfigError if the checkpoint has a different configuration, if the folder or its
        checkpoints cannot be used, if the device does not have the precision, or if the batch
        cannot be divided equally.
        """
        self._config = config
        self._dataset = dataset
        self._rank, self._world_size = place_in(None)
        self._folder = None if config.checkpoint is None else Path(config.checkpoint)
        self._identity = {name: getattr(config, name) for name in RESULT}
        self._identity["data"] = dataset.fingerprint()
        self._unread: list[Tensor] = []
        self.step = 0
        self.losses: list[float] = []
        self.precision = Precision(config.precision, device)
        torch.manual_seed(config.seed)
        self.model = build_model(config).to(device)
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), config.lr, weight_decay=config.weight_decay, fused=True
        )
        if self._folder is not None:
            self._resume(self._folder)
        self._ddp = _wrapped(self.model, config, device)
        self._rehearse()
        reports = config.log_every > 0
        self.stages = StageClock(self.model.parameters(), device, reports=reports)

    def _rehearse(self) -> None:
        """Run one unused backward, because both DDPs rebuild their buckets after the first one.

        A sum of K > 2 numbers depends on the order of addition, which depends on the position in
        the bucket. So a resumed run must not take a step with buckets that an uninterrupted run
        never used.
        """
        count = self._config.micro_batch_size(self._world_size)
        inputs, targets = (tensor[:count] for tensor in self._dataset.train)
        with self.precision.autocast():
            loss = mean_loss(self._ddp(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.zero_grad()

    def take_step(self, micro_batches: Tensor) -> None:
        """Take one step with this rank's examples: indices, int64 of shape (accumulate, size)."""
        self._optimizer.zero_grad()
        scaler = self.precision.scaler
        losses = []
        for number, indices in enumerate(micro_batches, 1):
            inputs, targets = (tensor[indices] for tensor in self._dataset.train)
            self.stages.end("data")
            last = number == len(micro_batches)
            with nullcontext() if last else self._ddp.no_sync():
                with self.precision.autocast():
                    loss = mean_loss(self._ddp(inputs), targets) / len(micro_batches)
                self.stages.end("forward")
                scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
                self.stages.end("backward")
            losses.append(loss.detach())
        self.stages.end("waiting")
        if self._config.clip_norm is not None:
            scaler.unscale_(self._optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self._config.clip_norm)
        scaler.step(self._optimizer)
        scaler.update()
        self._unread.append(torch.stack(losses).sum(dtype=torch.float64))
        self.step += 1

    def read_losses(self) -> None:
        """Bring `losses`, the means over the ranks, up to date. This waits for the GPU.

        Raises FloatingPointError if a loss is infinite or not a number.
        """
        if not self._unread:
            return
        losses = torch.stack(self._unread)
        self._unread.clear()
        dist.all_reduce(losses)
        self.losses += (losses / self._world_size).tolist()
        for number, loss in enumerate(self.losses[-len(losses) :], self.step - len(losses) + 1):
            self.require_finite(loss, f"the loss is {loss} at step {number}")

    def require_finite(self, loss: float, message: str) -> None:
        """Raise FloatingPointError, with `message` and advice, if `loss` is not a finite number.

        Call it with the same loss on all ranks.
        """
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"{message}. Use a smaller --lr than {self._config.lr:g}, or limit the gradient "
                "with --clip-norm 1"
            )

    def save(self) -> None:
        """Write a checkpoint on rank 0, if the run has a folder for checkpoints.

        This also reads the losses, and raises the errors of `read_losses`. On rank 0 it also raises
        the errors of `save_checkpoint`.
        """
        self.read_losses()
        if self._folder is None or self._rank != 0:
            return
        content = {
            "identity": self._identity,
            "step": self.step,
            "losses": torch.tensor(self.losses, dtype=torch.float64),
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "scaler": self.precision.scaler.state_dict(),
        }
        save_checkpoint(self._folder, self.step, content)

    def _resume(self, folder: Path) -> None:
        content = load_checkpoint(folder, say)
        if content is None:
            return
        stored = content["identity"]
        for name, value in self._identity.items():
            if stored.get(name) != value:
                raise ConfigError(_difference(folder, name, stored.get(name), value))
        self.step = content["step"]
        self.losses = content["losses"].tolist()
        self.model.load_state_dict(content["model"])
        self._optimizer.load_state_dict(content["optimizer"])
        self.precision.scaler.load_state_dict(content["scaler"])


def _difference(folder: Path, name: str, stored: object, value: object) -> str:
    run = f"with --{name.replace('_', '-')} {stored}, but this run has {value}"
    if name == "data":
        run = "on different data (the text comes from a different release of Python)"
    return (
        f"the checkpoint in {folder} is of a run {run}. Use the same options, or choose "
        "another folder with --checkpoint."
    )


def _wrapped(
    model: nn.Module, config: TrainConfig, device: torch.device
) -> DistributedDataParallel | TorchDDP:
    if config.ddp == "ours":
        return DistributedDataParallel(model)
    devices = [device] if device.type == "cuda" else None
    return TorchDDP(model, device_ids=devices, gradient_as_bucket_view=True)
