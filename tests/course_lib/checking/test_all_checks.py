"""Rules that hold for the cases of every check of every assignment."""

import pytest
import torch

from course_lib.checking.cases import case_generator
from course_lib.checking.on_ranks.leaves import tensors_in
from tests.helpers.course_folders import needs_sources
from tests.helpers.solutions import checks_of, tasks

pytestmark = [needs_sources, pytest.mark.parametrize(("folder", "task"), tasks())]

NARROWER = {
    torch.float64: (torch.float32, torch.bfloat16, torch.float16),
    torch.float32: (torch.bfloat16, torch.float16),
    torch.bfloat16: (),
}


def floats_of(name: str, check, case) -> list[torch.Tensor]:
    inputs = list(check.inputs(case, case_generator("tests", name, case)))
    tensors = tensors_in(inputs)
    return [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel()]


# Task → why its numbers have few bits.
EXACT = {
    **dict.fromkeys(("quantize", "encode_top_k", "with_feedback", "frontier"), "sums are exact"),
    **dict.fromkeys(("spectral_gap", "choose_graph"), "its matrices are fractions"),
    **dict.fromkeys(("column_parallel", "row_parallel"), "its numbers are small integers"),
}


def test_numbers_use_all_bits_of_their_dtype(folder, task: str) -> None:
    """Else nobody sees that an answer went through float32, bfloat16 or float16."""
    check = checks_of(folder)[task]
    if task in EXACT:
        pytest.skip(EXACT[task])
    for case in check.cases:
        tensors = floats_of(f"{folder.name}/{task}", check, case)
        widest = [t for t in tensors if t.dtype == getattr(torch, case.form.dtype, None)]
        for narrow in NARROWER.get(widest[0].dtype, ()) if widest else ():
            assert any(not torch.equal(t, t.to(narrow).to(t.dtype)) for t in widest), (
                f"{case.name}: {narrow} holds all numbers"
            )


def test_the_first_case_is_plain_and_the_special_ones_follow(folder, task: str) -> None:
    cases = checks_of(folder)[task].cases
    first = cases[0]
    assert [case.difficulty for case in cases] == sorted(case.difficulty for case in cases)
    assert (first.form.layout, len(first.groups), first.after) == ("contiguous", 1, None)
    several = [case.world_size for case in cases if case.world_size > 1]
    assert min(several, default=1) <= first.world_size <= max(3, min(several, default=1))
