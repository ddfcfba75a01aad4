"""Forgotten processes are found and named with their test; three of many cases run."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

LEAK = """
import os, time

def test_that_leaks():
    if os.fork() == 0:
        if os.fork() == 0:  # the grandchild: its parent is gone at once
            with open("pid", "w") as file:
                file.write(str(os.getpid()))
            os.execvp("sleep", ["sleep", "60"])
        os._exit(0)
    os.wait()
    while not os.path.exists("pid") or not open("pid").read():
        time.sleep(0.01)
    while "sleep" not in open(f"/proc/{open('pid').read()}/cmdline").read():  # not before the exec
        time.sleep(0.01)
"""


def run_pytest(folder: Path, source: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run one test file under a copy of this folder's conftest.py, away from its settings."""
    shutil.copy(Path(__file__).with_name("conftest.py"), folder)
    (folder / "test_it.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir=."]
    command += options
    return subprocess.run(
        [*command, *options], cwd=folder, capture_output=True, text=True, timeout=300
    )


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks into /proc")
def test_an_orphan_fails_the_run(tmp_path: Path) -> None:
    result = run_pytest(tmp_path, LEAK, "-n", "1")
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "these processes outlived the tests" in result.stdout
    assert "started during test_it.py::test_that_leaks (call): sleep 60" in result.stdout


MANY = """
import pytest

@pytest.mark.parametrize("k", range(9))
def test_of_many(k):
    pass

@pytest.mark.every_case
@pytest.mark.parametrize("k", range(9))
def test_whole(k):
    pass
"""


def test_three_of_many_cases_run_by_default(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, MANY, "-m", "not large", "-vv")
    ran = [name for name in ("[0]", "[4]", "[8]") if f"test_of_many{name} PASSED" in done.stdout]
    assert len(ran) == 3 and "test_of_many[1]" not in done.stdout
    assert "12 passed, 6 deselected" in done.stdout
