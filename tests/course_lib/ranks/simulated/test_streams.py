"""Ranks that share a process print through streams that stand in for the real ones."""

import io
import sys
import threading

import pytest

from course_lib.ranks.simulated.rank_streams import RankStreams


def test_a_stream_that_somebody_keeps_may_outlive_the_one_it_stands_in_for(monkeypatch):
    """As at the end of a program: a logger has kept it, and since Python 3.13 that was told."""
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stdout", screen)
    with RankStreams([threading.Thread()], lambda rank, line: None):
        stream = sys.stdout
        print("seen", flush=True)
    assert screen.getvalue() == "seen\n"
    screen.close()
    stream.flush()
    with pytest.raises(ValueError, match="closed file"):
        stream.write("lost, and not silently")
