"""docs/slides.md leads from every topic of the slides to an existing heading of a lecture."""

import re

import pytest

from tests.helpers import ROOT
from tests.helpers.notebook_rules import broken_links

PAGE = ROOT / "docs" / "slides.md"
TEXT = PAGE.read_text(encoding="utf-8")
TOPICS = [
    *("Mini-batch SGD", "Data-parallel SGD", "All-reduce", "Process groups", "The DDP API"),
    *("The sampler", "Bucketing", "Overlap", "Compression"),
    *("Asynchronous training", "Decentralized training", "Beyond the slides"),
]
ROWS = re.findall(r"^\| (.+) \| (.+) \|$", re.sub(r"^\| on the.*", "", TEXT, flags=re.M), re.M)
LINK = re.compile(r"\[(\d\d), ([^\]]+)\]\(\.\./lectures/(\w+)\.ipynb#([^)\s]+)\)")


def test_every_topic_has_its_table() -> None:
    assert re.findall(r"^## (.+)$", TEXT, re.MULTILINE) == TOPICS
    for section in TEXT.split("\n## ")[1:]:
        assert section.count("\n| ") > 1, f"nothing below {section.splitlines()[0]}"


def test_links_name_the_heading_they_lead_to() -> None:
    assert not (missing := list(broken_links(TEXT, PAGE.parent))), f"missing: {missing}"
    for number, heading, lecture, place in LINK.findall(TEXT):
        assert lecture.startswith(f"{number}_")
        assert heading.replace(" ", "-") == place


@pytest.mark.parametrize(("topic", "where"), ROWS)
def test_a_row_leads_to_a_lecture_or_names_one_that_is_to_come(topic: str, where: str) -> None:
    if LINK.search(where):
        return
    assert re.fullmatch(r"\d\d_\w+", where), f"{topic}: neither a link nor a lecture's name"
    there = (ROOT / "lectures" / f"{where}.ipynb").exists()
    assert not there, f"{topic}: {where} is there now; link to the heading that treats it"
