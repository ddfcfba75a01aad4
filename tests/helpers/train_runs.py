"""Small training runs, a comparison of two of them, and the oracle: one machine."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.utils.data.distributed import DistributedSampler

from course_lib.train import ConfigError, TrainConfig, TrainResult, train
from course_lib.train.datasets import load_dataset
from course_lib.train.models import build_model

CPU = torch.device("cpu")
EXACT = {"rtol": 1e-9, "atol": 1e-11}
# Digits: 2 steps per epoch, so that 5 steps need three orders.
DIGITS = TrainConfig(width=8, batch_size=480, steps=5, log_every=0)
TEXT = TrainConfig(
    model="transformer",
    **{"width": 16, "layers": 1, "heads": 2, "context": 32},
    **{"batch_size": 24, "steps": 5, "log_every": 0},
)
CONFIGS = {"mlp": DIGITS, "cnn": replace(DIGITS, model="cnn"), "transformer": TEXT}


def in_double(config: TrainConfig) -> TrainResult:
    torch.set_default_dtype(torch.float64)
    try:
        return train(config)
    finally:
        torch.set_default_dtype(torch.float32)


def bits(result: TrainResult) -> list[bytes]:
    return [weight.numpy().tobytes() for weight in result.weights.values()]


def same_everywhere(results: list[TrainResult]) -> TrainResult:
    """Check that the replicas have the same bits; return the first one's result."""
    for result in results:
        assert bits(result) == bits(results[0])
        assert result.losses == results[0].losses
        assert result.test_loss == results[0].test_loss
    return results[0]


def assert_same_training(result: TrainResult, expected: TrainResult, **tolerance: float) -> None:
    torch.testing.assert_close(result.losses, expected.losses, **tolerance)
    torch.testing.assert_close(result.weights, expected.weights, **tolerance)
    torch.testing.assert_close(result.test_loss, expected.test_loss, **tolerance)
    assert result.test_accuracy == pytest.approx(expected.test_accuracy, abs=1e-3)


def refusal(config: TrainConfig) -> str:
    with pytest.raises((ConfigError, FloatingPointError)) as error:
        train(config)
    return str(error.value)


def one_machine(config: TrainConfig) -> TrainResult:
    """The oracle: no ranks, no wrapper, the whole batch, the plain AdamW, in float64."""
    before = torch.random.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(config.seed)
        model, data = build_model(config), load_dataset(config, CPU)
        optimizer = torch.optim.AdamW(
            model.parameters(), config.lr, weight_decay=config.weight_decay, foreach=False
        )
        (inputs, targets), losses = data.train, []
        per_epoch = len(inputs) // config.batch_size
        sampler = DistributedSampler(range(len(inputs)), 1, 0, seed=config.seed)
        for step in range(config.steps or 0):
            if step % per_epoch == 0:
                sampler.set_epoch(step // per_epoch)
                order = list(sampler)
            start = step % per_epoch * config.batch_size
            batch = order[start : start + config.batch_size]
            optimizer.zero_grad()
            logits = model(inputs[batch])
            loss = cross_entropy(logits.flatten(0, -2), targets[batch].flatten().long())
            loss.backward()
            if config.clip_norm is not None:
                norm = clip_grad_norm_(model.parameters(), config.clip_norm)
                assert norm > config.clip_norm, "otherwise clipping would not be tested"
            optimizer.step()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            logits = model(data.test[0])
            test_loss = cross_entropy(logits.flatten(0, -2), data.test[1].flatten().long()).item()
            right = (logits.argmax(-1) == data.test[1]).double().mean().item()
        weights = {name: param.detach() for name, param in model.named_parameters()}
        return TrainResult(losses, test_loss, right, 0, weights)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.random.set_rng_state(before)
