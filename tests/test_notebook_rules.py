"""Each rule of notebook_rules.py can fail, and a notebook that keeps all rules passes."""

from collections.abc import Callable
from pathlib import Path

import pytest
from nbformat import NotebookNode, v4

from tests.helpers.notebook_rules import (
    ASSIGNMENT,
    KERNEL,
    LECTURE,
    RELEASED,
    Rule,
    problems,
    without_code,
)

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5C"
ALT = "The loss falls from 2.3 to 0.2 & stays."
FIGURE = {
    "text/html": f'<img alt="{ALT.replace("&", "&amp;")}" src="data:image/png;base64,{PNG}">',
    "image/png": PNG,
    "text/plain": ALT,
}


def lecture() -> NotebookNode:
    """Return a lecture that breaks no rule, though it comes close to several."""
    cells = [
        v4.new_markdown_cell(
            "# What does B cost?\n\nSee [sgd](sgd.py), `![](x)` and [1](#goal) "
            "or [less](other.ipynb#One,-two)."
        ),
        v4.new_markdown_cell("## Goal\n```python\n# no heading\n```\n![A ring](ring.png)"),
        v4.new_code_cell("1 / 0", execution_count=1, metadata={"tags": ["raises-exception"]}),
        v4.new_code_cell("show(fig)", execution_count=2),
        v4.new_code_cell("%pip install torch", metadata={"tags": ["skip-execution"]}),
        v4.new_code_cell("print(a)", execution_count=3),
        v4.new_code_cell(""),
    ]
    cells[2].outputs = [v4.new_output("error", ename="ZeroDivisionError", evalue="", traceback=[])]
    cells[3].outputs = [v4.new_output("display_data", data=FIGURE)]
    text = "2(K-1)/K/2 messages, C/K/2, ./a/b, ~/a/b, https://pytorch.org/docs/stable\n"
    cells[5].outputs = [v4.new_output("stream", text=text)]
    return v4.new_notebook(cells=cells, metadata={"kernelspec": dict(KERNEL)})


def assignment() -> NotebookNode:
    """Return an assignment that breaks no rule."""
    grading = {"grade_id": "shard", "schema_version": 3, "grade": True, "points": 2}
    cells = [
        v4.new_markdown_cell("# Shards"),
        v4.new_code_cell("check(shard)", metadata={"nbgrader": grading}),
        v4.new_code_cell("shard(7)", metadata={"tags": ["explore"]}),
    ]
    return v4.new_notebook(cells=cells, metadata={"kernelspec": dict(KERNEL)})


def judge(nb: NotebookNode, rules: list[Rule], folder: Path) -> list[str]:
    (folder / "sgd.py").touch()
    (folder / "ring.png").touch()
    other = v4.new_notebook(cells=[v4.new_markdown_cell("# Other\n\n## One, two")])
    (folder / "other.ipynb").write_text(v4.writes(other), encoding="utf-8")
    path = folder / "01_topic.ipynb"
    path.write_text(v4.writes(nb), encoding="utf-8")
    return problems(path, rules)


def test_good_notebooks_pass(tmp_path: Path) -> None:
    assert judge(lecture(), LECTURE, tmp_path) == []
    assert judge(assignment(), ASSIGNMENT, tmp_path) == []
    assert judge(assignment(), RELEASED, tmp_path) == []


def put(nb: NotebookNode, place: str, value: object) -> None:
    """Set ``put(nb, "cells.0.source", "x")``."""
    *path, last = (int(key) if key.isdigit() else key for key in place.split("."))
    for key in path:
        nb = nb[key]
    nb[last] = value


def output(text: str) -> list[NotebookNode]:
    return [v4.new_output("stream", text=text)]


def image(**data: str) -> list[NotebookNode]:
    bundle = {kind.replace("_", "/"): text for kind, text in data.items()}
    return [v4.new_output("display_data", data=bundle)]


BREACHES = [
    ("nbformat_minor", 4, "format_is_valid: format is 4.4"),
    ("cells.1.cell_type", "markup", "format_is_valid"),
    ("cells.1.id", "not allowed!", "format_is_valid"),
    ("metadata.kernelspec.name", "sgd-to-ddp", "kernel_is_the_stock_one"),
    ("metadata.kernelspec.display_name", "Python 3", "kernel_is_the_stock_one"),
    ("metadata.jupytext", {"formats": "ipynb,py"}, "kernel_is_the_stock_one: jupytext"),
    ("cells.0.source", "Welcome", "headings_form_an_outline: the first cell"),
    ("cells.0.source", "# One\n\n# Two", "headings_form_an_outline: the first cell"),
    ("cells.1.source", "# Another title", "headings_form_an_outline: the first cell"),
    ("cells.1.source", "### Too deep", "headings_form_an_outline: cell 1"),
    ("cells.0.source", "# T\n[x](missing.py)", "links_lead_somewhere: cell 0: missing.py"),
    ("cells.0.source", "# T\n<a href='missing.py'>x</a>", "links_lead_somewhere: cell 0"),
    ("cells.0.source", "# T\n[x](#gaol)", "links_lead_somewhere: cell 0: no heading"),
    ("cells.0.source", "# T\n[x](other.ipynb#Two)", "cell 0: other.ipynb#Two does not"),
    ("cells.0.source", "# T\n[x](none.ipynb#Two)", "cell 0: none.ipynb#Two does not"),
    ("cells.0.source", "# T\n![x](attachment:x.png)", "links_lead_somewhere: cell 0: attachment"),
    ("cells.1.source", "## Goal\n![](ring.png)", "images_are_described: cell 1"),
    ("cells.1.source", "## Goal\n<img src='ring.png'>", "images_are_described: cell 1"),
    ("cells.3.outputs", image(image_png=PNG, text_plain="<Figure>"), "a bare image"),
    ("cells.3.outputs", image(text_html="<img src='x'>"), "<img> without alternative text"),
    ("cells.3.outputs", image(**{**FIGURE, "text_plain": "<Figure>"}), "text/plain of an image"),
    ("cells.3.metadata.tags", ["slide"], "tags_are_known: cell 3"),
    ("cells.5.execution_count", 4, "was_run_once_from_the_top"),
    ("cells.5.execution_count", None, "was_run_once_from_the_top"),
    ("cells.2.metadata.tags", [], "errors_are_announced: cell 2: ZeroDivisionError"),
    ("cells.5.outputs", output("File /home/ada/course/x.py"), "absolute path /home/ada"),
    ("cells.5.outputs", output("\x1b[32m/tmp/ipykernel_7/1.py\x1b[0m"), "absolute path /tmp"),
    ("cells.5.outputs", output("file:///data/ada"), "absolute path file:///data/ada"),
    ("cells.5.outputs", output(r"C:\Users\ada"), "absolute path C:"),
    ("cells.5.outputs", image(text_html="<pre>/Users/ada/x</pre>"), "absolute path /Users/ada"),
    ("cells.2.outputs.0.traceback", ["at /opt/x/y.py"], "absolute path /opt/x"),
    ("cells.1.source", "## Long\n" + "x" * 1_000_000, "size"),
]


@pytest.mark.parametrize(("place", "value", "expected"), BREACHES, ids=range(len(BREACHES)))
def test_a_lecture_breaks_a_rule(place: str, value: object, expected: str, tmp_path: Path) -> None:
    nb = lecture()
    put(nb, place, value)
    found = judge(nb, LECTURE, tmp_path)
    assert any(expected in problem for problem in found), found


ASSIGNMENT_BREACHES: list[tuple[Callable[[NotebookNode], object], str]] = [
    (lambda nb: put(nb, "cells.1.execution_count", 1), "is_stripped: cell 1"),
    (lambda nb: put(nb, "cells.1.outputs", output("x")), "is_stripped: cell 1"),
    (lambda nb: nb.cells[1].metadata.pop("nbgrader"), "no cell gives points"),
    (lambda nb: nb.cells.append(nb.cells[1]), "grade_id 'shard' appears twice"),
    (lambda nb: nb.cells.append(nb.cells[1]), "format_is_valid: cell id"),
    (lambda nb: nb.cells[1].metadata.nbgrader.pop("grade_id"), "without a grade_id"),
    (lambda nb: put(nb, "cells.1.metadata.nbgrader.schema_version", 2), "schema_version"),
    (lambda nb: nb.cells[1].metadata.nbgrader.pop("points"), "graded, but without points"),
    (lambda nb: put(nb, "cells.2.metadata.editable", False), "explore_cells_are_free: cell 2"),
    (lambda nb: put(nb, "cells.2.metadata.nbgrader", {}), "explore_cells_are_free: cell 2"),
]


@pytest.mark.parametrize(("change", "expected"), ASSIGNMENT_BREACHES, ids=range(10))
def test_an_assignment_breaks_a_rule(
    change: Callable[[NotebookNode], object], expected: str, tmp_path: Path
) -> None:
    nb = assignment()
    change(nb)
    found = judge(nb, ASSIGNMENT, tmp_path)
    assert any(expected in problem for problem in found), found


@pytest.mark.parametrize("mark", ["BEGIN SOLUTION", "END MARK SCHEME", "BEGIN HIDDEN TESTS"])
def test_a_release_gives_something_away(mark: str, tmp_path: Path) -> None:
    nb = assignment()
    put(nb, "cells.2.source", f"x = 1\n### {mark}")
    assert judge(nb, ASSIGNMENT, tmp_path) == []
    (found,) = judge(nb, RELEASED, tmp_path)
    assert found.startswith("nothing_is_given_away: cell 2")


def test_an_attachment_that_is_there_is_no_broken_link(tmp_path: Path) -> None:
    nb = lecture()
    nb.cells[0].source += "\n![x](attachment:a%20b.png)"
    nb.cells[0].attachments = {"a b.png": {"image/png": PNG}}
    assert judge(nb, LECTURE, tmp_path) == []


def test_every_rule_is_seen_to_fail() -> None:
    seen = " ".join(expected for *_, expected in [*BREACHES, *ASSIGNMENT_BREACHES])
    seen += " nothing_is_given_away"  # by the test above
    by_message = {  # rules that the tables above name by what they say
        "images_are_described": "a bare image",
        "outputs_name_no_machine": "absolute path",
        "is_an_assignment": "no cell gives points",
    }
    for rule in {*LECTURE, *RELEASED}:
        assert by_message.get(rule.__name__, rule.__name__) in seen


def test_code_in_prose_is_no_prose() -> None:
    assert without_code("a `[x](y)` b\n```\n# c\n```\nd") == "a  b\n\nd"
