"""Progress: lines in a file, one line on a terminal, and rank 0 alone."""

import re
import sys
from dataclasses import replace

from course_lib.train import train
from course_lib.train.progress import Progress
from tests.helpers.train_runs import TEXT


def test_progress_is_lines_in_a_file_and_one_line_on_a_terminal(capsys, monkeypatch):
    def run() -> str:
        clock = iter([0.0, 2.0, 12.0])
        monkeypatch.setattr("time.perf_counter", lambda: next(clock))
        progress = Progress(
            start=100, total=200, steps_per_epoch=40, unit="tokens", units_per_step=50
        )
        progress.report(101, 5.5)
        progress.report(120, 4.25)
        progress.close()
        monkeypatch.undo()
        return capsys.readouterr().out

    first = "step 101/200 · epoch 3 · loss 5.5000 · 25 tokens/s · 3:18 left"
    second = "step 120/200 · epoch 3 · loss 4.2500 · 95 tokens/s · 0:48 left"
    assert run() == f"{first}\n{second}\n"
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert run() == f"\r\033[K{first[:39]}\r\033[K{second[:39]}\n"


def test_rank_0_alone_reports_and_only_when_asked(ranks_of, capsys):
    ranks = ranks_of("simulated", 2)
    config = replace(TEXT, steps=5, log_every=2)
    losses = ranks.run(train, config)[0].losses
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("[rank 0] ") for line in lines)
    assert "2 ranks × 12 examples" in lines[0]
    told = [re.findall(r"step (\d)/5 .* loss ([\d.]+) .* tokens/s", line) for line in lines[1:-1]]
    assert told == [[(str(step), f"{losses[step - 1]:.4f}")] for step in (1, 2, 4, 5)]
    assert re.search(r"5 steps in .* test loss [\d.]+, [\d.]+ % right", lines[-1])
    ranks.run(train, replace(config, log_every=0))
    assert capsys.readouterr().out == ""
