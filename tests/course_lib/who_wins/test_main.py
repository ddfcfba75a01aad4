"""The command: a small map, interrupted and gone on with; tables, JSON, a figure."""

import json
import math
from pathlib import Path

import pytest

from course_lib.who_wins import tune
from course_lib.who_wins.__main__ import main
from course_lib.who_wins.algorithms import ALGORITHMS
from course_lib.who_wins.settings import best, read

SMALL = (
    *("--workers", "2", "--target", "2.25", "--seeds", "2", "--processes", "1", "--steps", "4"),
    *("--latencies", "1e-3", "--bandwidths", "1e5", "1e7"),
)


@pytest.mark.large
def test_a_small_map(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ("--algorithms", "flat", "1-bit", "asynchronous", "--folder", str(tmp_path))
    figure = tmp_path / "map.png"
    assert main([*SMALL, *few, "--json", "--figure", str(figure)]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert figure.read_bytes().startswith(b"\x89PNG")
    # Two paces each, two trainings each, and two times two with a server.
    assert "12 of 12 runs" in err
    assert [each["bandwidth"] for each in found["cells"]] == [1e5, 1e7]
    slow, fast = (each["seconds"] for each in found["cells"])
    for name in ("flat", "1-bit", "asynchronous"):
        assert all(a > b > 0 for a, b in zip(slow[name], fast[name], strict=True))
    assert slow["1-bit"][0] < slow["flat"][0]

    assert main([*SMALL, *few]) == 0  # all of it is there already
    out, err = capsys.readouterr()
    assert "12 of 12 runs are in" in err
    assert "| 1 ms, 100 kB/s | " in out and "low bandwidth: compression wins" in out


def test_tuning_tries_the_same_settings_for_all_and_the_map_takes_the_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "settings.csv"
    monkeypatch.setattr(tune, "GRID", (1e-9, 0.5))
    monkeypatch.setattr(tune, "OPTIMIZERS", ("SGD", "momentum"))
    monkeypatch.setattr(tune, "SEEDS", (1000, 1001))
    monkeypatch.setattr("course_lib.who_wins.__main__.FILE", file)
    some = {name: ALGORITHMS[name] for name in ("flat", "bucketed", "asynchronous", "local SGD")}
    monkeypatch.setattr("course_lib.who_wins.__main__.ALGORITHMS", some)
    assert main([*SMALL, "--folder", str(tmp_path), "--tune", "--write"]) == 0
    err = capsys.readouterr().err
    assert "12 of 12 runs" in err and "6 of 6 runs" in err  # 1e-9 fails, and is not tried again
    tried = read(file)
    assert list(tried) == ["flat", "asynchronous", "local SGD"]  # bucketed's is flat's
    for name, tries in tried.items():
        assert list(tries) == [(o, lr) for o in ("SGD", "momentum") for lr in (1e-9, 0.5)], name
        assert [math.isinf(steps) for steps in tries.values()] == [True, False, True, False], name
        assert best(tries).lr == 0.5


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--workers", "1"], "workers must be 2 or more"),
        (["--bandwidths", "0"], "bandwidths above 0"),
        (["--seeds", "-1"], "at least 1"),
        (["--straggler", "0"], "above 0"),
        (["--write"], "only with --tune"),
        (["--tune", "--write", "--algorithms", "flat"], "without --algorithms"),
    ],
)
def test_what_cannot_be_is_refused(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--folder", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
