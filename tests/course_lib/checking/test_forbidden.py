"""The classes that a task asks for are refused under every name, and come back afterwards."""

import pytest
import torch
from torch.optim.sgd import sgd
from torch.utils.data import BatchSampler, SequentialSampler

from course_lib.checking.forbidden import OPTIMIZERS, refusing

pytestmark = pytest.mark.every_case
SAMPLERS = BatchSampler, SequentialSampler
# As a notebook's first cell may have imported it.
SGD = torch.optim.SGD


def weight() -> torch.nn.Parameter:
    param = torch.nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    return param


class OwnStep(SGD):
    """A class of the student's own, which goes around PyTorch's ``__init__``."""

    def __init__(self) -> None:
        SGD.__init__(self, [weight()], 0.1)


@torch.no_grad()
def functional() -> None:
    param = weight()
    state = [None]
    sgd(
        *([param], [param.grad], state),
        **{"weight_decay": 0.0, "momentum": 0.0, "lr": 0.1, "dampening": 0.0},
        nesterov=False,
        maximize=False,
    )


def by_iterating():
    sampler = object.__new__(BatchSampler)  # no __init__ is called
    sampler.sampler, sampler.batch_size, sampler.drop_last = range(4), 2, False
    return list(sampler)


@pytest.mark.parametrize(
    ("targets", "use", "name"),
    [
        (OPTIMIZERS, lambda: SGD([weight()], 0.1), "SGD"),
        (OPTIMIZERS, OwnStep, "Optimizer"),
        (OPTIMIZERS, functional, "sgd"),
        (SAMPLERS, lambda: SequentialSampler([1]), "SequentialSampler"),
        (SAMPLERS, by_iterating, "BatchSampler"),
    ],
)
def test_it_is_refused_by_its_name_and_given_back(targets, use, name):
    with (
        pytest.raises(
            RuntimeError, match=f"^{name} cannot be used: it is what this task asks you to write"
        ),
        refusing(*targets),
    ):
        use()
    use()
