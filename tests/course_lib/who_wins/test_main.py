"""The command: a small map of three algorithms, as tables."""

import os

import pytest

from course_lib.cores import usable_cores
from course_lib.who_wins.__main__ import main


@pytest.mark.large
def test_the_command_prints_the_map(capsys):
    network = ("--latencies", "1e-3", "--bandwidths", "1e7", "1e6")
    options = ("--algorithms", "flat", "bucketed", "--seeds", "2")
    assert main([*network, *options]) == 0
    out, err = capsys.readouterr()
    assert "| 1 ms, 1 MB/s | " in out and "| 1 ms, 10 MB/s | " in out
    assert "| bucketed | AdamW, 0.025 | " in out
    assert "6 of 6 runs" in err  # bucketed has the weights of flat


@pytest.mark.parametrize("option", ["--bandwidths", "--straggler"])
def test_what_cannot_be_is_refused(option, capsys):
    assert main([option, "0"]) == 2
    assert "must be above 0" in capsys.readouterr().err


def test_a_system_without_affinity_offers_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)  # as on macOS
    assert usable_cores() == (os.cpu_count() or 1)
