"""The calculator page beside the Python that it repeats, in a headless browser."""

import html
import json
import random
import re
import subprocess
from dataclasses import asdict
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
from course_lib.simulate import CLUSTERS, estimate
from course_lib.simulate.published import load
from tests.helpers import ROOT
from tests.helpers.browser import PROGRAM, needs_browser

PAGE = ROOT / "docs/calculator.html"
OF_A_NETWORK = {
    formula.__name__: formula
    for formula in (
        *(ring_reduce_scatter_time, ring_all_reduce_time, tree_all_reduce_time),
        *(central_all_reduce_time, halving_doubling_all_reduce_time, in_network_all_reduce_time),
    )
}


# A function of the page, its arguments, and what Python says.
Question = tuple[str, list[Any], Any]


def calls() -> list[Question]:
    rng, questions = random.Random(0), list[Question]()
    for k in (1, 2, 3, 4, 7, 8, 64):
        n, a, b = 10 ** rng.uniform(0, 10), 10 ** rng.uniform(-6, -2), 10 ** rng.uniform(7, 12)
        link = Link(a, b)
        questions.append(("message_time", [n, a, b], message_time(n, link)))
        questions += [(name, [n, k, a, b], f(n, k, link)) for name, f in OF_A_NETWORK.items()]
        m, backward = rng.randint(1, 40), 10 ** rng.uniform(-3, 1)
        buckets = [n / m] * m
        time = overlapped_time(buckets, backward, k, link)
        questions.append(("overlapped_time", [n, m, backward, k, a, b], time))
        for stage in range(4):
            questions.append(("model_state_bytes", [n, k, stage], model_state_bytes(n, k, stage)))
        questions.append(("bubble_fraction", [k, m, 2], bubble_fraction(k, m, 2)))
    return questions


def machine_of(cluster) -> dict[str, float]:
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


def transformer_steps() -> list[Question]:
    """Return every seventh published run as the page takes it, and what Python says of it."""
    questions: list[Question] = []
    for run in load()[::7]:
        cluster = CLUSTERS[run.cluster]
        step = estimate(run.model, cluster, run.layout)
        expected = step.causes._asdict() | {"seconds": step.seconds, "mfu": step.mfu}
        expected["state"] = step.memory.weights_and_state
        expected["activations"] = step.memory.activations
        questions.append(
            ("step", [asdict(run.model), machine_of(cluster), asdict(run.layout)], expected)
        )
    return questions


@needs_browser
def test_the_page_calculates_what_python_does(tmp_path) -> None:
    steps = transformer_steps()
    assert len({arguments[2]["zero"] for _, arguments, _ in steps}) == 4 and len(steps) > 20
    questions = [*calls(), *steps]
    asked = quote(json.dumps([question[:2] for question in questions]))
    page = subprocess.run(
        [PROGRAM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}",
         "--dump-dom", f"{PAGE.as_uri()}#{asked}"],
        capture_output=True, text=True, timeout=300, check=True,
    ).stdout  # fmt: skip
    (text,) = re.findall(r'<pre id="answers"[^>]*>(.*?)</pre>', page, re.DOTALL)
    answers = json.loads(html.unescape(text))
    for (name, arguments, expected), answer in zip(questions, answers, strict=True):
        if isinstance(expected, dict):  # the page returns more
            answer = {key: answer[key] for key in expected}
        assert answer == pytest.approx(expected, rel=1e-9, abs=1e-30), (name, arguments)
    assert page.count("<rect") > 10, "both figures are drawn"


def test_the_page_loads_nothing_from_elsewhere() -> None:
    assert not re.findall(r"(?:src|href)=[\"'](?!#)", PAGE.read_text())
