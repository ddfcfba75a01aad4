"""The abilities of a ``%%ranks`` cell, in a real Jupyter kernel, on both kinds of ranks."""

from collections.abc import Iterator

import pytest

from tests.helpers.kernels import Kernel, kernel


@pytest.fixture(scope="module", params=["cpu", "simulated"])
def pair(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    """A kernel with two ranks, once of each kind."""
    with kernel() as made:
        assert not made.run(f"%load_ext course_lib\n%ranks 2 --on {request.param}").error
        made.run("from course_lib.ranks.output import printer\nprinter.LINE_WINDOW = 5.0")
        yield made


def number_of_the_next(pair: Kernel) -> int:
    return int(pair.run("print(len(In) - 1)").text) + 1


def test_every_error_names_its_own_cell(pair: Kernel) -> None:
    cell = number_of_the_next(pair)
    assert f"Cell In[{cell}], line 3" in pair.run("%%ranks\n\nrank / 0").error
    stuck = pair.run("%%ranks\nif rank == 0:\n    dist.barrier()").error
    assert f"waits in barrier #1  Cell In[{cell + 1}], line 3" in stuck


def test_a_cell_that_runs_again_has_its_new_number(pair: Kernel) -> None:
    """The ranks stay, and know the cell's lines from its first run."""
    define = "def fail():\n    if torch.distributed.get_rank() == 1:\n        raise ValueError"
    pair.run("import torch")
    for _ in range(2):
        defined = number_of_the_next(pair)
        pair.run(define)
        assert f"Cell In[{defined}], line 3" in pair.run("ranks.run(fail)").error


def test_variables_travel_between_notebook_and_ranks(pair: Kernel) -> None:
    pair.run("import torch\nfrom course_lib.ranks import per_rank\nlr = 0.5")
    missing = pair.run("%%ranks\nlr").error
    assert "NameError: name 'lr' is not defined" in missing
    assert "ranks.push(lr=lr)" in missing
    pair.run("pytorch = torch")
    assert "import torch as pytorch" in " ".join(pair.run("%%ranks\npytorch").error.split())
    assert not pair.run("ranks.push(lr=lr, shard=per_rank([torch.ones(2), torch.ones(3)]))").error
    pair.run("%%ranks\nloss = lr * shard.sum().item()\ndist.barrier()")
    assert pair.run("print(ranks.pull('loss'), len(ranks.trace.operations))").text == (
        "[1.0, 1.5] 2\n"  # a pull leaves the trace of the cell
    )
    assert pair.run("losses, rates = ranks.pull('loss', 'lr')\nprint(losses, rates)").text == (
        "[1.0, 1.5] [0.5, 0.5]\n"
    )
    nothing = pair.run("ranks.pull('momentum')").error
    assert "no variable 'momentum'; it has" in nothing and "loss" in nothing


def test_an_exception_of_one_rank_leaves_the_variables_of_all(pair: Kernel) -> None:
    pair.run("%%ranks\nkept = 10 + rank")
    assert "ZeroDivisionError" in pair.run("%%ranks\nif rank == 1:\n    1 / 0").error
    assert pair.run("print(ranks.pull('kept'))").text == "[10, 11]\n"


def test_some_of_the_ranks_run_a_cell(pair: Kernel) -> None:
    assert pair.run("%%ranks 1\nalone = rank\nalone").text == "[rank 1] 1\n"
    assert "it has" in pair.run("ranks.pull('alone')").error
    error = pair.run("%%ranks 0\ndist.barrier()").error
    assert "Only rank 0 runs this cell (%%ranks 0)" in error
    assert "must be 0 to 1" in pair.run("%%ranks 2\nrank").error


def test_shell_commands_magics_and_await_inside(pair: Kernel) -> None:
    outcome = pair.run(
        "%%ranks\n\n"
        "import asyncio\n"
        "!echo from {rank}\n"
        "words = !echo a; echo b\n"
        "async def later():\n"
        "    await asyncio.sleep(0)\n"
        "    return words\n"
        "await later()"
    )
    assert not outcome.error
    assert outcome.text.splitlines() == [
        "[rank 0] from 0",
        "[rank 1] from 1",
        "[ranks 0-1] ['a', 'b']",
    ]
    assert "time: " in pair.run("%%ranks 0\n%time x = sum(range(10))").text
    timed = pair.run("%%ranks 0\n%%time\ny = 3\ny")
    assert "time: " in timed.text and "[rank 0] 3" in timed.text
    assert "Cell In[" in (error := pair.run("%%ranks\n%%time\n\ny / 0").error)
    assert "line 4" in error
    assert "put %run into a cell without %%ranks" in pair.run("%%ranks\n%run x.py").error
    assert "SyntaxError" in pair.run("%%ranks\nawait await").error


def test_figures_left_open_are_shown(pair: Kernel) -> None:
    outcome = pair.run(
        "%%ranks\nimport matplotlib.pyplot as plt\nplt.plot([0, rank])\nprint('drawn');"
    )
    assert not outcome.error
    assert [set(bundle) & {"image/png"} for bundle in outcome.bundles] == [{"image/png"}] * 2
    assert outcome.text.splitlines() == ["[ranks 0-1] drawn", "[rank 0]", "[rank 1]"]


def test_a_mistake_in_the_options_leaves_the_ranks(pair: Kernel) -> None:
    pair.run("%%ranks\nprecious = 1")
    for line in ("3 --onn cpu", "3 --on moon", "-1", "a"):
        error = pair.run(f"%ranks {line}").error
        assert "UsageError" in error and "Traceback" not in error, line
        assert pair.run("print(ranks.pull('precious'))").text == "[1, 1]\n"
