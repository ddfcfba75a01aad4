"""A class of two on a real JupyterHub, with the configuration that the instructor's guide shows.

All passes through the hub: students fetch, submit and read their feedback at the same time, and two
graders share the formgrader. Accounts and processes are those of a trial, which needs no root.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import nbformat
import pytest
import requests  # comes with JupyterLab's server
from nbgrader.api import Gradebook

from tests.helpers import ROOT
from tests.helpers.course_folders import SOURCES, copy_assignment, needs_sources

PROXY = Path(sys.executable).with_name("configurable-http-proxy")
NAME = "02_data_parallel_sgd"
WHICH = {"course_id": "sgd-to-ddp", "assignment_id": NAME}
PORT = 18100
HUB = f"http://127.0.0.1:{PORT}"
SERVICE = f"{HUB}/services/sgd-to-ddp"
TRIAL = ["--JupyterHub.spawner_class=simple", "--JupyterHub.authenticator_class=dummy"]

pytestmark = [
    pytest.mark.large,
    pytest.mark.timeout(1800),
    needs_sources,
    pytest.mark.skipif(
        find_spec("jupyterhub") is None or not PROXY.exists(),
        reason="there is no JupyterHub: pip install -e '.[hub]'",
    ),
    pytest.mark.skipif(os.geteuid() == 0, reason="Jupyter's servers do not start as root"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory):
    """A course, an exchange, homes, and a hub."""
    place = tmp_path_factory.mktemp("hub")
    course = place / "course"
    copy_assignment(NAME, course)
    shutil.copy(ROOT / "nbgrader_config.py", course)
    (place / "exchange").mkdir(mode=0o777)
    paths = [str(PROXY.parent), os.environ["PATH"]]
    environment = {
        **os.environ,
        "PATH": os.pathsep.join(paths),
        "PYTHONPATH": str(ROOT),
        "COURSE": str(course),
        "PORT": str(PORT),
        "EXCHANGE": str(place / "exchange"),
    }
    command = [sys.executable, "-m", "jupyterhub", *TRIAL]
    command += ["-f", str(ROOT / "docs" / "jupyterhub" / "jupyterhub_config.py")]
    command += [f"--SimpleLocalProcessSpawner.home_dir_template={place}/{{username}}"]
    with (place / "hub.log").open("wb") as log:
        hub = subprocess.Popen(command, cwd=place, env=environment, stdout=log, stderr=log)
    try:
        wait_for(lambda: "JupyterHub is now running" in (place / "hub.log").read_text(), hub)
        yield place
    finally:
        hub.send_signal(signal.SIGINT)  # it ends all servers and the proxy
        try:
            hub.wait(120)
        except subprocess.TimeoutExpired:
            hub.kill()
            hub.wait()


def wait_for(is_so, hub: subprocess.Popen[bytes] | None = None) -> None:
    deadline = time.monotonic() + 600
    while not is_so():
        assert time.monotonic() < deadline and (hub is None or hub.poll() is None)
        time.sleep(0.5)


class Person:
    """Somebody who logged in with the hub's form; their requests carry their token."""

    def __init__(self, name: str) -> None:
        self.name = name
        session = requests.Session()
        session.get(f"{HUB}/hub/login", timeout=300)
        form = {"username": name, "password": "any", "_xsrf": session.cookies["_xsrf"]}
        session.post(f"{HUB}/hub/login", data=form, allow_redirects=False, timeout=300)
        login = {"auth": {"username": name, "password": "any"}}
        response = requests.post(f"{HUB}/hub/api/users/{name}/tokens", json=login, timeout=300)
        response.raise_for_status()
        self.headers = {"Authorization": f"token {response.json()['token']}"}

    def ask(self, method: str, url: str, **options):
        answer = requests.request(method, url, headers=self.headers, timeout=600, **options)
        assert answer.ok, f"{method} {url}: {answer.status_code} {answer.text[:2000]}"
        return answer.json() if answer.content else None

    def status(self, url: str) -> int:
        return requests.get(url, headers=self.headers, timeout=600).status_code


class Student(Person):
    """With a server of their own."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.url = f"{HUB}/user/{name}"
        self.ask("POST", f"{HUB}/hub/api/users/{name}/server")
        wait_for(lambda: self.ask("GET", f"{HUB}/hub/api/users/{name}")["servers"][""]["ready"])

    def act(self, action: str):
        """Do what a button of the assignment list does."""
        response = self.ask("POST", f"{self.url}/assignments/{action}", data=WHICH)
        assert response["success"], response["value"]
        return response["value"]

    def fetch_and_submit(self, solved: bool):
        listed = self.ask("GET", f"{self.url}/assignments", params={"course_id": "sgd-to-ddp"})
        assert [entry["status"] for entry in listed["value"]] == ["released"]
        self.act("fetch")
        if solved:
            path = f"{self.url}/api/contents/{NAME}/{NAME}.ipynb"
            notebook = self.ask("GET", path)
            solve(notebook["content"]["cells"])
            self.ask("PUT", path, json=notebook)
        return self.act("submit")


def solve(cells) -> None:
    """Write our own solutions into a released notebook's cells."""
    ours = nbformat.read(SOURCES / NAME / f"{NAME}.ipynb", as_version=4)
    roles = [(cell, cell.metadata.get("nbgrader")) for cell in ours.cells]
    sources = {role.grade_id: cell.source for cell, role in roles if role}
    for cell in cells:
        role = cell["metadata"].get("nbgrader", {})
        if cell["cell_type"] == "code" and role.get("solution"):
            cell["source"] = sources[role["grade_id"]]


def autograder(place: Path, *arguments: str) -> str:
    """Run a command as the graders do, in a terminal of their server."""
    process = subprocess.run(
        [sys.executable, "-m", "autograder", *arguments],
        cwd=place / "course",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def test_a_class_fetches_submits_and_gets_its_feedback(place: Path) -> None:
    first, second = Person("instructor1"), Person("instructor2")
    api = f"{SERVICE}/formgrader/api/assignment/{NAME}"
    assert first.ask("POST", f"{api}/assign")["success"]
    assert second.ask("POST", f"{api}/release")["success"]
    with ThreadPoolExecutor(2) as at_once:
        ada, bob = at_once.map(Student, ["ada", "bob"])
        submitted = list(at_once.map(Student.fetch_and_submit, (ada, bob), (True, False)))
    for listed in submitted:  # nobody sees what another one has submitted
        assert sorted(entry["status"] for entry in listed) == ["fetched", "submitted"]

    assert ada.status(f"{SERVICE}/formgrader/api/grades") == 403
    assert ada.status(f"{bob.url}/api/contents") == 403
    assert first.status(f"{bob.url}/api/contents") == 403

    output = autograder(place, "collect", NAME, str(place / "exchange"), "--from", "exchange")
    assert "exchange: 2 taken" in output
    autograder(place, "grade", NAME)
    autograder(place, "feedback", NAME)
    assert first.ask("POST", f"{api}/release_feedback")["success"]
    with Gradebook(f"sqlite:///{place}/course/grading/gradebook.db") as gradebook:
        scores = {s.student_id: s.score for s in gradebook.assignment_submissions(NAME)}
    assert scores == {"ada": 12, "bob": 0}
    listed = second.ask("GET", f"{SERVICE}/formgrader/api/submissions/{NAME}")
    assert {entry["student"]: entry["score"] for entry in listed} == scores

    with ThreadPoolExecutor(2) as at_once:
        list(at_once.map(lambda student: student.act("fetch_feedback"), (ada, bob)))
    for student in (ada, bob):
        (page,) = (place / student.name / NAME / "feedback").glob(f"*/{NAME}.html")
        assert f"{NAME} (Score: {scores[student.name]} / 15.0)" in page.read_text()
