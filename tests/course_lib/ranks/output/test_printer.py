"""Folding: the same line of several ranks is shown once, and no line is lost or reordered."""

import contextlib
import io
import time

from hypothesis import given
from hypothesis import strategies as st

from course_lib.ranks.output import printer as module
from course_lib.ranks.output.printer import Printer


def print_all(lines) -> None:
    printer = Printer(len(lines))
    for rank, texts in enumerate(lines):
        for text in texts:
            printer.add(rank, text)
    printer.end_call()


def labelled(out: str) -> list[tuple[str, str]]:
    pairs = [line.split("] ", 1) for line in out.splitlines()]
    return [(label + "]", text) for label, text in pairs]


def test_equal_lines_are_folded_also_where_one_rank_says_more(capsys) -> None:
    print_all([["start", "step"], ["step"], ["step"]])
    shown = labelled(capsys.readouterr().out)
    assert shown == [("[rank 0]", "start"), ("[ranks 0-2]", "step")]


def test_a_lone_line_waits_for_the_others_and_no_longer(capsys, monkeypatch):
    monkeypatch.setattr(module, "LINE_WINDOW", 1000.0)
    printer = Printer(2)
    printer.add(1, "only here")
    printer.release()
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(module, "LINE_WINDOW", 0.01)
    time.sleep(0.02)
    printer.release()
    assert capsys.readouterr().out == "[rank 1] only here\n"


@given(st.lists(st.lists(st.sampled_from("abc"), max_size=6), min_size=1, max_size=4))
def test_every_rank_can_read_its_own_lines_in_order(lines) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        print_all(lines)
    got = labelled(out.getvalue())
    for rank, texts in enumerate(lines):
        own_texts = [text for label, text in got if rank in ranks_of(label)]
        assert own_texts == texts


def ranks_of(label: str) -> set[int]:
    numbers = label.strip("[]").split(" ", 1)[1]
    if "-" in numbers:
        first, last = map(int, numbers.split("-"))
        return set(range(first, last + 1))
    return {int(number) for number in numbers.split(", ")}


def test_figures_that_come_late_are_shown_in_rank_order(capsys, monkeypatch):
    monkeypatch.setattr(module, "LINE_WINDOW", 0.01)
    monkeypatch.setattr(module, "DISPLAY_WINDOW", 1000.0)
    printer = Printer(3)
    for rank in (2, 0, 1):
        printer.add(rank, {"text/plain": f"figure {rank}"})
        time.sleep(0.02)  # longer than a line waits
        printer.release()
    shown = capsys.readouterr().out.splitlines()
    assert shown == [f"[rank {rank}] figure {rank}" for rank in range(3)]
