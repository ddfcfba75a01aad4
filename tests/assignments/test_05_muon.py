"""Assignment 05, task 8: the expected step is the step of PyTorch's own Muon."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from course_lib.checking import Case
from course_lib.checking.loading import load_module
from tests.helpers.course_folders import RELEASED

judges = load_module(RELEASED / "05_bucketing_and_overlap" / "muon_judges.py")


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="PyTorch 2.9 and newer have it")
def test_the_expected_step_is_that_of_torch_optim_muon() -> None:
    shapes = [(6, 4), (3, 5), (8, 8)]
    case = Case("", 1, {"shapes": shapes, "owners": [0] * 3, "lrs": [0.05, 0.05], "beta": 0.9})
    (mine,) = judges.muon_inputs(case, torch.Generator().manual_seed(1))
    mine["momenta"] = [torch.zeros(shape) for shape in shapes]
    expected = judges.muon(lambda momentum, gradient: judges.scaled(momentum))(case, [mine], 0)
    params = [nn.Parameter(weight.clone()) for weight in mine["weights"]]
    theirs = torch.optim.Muon(
        *(params, 0.05),
        **{"momentum": 0.9, "nesterov": False, "weight_decay": 0.0},
        adjust_lr_fn="match_rms_adamw",
    )
    for gradients in mine["gradients"]:
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient
        theirs.step()
    for ours, param, before in zip(
        expected[judges.PARAMETER], params, mine["weights"], strict=True
    ):
        # PyTorch's iteration is in bfloat16.
        torch.testing.assert_close(ours - before, param.detach() - before, rtol=0.1, atol=1e-3)
