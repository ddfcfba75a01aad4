"""The examples in docstrings, the lines behind `>>>`, do what they say.

Those of the rungs run on two CPU ranks, the others here, in the notebook's place. The
printed output of a line is compared with the docstring's.
"""

import ast
import doctest
from collections import defaultdict

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_lib import READING_ORDER, cost_model
from tests.helpers import ROOT


def module_of(path) -> str:
    """Return the dotted name of a file: of a folder's face, that of the folder."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = [path for top in ("course_lib", "autograder") for path in (ROOT / top).rglob("*.py")]


def docstrings_by_name() -> dict[str, str]:
    """Return the docstrings of modules, classes and functions; of equal names together."""
    docstrings: defaultdict[str, str] = defaultdict(str)
    for path in FILES:
        if ">>>" not in (source := path.read_text()):
            continue  # most files, and every worker of pytest reads them all
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                name = f"{module_of(path)}.{getattr(node, 'name', '')}".rstrip(".")
                docstrings[name] += f"{ast.get_docstring(node) or ''}\n\n"
    return docstrings


def is_rung(name: str) -> bool:
    return name.split(".")[1:2] != [] and name.split(".")[1] in READING_ORDER


EXAMPLES = {name: text for name, text in docstrings_by_name().items() if ">>>" in text}
OF_RUNGS = sorted(name for name in EXAMPLES if is_rung(name))
OTHERS = sorted(set(EXAMPLES) - set(OF_RUNGS))


def gradient_of(rank: int):
    """Whole numbers, of a length that two ranks cannot halve: sums are exact in any order."""
    return torch.arange(1.0, 8) * (rank + 1)


def usual_names(rank: int, name: str):
    """Return the names that the examples use; they differ on every rank, to reveal mix-ups."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    data = [(torch.randn(8, 3), torch.randn(8, 1)) for _ in range(3)]
    x, y = torch.randn(80, 3), torch.randn(80, 1)
    uneven = name.endswith("uneven_inputs")
    return {
        **{"torch": torch, "nn": nn, "dist": dist},
        **{"model": model, "loss_fn": nn.functional.mse_loss, "x": x, "y": y},
        "loader": data[rank:] if uneven else data,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        **{"gradient": gradient_of(rank), "tensor": gradient_of(rank)},
        **{"right": (rank + 1) % 2, "outgoing": gradient_of(rank)},
        **{"left": (rank - 1) % 2, "incoming": torch.empty(7)},
        **{"shown": [gradient_of(0), gradient_of(1)], "result": torch.empty(7)},
        "network": cost_model.Link(latency=20e-6, bandwidth=10e9),
    }


def run_lines(text: str, names, name: str = "example"):
    """Run the examples of a docstring; return all names afterwards.

    Raises AssertionError, with what doctest says, as soon as one does not do what it should.
    """
    lines: list[str] = []
    examples = doctest.DocTestParser().get_doctest(text, names, name, None, None)
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.FAIL_FAST)
    runner.run(examples, out=lines.append, clear_globs=False)
    assert not runner.failures, "".join(lines)
    return examples.globs


def on_a_rank(name: str, text: str) -> None:
    """Run the examples on this rank."""
    run_lines(text, usual_names(dist.get_rank(), name), name)


@pytest.mark.parametrize("name", OF_RUNGS)
def test_the_examples_of_a_rung_do_what_they_say(ranks_of, name):
    ranks_of("cpu", 2).run(on_a_rank, name, EXAMPLES[name])


@pytest.mark.parametrize("name", OTHERS)
def test_the_examples_of_a_notebook_do_what_they_say(name):
    from matplotlib.figure import Figure

    names = {
        "__name__": "__main__",  # so that functions travel to ranks as those of a cell do
        **{"torch": torch, "figure": Figure()},
        **{"fn": lambda shard, lr: shard, "shards": list(range(4))},
    }
    afterwards = run_lines(EXAMPLES[name], names, name)
    assert afterwards.get("results", [0, 1, 2, 3]) == [0, 1, 2, 3]
