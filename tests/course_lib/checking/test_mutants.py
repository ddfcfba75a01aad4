"""What stands in a `mutants.py` is handed in as a student would have written it."""

import torch

from course_lib.checking.mutants import Mutant, fails


@torch.no_grad()
def step__counts_calls(x):
    step__counts_calls.calls = getattr(step__counts_calls, "calls", 0) + 1
    return x * step__counts_calls.calls


def test_the_source_keeps_other_decorators_and_calls_itself_by_the_task_s_name() -> None:
    function = fails("expected")(step__counts_calls)
    source = Mutant("step", "counts_calls", function, "expected").source
    cell = {"torch": torch}
    exec(source, cell)
    one = torch.ones(1, requires_grad=True)
    step = cell["step"]
    assert [step(one).item(), step(one).item()] == [1, 2]
    assert not step(one).requires_grad


def test_the_source_is_without_its_mark() -> None:
    @fails("expected")
    def step__doubles(x):
        return 2 * x

    mutant = Mutant("step", "doubles", step__doubles, "expected")
    assert mutant.source == "def step(x):\n    return 2 * x"
