"""The effects of `make` on .venv, also when interrupted; with a small stand-in Python and pip."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.helpers import ROOT

pytestmark = [pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")]

PYTHON = """#!/bin/sh
case "$*" in *venv*) mkdir -p .venv/bin .venv/lib;; esac
"""
HANGING_PIP = """#!/bin/sh
echo > pip-has-started
exec sleep 60
"""
# Not those of the make that runs the tests, nor another place for Jupyter's files than home.
ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("MAKE", "MFLAGS", "JUPYTER", "XDG"))
}


def write_programs(folder, programs: dict[str, str]) -> None:
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


@pytest.fixture
def checkout(tmp_path):
    """Return a folder with the Makefile, and a Python and a pip for it."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    shutil.copy(ROOT / "Makefile", folder)
    shutil.copy(ROOT / "pyproject.toml", folder)
    write_programs(folder, {"python": PYTHON, "hanging-pip": HANGING_PIP})
    return folder


def command(**variables: str) -> list[str]:
    settings = {"PYTHON": "./python", "PIP": "true"} | variables
    return ["make", ".venv/ready", *(f"{name}={value}" for name, value in settings.items())]


def make(checkout, **variables: str) -> subprocess.CompletedProcess[str]:
    """Build .venv and return what make said."""
    options = {"cwd": checkout, "env": ENVIRONMENT, "capture_output": True, "text": True}
    done = subprocess.run(command(**variables), **options)
    assert done.returncode == 0, done.stderr
    assert (checkout / ".venv/ready").is_file()
    return done


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_venv_of_ours_is_built_anew(checkout, how: signal.Signals) -> None:
    process = subprocess.Popen(
        command(PIP="./hanging-pip"),
        cwd=checkout,
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 300
        while not (checkout / "pip-has-started").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        os.killpg(process.pid, how)
        process.wait()
    (checkout / "pip-has-started").unlink()
    assert not (checkout / ".venv/ready").exists()
    (checkout / ".venv/half-installed").touch()
    assert "removing an incomplete" in make(checkout).stdout
    assert not (checkout / ".venv/half-installed").exists()


def test_an_outdated_venv_is_removed_if_it_is_ours(checkout) -> None:
    make(checkout)
    ours = checkout / ".venv/installed"
    ours.touch()
    assert "up to date" in make(checkout).stdout
    (checkout / "pyproject.toml").touch()
    os.utime(checkout / ".venv/ready", (0, 0))
    assert "updating .venv" in make(checkout).stdout
    assert ours.exists()
    assert "removing an incomplete or outdated" in make(checkout, TORCH="torch==2.14.*").stdout
    assert not ours.exists()


@pytest.mark.parametrize(
    ("system", "gpu", "index"),
    [("Linux", False, "--extra-index-url"), ("Linux", True, ""), ("Darwin", False, "")],
)
def test_the_index_of_cpu_wheels_is_for_linux_without_a_gpu(system, gpu, index, checkout):
    write_programs(checkout, {"uname": f"#!/bin/sh\necho {system}\n"})
    write_programs(checkout, {"nvidia-smi": "#!/bin/sh\n"} if gpu else {})
    done = subprocess.run(
        [shutil.which("make") or "make", "--eval", "index:;@echo '$(INDEX)'", "index"],
        cwd=checkout,
        env={**ENVIRONMENT, "PATH": f"{checkout}:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.partition(" ")[0].strip() == index, done.stdout


def test_the_cuda_wheel_does_not_come_in_silence(checkout) -> None:
    """PyPI's torch is recognised by what it requires."""
    metadata = checkout / ".venv/lib/python3.13/site-packages/torch-2.13.0.dist-info/METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Requires-Dist: filelock\n")

    def said(index: str) -> str:
        return make(checkout, INDEX=index, TORCH="torch").stderr

    assert said("--extra-index-url x") == ""
    (checkout / ".venv/ready").unlink()
    metadata.write_text("Requires-Dist: nvidia-nccl-cu13==2.29.7; platform_system == 'Linux'\n")
    if sys.platform == "linux":
        assert "5 GB of CUDA" in said("--extra-index-url x")
        (checkout / ".venv/ready").unlink()
    assert said("") == ""  # there is a GPU, and CUDA is what it needs
