"""The course in a browser: a real JupyterLab, with the clicks of students and instructors."""

import json
import sys

import nbformat
import pytest
from nbformat import v4

from course_lib.learner._desk import refresh
from course_lib.learner.lab import environment, style
from tests.helpers import ROOT
from tests.helpers.browser import Browser, jupyterlab, needs_browser
from tests.helpers.course_folders import needs_sources

pytestmark = [pytest.mark.large, pytest.mark.timeout(900), needs_browser]

NOTEBOOK = "window.jupyterapp.shell.currentWidget"
CODE = f"{NOTEBOOK}.content.widgets.filter(c => c.model.type === 'code')"


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("my desk") / "work"
    refresh(ROOT, folder)
    return folder


OPTIONS = (
    *("--no-browser", "--port=0", "--IdentityProvider.token=", "--allow-root"),
    "--LabApp.expose_app_in_browser=True",
)


@pytest.fixture(scope="module")
def lab(desk):
    """Start JupyterLab as `course lab` does; return its address."""
    command = [sys.executable, "-m", "jupyterlab", *OPTIONS, f"--ServerApp.root_dir={desk}"]
    command += style()
    with jupyterlab(command, desk, desk.parent, **environment()) as address:
        yield address


@pytest.fixture
def page(lab: str):
    with Browser() as browser:
        yield browser


def open_notebook(page: Browser, lab: str, path: str) -> None:
    page.open(f"{lab}lab/tree/{path}?reset")
    page.wait_for("window.jupyterapp !== undefined", 180)
    page.wait_for(
        f"{NOTEBOOK} && {NOTEBOOK}.sessionContext && {NOTEBOOK}.sessionContext.session"
        f" && {NOTEBOOK}.sessionContext.session.kernel"
        f" && {NOTEBOOK}.sessionContext.session.kernel.status === 'idle'",
        180,
    )


def test_sliders_move_a_figure_dark_and_light_without_a_kernel_and_opened_again(page, lab, desk):
    cell = v4.new_code_cell(
        "import matplotlib.pyplot as plt\nfrom course_lib.figures import explore\n"
        "def draw(K):\n    figure, axes = plt.subplots()\n    axes.bar(range(K), range(1, K + 1))\n"
        "    return figure\n"
        "explore(draw, lambda K: f'{K} ranks', K=[2, 4, 8], alt='Bars', play='K')"
    )
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    nbformat.write(v4.new_notebook(cells=[cell], metadata=kernel), desk / "sliders.ipynb")
    open_notebook(page, lab, "sliders.ipynb")
    page.run("void window.jupyterapp.commands.execute('notebook:run-all-cells')")
    root = "document.querySelector('.jp-OutputArea-output div.course-explore')"
    slider, told = f"{root}.querySelector('input')", f"{root}.querySelector('.words').textContent"
    page.wait_for(f"{root} && {root}.querySelector('svg') !== null")
    page.run(f"{NOTEBOOK}.context.save().then(() => true)")
    page.run(f"{NOTEBOOK}.sessionContext.shutdown().then(() => true)")
    page.run(f"{slider}.value = 2; {slider}.dispatchEvent(new Event('input'))")
    assert page.run(told) == "8 ranks"
    drawn = f"{root}.querySelector('.picture svg')"
    for theme, seen in (("Dark", "brightness(0.78)"), ("Light", "none")):
        change = f"'apputils:change-theme', {{theme: 'JupyterLab {theme}'}}"
        page.run(f"window.jupyterapp.commands.execute({change}).then(() => true)")
        page.wait_for(f"getComputedStyle({drawn}).filter === '{seen}'")
    open_notebook(page, lab, "sliders.ipynb")  # trusted, because it was run here
    page.wait_for(f"{root} && {root}.querySelector('svg') !== null")


@needs_sources
def test_a_check_is_red_and_then_green(page: Browser, lab: str) -> None:
    name = "02_data_parallel_sgd"
    source = nbformat.read(ROOT / f"instructor/{name}/{name}.ipynb", as_version=4)
    solutions = {
        cell.metadata.nbgrader.grade_id: cell.source
        for cell in source.cells
        if cell.cell_type == "code" and cell.metadata.get("nbgrader", {}).get("solution")
    }
    open_notebook(page, lab, f"assignments/{name}/{name}.ipynb")
    write = f"{CODE}.find(c => c.model.sharedModel.getSource().startsWith('def shard_bounds'))"
    check = f"{CODE}.find(c => c.model.sharedModel.getSource().includes('/shard_bounds'))"
    told = f"JSON.stringify({check}.model.outputs.toJSON())"

    def run(cell: str) -> None:
        page.run(f"{NOTEBOOK}.content.activeCellIndex = {NOTEBOOK}.content.widgets.indexOf({cell})")
        page.run("window.jupyterapp.commands.execute('notebook:run-cell')")

    for cell in (f"{CODE}[0]", write, check):
        run(cell)
    page.wait_for(f"{told}.includes('CheckFailed')", 240)
    assert "NotImplementedError" in page.run(told)
    page.run(f"{write}.model.sharedModel.setSource({json.dumps(solutions['write_shard_bounds'])})")
    for cell in (write, check):
        run(cell)
    page.wait_for(f"{told}.includes('5 of 5 cases passed')", 240)
    assert "CheckFailed" not in page.run(told)
