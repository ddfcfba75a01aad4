"""The calculator page beside the Python that it repeats, in a headless browser."""

from __future__ import annotations

import html
import json
import random
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest

from course_lib.bucketing import overlapped_time
from course_lib.cost_model import (
    Link,
    central_all_reduce_time,
    halving_doubling_all_reduce_time,
    in_network_all_reduce_time,
    message_time,
    ring_all_reduce_time,
    ring_reduce_scatter_time,
    tree_all_reduce_time,
)
from course_lib.pipeline_parallel import bubble_fraction
from course_lib.sharded_optimizer import model_state_bytes

PAGE = Path(__file__).parents[1] / "docs/calculator.html"
BROWSER = next(
    (found for name in ("chromium", "google-chrome") if (found := shutil.which(name))), ""
)
OF_A_NETWORK: dict[str, Callable[..., float]] = {
    each.__name__: each
    for each in (
        *(ring_reduce_scatter_time, ring_all_reduce_time, tree_all_reduce_time),
        *(central_all_reduce_time, halving_doubling_all_reduce_time, in_network_all_reduce_time),
    )
}


def calls() -> list[tuple[str, list[float], float]]:
    """Return function, arguments on the page, and what Python says."""
    rng, found = random.Random(0), list[tuple[str, list[float], float]]()
    for k in (1, 2, 3, 4, 7, 8, 64):
        n, a, b = 10 ** rng.uniform(0, 10), 10 ** rng.uniform(-6, -2), 10 ** rng.uniform(7, 12)
        link = Link(a, b)
        found.append(("message_time", [n, a, b], message_time(n, link)))
        found += [(name, [n, k, a, b], f(n, k, link)) for name, f in OF_A_NETWORK.items()]
        m, backward = rng.randint(1, 40), 10 ** rng.uniform(-3, 1)
        buckets = [n / m] * m
        time = overlapped_time(buckets, backward, k, link)
        found.append(("overlapped_time", [n, m, backward, k, a, b], time))
        for stage in range(4):
            found.append(("model_state_bytes", [n, k, stage], model_state_bytes(n, k, stage)))
        found.append(("bubble_fraction", [k, m, 2], bubble_fraction(k, m, 2)))
    return found


@pytest.mark.skipif(not BROWSER, reason="needs chromium")
def test_the_page_calculates_what_python_does(tmp_path: Path) -> None:
    asked = calls()
    question = quote(json.dumps([[name, given] for name, given, _ in asked]))
    page = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}",
         "--dump-dom", f"{PAGE.as_uri()}#{question}"],
        capture_output=True, text=True, timeout=300, check=True,
    ).stdout  # fmt: skip
    (answers,) = re.findall(r'<pre id="answers"[^>]*>(.*?)</pre>', page, re.DOTALL)
    answered = json.loads(html.unescape(answers))
    for (name, given, expected), found in zip(asked, answered, strict=True):
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-30), (name, given)
    assert page.count("<rect") > 10, "both figures are drawn"


def test_the_page_loads_nothing_from_elsewhere() -> None:
    assert not re.findall(r"(?:src|href)=[\"'](?!#)", PAGE.read_text())
