"""Models and precision: who sees what, and in which numbers."""

from dataclasses import replace

import torch

from course_lib.train import train
from course_lib.train.models import build_model
from course_lib.train.precision import Precision
from tests.helpers.train_runs import CPU, TEXT, same_everywhere


def test_bf16_computes_products_in_bf16_and_keeps_weights_in_fp32(ranks_of):
    config = replace(TEXT, width=32)
    full, mixed = (
        same_everywhere(ranks_of("simulated", 2).run(train, replace(config, precision=precision)))
        for precision in ("fp32", "bf16")
    )
    assert full.losses != mixed.losses
    torch.testing.assert_close(mixed.losses, full.losses, rtol=0.01, atol=0)
    assert {weight.dtype for weight in mixed.weights.values()} == {torch.float32}
    with Precision("bf16", CPU).autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


def test_no_position_of_the_transformer_sees_a_later_one_and_each_sees_all_before():
    torch.manual_seed(0)
    model = build_model(replace(TEXT, layers=2))
    text = torch.randint(0, 256, (1, 32), generator=torch.Generator().manual_seed(1)).int()
    logits = model(text)
    assert logits.shape == (1, 32, 256)
    for changed in (0, 7, 31):
        other = text.clone()
        other[0, changed] ^= 1
        differs = (model(other) != logits).any(-1)[0]
        assert differs.tolist() == [position >= changed for position in range(32)]
