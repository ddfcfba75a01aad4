"""The report, the tolerances and the layouts."""

import pickle

import pytest
import torch

from course_lib.compare import compare, record, trusted_run
from tests.course_lib.compare.museum import batch, mlp, one_rank, sgd, train


def test_a_record_can_be_sent_and_nothing_stays_behind() -> None:
    model = mlp()
    with record(model, optimizer := sgd(model)) as recorded:
        model(batch()[0]).sum().backward()
        optimizer.step()
    again = pickle.loads(pickle.dumps(recorded))
    assert again.tensors.keys() == recorded.tensors.keys()
    before = len(recorded.tensors)
    model(batch()[0]).sum().backward()
    optimizer.step()
    assert len(recorded.tensors) == before  # the hooks are gone


@pytest.mark.parametrize("error", [1e-7, 1e-3])
def test_the_tolerance_lies_between_rounding_and_an_error(error: float) -> None:
    def after(model) -> None:
        grad = model[3].weight.grad
        grad[1, 2] += error * grad.abs().max()

    def step():
        return train(mlp(), after=after)

    report = compare(trusted_run(one_rank), [step()])
    if error < 1e-5:
        assert report.first is None, report
    else:
        assert (report.first.key.kind, report.first.key.name) == ("gradient", "3.weight")
        assert report.first.part == "[1:2, 2:3]"


def test_wrong_uses_are_refused() -> None:
    trusted = trusted_run(one_rank)
    with pytest.raises(ValueError, match="lacks the disturbed runs"):
        compare(one_rank(), [one_rank()])
    lonely = one_rank()
    lonely.rank, lonely.world_size = 1, 2
    with pytest.raises(ValueError, match=r"records of the ranks \[1\]"):
        compare(trusted, [lonely])
    with pytest.raises(ValueError, match=r"trusted_run\(step, dtype=torch.bfloat16\)"):
        compare(trusted, [one_rank(dtype=torch.bfloat16)])
    model = mlp()
    with pytest.raises(ValueError, match="build the model inside the step"):
        trusted_run(lambda: one_rank(make=lambda: model))
