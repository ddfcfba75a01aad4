"""``autograder gradescope``: write the zip that makes Gradescope grade with this grader.

The zip contains a copy of the course without the tests and the other assignments, and two scripts
that Gradescope calls. ``setup.sh`` builds ``.venv`` there, as ``make`` does in a clone.
``run_autograder`` calls `autograder.commands._gradescope_run` for each submission.
The zip's format is documented at https://gradescope-autograders.readthedocs.io/en/latest/specs/.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
import zipfile
from pathlib import Path

import nbformat
from nbgrader.utils import is_grade, is_solution

from autograder.commands.release import LEFTOVERS
from autograder.course import data_folder, find_sources
from autograder.examination.seed import assignment_secret
from autograder.exporting.gradescope import DEFAULT, WHEN

DESCRIPTION = """\
Write a zip that makes this grader the autograder of a programming assignment in Gradescope.
Students get the same points and the same texts there as here. The zip has the solution and the
hidden cases: give it to nobody. People grade the written answers. Gradescope's container must allow
the sandbox: when you build the autograder there, it tests this and says what to do."""
EXAMPLES = """\
examples:
  autograder gradescope 02_data_parallel_sgd
  autograder gradescope 02_data_parallel_sgd --points visible -o 02.zip"""

ALWAYS = ("Makefile", "pyproject.toml", "hatch_build.py", "nbgrader_config.py", "README.md")
SETUP = """\
#!/usr/bin/env bash
# Gradescope runs this once, as root, to build the container. The build's log has its output.
set -eu
source="${AUTOGRADER:-/autograder}/source"

export DEBIAN_FRONTEND=noninteractive
apt-get update
apt-get install --yes make python3-venv util-linux

# Ubuntu 22.04 has an older Python than the course needs. All users must be able to read this one.
export UV_PYTHON_INSTALL_DIR=/opt/python
python3 -m venv /opt/uv
/opt/uv/bin/pip install --quiet uv
/opt/uv/bin/uv python find '>=3.11' || /opt/uv/bin/uv python install 3.12
make -C "$source/course" .venv/ready PYTHON="$(/opt/uv/bin/uv python find '>=3.11')"

# Grade the solution, to see whether this container can grade.
trial="$(mktemp -d)"
mkdir "$trial/submission" "$trial/results"
ln -s "$source" "$trial/source"
cp "$source"/course/instructor/*/*.ipynb "$trial/submission"
if AUTOGRADER="$trial" bash "$source/run_autograder"; then
  echo "This container can grade: the solution's points are above."
else
  echo "This container CANNOT grade: the reason is above. Submissions will get an error, no points."
fi
"""
RUN = """\
#!/usr/bin/env bash
# Gradescope runs this for each submission; instructors see what it prints. Gradescope gives a zero
# to a submission that exceeds its timeout, and an error if there is no results.json. So this ends
# first, and leaves none if the machine fails.
home="${{AUTOGRADER:-/autograder}}"
rm -f "$home/results/results.json"
exec 2>&1
exec timeout --kill-after=20 {seconds} "$home/source/course/.venv/bin/python" \\
  -m autograder.commands._gradescope_run {assignment} --points {points}
"""


class GradescopeError(RuntimeError):
    """The zip cannot be written; the message says what to do."""


def pack(root: Path, assignment: str, to: Path, *, points: str, minutes: int) -> None:
    """Write the zip.

    Args:
        root: the course folder.
        assignment: its name.
        to: the zip.
        points: when students see points, one of `WHEN`.
        minutes: Gradescope's timeout for the assignment.

    Raises:
        SourcesMissing: this copy of the course lacks ``instructor/``.
        GradescopeError: there is no such assignment.

    """
    sources = find_sources(root)
    released = sorted((root / "assignments" / assignment).glob("*.ipynb"))
    if not released or not (sources / assignment / "hidden.py").is_file():
        known = ", ".join(sorted(path.parent.name for path in sources.glob("*/hidden.py")))
        raise GradescopeError(
            f"there is no assignment {assignment!r} with a hidden.py. The assignments are: {known}"
        )
    run = RUN.format(assignment=assignment, points=points, seconds=60 * minutes - 60)
    data = data_folder(root)
    assignment_secret(data, assignment)  # so that Gradescope draws the same inputs as this machine
    draft = to.with_name(f"{to.name}.part")
    with zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, script in (("setup.sh", SETUP), ("run_autograder", run)):
            info = zipfile.ZipInfo(name)
            info.external_attr = 0o100755 << 16
            archive.writestr(info, script, zipfile.ZIP_DEFLATED)
        for path in _files(root, assignment):
            archive.write(path, Path("course", path.relative_to(root)))
        for path in released:
            archive.write(path, Path("course/grading/release", assignment, path.name))
        archive.write(data / "seeds" / assignment, Path("course/grading/seeds", assignment))
    draft.replace(to)


def _files(root: Path, assignment: str) -> list[Path]:
    """Return the files of the assignment, and those that ``make`` needs to install the course."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    parts = {*ALWAYS, *project["project"]["license-files"], *wheel["packages"]}
    parts |= {*wheel["shared-data"], f"assignments/{assignment}", f"instructor/{assignment}"}
    found: set[Path] = set()
    for path in (root / part for part in parts - {"assignments"}):
        found |= {path} if path.is_file() else {each for each in path.rglob("*") if each.is_file()}
    return sorted(path for path in found if not LEFTOVERS & {*path.relative_to(root).parts})


def next_steps(root: Path, assignment: str, to: Path, minutes: int) -> str:
    """Return the instructions for the zip."""
    checks = by_hand = 0.0
    for path in sorted((root / "assignments" / assignment).glob("*.ipynb")):
        for cell in nbformat.read(path, as_version=4).cells:
            if is_grade(cell) and is_solution(cell):
                by_hand += cell.metadata.nbgrader.points
            elif is_grade(cell):
                checks += cell.metadata.nbgrader.points
    manual = f"\n     and manual grading for written answers: {by_hand:g} points" * bool(by_hand)
    return f"""\
Written: {to} ({to.stat().st_size / 2**20:.1f} MB): setup.sh, run_autograder, and the course with
the solution and the hidden cases of {assignment}. Give it to nobody.

In Gradescope:
  1. Create Assignment, Programming Assignment; autograder points: {checks:g}{manual}
  2. Settings, Container Specifications: 4.0 CPU, 6.0GB RAM; Autograder Timeout: {minutes} minutes
  3. Configure Autograder: base image Ubuntu 22.04; upload the zip. At the end of the build's output
     a line says whether the container can grade.
  4. Test Autograder: the notebook in instructor/{assignment} gets {checks:g} points, the
     notebook in assignments/{assignment} gets none."""


def _minutes(text: str) -> int:
    if not text.isdigit() or not 2 <= int(text) <= 40:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of minutes from 2 to 40")
    return int(text)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument("assignment", help="the assignment's name, such as 02_data_parallel_sgd")
    parser.add_argument(
        *("--output", "-o"),
        type=Path,
        metavar="ZIP",
        help="the zip (default: ASSIGNMENT_gradescope.zip in the folder of the gradebook)",
    )
    parser.add_argument(
        "--points",
        choices=WHEN,
        default=DEFAULT,
        help="when students see their points, which also depend on hidden cases (default: "
        "%(default)s); the results of visible cases are always shown",
    )
    parser.add_argument(
        "--minutes",
        type=_minutes,
        default=10,
        help="the assignment's Autograder Timeout in Gradescope (default: %(default)s, also there)",
    )


def run(root: Path, arguments: argparse.Namespace) -> int:
    """Write the zip for the command line; return the exit status."""
    name = arguments.assignment
    to = arguments.output or data_folder(root) / f"{name}_gradescope.zip"
    try:
        pack(root, name, to, points=arguments.points, minutes=arguments.minutes)
    except (GradescopeError, OSError) as error:
        print(f"autograder gradescope: {error}", file=sys.stderr)
        return 2
    print(next_steps(root, name, to, arguments.minutes))
    return 0
