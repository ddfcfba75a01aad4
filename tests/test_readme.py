"""The README and the pages beside it tell the truth: first check, pictures, commands."""

import re
import subprocess
import sys
import tomllib

import pytest
import yaml

from course_lib.checking import CheckFailed
from course_lib.learner.__main__ import COMMANDS
from tests.helpers import ROOT
from tests.helpers.notebook_rules import broken_links, without_code

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_first_check_says_what_is_printed_below_it(capsys, monkeypatch, tmp_path):
    page = (ROOT / "docs" / "grading.md").read_text(encoding="utf-8")
    shown = re.search(r"<!-- first check -->(.*)<!-- end of first check -->", page, re.DOTALL)
    assert shown, "docs/grading.md has lost its first check"
    code, report = re.findall(r"```\w+\n(.*?)```", shown[1], re.DOTALL)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckFailed):  # a wrong answer is an error, also where nobody reads
        exec(code, {"__name__": "__main__"})
    assert capsys.readouterr().out == report


AS_A_CELL = """
import sys, torch, torch.distributed as dist
from IPython.core.interactiveshell import InteractiveShell
from course_lib.checking import check
from course_lib.ranks import Ranks

shell = InteractiveShell.instance()
shell.showtraceback = lambda *_, **__: None
shell.push({"torch": torch, "dist": dist, "Ranks": Ranks, "check": check})
error = shell.run_cell(sys.stdin.read()).error_in_exec
if not hasattr(error, "report"):  # a check has printed its report
    print(f"{type(error).__name__}: {error}")
"""


@pytest.mark.parametrize("number", [0, 1])
def test_the_readme_shows_what_is_printed(number: int, tmp_path) -> None:
    blocks = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", README, re.DOTALL)
    code, shown = blocks[number]
    command = [sys.executable, "-c", AS_A_CELL]
    printed = subprocess.check_output(command, input=code, text=True, cwd=tmp_path)
    assert re.sub(r"\d\.\d s", "0.0 s", printed).strip() == shown.strip()


def test_the_readme_is_short() -> None:
    assert len(without_code(README).split()) <= 900


ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_the_walks_through_the_code_name_files_that_there_are() -> None:
    walks = re.findall(r"^\| (.+?) \| `(\S+)` \| (.+→.+) \|$", ARCHITECTURE, re.MULTILINE)
    assert len(walks) == 5
    for walk, folder, files in walks:
        for file in re.findall(r"`(\S+)`", files):
            assert (ROOT / folder / file).is_file(), f"{walk}: there is no {folder}/{file}"


def test_the_table_of_changes_names_what_there_is() -> None:
    table = ARCHITECTURE.split("Where to change what")[1]
    named = re.findall(r"`([\w/]+(?:\.py|/))`", table)
    assert len(named) > 10
    assert not (missing := [path for path in named if not (ROOT / path).exists()]), missing


PAGES = (
    *("README.md", "CONTRIBUTING.md", "AGENTS.md", "CHANGELOG.md"),
    *(f"docs/{name}.md" for name in ("architecture", "grading", "programs", "setting_up")),
)
LINKED = (
    *("docs/instructors_guide.md", "docs/questions.md", "docs/slides.md"),
    *("course_lib/ranks/README.md", "course_lib/ranks/simulated/README.md", "autograder/README.md"),
)


@pytest.mark.every_case
@pytest.mark.parametrize("name", [*PAGES, *LINKED])
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    text = without_code(page.read_text(encoding="utf-8"))
    assert not (missing := list(broken_links(text, page.parent))), missing


@pytest.mark.parametrize("name", PAGES)
def test_the_pages_for_maintainers_name_what_there_is(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    commands = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert commands <= targets, f"no make target: {commands - targets}"
    assert set(re.findall(r"`?course ([a-z]+)(?= [\d`A-Z]|`)", text)) <= {*COMMANDS}


def test_the_citation_names_what_the_package_says() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert cited["version"] == project["version"]
    assert project["license"] in cited["license"]
