"""The three ways to set up the course (make, pip, conda) ask for the same things."""

import json
import re
import sys
import tomllib
from pathlib import Path

import pytest
import yaml  # comes with JupyterLab, which reads YAML schemas
from packaging.requirements import Requirement

from course_lib.learner.lab import SETTINGS
from course_lib.ranks._torch.versions import NEWEST, OLDEST, warn_if_untried
from tests.helpers import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()
SETTING_UP = (ROOT / "docs" / "setting_up.md").read_text()

PYPI_NAME = {"pytorch": "torch", "matplotlib-base": "matplotlib"}  # all others: the same on both
ONLY_CONDA = {"pip"}  # a virtual environment brings its own


def bounds_of(requirement: Requirement) -> str:
    """Return the bounds, and the machines they are for if not all."""
    marker = f"; {requirement.marker}" if requirement.marker else ""
    return f"{requirement.specifier}{marker}"


def pip_requirements() -> dict[str, str]:
    """Return {name: bounds} that `pip install '.[test]'` asks for, Python included."""
    lines = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["test"]
    requirements = [Requirement(line) for line in lines]
    return {"python": PROJECT["requires-python"]} | {r.name: bounds_of(r) for r in requirements}


def conda_requirements() -> dict[str, str]:
    """Return {PyPI name: bounds} of environment.yml, with what conda leaves to pip."""
    *entries, section = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    pairs = [entry.partition(" ")[::2] for entry in entries]
    pairs += [(r.name, bounds_of(r)) for r in map(Requirement, section["pip"][:-1])]
    return {PYPI_NAME.get(name, name): bounds for name, bounds in pairs if name not in ONLY_CONDA}


def test_conda_and_pip_ask_for_the_same() -> None:
    assert conda_requirements() == pip_requirements()


def test_the_versions_of_pytorch_that_were_tried_stand_in_one_place() -> None:
    """What asks for PyTorch, and what tests it, follows that place; beyond it a warning comes."""
    (torch,) = (r for r in map(Requirement, PROJECT["dependencies"]) if r.name == "torch")
    assert str(torch.specifier) == f">={OLDEST.rpartition('.')[0]}"
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())
    job = workflow["jobs"]["torch"]
    assert job["strategy"]["matrix"]["torch"] == [OLDEST, NEWEST]
    assert "make test TORCH=torch==${{ matrix.torch }}" in job["steps"][-1]["run"]
    for tried in (OLDEST, NEWEST, NEWEST.rpartition(".")[0] + ".9+cu130"):
        warn_if_untried(tried)
    for beyond in ("2.7.1", "3.0.0a0+git1", f"2.{int(NEWEST.split('.')[1]) + 1}.0"):
        with pytest.warns(UserWarning, match=f"not with {re.escape(beyond)}"):
            warn_if_untried(beyond)


def test_the_page_installs_what_the_makefile_installs() -> None:
    (torch,) = re.findall(r"^TORCH \?= (\S+)$", MAKEFILE, re.MULTILINE)
    assert f'"{Requirement(torch)}"' in SETTING_UP
    (wheels,) = re.findall(r"^CPU_WHEELS \?= (\S+)$", MAKEFILE, re.MULTILINE)
    assert wheels in SETTING_UP
    assert 'pip install -e ".[test]"' in SETTING_UP
    assert "conda env create -f environment.yml" in SETTING_UP


def test_the_makefile_checks_for_the_python_of_pyproject() -> None:
    (minimum,) = re.findall(r"sys\.version_info < \((\d+), (\d+)\)", MAKEFILE)
    assert PROJECT["requires-python"] == ">=" + ".".join(minimum)


def test_make_help_lists_every_target() -> None:
    phony = re.search(r"^\.PHONY: (.+)$", MAKEFILE, re.MULTILINE)
    assert phony
    assert set(re.findall(r"^([\w-]+):.*  ## ", MAKEFILE, re.MULTILINE)) == set(phony[1].split())


def test_the_settings_of_jupyterlab_are_ones_that_it_has() -> None:
    overrides = json.loads((SETTINGS / "labconfig/default_setting_overrides.json").read_text())
    schemas = Path(sys.prefix) / "share/jupyter/lab/schemas"
    for plugin, settings in overrides.items():
        package, name = plugin.split(":")
        schema = json.loads((schemas / package / f"{name}.json").read_text())
        assert settings.keys() <= schema["properties"].keys()


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_what_there_is(path: Path) -> None:
    jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    assert all("timeout-minutes" in job for job in jobs.values() if len(job["steps"]) > 1)
    asked = set(re.findall(r"\bmake ([a-z-]+)", "\n".join(step.get("run", "") for step in steps)))
    assert asked <= set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
