"""Verdict files can be read again; seeds are the same every time, and no student knows them."""

from __future__ import annotations

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from autograder.examination.verdict import (
    SCHEMA,
    CheckVerdict,
    Verdict,
    assignment_secret,
    checks_digest,
    submission_seed,
)
from tests.helpers.course_folders import RELEASED, copy_assignment, needs_sources


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    verdict = Verdict("02", "ada", "02", "5eed", "0", notes=["half a \ud800 surrogate"])
    verdict.checks.append(CheckVerdict("02/a", 0.0, 3.0, "wrong", [{"name": "1 rank"}]))
    verdict.write(tmp_path / "deep" / "v.json")
    assert json.loads((tmp_path / "deep" / "v.json").read_text())["schema"] == SCHEMA
    again = Verdict.read(tmp_path / "deep" / "v.json")
    assert (again.score, again.max_score, again.checks) == (0.0, 3.0, verdict.checks)


def test_the_key_is_that_of_the_content() -> None:
    verdict = Verdict("02", "ada", "02", "5eed", "0")
    other = {"source_sha256": "2", "seed": "dee5", "checks_sha256": "2", "settings": {"on": "cpu"}}
    keys = {replace(verdict, **{name: value}).key for name, value in other.items()}
    assert len({verdict.key, *keys}) == 5
    assert verdict.key == replace(verdict, seconds=3.0, notes=["slow"]).key


@needs_sources
@pytest.mark.parametrize(
    "name",
    [
        *("collectives/ring.py", "capstone/light.py", "checking/draw.py"),
        *("09_sharding_the_model/checks.py", "judges.py"),
    ],
)
def test_a_verdict_is_outdated_when_a_file_of_its_check_changes(tmp_path, monkeypatch, name):
    """Status and regrade compare this digest, and the verdict's key has it."""
    source = copy_assignment("09_sharding_the_model", tmp_path)
    released = tmp_path / RELEASED.name / source.name / f"{source.name}.ipynb"
    before, read = checks_digest(source, released), Path.read_bytes
    assert before == checks_digest(source, released)
    another_line = lambda path: read(path) + b"# another line" * str(path).endswith(f"/{name}")
    monkeypatch.setattr(Path, "read_bytes", another_line)
    changed = checks_digest(source, released)
    assert changed != before
    (released.parent / "more_judges.py").touch()
    assert checks_digest(source, released) not in (before, changed)


def test_the_secret_is_made_once_also_by_many_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        secrets = {*threads.map(lambda _: assignment_secret(tmp_path, "02"), range(8))}
    (secret,) = secrets
    assert len(secret) == 64 and assignment_secret(tmp_path, "03") != secret
    assert sorted(path.name for path in (tmp_path / "seeds").iterdir()) == ["02", "03"]


def test_a_seed_depends_on_all_that_it_belongs_to() -> None:
    content = [*itertools.product(("s", "t"), ("ada", "bob"), ("02", "03"), ("0", "1"))]
    assert len({submission_seed(*parts) for parts in content}) == 16
    assert submission_seed("s", "a", "b", "c") == submission_seed("s", "a", "b", "c")
