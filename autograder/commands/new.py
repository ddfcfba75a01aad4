"""``autograder new``: write an assignment with one whole task, for you to change.

The assignment has two folders: ``assignments/NN_name/`` has the check, and ``instructor/NN_name/``
has the rest.

It passes its tests and can be released as it is. So any later failure comes from a change.
Its check is the one that ``instructor/README.md`` explains, and is read from there.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import nbformat
from nbformat import NotebookNode, v4

from autograder.course import find_sources, handed_out

DESCRIPTION = (
    "Write assignments/NN_name with the check that instructor/README.md explains, and "
    "instructor/NN_name with a notebook of one task and its solution, hidden cases, and wrong "
    "solutions. This assignment passes its tests and can be released. Change it into yours."
)
NAME = re.compile(r"\d\d_[a-z][a-z0-9_]*")

HANDED_OUT = '''"""The checks of this assignment. They are handed out.

If a judge is too long to read here, write it in judges.py beside this file, and import it:
from .judges import …
"""

'''

HIDDEN = '''"""Cases that are never handed out and never enter a sandbox."""

from course_lib.checking import Case, in_many_forms

HIDDEN = {
    "rotate": in_many_forms(
        Case("6 ranks, length 2", 6, {"length": 2}),
        Case("3 ranks, length 4, in two groups", 3, {"length": 4}),
    ),
}

# Modules with the answer: they cannot be imported while this is graded.
MASKED = ()
'''

MUTANTS = '''"""Wrong solutions that people write, and right ones that differ from ours."""

import torch
import torch.distributed as dist

from course_lib.checking.mutants import edits_of, fails, passes


@passes
def rotate__both_begun_then_waited_for(x, group=None):
    k, me = dist.get_world_size(group), dist.get_rank(group)
    if k == 1:
        return x.clone()
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    handles = [
        dist.isend(x.contiguous(), group=group, group_dst=(me + 1) % k),
        dist.irecv(received, group=group, group_src=(me - 1) % k),
    ]
    for handle in handles:
        handle.wait()
    return received


edits_of(rotate__both_begun_then_waited_for)("""
wrong_direction: the direction is wrong
    group_dst=(me + 1) % k → group_dst=(me - 1) % k
    group_src=(me - 1) % k → group_src=(me + 1) % k
ignores_the_group: pass group=group to every call
    k, me = dist.get_world_size(group), dist.get_rank(group) → group = None; …
does_not_wait (simulated, grader): never waits for the handle
    handle.wait() → pass
one_alone_returns_its_input: shares memory with x
    return x.clone() → return x
through_float32: dtype
    k, me = dist.get_world_size(group), dist.get_rank(group) → …; x = x.float()
""")


@fails("may exchange messages only with")
def rotate__gathers_all(x, group=None):
    every = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, x, group=group)
    return every[dist.get_rank(group) - 1]
'''

TITLE = """# Assignment {number}: a question as its title?

You will …

**You need** lecture `NN_name`. **You get** 4 points from checks. **It takes** about … minutes.

**The rules of all tasks.** Your functions get what the text says and no more; a check calls them
with other groups, dtypes (`float32`, `float64`, `bfloat16`) and memory layouts than the examples
do. `group` is `None` for all ranks, or a process group of some of them, whose ranks need not begin
with 0; pass it on to every call. Change nothing that the task does not ask you to change, seed and
draw no random numbers, wait for every handle, and keep nothing from one call to the next. The
points of a task's *values* come all together, if every case is right; those of its *communication*
as well, where the values are right."""

SETUP = """import torch
import torch.distributed as dist

from course_lib.checking import check"""

TASK = """## Task 1: to the next rank  (4 points)

Every rank of the group has a tensor `x` of the same shape. Return the left neighbour's tensor, in
new memory: rank $r$ of the group returns the tensor of rank $r - 1$, and rank 0 the last rank's.

*Rules*: a rank talks to its two neighbours only, and sends `x` once. 3 points for the values, 1 for
the communication."""

ANSWER = '''def rotate(x, group=None):
    """Return the left neighbour's tensor."""
    ### BEGIN SOLUTION
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    if world_size == 1:
        return x.clone()
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    sent = dist.isend(x.contiguous(), group=group, group_dst=(rank + 1) % world_size)
    dist.recv(received, group=group, group_src=(rank - 1) % world_size)
    sent.wait()
    return received
    ### END SOLUTION'''


class NewError(RuntimeError):
    """The folder cannot be written; the message says what to do."""


def new(root: Path, name: str) -> Path:
    """Write ``instructor/NN_name/`` and ``assignments/NN_name/``; return the first path.

    Raises:
        SourcesMissing: this copy of the course lacks ``instructor/``.
        NewError: the name is not usable, a folder exists already, or the README has no check.

    """
    sources = find_sources(root)
    if not NAME.fullmatch(name):
        raise NewError(
            f"{name!r} is no usable name: use a name like 12_my_topic, two digits and small letters"
        )
    folder = sources / name
    for each in (folder, handed_out(folder)):
        if each.exists():
            raise NewError(f"{each} exists already: choose another name, or remove it first")
    made = {
        handed_out(folder) / "checks.py": HANDED_OUT + check(sources),
        folder / f"{name}.ipynb": nbformat.writes(notebook(name), version=4) + "\n",
        folder / "hidden.py": HIDDEN,
        folder / "mutants.py": MUTANTS,
    }
    for path, text in made.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def check(sources: Path) -> str:
    """Return the check that the README explains: its first block of Python."""
    readme = sources / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    block = re.search(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    if block is None:
        raise NewError(f"{readme} has no block of Python to start from: restore it from git")
    return block[1]


def notebook(name: str) -> NotebookNode:
    """Return the notebook: a title, the first cell, one task, its solution and its test."""
    cells = [
        _cell(v4.new_markdown_cell(TITLE.format(number=name[:2])), "intro"),
        _cell(v4.new_code_cell(SETUP), "setup"),
        _cell(v4.new_markdown_cell(TASK), "task_1"),
        _cell(v4.new_code_cell(ANSWER), "write_rotate", locked=False, solution=True),
        _cell(v4.new_code_cell(f'check("{name}/rotate", rotate)'), "rotate", points=4),
    ]
    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    made: NotebookNode = v4.new_notebook(
        cells=cells, metadata={"kernelspec": kernel, "language_info": {"name": "python"}}
    )
    return made


def _cell(
    cell: NotebookNode,
    grade_id: str,
    *,
    locked: bool = True,
    solution: bool = False,
    points: int | None = None,
) -> NotebookNode:
    """Give the cell its role in nbgrader; a cell with points is a test."""
    cell.id = grade_id.replace("_", "-")
    role = {"grade": points is not None, "grade_id": grade_id, "locked": locked}
    role |= {"schema_version": 3, "solution": solution, "task": False}
    cell.metadata["nbgrader"] = role | ({} if points is None else {"points": points})
    return cell


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("assignment", help="name of the new folder, such as 12_my_topic")


def run(root: Path, arguments: argparse.Namespace) -> int:
    """Write the folder for the command line; return the exit status."""
    try:
        folder = new(root, arguments.assignment)
    except NewError as error:
        print(f"autograder new: {error}", file=sys.stderr)
        return 2
    name = folder.name
    print(f"Written: {folder}\n")
    print(
        "  make formgrader                   edit the notebook, hidden.py and mutants.py beside it"
    )
    print(f"  assignments/{name}/checks.py      the check, which students get")
    print(f'  make test-all ARGS="tests/test_assignments.py -k {name}"')
    print("  autograder release                make the students' version, and the kill matrix")
    print(
        "  README.md                         add a row for it; nothing else in the course changes"
    )
    return 0
