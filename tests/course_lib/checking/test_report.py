"""A report in a notebook: all of it is there, and no text of a student's becomes markup."""

import pytest
from bs4 import BeautifulSoup  # comes with nbconvert
from hypothesis import given
from hypothesis import strategies as st

from course_lib.checking import CheckReport
from course_lib.checking.report import CaseResult, cause_of, html_of
from course_lib.ranks import Event, Trace


def read(html: str) -> BeautifulSoup:
    return BeautifulSoup(html, "html.parser")


def tags_in(page: BeautifulSoup):
    """Return the tags, each with its depth and the names of its attributes."""
    return [(tag.name, len([*tag.parents]), *tag.attrs) for tag in page.find_all()]


def failed(name: str, reason: str, detail: str = "", **fields) -> CaseResult:
    return CaseResult(name, False, reason, detail, 0.1, **fields)


def report_of(name: str, case: str, sentence: str, detail: str, value: str) -> CheckReport:
    """Return a report with these texts in all places; causes do not depend on the texts."""
    detail = detail.replace("\n", " ")  # lines and blank lines make the paragraphs
    return CheckReport(
        f"t/{name}",
        (
            CaseResult(f"right {case}", True, "", "", 0.1),
            failed(
                f"a {case}",
                f"x: expected <{value}>. {sentence}",
                f"table\n|{detail}|\n\n|{detail}|",
                difficulty=(1,),
            ),
            failed(f"b {case}", "exactly this", difficulty=(2,), summary=sentence, detail="d"),
            failed(f"c {case}", "exactly this", difficulty=(3,)),
            failed(case, "It is wrong.", hidden=True),
        ),
        worth={f"values {sentence}": 1.0},
        function=f"f{name}",
        traced=f"b {case}",
    )


MARKUP = st.sampled_from(
    ["<script>x</script>", "</pre><img src=x onerror=y>", '" onload="y', "'>", "&lt;b&gt;", "]]>"]
)


@given(st.text() | MARKUP, st.lists(st.text() | MARKUP, min_size=5, max_size=5))
def test_no_text_adds_a_tag_or_an_attribute(alt: str, texts: list[str]) -> None:
    plain = read(html_of(report_of("n", "c", "w", "d", "v"), (b"png", "alt")))
    page = read(html_of(report_of(*texts), (b"png", alt)))
    assert tags_in(page) == tags_in(plain)
    assert page.img["alt"] == alt


def test_the_simplest_case_is_open_and_the_others_are_folded() -> None:
    page = read(html_of(report_of("n", "c", "w", "d", "v")))
    folds = page.find_all("details")
    assert sum(fold.has_attr("open") for fold in folds) == 1
    # One for the passed cases, one for each of three causes, one for the case like another one.
    assert len(folds) == 5
    assert 'check("t/n", fn, case="a c")' in page.text
    assert 'case="c"' not in page.text  # nobody can run a hidden case


def test_the_timeline_of_the_traced_case_is_in_the_report() -> None:
    events = [
        Event(rank, kind, (0, 1), 1 - rank, 8, "float32", 1, 0.0, 1e-3, "Cell In[1], line 2")
        for rank, kind in enumerate(("send", "recv"))
    ]
    cases = failed("a", "one", difficulty=(1,)), failed("b", "two", difficulty=(2,))
    report = CheckReport("t/f", cases, trace=Trace(events, 2), traced="b")
    html = report._repr_html_()
    (image,) = read(html).find_all("img")
    assert "2 ranks" in image["alt"] and "send" in image["alt"]
    assert html.index("two") < html.index("<img")
    assert "<img" not in html_of(report)  # it is not drawn unless asked for


# Causes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "other"),
    [
        (
            "rank 0: sum[0, 2]: expected 1.5, got -3 (6 of 6 elements differ). This equals X.",
            "rank 2: sum[11]: expected -2e-05, got 4 (1 of 9 elements differ). This equals X.",
        ),
        (
            "Ranks 0, 1 raised ValueError: no  (Cell In[3], line 2)",
            "Rank 2 raised ValueError: no  (Cell In[3], line 2)",
        ),
        (
            "Nobody goes on. Rank 0 waits in recv from rank 1 (8 B). Rank 1 waits in recv from "
            "rank 0 (8 B).",
            "Nobody goes on. Rank 0 waits in recv from rank 2 (1.5 KiB). Rank 1 waits in recv from "
            "rank 0 (1.5 KiB). Rank 2 waits in recv from rank 1 (1.5 KiB).",
        ),
        ("the ranks need 44.06 µs, expected 44.03 µs", "the ranks need 1.2 ms, expected 1 ms"),
        (
            "rank 0: tensor has dtype torch.float32, expected torch.bfloat16",
            "rank 1: tensor has dtype torch.float32, expected torch.float64",
        ),
    ],
)
def test_numbers_ranks_and_places_do_not_make_another_cause(reason: str, other: str) -> None:
    assert cause_of(reason) == cause_of(other)


def result(name: str, reason: str, difficulty: tuple[int, ...] = (), **fields) -> CaseResult:
    return failed(name, reason, f"all about {name}", difficulty=difficulty, **fields)


def test_a_cause_is_told_once_for_its_simplest_case() -> None:
    report = CheckReport(
        "t/f",
        (
            CaseResult("right", True, "", "", 0.1),
            result("hard", "rank 3: sum[7]: expected 1, got 2", (4, 4)),
            result("other", "rank 0: loss[0]: expected 3, got 4", (2, 2)),
            result("simple", "rank 0: sum[0]: expected 3, got 4", (0, 2)),
            result("middle", "rank 1: sum[2]: expected 5, got 6", (1, 2)),
        ),
    )
    assert str(report).splitlines() == [
        "t/f: 1 of 5 cases passed",
        "  ✓ right",
        "  ✗ simple",
        "      rank 0: sum[0]: expected 3, got 4",
        "      all about simple",
        "      The same in 2 other cases: hard · middle",
        "  ✗ other",
        "      rank 0: loss[0]: expected 3, got 4",
    ]
    assert report.reason == "rank 0: sum[0]: expected 3, got 4"


def test_of_hidden_cases_the_order_says_nothing_about_them() -> None:
    report = CheckReport(
        "t/f",
        (
            result("seen", "rank 0: wrong", (9, 9)),
            result("secret A", "It is wrong.", (5, 5), hidden=True),
            result("secret B", "It is wrong.", (0, 1), hidden=True),
            result("late", "not run: 2 cases before it took long", ran=False),
        ),
    )
    cases = [line for line in str(report).splitlines() if line.startswith("  ✗")]
    assert cases == ["  ✗ seen", "  ✗ hidden case 2", "  ✗ late"]
    assert "The same in 1 other case: hidden case 3" in str(report)
    assert "secret" not in str(report)
