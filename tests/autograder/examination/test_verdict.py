"""Verdict files can be read again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autograder.examination.verdict import SCHEMA, CheckVerdict, Verdict, checks_digest
from tests.helpers.course_folders import RELEASED, ROOT, copy_assignment, needs_sources


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    verdict = Verdict("02", "ada", "02", "5eed", "0", notes=["half a \ud800 surrogate"])
    verdict.checks.append(CheckVerdict("02/a", 0.0, 3.0, "wrong", [{"name": "1 rank"}]))
    verdict.write(tmp_path / "deep" / "v.json")
    assert json.loads((tmp_path / "deep" / "v.json").read_text())["schema"] == SCHEMA
    again = Verdict.read(tmp_path / "deep" / "v.json")
    assert (again.score, again.max_score, again.checks) == (0.0, 3.0, verdict.checks)


def test_the_key_is_that_of_the_content() -> None:
    def key(**changes: Any) -> str:
        fields = {"source_sha256": "0", "seed": "5eed", "checks_sha256": "1", **changes}
        return Verdict("02", "ada", "02", **fields).key

    keys = {
        key(),
        key(source_sha256="2"),
        key(seed="dee5"),
        key(checks_sha256="2"),
        key(settings={"on": "cpu"}),
    }
    assert len(keys) == 5
    assert key() == key(seconds=3.0, notes=["slow"])


@needs_sources
def test_a_verdict_is_outdated_when_a_reference_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = copy_assignment("10_capstone", tmp_path)
    released = tmp_path / RELEASED.name / source.name / f"{source.name}.ipynb"
    before = checks_digest(source, released)
    assert before == checks_digest(source, released)
    read, course = Path.read_bytes, ROOT / "course_lib"
    for changed in ("collectives/ring.py", "capstone/light.py", "checking/draw.py"):

        def other(path: Path, changed: Path = course / changed) -> bytes:
            return read(path) + b"# another line" * (path == changed)

        monkeypatch.setattr(Path, "read_bytes", other)
        assert checks_digest(source, released) != before, changed


@needs_sources
@pytest.mark.parametrize("name", ["checks.py", "judges.py", "more_judges.py"])
def test_a_verdict_is_outdated_when_a_file_of_its_check_changes(tmp_path: Path, name: str) -> None:
    """Status and regrade compare this digest, and the verdict's key has it."""
    source = copy_assignment("09_sharding_the_model", tmp_path)
    released = tmp_path / RELEASED.name / source.name
    before = checks_digest(source, released / f"{source.name}.ipynb")
    with (released / name).open("a") as file:
        file.write("# another line\n")
    assert checks_digest(source, released / f"{source.name}.ipynb") != before
