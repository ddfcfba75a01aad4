"""Every command in the instructor's guide exists, and so do its options."""

import contextlib
import io
import re
import shlex
import subprocess
import sys
from importlib import import_module

import nbformat
import pytest

from autograder.__main__ import COMMANDS, main
from tests.helpers import ROOT

GUIDE = ROOT / "docs" / "instructors_guide.md"
TEXT = GUIDE.read_text(encoding="utf-8")


def commands(program: str) -> list[list[str]]:
    """Return the command lines of a program, in blocks and in the text, as words."""
    blocks = "\n".join(re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL))
    inline = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)
    lines = [line.strip() for line in blocks.splitlines()]
    lines += [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", inline)]
    lines_of_program = [
        shlex.split(line, comments=True) for line in lines if line.startswith(f"{program} ")
    ]
    assert lines_of_program
    return [parts[1:] for parts in lines_of_program]


@pytest.mark.parametrize("arguments", commands("autograder"), ids=" ".join)
def test_a_command_of_the_autograder_parses(arguments, monkeypatch, capsys):
    if arguments == ["COMMAND", "--help"]:
        return
    if len(arguments) == 1 and arguments[0] in COMMANDS:  # a name in the text: `autograder regrade`
        return
    ran = []
    if arguments[0] in COMMANDS:
        module = import_module(f"autograder.commands.{arguments[0]}")
        monkeypatch.setattr(module, "run", lambda root, arguments: ran.append(arguments) or 0)
    monkeypatch.setattr(sys, "argv", ["autograder", *arguments])
    monkeypatch.chdir(ROOT)
    try:
        assert main() == 0
    except SystemExit as end:
        assert end.code in (0, None), capsys.readouterr().err
        assert arguments[-1] in ("--help", "--version"), capsys.readouterr().err
    else:
        assert ran


def test_every_command_is_in_the_guide() -> None:
    names = {arguments[0] for arguments in commands("autograder")}
    assert names >= set(COMMANDS) - {"demo"}


def test_commands_of_nbgrader_and_make_are_there() -> None:
    from nbgrader.apps.nbgraderapp import NbGraderApp

    names = {name.replace("-", "_") for name in NbGraderApp.subcommands}
    assert {arguments[0].replace("-", "_") for arguments in commands("nbgrader")} <= names
    targets = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {arguments[0] for arguments in commands("make") if arguments} <= set(targets)


def test_each_student_has_numbers_of_their_own_and_the_command_finds_a_copy(tmp_path) -> None:
    cell = next(
        block for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if "me =" in block
    )
    find = next(line for line in TEXT.splitlines() if line.startswith("grep "))
    printed = {}
    for student, me in (("s1", "s1"), ("s2", "s2"), ("s3", "s1")):
        filled = cell.replace('me = ""', f'me = "{me}"')
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(filled, {})
        printed[student] = out.getvalue()
        path = tmp_path / "grading/submitted" / student / "NN_name" / "NN_name.ipynb"
        path.parent.mkdir(parents=True)
        filled += f'name = "the same in all"  # {me}'
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(filled)])
        nbformat.write(notebook, path)
    assert printed["s1"] == printed["s3"] != printed["s2"]
    process = subprocess.run(
        find, shell=True, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert process.stdout.count("\n") == 1
    assert '"s1' in process.stdout.replace("\\", "")
