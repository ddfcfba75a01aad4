"""Students' and instructors' pages say all they must, and nothing of a submission runs in them."""

from __future__ import annotations

import http.server
import json
import re
import shutil
import sys
import threading
import time
import types
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
import soupsieve
import torch
import torch.distributed as dist
from nbgrader.api import Gradebook
from nbgrader.apps.api import NbGraderAPI

from autograder.__main__ import main
from autograder.commands import doctor
from autograder.commands.demo import ASSIGNMENT
from autograder.course import load_config
from autograder.examination.verdict import (
    MAX_EVENTS,
    CheckVerdict,
    Verdict,
    trace_summary,
    verdict_path,
)
from autograder.passes.safe_markdown import safe_html
from autograder.passes.tell import caption_of, timeline_of
from autograder.tables import plain_text
from course_lib.ranks import Network, Ranks
from tests.helpers.browser import Browser, jupyterlab, needs_browser
from tests.helpers.course_folders import ROOT, needs_sources
from tests.helpers.hostile_notebook import MARK, hostile, payloads
from tests.helpers.whole_class import TASKS

pytestmark = pytest.mark.filterwarnings("ignore")


class Beacon(http.server.BaseHTTPRequestHandler):
    """Only writes down what is fetched from its server."""

    def do_GET(self) -> None:
        self.server.fetched.append(self.path)
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture(scope="module")
def beacons() -> Iterator[Any]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Beacon) as server:
        server.fetched, server.address = [], f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def course(graded_course: Path, copy_of: Callable[[Path], Path], beacons: Any) -> Path:
    """The graded class, in which one more attacks whoever reads the submission."""
    root = copy_of(graded_course)
    data = root / "grading"
    released = nbformat.read(data / "release" / ASSIGNMENT / f"{ASSIGNMENT}.ipynb", as_version=4)
    folder = data / "submitted" / "eve" / ASSIGNMENT
    folder.mkdir(parents=True)
    nbformat.write(hostile(released, beacons.address), folder / f"{ASSIGNMENT}.ipynb")
    outcome = NbGraderAPI(config=load_config(root)).autograde(ASSIGNMENT, "eve")
    assert outcome["success"], str(outcome.get("log"))[-3000:]
    return root


@pytest.fixture(scope="module")
def pages(course: Path) -> dict[str, Path]:
    """Return the page of the one who attacks, and of one whose ranks wait forever."""
    names = ("eve", "deadlock")
    command = ["autograder", "feedback", ASSIGNMENT, "--student", "eve", "--student", "deadlock"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", [*command, "--course", str(course)])
        assert main() == 0
    folder = course / "grading" / "feedback"
    return {name: folder / name / ASSIGNMENT / f"{ASSIGNMENT}.html" for name in names}


def text_of(html: str) -> str:
    return re.sub(r"<[^>]+>", "", html)


@needs_sources
def test_the_page_says_what_happened(pages: dict[str, Path]) -> None:
    html = pages["deadlock"].read_text()
    text = " ".join(text_of(html).split())
    assert "What was examined?" in text
    data = pages["deadlock"].parents[3]
    verdict = Verdict.read(verdict_path(data, ASSIGNMENT, "deadlock", ASSIGNMENT))
    assert f"(Score: {verdict.score:.1f} / {verdict.max_score + 3:.1f})" in text
    for check in verdict.checks:
        hidden = [case["passed"] for case in check.cases if case["hidden"]]
        visible = [case["passed"] for case in check.cases if not case["hidden"]]
        counts = f"{sum(visible)} of {len(visible)} visible; {sum(hidden)} of {len(hidden)} hidden"
        assert text.count(counts) >= 2, "above, and at the task"
    assert "Rank 0 waits in recv from rank 1" in text
    assert "hidden.py" not in html and "each rank counts with" not in html
    hidden = [case["name"] for check in verdict.checks for case in check.cases if case["hidden"]]
    assert len(hidden) == len(verdict.checks)
    assert not [name for name in hidden if name in html], "hidden cases stay hidden"
    assert html.count('alt="g \\leftarrow') == 1, "formulas are pictures"
    names = re.findall(r'<li><a href="#([^"]+)"><code>(.+)</code></a>', html)
    assert names == [(name, name) for name in (*TASKS, "explain_weights")]


@needs_sources
def test_no_page_holds_a_script_or_an_address(pages: dict[str, Path], beacons: Any) -> None:
    for path in pages.values():
        html = path.read_text()
        assert "<script" not in html.lower()
        assert html.index("Content-Security-Policy") < html.index("<style")
        tags = re.findall(r"<[a-zA-Z][^>]*>", html)
        assert not [tag for tag in tags if re.search(r"\son\w+\s*=", tag)]
        fetched = [tag for tag in tags if not tag.startswith("<a ") and beacons.address in tag]
        assert not fetched, "links may lead there: who clicks is asked by nobody"
        assert not [tag for tag in tags if re.search(r"(?i)(href|src)\s*=\s*.?javascript", tag)]
        assert len(html) < 3_000_000, "ten megabytes were printed"
        assert plain_text(html) == html, "no text turns another one, or controls a terminal"


@needs_sources
def test_a_page_that_cannot_be_rendered_says_why(pages, monkeypatch, autograder):
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("invalid SRE code")

    monkeypatch.setattr(soupsieve.SoupSieve, "select", method_of("soupsieve", fail))
    course, folder = pages["eve"].parents[4], pages["eve"].parent
    copy = shutil.copytree(folder, course / "copy")
    status, output = autograder(course, "feedback", ASSIGNMENT, "--student", "eve")
    shutil.copytree(copy, folder, dirs_exist_ok=True)
    assert status == 1
    assert "no page could be written for eve: RuntimeError: invalid SRE code (raised in" in output
    finding = doctor.page(ROOT)
    assert "RuntimeError: invalid SRE code (raised in soupsieve" in finding.summary


def method_of(module: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function as if its code were in this module."""
    return types.FunctionType(function.__code__, {**globals(), "__name__": module})


@pytest.fixture
def formgrader(course: Path, tmp_path: Path) -> Iterator[str]:
    options = {"root_dir": ".", "token": "", "password": "", "ip": "127.0.0.1", "port": 0}
    options |= {"open_browser": False, "allow_root": True}
    options["jpserver_extensions"] = "jupyterlab=False"  # it takes a second
    arguments = [f"--ServerApp.{name}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "jupyter_server", *arguments]
    with jupyterlab(command, course, tmp_path) as address:
        yield address.rstrip("/")


@needs_sources
@needs_browser
def test_no_page_runs_over_the_edge_of_a_phone(pages: dict[str, Path]) -> None:
    with Browser() as browser:
        browser.narrow(390)
        for page in pages.values():
            browser.open(page.as_uri())
            browser.wait_for("document.readyState == 'complete'")
            assert browser.run("document.scrollingElement.scrollWidth") == 390, page


@needs_sources
@needs_browser
def test_nothing_runs_in_formgrader(course: Path, formgrader: str, beacons: Any) -> None:
    url = load_config(course).CourseDirectory.db_url
    with Gradebook(url, "sgd-to-ddp") as gradebook:
        number = gradebook.find_submission_notebook(ASSIGNMENT, ASSIGNMENT, "eve").id
    url = f"{formgrader}/formgrader/submissions/{number}/?index=0"
    with urllib.request.urlopen(url, timeout=300) as page:  # takes long on a busy machine
        html = page.read().decode()
    assert plain_text(html) == html
    with Browser() as browser:
        browser.open(url)
        browser.wait_for("document.readyState == 'complete'")
        time.sleep(2)  # what attacks may wait for a moment
        dom = browser.run("document.documentElement.outerHTML")
    assert "My answer, 中文, reads <strong>well</strong>" in dom, "the page is there"
    assert "Student's answer" in dom and "each rank counts with its number of rows" in dom
    assert f"{MARK}=" not in dom.partition("<head")[0]
    assert beacons.fetched == []
    assert 'href="javascript:' not in dom


@pytest.mark.parametrize("number", range(len(payloads(""))))
def test_a_payload_is_text(number: int) -> None:
    html = safe_html(payloads("http://127.0.0.1:9")[number])
    tags = re.findall(r"<(\w+)([^>]*)>", html)
    allowed = {"p", "div", "span", "details", "summary", "a", "br", "pre", "code", "em", "strong"}
    assert {name for name, _ in tags} <= allowed | {"img"}
    assert not [
        attributes
        for _, attributes in tags
        if re.search(r"\b(on\w+|style|src|id|name)\s*=", attributes)
    ]
    assert 'class="pull-right' not in html


def test_a_picture_is_shown_if_it_is_attached_and_else_described() -> None:
    text = "![a sketch](attachment:a.png)"
    shown = safe_html(text, {"a.png": {"image/png": "iVBORw0KGgo="}})
    assert 'src="data:image/png;base64,iVBORw0KGgo="' in shown and 'alt="a sketch"' in shown
    assert "a sketch" in safe_html(text) and "<img" not in safe_html(text)
    assert "<svg" not in safe_html(text, {"a.png": {"image/svg+xml": "<svg onload=alert(1)>"}})


def test_a_timeline_is_drawn_of_what_the_verdict_has() -> None:
    """The messages belong to a group whose name attacks the drawing program."""

    def program() -> None:
        group = dist.new_group([0, 1], group_desc="$\\frac <script>")
        exchange = dist.recv if dist.get_rank() else dist.send
        for _ in range(MAX_EVENTS):
            exchange(torch.ones(1000), 1 - dist.get_rank(), group=group)

    with Ranks(2, on="simulated", network=Network(latency=1e-3, bandwidth=1e9)) as ranks:
        ranks.run(program)
        trace = ranks.trace
    assert any("script" in event.group_name for event in trace.events)
    stored = json.dumps(trace_summary(trace, "2 ranks"), indent=1)
    assert "frac" not in stored and "script" not in stored
    assert len(stored) < 70_000
    read = json.loads(stored)
    check = CheckVerdict("02/t", 0, 1, "", [], read)
    png, alt = timeline_of(check)
    assert png.startswith(b"\x89PNG")
    drawn = trace.events[:MAX_EVENTS]
    assert f"{sum(event.kind == 'send' for event in drawn)} send" in alt
    assert "“2 ranks”" in caption_of(check)
    assert "Only the first" in caption_of(check) and len(drawn) < len(trace.events)
