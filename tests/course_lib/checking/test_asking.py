"""Questions: locked, decided by what was run alone, kept on the desk, never in the way."""

import pytest
import torch

from course_lib import diary
from course_lib.checking import ask, asking

pytestmark = pytest.mark.every_case
IDLE = {"none": 0.0, "a quarter": 0.25, "more than half": lambda share: share > 0.5}
WHY = ["Pieces fill it.", "One in four.", "It has to fill and to drain."]


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(asking, "_locked", {})


@pytest.mark.parametrize("options", [None, [4, 7, 64]])
def test_the_first_answer_counts(options, capsys) -> None:
    assert ask("how many?", options=options).answer is None  # that locks nothing
    assert ask("how many?", 2, options=options).answer == 2
    assert ask("how many?", 3, options=options).answer == 2
    assert "Your first answer counts: 2." in capsys.readouterr().out
    assert ask("how many?", options=options).answer == 2


@pytest.mark.parametrize(
    ("answer", "actual", "verdict"),
    [
        (100, 101, "right"),
        (100, torch.tensor(100.0), "right"),
        (200, 100, "2 times too large"),
        (50, 100, "2 times too small"),
        (-1, 100, "not right"),
        (1, 0, "not right"),
    ],
)
def test_a_number_is_scored_against_what_was_run(answer, actual, verdict: str) -> None:
    scored = ask("q", answer).score(actual)
    assert str(scored).endswith(f": {verdict}.")
    assert scored.right is (verdict == "right")


@pytest.mark.parametrize("answer", [1, 2, 3])
@pytest.mark.parametrize(
    ("actual", "holds"),
    [(0.0, 1), (0, 1), (torch.tensor(0.25), 2), (0.26, 2), (0.9, 3), (0.4, None)],
)
def test_what_was_run_decides_about_options(answer, actual, holds, monkeypatch):
    monkeypatch.setattr(asking, "_reasons_of_lectures", lambda: {"idle?": WHY})
    scored = ask("idle?", answer, options=IDLE).score(actual)
    assert scored.right is (None if holds is None else answer == holds)
    assert ("no option says that" if holds is None else f"✓ {holds}. ") in str(scored)
    for text in (str(scored), scored._repr_html_()):
        assert text.count("✓") == (holds is not None)
        assert all(reason in text for reason in WHY)


def test_a_list_of_values_is_its_own_options(capsys) -> None:
    first = ask("who is first?", 2, options=["ring", "direct"])
    assert "  2. direct  ← your answer" in capsys.readouterr().out
    assert first.score("Direct").right
    assert ask("how many?", 3, options=[4, 7, 64]).score(64).right


@pytest.mark.parametrize("options", [None, IDLE])
def test_without_an_answer_the_run_still_decides_and_nothing_is_kept(options, tmp_path):
    (tmp_path / ".desk").mkdir()
    scored = ask("idle?", options=options).score(0.25)
    assert scored.right is None and "The run shows 0.25" in str(scored)
    assert "<details>" in scored._repr_html_()  # folded, until a reader looks
    assert diary.kept(diary.PREDICTIONS, tmp_path) == []


@pytest.mark.parametrize("answer", [0, 4, -1, "2", 1.0, True])
def test_a_number_that_no_option_has_is_said_and_locks_nothing(answer, capsys) -> None:
    assert ask("idle?", answer, options=IDLE).answer is None
    assert "is no option. Put a number from 1 to 3." in capsys.readouterr().out
    assert ask("idle?", 2, options=IDLE).answer == 2


def test_the_desk_keeps_it(tmp_path, monkeypatch) -> None:
    (tmp_path / ".desk").mkdir()
    lecture = tmp_path / "lectures" / "01"
    lecture.mkdir(parents=True)
    monkeypatch.chdir(lecture)
    monkeypatch.setenv("JPY_SESSION_NAME", "lectures/01/sgd.ipynb")
    ask("steps", 10).score(12)
    ask("idle?", 2, options=IDLE).score(0.25)
    with (tmp_path / ".desk" / diary.PREDICTIONS).open("a") as file:
        file.write("{ cut")
    first, second, third, fourth = diary.kept(diary.PREDICTIONS, tmp_path)
    assert (first["predicted"], first["guess"]) == ("steps", 10)
    assert (first["folder"], first["notebook"]) == ("lectures/01", "sgd")
    assert (second["scored"], second["actual"], second["right"]) == ("steps", 12, False)
    assert (third["predicted"], third["guess"]) == ("idle?", "a quarter")
    assert (fourth["scored"], fourth["right"]) == ("idle?", True)


@pytest.mark.parametrize(
    ("line", "is_right", "message"),
    [
        (lambda rank: ..., None, "Not filled in yet"),
        (lambda rank: rank - 1, False, "2 of 3 cases. With rank=0 your line gives -1; right is 2."),
        (lambda rank: 1 // rank - 1, False, "With rank=0 your line raises ZeroDivisionError"),
    ],
)
def test_a_line_that_is_not_right_is_told_why(line, is_right: bool | None, message: str) -> None:
    cases = [{"rank": 1}, {"rank": 0}, {"rank": 2}]
    question = ask("Who?", line, cases=cases).score(lambda rank: (rank - 1) % 3)
    assert question.right is is_right and message in str(question)


@pytest.mark.parametrize(
    ("value", "right", "same"),
    [
        (0.1 + 0.2, 0.3, True),
        (torch.tensor([1.0, 2.0]), [1, 2], True),
        ([1, 2], torch.tensor([1, 2]), True),
        ([1, 2], torch.tensor([1, 3]), False),
        ({2, 1}, [1, 2], True),
        ([1, 2], [1, 2, 3], False),
        ("1", 1, False),
        (None, None, True),
        (float("nan"), 1.0, False),
    ],
)
def test_values_that_mean_the_same(value, right, same: bool) -> None:
    cases = [{"rank": 0}]
    assert ask("x?", lambda rank: value, cases=cases).score(lambda rank: right).right is same
