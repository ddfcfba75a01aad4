"""Executes a lecture, and compares what it prints with what it printed when it was committed.

Seconds that a cell takes on this machine differ from run to run. Such a cell carries the tag
``measured`` in its metadata and is left out. All others, also those with virtual times, have to
print the same words, and the same numbers but for rounding.
"""

import math
import re
import shutil

import nbformat
from nbclient import NotebookClient

from tests.helpers import ROOT
from tests.helpers import notebook_rules as rules

# The tag of a cell whose output depends on the machine.
MEASURED = "measured"
# Sums in another order, by another processor or another PyTorch, stay within this.
RELATIVE = 0.01
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
# Numbers this small are rounding errors: only that they are small is compared.
ROUNDING = 1e-6
SECONDS_PER_CELL = 300


def executed_again(path, folder) -> list[str]:
    """Return what is wrong with a lecture that is executed now.

    Args:
        path: the lecture.
        folder: gets a copy of all lectures, so that nothing comes from, or goes into, the folder
            of a student.

    """
    lectures = shutil.copytree(ROOT / "lectures", folder / "lectures")
    copy = lectures / path.relative_to(ROOT / "lectures")
    nb = nbformat.read(copy, as_version=4)
    at = {"metadata": {"path": str(copy.parent)}}
    NotebookClient(nb, timeout=SECONDS_PER_CELL, resources=at).execute()
    nbformat.write(nb, copy)
    # Links are relative to the repository, which was not copied.
    # And a lecture that has just been run shows its answers.
    left_out = (rules.links_lead_somewhere, rules.answers_are_out_of_sight)
    applied = [rule for rule in rules.LECTURE if rule not in left_out]
    return [*differences(nbformat.read(path, as_version=4), nb), *rules.problems(copy, applied)]


def text_of(cell) -> str:
    """Return the text of all outputs of a cell; a figure's is its alternative text."""
    parts = []
    for output in rules.outputs_of(cell):
        if output.output_type == "stream":
            parts.append(output.text)
        elif output.output_type in ("execute_result", "display_data"):
            parts.append(output.data.get("text/plain", ""))
    return "".join(parts)


def differences(committed, executed) -> list[str]:
    """Return one sentence for each cell that does not print what it printed."""
    now = {cell.id: cell for cell in executed.cells}
    found = []
    for cell in committed.cells:
        if cell.cell_type != "code" or MEASURED in cell.metadata.get("tags", []):
            continue
        before, after = by_rank(text_of(cell)), by_rank(text_of(now[cell.id]))
        if not same(before, after):
            found.append(f"{cell.id} printed {before!r} when it was committed, now {after!r}")
    return found


def by_rank(text: str) -> str:
    """Return the text with the lines of each rank together.

    A line that several ranks print at the same time stands there once, for all of them. A busy
    machine prints one of them later.
    """
    found: list[tuple[int, str]] = []
    for line in text.splitlines(keepends=True):
        label = re.match(r"\[ranks? ([\d, -]+)\] ", line)
        if label is None:
            return text
        for span in label[1].split(", "):
            first, _, last = span.partition("-")
            ranks = range(int(first), int(last or first) + 1)
            found += [(rank, line[label.end() :]) for rank in ranks]
    return "".join(
        f"[rank {rank}] {line}" for rank, line in sorted(found, key=lambda each: each[0])
    )


def same(before: str, after: str) -> bool:
    """Return whether two outputs have the same words, and the same numbers but for rounding."""
    words = [re.sub(r"[\s─]+", " ", NUMBER.sub("#", text)).strip() for text in (before, after)]
    pairs = zip(NUMBER.findall(before), NUMBER.findall(after), strict=False)
    return words[0] == words[1] and all(close(a, b) for a, b in pairs)


def close(before: str, after: str) -> bool:
    """Return whether two printed numbers are equal up to `RELATIVE` and their last digit."""
    a, b = float(before), float(after)
    if max(abs(a), abs(b)) < ROUNDING:
        return True
    unit = 10.0 ** -len(before.partition(".")[2]) if "e" not in before else 0.0
    return math.isclose(a, b, rel_tol=RELATIVE, abs_tol=unit * 1.001 if unit < 1 else 0.0)
