"""Seeds are the same every time and differ between students; no student can work them out."""

from __future__ import annotations

import threading
from pathlib import Path

from autograder.examination.verdict import assignment_secret, submission_seed


def test_the_secret_is_made_once_also_by_many_at_once(tmp_path: Path) -> None:
    secrets: list[str] = []
    threads = [
        threading.Thread(target=lambda: secrets.append(assignment_secret(tmp_path, "02")))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(secrets)) == 1 and len(secrets[0]) == 64
    assert assignment_secret(tmp_path, "03") != secrets[0]
    assert sorted(path.name for path in (tmp_path / "seeds").iterdir()) == ["02", "03"]


def test_a_seed_depends_on_all_that_it_belongs_to() -> None:
    seeds = {
        submission_seed(secret, student, notebook, source)
        for secret in ("s", "t")
        for student in ("ada", "bob")
        for notebook in ("02", "03")
        for source in ("0", "1")
    }
    assert len(seeds) == 16
    assert submission_seed("s", "a", "b", "c") == submission_seed("s", "a", "b", "c")
