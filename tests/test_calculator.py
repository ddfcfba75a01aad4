"""The calculator page beside the Python that it repeats, in a headless browser."""

from __future__ import annotations

import html
import json
import random
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
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
from course_lib.simulate import CLUSTERS, Cluster, estimate
from course_lib.simulate.published import load

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


def page_asked(question: list[list[Any]], tmp_path: Path) -> str:
    """Return the page after a browser has opened it with a question."""
    return subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}",
         "--dump-dom", f"{PAGE.as_uri()}#{quote(json.dumps(question))}"],
        capture_output=True, text=True, timeout=300, check=True,
    ).stdout  # fmt: skip


def answers_in(page: str) -> list[Any]:
    (answers,) = re.findall(r'<pre id="answers"[^>]*>(.*?)</pre>', page, re.DOTALL)
    return list(json.loads(html.unescape(answers)))


@pytest.mark.skipif(not BROWSER, reason="needs chromium")
def test_the_page_calculates_what_python_does(tmp_path: Path) -> None:
    asked = calls()
    page = page_asked([[name, given] for name, given, _ in asked], tmp_path)
    answered = answers_in(page)
    for (name, given, expected), found in zip(asked, answered, strict=True):
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-30), (name, given)
    assert page.count("<rect") > 10, "both figures are drawn"


def machine_of(cluster: Cluster) -> dict[str, float]:
    """Return a cluster as the page takes it."""
    reached = cluster.reached
    return {
        "flops": cluster.device.flops,
        "memory_bandwidth": cluster.device.memory_bandwidth,
        "memory_reached": reached.memory,
        **{name: getattr(reached, name) for name in ("matmul", "attention", "eager")},
        **{name: getattr(reached, name) for name in ("hidden", "tensor_hidden")},
        "node": cluster.node_size,
        **{"a1": cluster.link_inside.latency, "b1": cluster.link_inside.bandwidth},
        **{"a2": cluster.link_between.latency, "b2": cluster.link_between.bandwidth},
    }


def transformer_steps() -> list[tuple[str, list[Any], dict[str, float]]]:
    """Return every seventh published run as the page takes it, and what Python says of it."""
    asked: list[tuple[str, list[Any], dict[str, float]]] = []
    for run in load()[::7]:
        cluster = CLUSTERS[run.cluster]
        found = estimate(run.model, cluster, run.layout)
        expected = found.causes._asdict() | {"seconds": found.seconds, "mfu": found.mfu}
        expected["state"] = found.memory.weights_and_state
        expected["activations"] = found.memory.activations
        asked.append(
            ("step", [asdict(run.model), machine_of(cluster), asdict(run.layout)], expected)
        )
    return asked


@pytest.mark.skipif(not BROWSER, reason="needs chromium")
def test_a_transformers_step_in_the_page_is_that_of_the_simulator(tmp_path: Path) -> None:
    asked = transformer_steps()
    assert len({run[1][2]["zero"] for run in asked}) == 4 and len(asked) > 20
    page = page_asked([[name, given] for name, given, _ in asked], tmp_path)
    answered = answers_in(page)
    for (_, given, expected), found in zip(asked, answered, strict=True):
        assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-9), given


def test_the_page_loads_nothing_from_elsewhere() -> None:
    assert not re.findall(r"(?:src|href)=[\"'](?!#)", PAGE.read_text())
