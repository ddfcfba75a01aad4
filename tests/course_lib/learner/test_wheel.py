"""The course of someone who has no checkout: a wheel in an environment of its own."""

import shutil
import subprocess
import sys
import sysconfig

import pytest

from tests.helpers import ROOT
from tests.helpers.course_folders import needs_sources

pytestmark = [pytest.mark.large, needs_sources]


def run(*command: object, at) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command], cwd=at, capture_output=True, text=True, timeout=500
    )


def installed(source, folder):
    """Build a wheel from `source`, and install it alone; return the new environment's programs."""
    build = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, source)
    done = run(*build, at=folder)
    if "No matching distribution" in done.stderr or "No module named pip" in done.stderr:
        pytest.skip("no package index, and so no hatchling to build with")
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    assert run(sys.executable, "-m", "venv", folder / "env", at=folder).returncode == 0
    python = folder / "env/bin/python"
    assert run(python, "-m", "pip", "install", "-q", "--no-deps", wheel, at=folder).returncode == 0
    # torch and the rest are this environment's; the editable course in it is not seen.
    (packages,) = (folder / "env").glob("lib/python3*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    return python.parent


@pytest.mark.parametrize("with_solutions", [True, False])
def test_a_wheel_has_the_solutions_of_the_copy_it_was_built_from(with_solutions, tmp_path):
    source, here = tmp_path / "copy", tmp_path / "anywhere"
    hidden = shutil.ignore_patterns(".*", "_site", "work", "grading", "__pycache__", "tests")
    shutil.copytree(ROOT, source, ignore=hidden)
    if not with_solutions:
        shutil.rmtree(source / "instructor")
    here.mkdir()
    programs = installed(source, tmp_path)
    assert run(programs / "course", "start", "1", at=here).returncode == 0
    assert (here / "work/assignments/01_minibatch_sgd/01_minibatch_sgd.ipynb").is_file()
    assert (here / "work/docs/symbols.md").is_file()
    shown = run(programs / "course", "solution", "1", "sgd_step", "--yes", at=here)
    if with_solutions:
        assert shown.returncode == 0, shown.stderr
        assert "def sgd_step" in shown.stdout and "NotImplementedError" not in shown.stdout
    else:
        assert shown.returncode == 2 and "no solutions" in shown.stderr
    found = (tmp_path / "env").rglob("hidden.py")
    left = [path for path in found if path.parent.name != "template"]  # for a new assignment
    assert not left, "hidden cases stay with those who grade"
