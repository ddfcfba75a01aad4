"""The text: targets are the bytes that follow, and no test text is trained on."""

import torch

from course_lib.train.datasets import documentation_text, load_dataset, pieces
from tests.helpers.train_runs import CPU, TEXT


def test_targets_are_the_bytes_that_follow_and_no_test_text_is_trained_on():
    inputs, targets = pieces(torch.arange(100, dtype=torch.uint8), 7)
    assert inputs.shape == targets.shape == (14, 7)
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(inputs.flatten(), torch.arange(98, dtype=torch.uint8))

    data = load_dataset(TEXT, CPU)
    text = bytes(documentation_text().tolist())
    train_text, test_text = (bytes(part[0].flatten().tolist()) for part in (data.train, data.test))
    assert text.startswith(train_text)
    assert len(test_text) > 0.09 * len(text)
    start = text.index(test_text)  # the end of the text, after all that is trained on
    assert start >= len(train_text)
