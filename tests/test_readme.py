"""What README.md shows is what happens: its first check and its pictures."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")

pytestmark = pytest.mark.timeout(120)


def test_the_first_check_says_what_is_printed_below_it(tmp_path: Path) -> None:
    shown = re.search(r"<!-- first check -->(.*)<!-- end of first check -->", README, re.DOTALL)
    assert shown, "README.md has lost its first check"
    code, report = re.findall(r"```\w+\n(.*?)```", shown[1], re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=90
    )
    assert done.stdout == report
    assert "CheckFailed" in done.stderr  # a wrong answer is an error, also where nobody reads


def test_pictures_are_described_as_they_are_drawn(tmp_path: Path) -> None:
    drawn = subprocess.run(
        [sys.executable, ROOT / "docs" / "pictures.py", "--to", tmp_path],
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    ).stdout
    for line in drawn.splitlines():
        path, alt = line.split(": ", 1)
        assert Path(path).read_bytes().startswith(b"\x89PNG")
        assert (ROOT / "docs" / Path(path).name).is_file()
        assert f"![{alt}](docs/{Path(path).name})" in README
