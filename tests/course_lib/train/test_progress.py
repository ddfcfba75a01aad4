"""Progress: lines in a file, one line on a terminal, and rank 0 alone."""

import re
from dataclasses import replace

from course_lib.train import train
from tests.helpers.train_runs import TEXT


def test_rank_0_alone_reports_and_only_when_asked(ranks_of, capsys):
    ranks = ranks_of("simulated", 2)
    config = replace(TEXT, steps=5, log_every=2)
    losses = ranks.run(train, config)[0].losses
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("[rank 0] ") for line in lines)
    assert "2 ranks × 12 examples" in lines[0]
    reports = [
        re.findall(r"step (\d)/5 .* loss ([\d.]+) .* tokens/s", line) for line in lines[1:-1]
    ]
    assert reports == [[(str(step), f"{losses[step - 1]:.4f}")] for step in (1, 2, 4, 5)]
    assert re.search(r"5 steps in .* test loss [\d.]+, [\d.]+ % right", lines[-1])
    ranks.run(train, replace(config, log_every=0))
    assert capsys.readouterr().out == ""
