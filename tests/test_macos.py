"""The student's half of the course in an emulation of macOS, which lies in `helpers/macos`."""

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.helpers import ROOT

pytestmark = pytest.mark.large

ON_A_MAC = """
import os
from course_lib.ranks.processes import gloo
assert not hasattr(os, "memfd_create") and not gloo.CONNECTS_LATER
"""
PAGES = [
    "lectures/00_start_here.ipynb",
    "instructor/02_data_parallel_sgd/02_data_parallel_sgd.ipynb",
]
PAGES = os.environ.get("MACOS_PAGES", " ".join(PAGES)).split()
PROBES = [
    "tests/course_lib/ranks/processes/test_on_macos.py",
    "tests/course_lib/ranks/test_student_bugs.py",
    "tests/course_lib/ranks/test_watch.py::test_the_cause_is_named",
    "tests/course_lib/ranks/notebook/test_notebook.py",
]


@pytest.fixture
def emulation(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a process in the emulation."""
    # A Mac's path of temporary files is long.
    temporary = tmp_path / "var/folders/xx" / ("y" * 31) / "T"
    temporary.mkdir(parents=True)
    return {
        **os.environ,
        "PYTHONPATH": f"{ROOT}/tests/helpers/macos:{ROOT}",
        "TMPDIR": str(temporary),
        "GLOO_SOCKET_IFNAME": "lo",  # a Mac's is lo0
        "OMP_NUM_THREADS": "1",
    }


@pytest.mark.parametrize("page", PAGES)
def test_a_page_runs(page: str, emulation: dict[str, str]) -> None:
    """A solution's page has the checks, which raise what they find."""
    book = nbformat.read(ROOT / page, 4)
    book.cells.insert(0, nbformat.v4.new_code_cell(ON_A_MAC))
    folder = {"metadata": {"path": str((ROOT / page).parent)}}
    client = NotebookClient(book, timeout=600, kernel_name="python3", resources=folder)
    client.execute(env=emulation)


@pytest.mark.parametrize("file", PROBES)
def test_failures_are_explained(file: str, emulation: dict[str, str]) -> None:
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "-m", "not large", file]
    done = subprocess.run(command, cwd=ROOT, env=emulation, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
