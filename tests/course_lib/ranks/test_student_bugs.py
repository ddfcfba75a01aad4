"""The same mistake is called the same on every kind of ranks; `docs/student_bugs.md` lists them.

After a change of the words: ``python -m tests.course_lib.ranks.test_student_bugs`` writes the page.
"""

import functools
import re

import pytest
import torch
import torch.distributed as dist

from course_lib.ranks import DeadlockError, MismatchError, RankError, RankTimeout
from course_lib.ranks.explain.words import names
from tests.helpers import ROOT
from tests.helpers.carriers import CARRIERS, ranks_on
from tests.helpers.student_bugs import BUGS, NOT_UNDER_TORCHRUN

pytestmark = pytest.mark.usefixtures("ddp_is_imported")

PAGE = ROOT / "docs" / "student_bugs.md"
NAMES = [re.sub(r"\W+", "_", bug.what) for bug in BUGS]


@functools.cache
def outcome(index: int, carrier: str) -> Exception | None:
    """Return what a bug ends in."""
    bug = BUGS[index]
    limit = 1 if bug.error is RankTimeout else 60
    try:
        ranks_on(carrier, 4, limit).run(bug.fn)
    except Exception as error:
        return error
    return None


def crosses_sockets(bug) -> bool:
    """Return whether the grader's network sees the bug: it is not what a rank alone knows."""
    return bug.error in (DeadlockError, MismatchError) and "DDP" not in bug.what


@pytest.mark.every_case
@pytest.mark.parametrize("index", range(len(BUGS)), ids=NAMES)
@pytest.mark.parametrize(
    "carrier", ["simulated", *(pytest.param(c, marks=pytest.mark.large) for c in CARRIERS[1:])]
)
def test_the_cause_is_named(index: int, carrier: str) -> None:
    bug = BUGS[index]
    if carrier == "sockets" and not crosses_sockets(bug):
        pytest.skip("this carrier is not told")
    error = outcome(index, carrier)
    assert type(error) is bug.error, error
    assert all(word.lower() in str(error).lower() for word in bug.words), error
    assert ranks_on(carrier, 4).run(dist.get_rank) == [0, 1, 2, 3]


def cause(bug, error: Exception | None) -> str:
    """Return the part of a report that names the cause."""
    if error is None:
        return "nothing"
    summary = str(getattr(error, "summary", error))
    if isinstance(error, MismatchError) and "collective" in summary:
        same: dict[str, list[int]] = {}
        for state in error.states:
            same.setdefault(state.doing, []).append(state.rank)
        calls = [f"{names(ranks)}: {doing}" for doing, ranks in same.items() if doing != "finished"]
        return f"{summary} {'; '.join(calls)}"
    if isinstance(error, DeadlockError):
        lines = error.detail.splitlines()
        return next((line for line in lines if bug.words[0] in line), lines[0])
    return summary


def page() -> str:
    """Return the page: what simulated ranks say, which say it the same every time.

    It is a list, which also a phone shows, by exception: that is what one has read.
    """
    parts = [_HEAD]
    for error, heading in _ERRORS.items():
        parts.append(f"## {error.__name__}: {heading}\n")
        for index, bug in enumerate(BUGS):
            if bug.error is error:
                sentence = cause(bug, outcome(index, "simulated"))
                sentence = re.sub(r" *\((\S+|Cell In.*), line \d+\)", "", sentence)
                sentence = sentence.replace("<", r"\<")  # or Markdown would take it for a tag
                parts.append(f"- **{bug.what}**\\\n  {sentence}")
        parts.append("")
    return "\n".join([*parts, ""])


_ERRORS: dict[type[Exception], str] = {
    DeadlockError: "a deadlock, the ranks wait for one another",
    MismatchError: "the ranks disagree about a call",
    RankError: "a rank raised an exception",
    RankTimeout: "a call took too long",
    TypeError: "something cannot be sent to the ranks",
}
_HEAD = """\
# What students do wrong, and what they are told
"""
# What begins here is written by hand.
_FOOT = "## Under torchrun"


def test_the_page_says_what_the_ranks_say() -> None:
    listed, _, foot = PAGE.read_text().partition(_FOOT)
    if torch.__version__.partition("+")[0] not in foot or torch.version.cuda:
        pytest.skip("the page quotes another PyTorch")
    assert {bug.error for bug in BUGS} == _ERRORS.keys()
    assert listed == page(), "python -m tests.course_lib.ranks.test_student_bugs"
    count = f"{len(BUGS) - len(NOT_UNDER_TORCHRUN)} of these {len(BUGS)} mistakes"
    assert count in foot and all(mistake in foot for mistake in NOT_UNDER_TORCHRUN)


if __name__ == "__main__":
    PAGE.write_text(page() + _FOOT + PAGE.read_text().partition(_FOOT)[2])
    print(PAGE)
