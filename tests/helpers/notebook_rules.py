"""The rules of every notebook of the course. A rule yields one sentence for each breach.

`problems(path, rules)` applies LECTURE or ASSIGNMENT: lectures are committed with their outputs,
assignments without.
"""

import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import unquote

import nbformat
from bs4 import BeautifulSoup  # comes with nbconvert
from nbformat import NotebookNode
from nbformat.validator import iter_validate
from nbgrader.nbgraderformat import MetadataValidator, SchemaTooOldError, ValidationError

MAX_BYTES = 1_000_000  # what GitHub still shows, and a diff still bears
# measured: prints seconds of this machine;
# explore, for assignments: a cell to play with, which the grader does not run.
TAGS = {"hide-input", "drawing", "skip-execution", "raises-exception", "measured", "explore"}
TAGS |= {"hide-output"}  # what answers a guess: folded on the web pages until it is asked for
KERNEL = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}

Rule = Callable[[NotebookNode, Path], Iterator[str]]


def tags(cell: NotebookNode) -> set[str]:
    return set(cell.metadata.get("tags", []))


def code_cells(nb: NotebookNode) -> Iterator[tuple[int, NotebookNode]]:
    return ((i, cell) for i, cell in enumerate(nb.cells) if cell.cell_type == "code")


def prose_cells(nb: NotebookNode) -> Iterator[tuple[int, str, NotebookNode]]:
    """Yield (index, text without code, cell) of the Markdown cells."""
    for i, cell in enumerate(nb.cells):
        if cell.cell_type == "markdown":
            yield i, without_code(cell.source), cell


def without_code(markdown: str) -> str:
    fenced = re.sub(r"^ *(```|~~~).*?^ *\1 *$", "", markdown, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]+`", "", fenced)


def outputs(nb: NotebookNode) -> Iterator[tuple[int, NotebookNode]]:
    return ((i, output) for i, cell in code_cells(nb) for output in outputs_of(cell))


def outputs_of(cell: NotebookNode) -> list[NotebookNode]:
    """Return a cell's outputs, also those that docs/site/answers.py has moved."""
    outputs: list[NotebookNode] = cell.outputs or cell.metadata.get("answer", [])
    return outputs


def format_is_valid(nb: NotebookNode, path: Path) -> Iterator[str]:
    if (nb.nbformat, nb.nbformat_minor) != (4, 5):
        yield f"format is {nb.nbformat}.{nb.nbformat_minor}, not 4.5"
    yield from (error.message for error in iter_validate(nb, version=4, version_minor=5))
    if len({cell.get("id") for cell in nb.cells}) < len(nb.cells):
        yield "a cell id appears twice"


def kernel_is_the_stock_one(nb: NotebookNode, path: Path) -> Iterator[str]:
    if (kernel := dict(nb.metadata.get("kernelspec", {}))) != KERNEL:
        yield f"kernelspec is {kernel}, not {KERNEL}"
    if "jupytext" in nb.metadata:
        yield "jupytext metadata: JupyterLab would write a second copy beside the notebook"


def headings_form_an_outline(nb: NotebookNode, path: Path) -> Iterator[str]:
    found = [
        (i, len(marks))
        for i, text, _ in prose_cells(nb)
        for marks in re.findall(r"^ {0,3}(#{1,6})[ \t]+\S", text, re.MULTILINE)
    ]
    if [i for i, level in found if level == 1] != [0]:
        yield "the first cell, and no other, has one heading of level 1"
    for (_, above), (i, level) in itertools.pairwise(found):
        if level > above + 1:
            yield f"cell {i}: a heading of level {level} follows one of level {above}"


def links_lead_somewhere(nb: NotebookNode, path: Path) -> Iterator[str]:
    here = anchors(nb)
    for i, text, cell in prose_cells(nb):
        for target in broken_links(text, path.parent, set(cell.get("attachments", {}))):
            yield f"cell {i}: {target} does not exist"
        for place in re.findall(r"\]\(#([^)\s]+)\)", text):
            if anchor(unquote(place)) not in here:
                yield f"cell {i}: no heading on this page is called #{place}"


def anchor(heading: str) -> str:
    """Return a heading as links name it, whichever site or program made the name."""
    return re.sub(r"[^\w-]", "", re.sub(r"\s+", "-", heading.strip())).lower()


def anchors(nb: NotebookNode) -> set[str]:
    """Return the places on a notebook's page that a link can name: its headings."""
    pages = "\n".join(text for _, text, _ in prose_cells(nb))
    return {anchor(each) for each in re.findall(r"^ {0,3}#+[ \t]+(.+)$", pages, re.MULTILINE)}


def broken_links(markdown: str, folder: Path, attachments: set[str] = frozenset()) -> Iterator[str]:
    """Yield the local targets in a Markdown text that are missing, seen from ``folder``.

    Where a target names a heading of a notebook, that must be there too.
    """
    targets = re.findall(r"\]\(<?([^)\s>]+)", markdown)
    targets += re.findall(r"""(?:src|href)=["']([^"']+)""", markdown)
    for target in targets:
        if target.startswith("attachment:"):
            if unquote(target.removeprefix("attachment:")) not in attachments:
                yield target
        elif re.match(r"[a-z][a-z0-9+.-]*:|#|//", target, re.IGNORECASE):
            continue  # another site, or a place on this page
        elif not (file := folder / unquote(target.partition("#")[0])).exists():
            yield target
        elif file.suffix == ".ipynb" and (place := unquote(target.partition("#")[2])):
            page = nbformat.read(file, as_version=4)
            if anchor(place) not in anchors(page):
                yield target


def descriptions(html: str) -> list[str]:
    """Return the alternative texts of the images, empty where there is none."""
    images = BeautifulSoup(html, "html.parser").find_all("img")
    return [image.get("alt", "").strip() for image in images]


def images_are_described(nb: NotebookNode, path: Path) -> Iterator[str]:
    for i, text, _ in prose_cells(nb):
        if re.search(r"!\[\s*\]", text) or "" in descriptions(text):
            yield f"cell {i}: an image without alternative text"
    for i, output in outputs(nb):
        data = output.get("data", {})
        alts = descriptions(data.get("text/html", ""))
        if "" in alts:
            yield f"cell {i}: an <img> without alternative text"
        if any(kind.startswith("image/") for kind in data):
            # Only this bundle keeps its description in every notebook viewer.
            if not alts:
                yield f"cell {i}: a bare image; draw it with figures.show(fig, alt=...)"
            elif data.get("text/plain", "").strip() not in alts:
                yield f"cell {i}: text/plain of an image differs from its alternative text"


def tags_are_known(nb: NotebookNode, path: Path) -> Iterator[str]:
    for i, cell in enumerate(nb.cells):
        yield from (f"cell {i}: tag {tag!r} means nothing here" for tag in tags(cell) - TAGS)


def answers_are_out_of_sight(nb: NotebookNode, path: Path) -> Iterator[str]:
    """Yield the cells that show, below a question, which option is right, or why."""
    for i, cell in code_cells(nb):
        # A line is scored where it is asked for: its reader has typed it.
        scores = ".score(" in cell.source and "ask(" not in cell.source
        scores = scores and "explore" not in tags(cell)
        if scores and "hide-input" not in tags(cell):
            yield f"cell {i}: a score without the tag hide-input"
        if "hide-input" in tags(cell) and not cell.metadata.get("jupyter", {}).get("source_hidden"):
            yield f"cell {i}: the tag hide-input without jupyter.source_hidden"
        if (scores or "hide-output" in tags(cell)) and cell.outputs:
            yield f"cell {i}: an answer in sight: python docs/site/answers.py {path.name}"
        if scores and "why=" in cell.source:
            yield f"cell {i}: reasons in sight: their place is course_lib/checking/reasons.json"


def was_run_once_from_the_top(nb: NotebookNode, path: Path) -> Iterator[str]:
    run = [c for _, c in code_cells(nb) if c.source.strip() and "skip-execution" not in tags(c)]
    counts = [cell.execution_count for cell in run]
    if counts != list(range(1, len(run) + 1)):
        yield f"execution counts are {counts}: restart the kernel and run all cells"


def errors_are_announced(nb: NotebookNode, path: Path) -> Iterator[str]:
    for i, output in outputs(nb):
        if output.output_type == "error" and "raises-exception" not in tags(nb.cells[i]):
            yield f"cell {i}: {output.ename} without the tag raises-exception"


# Two components at least, not after a word, a dot (relative), a tilde or a closing bracket (K/2/3).
_ABSOLUTE = re.compile(r"file://[^\s'\"]+|(?<![\w./~)\]-])/[\w.-]+/[\w.-]+|\b[A-Za-z]:\\\w+")


def outputs_name_no_machine(nb: NotebookNode, path: Path) -> Iterator[str]:
    """Yield absolute paths: they name a user and a machine, and change with whoever runs it."""
    for i, output in outputs(nb):
        texts = [output.get("text", ""), *output.get("traceback", [])]
        texts += [str(v) for k, v in output.get("data", {}).items() if k.startswith("text/")]
        text = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(texts))  # colours hide where a path starts
        text = re.sub(r"data:image/[^\"']+|\"drawings\":\"[^\"]+", "", text)
        yield from (f"cell {i}: absolute path {p} in an output" for p in _ABSOLUTE.findall(text))


def is_stripped(nb: NotebookNode, path: Path) -> Iterator[str]:
    for i, cell in code_cells(nb):
        if cell.outputs or cell.execution_count is not None:
            yield f"cell {i}: assignments are committed without outputs and execution counts"


def is_an_assignment(nb: NotebookNode, path: Path) -> Iterator[str]:
    try:
        MetadataValidator().validate_nb(nb)
    except (ValidationError, SchemaTooOldError) as error:
        yield str(error)


def explore_cells_are_free(nb: NotebookNode, path: Path) -> Iterator[str]:
    """Yield the cells to play with that nbgrader tracks or locks: nobody could play with them."""
    for i, cell in enumerate(nb.cells):
        locked = not cell.metadata.get("editable", True)
        if "explore" in tags(cell) and (locked or "nbgrader" in cell.metadata):
            yield f"cell {i}: tagged explore, but nbgrader tracks it, or it is locked"


EVERYWHERE: list[Rule] = [
    *(format_is_valid, kernel_is_the_stock_one, headings_form_an_outline, links_lead_somewhere),
    *(images_are_described, tags_are_known, errors_are_announced, outputs_name_no_machine),
    answers_are_out_of_sight,
]
LECTURE: list[Rule] = [*EVERYWHERE, was_run_once_from_the_top]
ASSIGNMENT: list[Rule] = [*EVERYWHERE, is_stripped, is_an_assignment, explore_cells_are_free]


def problems(path: Path, rules: list[Rule]) -> list[str]:
    """Return the breaches of ``rules`` in a notebook file, each as "rule: what and where"."""
    text = path.read_text(encoding="utf-8")
    nb = nbformat.v4.reads(text)  # joins split lines; unlike nbformat.reads it repairs nothing
    found = [f"{rule.__name__}: {breach}" for rule in rules for breach in rule(nb, path)]
    if (size := len(text.encode())) > MAX_BYTES:
        found.append(f"size: {size} bytes, more than {MAX_BYTES}")
    return found
