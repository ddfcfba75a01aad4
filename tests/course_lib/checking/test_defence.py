"""Questions on the lines of a student's code: who answers what the trace shows gets the points."""

import re
from statistics import mean

import pytest
import torch

from autograder.examination.defence import answer_to, is_right, with_questions
from course_lib.checking import Wrong, defence, local, run_check
from course_lib.checking.defence import SETS, Defence, defend
from course_lib.checking.local import LocalRunner
from course_lib.ranks import Trace
from course_lib.ranks.trace.event import Event
from tests.helpers.course_folders import SOURCES, assignments, needs_sources
from tests.helpers.solutions import checks_of, mutants_in, solution_of

pytestmark = needs_sources

DEFENCES = [
    (folder, check)
    for folder in assignments(SOURCES)
    for check in checks_of(folder).values()
    if isinstance(check, Defence)
]
each_task = pytest.mark.parametrize(
    ("folder", "check"), DEFENCES, ids=lambda x: getattr(x, "of", "")
)


FORM = "form ✓; the grader judges the numbers"


def questions(folder, check, student, number=1, solution=None):
    solution = solution or solution_of(folder, check.of)
    with LocalRunner(solution, "simulated", echo=None) as run:
        _, trace, drawn = check.questions(checks_of(folder)[check.of], run, student, number)
    return [(question, answer_to(question, trace)[0]) for question in drawn]


def share(questions_and_answers, answers) -> float:
    """Return the share of the questions that these answers are right for."""
    pairs = zip(questions_and_answers, answers, strict=True)
    return sum(is_right(*question, answer) for question, answer in pairs) / len(
        questions_and_answers
    )


def answered(folder, check: Defence, student: str, answers):
    """Return the report as the grader's: of the questions, with these answers."""
    with LocalRunner(solution_of(folder, check.of), "simulated", echo=None) as run:
        about = checks_of(folder)[check.of]
        sets = [check.questions(about, run, student, number)[1:] for number in SETS]
    with LocalRunner(answers, "simulated", echo=None) as run:
        return run_check("check", with_questions(check, sets), run, seed="any")


@pytest.mark.every_case
@each_task
def test_right_answers_earn_all_points_or_in_the_second_set_half(folder, check):
    for number, share in ((1, 1.0), (2, 0.5)):
        right = [right for _, right in questions(folder, check, "ada", number)]
        report = answered(folder, check, "ada", lambda n=number, r=right: (n, r))
        assert report.fraction == pytest.approx(share), report


@each_task
def test_a_wrong_answer_costs_a_third_and_is_told_what_the_run_shows(folder, check):
    drawn = questions(folder, check, "ada")
    right = [answer for _, answer in drawn]
    wrong_answer = [1.1 * answer + 1 for answer in right[1]]
    report = answered(folder, check, "Ada ", lambda: (1, [right[0], wrong_answer, right[2]]))
    assert report.fraction == pytest.approx(2 / 3)
    assert drawn[1][0].text in report.reason and "your own run shows" in report.reason


@pytest.mark.large
def test_a_neighbours_answers_and_guesses_earn_little() -> None:
    """The neighbour has the same code. A guess is a student's answers with other code, or luck."""
    copied, guessed = [], []
    for folder, check in DEFENCES:
        of = [candidate for candidate in mutants_in(folder) if candidate.task == check.of]
        other = next(candidate.function for candidate in of if candidate.reason is None)
        students = [f"student {i}" for i in range(10)]
        drawn = [questions(folder, check, student) for student in students]
        of_other_code = [
            questions(folder, check, candidate, solution=other) for candidate in students
        ]
        for i, own_questions in enumerate(drawn):
            copied.append(share(own_questions, [q[1] for q in drawn[i - 1]]))
            guessed += [
                share(own_questions, [q[1] for q in of_other_code[i - 1]]),
                share(own_questions, [[5, 5, 6]] * 3),
            ]
    assert mean(copied) <= 1 / 3 and mean(guessed) <= 1 / 5


@each_task
def test_two_students_have_different_cases(folder, check: Defence) -> None:
    def drawn(seed: int):
        return check.draw(torch.Generator().manual_seed(seed))[0]

    assert len({drawn(seed).name for seed in range(20)}) > 15
    assert drawn(3).name == drawn(3).name


def test_the_questions_are_printed_and_answers_only_for_practice(capsys):
    folder, check = next(pair for pair in DEFENCES if pair[1].of == "data_parallel")
    solution = solution_of(folder, check.of)
    defend(f"{folder.name}/{check.of}", solution, "ada")
    printed = capsys.readouterr().out
    assert all(question.text in printed for question, _ in questions(folder, check, "ada"))
    assert "The answers" not in printed
    defend(f"{folder.name}/{check.of}", solution)
    assert "The answers are in the calls of rank" in capsys.readouterr().out
    with pytest.raises(ValueError, match="sets 1 and 2"):
        defend(f"{folder.name}/{check.of}", solution, "ada", draw=3)


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ([2, (1.5, 24, 360)], ""),
        ((1, [[4, 4, 9], (7,), 30]), ""),
        ((1, [[12], None, 30]), "answer 2 is not written yet"),
        ([12, 24, 30], "a list of three answers"),
        ((3, [12, 24, 30]), "a list of three answers"),
        ((1, ["12 µs", "24 B", "30 µs"]), "a list of three answers"),
        ((1, [12, [[3]], 30]), "a list of three answers"),
    ],
)
def test_a_notebook_looks_only_at_the_form_of_the_answers(answers, says: str) -> None:
    _, check = DEFENCES[0]
    with LocalRunner(lambda: answers, "simulated", echo=None) as run:
        report = run_check("check", check, run, seed="any")
    assert report.passed == (not says) and says in report.reason


def test_wrong_answers_in_the_right_form_are_open_and_not_passed(capsys):
    folder, check = DEFENCES[0]
    name = f"{folder.name}/{check.function}"
    report = local.check(name, lambda: (1, [0, 0, 0]), on="simulated")
    assert capsys.readouterr().out.splitlines()[-1] == f"{name}: {FORM}"
    html = report._repr_html_()
    assert 'class="open"' in html and 'class="good"' not in html and "passed" not in html
    assert report.fraction == 0


@each_task
def test_what_students_have_knows_no_answer(folder, check: Defence) -> None:
    """A question has what its text says, and only the grader's package knows more."""
    for question, right in questions(folder, check, "ada"):
        unit = 1e-6 if question.asks == "before" else 1
        numbers = {*map(float, re.findall(r"\d[\d.e+]*", question.text))}
        shift = question.asks != "before"
        assert {float(f"{n / unit + shift:.4g}") for n in question.about} <= numbers
        assert right and vars(question).keys() == {"text", "asks", "rank", "about", "functions"}


def call(turn: int, size: int, start: float, end: float, outer: int, inner: int) -> Event:
    lines = (("outer", outer), ("outer.inner", inner))
    fields = 0, "send", (0,), None, size, "float32", 1, start, end, "a line"
    return Event(*fields, turn=turn, lines=lines)


BY_HAND = Trace(
    [
        call(1, 8, 0, 3, outer=4, inner=3),
        call(0, 4, 0, 2, outer=4, inner=2),
        call(0, 16, 2, 6, outer=5, inner=2),
        call(0, 32, 6, 8, outer=5, inner=3),
    ],
    world_size=1,
)
ON = {"outer": [4, 4, 5, 5], "outer.inner": [2, 3, 2, 3]}  # in the order of the launches


def asked_by(kind):
    """Return for each call that students are asked about: function, number or time, answer."""
    drawn = [kind(BY_HAND, torch.Generator().manual_seed(seed)) for seed in range(200)]
    answers = set()
    for question in drawn:
        names = re.findall(r"`(.+)`", question.text)
        numbers = re.findall(r"\d[\d.e+]*", question.text.replace("rank 0", ""))
        right, _ = answer_to(question, BY_HAND)
        assert len(numbers) == len(right) <= 3
        answers |= {(*names, float(n), answer) for n, answer in zip(numbers, right, strict=True)}
    return answers


def test_each_kind_asks_about_every_call_and_reads_the_answer_from_the_trace() -> None:
    """A call that starts together with another one and is launched second is the later one.

    No question asks for a function whose line is the same in all answers, if another one differs.
    """
    starts_after = {1: 2, 2: 3, 3: 3}  # a call → the place of the first one after its end
    last_before = {1e6: 1, 4e6: 2, 7e6: 3}  # µs → the place of the last call before
    assert asked_by(defence.lines_of_calls) == {
        (name, i + 1, line) for name in ON for i, line in enumerate(ON[name])
    }
    assert asked_by(defence.lines_after_calls) == {
        ("outer.inner", i, ON["outer.inner"][after]) for i, after in starts_after.items()
    }
    assert asked_by(defence.lines_before) == {
        (name, time, ON[name][i]) for name in ON for time, i in last_before.items()
    }
    assert asked_by(defence.bytes_of_call) == {(1, 4), (2, 8), (3, 16), (4, 32)}
    assert asked_by(defence.end_of_call) == {(1, 2e6), (2, 3e6), (3, 6e6), (4, 8e6)}


@pytest.mark.parametrize(
    ("finish", "asks"),
    [
        ([("finish", 3), ("send", 7)], {"`finish` or `hook`"}),
        ([("finish", 3), ("hook", 5), ("send", 7)], {"`finish`", "`hook`", "`send`"}),
        ([("finish", 3), ("hook", 6), ("send", 7)], {"`hook`"}),
        ([("hook", 5), ("send", 8)], {"`send`"}),
    ],
)
def test_a_call_never_has_two_lines(finish: list[tuple[str, int]], asks: set[str]) -> None:
    """A hook makes a call through `send`, and then `finish` does, perhaps through the hook."""
    hooked, finished = BY_HAND.events[1]._replace(lines=(("hook", 5), ("send", 7))), tuple(finish)
    trace = Trace([hooked, BY_HAND.events[2]._replace(lines=finished)], 1)
    texts = [
        defence.lines_of_calls(trace, torch.Generator().manual_seed(seed)).text
        for seed in range(50)
    ]
    assert {re.split(" of | make ", text)[1] for text in texts} == asks


def test_one_line_is_asked_for_if_the_same_lines_make_all_calls() -> None:
    alike = Trace([call(i, 4, i, i + 1, outer=2, inner=2) for i in range(3)], 1)
    for trace, lines in ((BY_HAND, 3), (alike, 1)):
        drawn = [kind(trace, torch.Generator()) for kind in defence.kinds_for(trace)]
        assert sum("Which lines" in question.text for question in drawn) == lines


def test_without_a_function_of_the_student_nothing_is_asked() -> None:
    nameless = Trace([event._replace(lines=()) for event in BY_HAND.events], 1)
    with pytest.raises(Wrong, match="there is nothing to ask"):
        defence.lines_of_calls(nameless, torch.Generator())
