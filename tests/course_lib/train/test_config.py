"""Impossible settings are refused before the run begins, with advice."""

import re
from dataclasses import replace

import pytest

from course_lib.ranks import RankError
from course_lib.train import ConfigError, TrainConfig, train
from tests.helpers.train_runs import DIGITS, refusal


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("model", "rnn"), ("lr", float("nan")), ("batch_size", 0)),
        *(("log_every", -1), ("seed", -1), ("checkpoint", "")),
    ],
)
def test_an_option_that_makes_no_sense_is_named(option, value):
    with pytest.raises(ConfigError, match=f"--{option.replace('_', '-')} is "):
        TrainConfig(**{option: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 50}, r"--batch-size 50 .* 2 ranks × accumulate=2 .* multiple of 4\."),
        ({"batch_size": 4000}, "the training set has 1438 examples"),
        ({"model": "transformer", "context": 10**6}, "--context 1000000 is too large"),
        ({"precision": "fp16"}, "--precision fp16 needs a GPU"),
        ({"lr": 1e30, "steps": 9}, "the loss is (nan|inf) at step .* smaller --lr than 1e"),
    ],
)
def test_a_run_that_cannot_be_is_refused_with_advice(ranks_of, change, message):
    config = replace(DIGITS, accumulate=2, **change)
    with pytest.raises(RankError, match=message):
        ranks_of("simulated", 2).run(train, config)


def test_a_last_step_that_ruins_the_weights_is_no_finished_run(ranks_of):
    messages = ranks_of("simulated", 2).run(refusal, replace(DIGITS, lr=1e38, steps=1))
    assert messages[0] == messages[1]
    assert re.match("the test loss is (nan|inf) after step 1. .* smaller --lr than 1e", messages[0])


def test_without_ranks_it_says_how_to_get_them():
    with pytest.raises(ValueError, match="torchrun"):
        train(DIGITS)
