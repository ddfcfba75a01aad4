"""``check(…)`` as a student meets it."""

import os
import shutil
import sys

import pytest

from course_lib import diary
from course_lib.checking import CheckFailed, check, loading
from course_lib.checking.loading import find_assignment, find_check, load_module
from course_lib.ranks.processes import fork_client
from tests.helpers import ROOT
from tests.helpers.kernels import kernel


def right_bounds(length: int, world_size: int, rank: int) -> tuple[int, int]:
    return length * 0 + _start(length, world_size, rank), _start(length, world_size, rank + 1)


def _start(length: int, world_size: int, rank: int) -> int:
    return rank * (length // world_size) + min(rank, length % world_size)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_what_ranks_of_a_check_start_with_is_safe_to_fork() -> None:
    check("02_data_parallel_sgd/shard_bounds", right_bounds)
    pid = fork_client.shared_server().process.pid
    assert len(os.listdir(f"/proc/{pid}/task")) == 1


def test_a_wrong_function_fails_with_the_report_above_a_short_error(capsys) -> None:
    with pytest.raises(CheckFailed, match="belong to nobody") as caught:
        check(
            "02_data_parallel_sgd/shard_bounds", lambda n, k, r: (r * (n // k), (r + 1) * (n // k))
        )
    printed = capsys.readouterr().out
    assert "✓ a plain case" in printed
    assert "✗ fewer elements than ranks" in printed
    shown = caught.value._render_traceback_()
    assert shown == ["CheckFailed: the report above says what failed, and why"]


def test_a_notebook_alone_finds_the_assignments_of_the_installed_course(tmp_path, monkeypatch):
    """As on Colab: the wheel is installed, and the notebook lies in an empty folder."""
    folder = tmp_path / "share" / "assignments" / "55_installed"
    folder.mkdir(parents=True)
    (folder / "checks.py").write_text("CHECKS = {}")
    (tmp_path / "content").mkdir()
    monkeypatch.chdir(tmp_path / "content")
    with pytest.raises(LookupError, match="'55_installed' was not found"):
        find_assignment("55_installed")
    monkeypatch.setattr(loading, "find_course", lambda: tmp_path / "share")
    assert find_assignment("55_installed") == ("55_installed", folder)


def test_an_assignment_goes_by_its_number_and_a_name_without_one_is_explained() -> None:
    for number in ("2", "02", "02_data_parallel_sgd"):
        name, task = find_check(f"{number}/shard_bounds")
        assert (name, task.function) == ("02_data_parallel_sgd/shard_bounds", "shard_bounds")
    with pytest.raises(LookupError, match="shard_bounds, average_gradients"):
        find_check("2/shards")
    with pytest.raises(LookupError, match=r"assignment/check.*02_data_parallel_sgd, 03_coll"):
        find_check("shard_bounds")
    with pytest.raises(LookupError, match=r"'77' was not found.*02_data_parallel_sgd, 03_coll"):
        find_check("77/shard_bounds")


def test_what_a_function_returned_is_no_function() -> None:
    with pytest.raises(TypeError, match=r"check\('2/shard_bounds', f\), not .* got a tuple of 2"):
        check("2/shard_bounds", right_bounds(4, 2, 0))


def test_one_case_is_run_alone_and_not_noted(monkeypatch) -> None:
    noted = []
    monkeypatch.setattr(diary, "keep", lambda *args: noted.append(args))

    def wrong_where_it_does_not_divide(length: int, world_size: int, rank: int) -> tuple[int, int]:
        return rank * (length // world_size), (rank + 1) * (length // world_size)

    with pytest.raises(CheckFailed):
        check("2/shard_bounds", wrong_where_it_does_not_divide, on="simulated")
    assert len(noted) == 1
    report = check(
        "2/shard_bounds", wrong_where_it_does_not_divide, on="simulated", case="a plain case"
    )
    assert [result.name for result in report.results] == ["a plain case"]
    assert len(noted) == 1
    with pytest.raises(LookupError, match=r"no case 'x'\. The cases: a plain case; "):
        check("2/shard_bounds", right_bounds, case="x")


def test_a_terminal_shows_what_runs_from_the_first_moment(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)

    def chatty(length: int, world_size: int, rank: int) -> tuple[int, int]:
        print("hello")
        return right_bounds(length, world_size, rank)

    check("2/shard_bounds", chatty, on="cpu")
    out, progress = capsys.readouterr()
    shown = [line for line in progress.split("\r\033[K") if line]
    assert shown[0] == "reading 2/shard_bounds …"
    assert shown[1] == "simulated ranks, case 1 of 5: a plain case"
    assert shown[-1].startswith("CPU ranks, case 5 of 5: ")
    assert progress.endswith("\r\033[K")  # the report begins on an empty line
    assert "hello" in out and "5 of 5 cases passed" in out


@pytest.mark.large
def test_a_notebook_shows_one_output_that_becomes_the_report() -> None:
    define = """
import torch.distributed as dist
from course_lib.checking import check

def average_gradients(params, group=None):
    for param in params:
        if param.grad is not None:
            dist.all_reduce(param.grad, group=group)
"""
    call = "check('2/average_gradients', average_gradients, on='simulated')"
    with kernel(cwd=ROOT) as running:
        assert not running.run(define).error
        failing = running.run(call)
        unknown = running.run("check('2/nothing', average_gradients)")
        right = running.run(
            "check('2/shard_bounds', lambda n, k, r: (n * r // k, n * (r + 1) // k))"
        )
    (shown,) = failing.bundles
    assert "<img alt=" in shown["text/html"] and "<details" in shown["text/html"]
    assert "✗ 2 ranks" in shown["text/plain"]
    # The red box under it says nothing a second time.
    assert failing.error == "CheckFailed: the report above says what failed, and why"
    assert unknown.bundles == [{}] and "has no check 'nothing'" in unknown.error
    (shown,) = right.bundles
    assert "cases passed" in shown["text/plain"]


def test_a_handed_out_folder_is_found_from_within(tmp_path, monkeypatch) -> None:
    name = "02_data_parallel_sgd"
    shutil.copytree(ROOT / "assignments" / name, tmp_path / name)
    monkeypatch.chdir(tmp_path / name)
    assert find_assignment(name) == (name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    assert find_assignment(name) == (name, tmp_path / name)


def test_folders_of_one_name_have_judges_of_their_own(tmp_path) -> None:
    paths = [tmp_path / parent / "12_echo" / "checks.py" for parent in "ab"]
    for factor, path in enumerate(paths):
        path.parent.mkdir(parents=True)
        path.with_name("judges.py").write_text(f"FACTOR = {factor}")
        path.write_text("from .judges import FACTOR")
    first, second = paths
    assert [vars(load_module(path))["FACTOR"] for path in (first, second, first)] == [0, 1, 0]
