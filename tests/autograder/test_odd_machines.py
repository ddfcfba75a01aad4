"""On odd machines a class is graded right, or refused in a sentence and nobody is graded.

Each machine is a row of `MACHINES`: how to make it, and what `autograder grade` must do on it.
Folders are moved by bind mounts in a mount namespace of the command's own, which needs root. The
tests change nothing of the machine that they run on.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shlex
import shutil
import sqlite3
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from autograder.commands.demo import ASSIGNMENT
from autograder.errors import SandboxUnavailable
from autograder.sandbox.bubblewrap import probe
from tests.helpers import ROOT
from tests.helpers.course_folders import needs_sources
from tests.helpers.whole_class import (
    booked,
    hand_in,
    small_class,
    unexpected,
)

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
AS_ROOT = os.geteuid() == 0
USER = "61999"
"""A user that no machine has, and that no sandbox takes."""
NAMES = ("right", "sum")
"""The class: one right submission, one wrong."""

pytestmark = [
    needs_sources,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox needs Linux"),
]


@pytest.fixture(scope="module")
def course(released_course: Path, copy_of: Callable[[Path], Path]) -> Path:
    """A course folder with few cases and two submissions."""
    try:
        probe()
    except SandboxUnavailable as error:
        pytest.skip(error.reason)
    root = copy_of(released_course)
    members = small_class(root)
    hand_in(root, {name: members[name] for name in NAMES})
    return root


@dataclass
class Machine:
    """The way to run a command on an odd machine.

    Attributes:
        course: the course folder: a copy of its own.
        scratch: an empty folder that others may enter.
        env: the command's environment.
        python: the Python to use.
        before: shell code that makes the machine, in a mount namespace of its own if it `mounts`.
        after: shell code to run there at the end.
        seen: the path of the course folder after that; default: `course`.
        wrapped: words in front of the command, such as ``setpriv``.
        arguments: further arguments of ``autograder grade``.
        cwd: the working directory of the command.
        prepare: called in the command's process before it runs.
    """

    course: Path
    scratch: Path
    env: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    python: str = sys.executable
    before: list[str] = field(default_factory=list)
    mounts: bool = False
    after: str = ""
    seen: Path | None = None
    wrapped: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    cwd: Path = ROOT
    prepare: Callable[[], None] | None = None
    home: str = ""
    base: str = sys.base_prefix
    leftovers: list[Path] = field(default_factory=list)

    def words(self) -> list[str]:
        command = [
            *(*self.wrapped, self.python, "-P", "-m", "autograder", "grade", ASSIGNMENT),
            *("--jobs", "1", "--course", str(self.course), *self.arguments),
        ]
        if not self.before:
            return command
        run = f"exec {shlex.join(command)}"
        if self.after:
            run = f"status=0; {shlex.join(command)} || status=$?; {self.after}; exit $status"
        script = "\n".join(["set -e", *self.before, run])
        return [*(["unshare", "-m"] if self.mounts else []), "sh", "-c", script]

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.words(),
            cwd=self.cwd,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            preexec_fn=self.prepare,
        )

    def show(self, source: str | Path, at: str | Path) -> None:
        """Show the file or folder `source` also at `at`."""
        self.mounts = True
        source, at = str(source), str(at)
        make = ["mkdir", "-p", at] if os.path.isdir(source) else ["touch", at]
        self.before.append(f"{shlex.join(make)}\n{shlex.join(['mount', '--bind', source, at])}")

    def move(self, folder: str) -> None:
        """Move the course's packages and a virtual environment below `folder`."""
        if not AS_ROOT:
            pytest.skip("only root can show folders at other places")
        self.leftovers.append(Path(folder))
        self.home = folder
        venv, base = Path(folder, "venv"), Path(self.base)
        packages = venv / "lib" / f"python{VERSION}" / "site-packages"
        (venv / "bin").mkdir(parents=True)
        (venv / "bin" / "python").symlink_to(base / "bin" / f"python{VERSION}")
        (venv / "pyvenv.cfg").write_text(f"home = {base / 'bin'}\n")
        self.show(sysconfig.get_path("purelib"), packages)
        self.show(ROOT / "course_lib", Path(folder, "clone", "course_lib"))
        self.show(ROOT / "autograder", Path(folder, "clone", "autograder"))
        self.python = str(venv / "bin" / "python")
        self.env["PYTHONPATH"] = str(Path(folder, "clone"))
        self.cwd = Path("/")

    def be_an_ordinary_user(self) -> None:
        """Run the command as a user who may not enter, say, /root."""
        if not AS_ROOT:
            return
        if not self.home:
            self.move(f"/home/odd-{os.getpid()}")
        if shut := _shut_to_others(Path(self.base)):
            held = self.scratch / "held"
            self.show(self.base, held)
            self.before += [
                shlex.join(["mount", "-t", "tmpfs", "-o", "mode=755", "none", str(shut)]),
                shlex.join(["mkdir", "-p", self.base]),
                shlex.join(["mount", "--bind", str(held), self.base]),
            ]
        self.before.append(shlex.join(["chown", "-R", f"{USER}:{USER}", str(self.course)]))
        self.wrapped += ["setpriv", "--reuid", USER, "--regid", USER, "--clear-groups"]
        self.env["HOME"] = "/nonexistent"


def _shut_to_others(path: Path) -> Path | None:
    """Return the first folder above `path` that others may not enter."""
    above = reversed(path.parents)
    return next((folder for folder in above if not folder.stat().st_mode & 0o001), None)


Make = Callable[[Machine], Any]
RIGHT = ""


def at(folder: str) -> Make:
    """Everything lies below `folder`, in a folder of this test."""
    return lambda m: m.move(f"{folder}/odd-{os.getpid()}")


def named(name: str) -> Make:
    """The course, its packages and its Python lie in folders of this name."""

    def make(m: Machine) -> None:
        m.course = m.course.rename(m.course.with_name(name))
        m.move(f"/var/tmp/odd-{os.getpid()}/{name}")
        m.leftovers.append(Path(m.home).parent)

    return make


def with_a_colon(m: Machine) -> None:
    """Python finds the clone because it was installed from there, not by PYTHONPATH."""
    m.move(f"/var/tmp/odd-{os.getpid()}:1")
    code = f"import sys\nsys.path.insert(0, {m.env['PYTHONPATH']!r})\n"
    (m.scratch / "sitecustomize.py").write_text(code)
    m.env["PYTHONPATH"] = str(m.scratch)


def environment(*values: tuple[str, str | None]) -> Make:
    def make(m: Machine) -> None:
        for name, value in values:
            m.env.pop(name, None)
            if value is not None:
                m.env[name] = value

    return make


def limited(**limits: int) -> Make:
    """Each of the command's processes has these limits."""

    def set_limits() -> None:
        for name, value in limits.items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{name.upper()}"), (value, value))

    return lambda m: setattr(m, "prepare", set_limits)


def ordinary_user(m: Machine) -> None:
    m.be_an_ordinary_user()


def both(*makes: Make) -> Make:
    def make(m: Machine) -> None:
        for each in makes:
            each(m)

    return make


def packages_read_only(m: Machine) -> None:
    m.move(f"/var/tmp/odd-{os.getpid()}")
    for package in ("course_lib", "autograder"):
        path = f"{m.home}/clone/{package}"
        m.before.append(shlex.join(["mount", "-o", "remount,bind,ro", path]))


def course_read_only(m: Machine) -> None:
    need_root()
    m.show(m.course, m.course)
    m.before.append(shlex.join(["mount", "-o", "remount,bind,ro", str(m.course)]))


def without_virtual_environment(m: Machine) -> None:
    """All packages lie in Python's own folder, as conda has it."""
    need_root()
    library = Path(sys.base_prefix, "lib", f"python{VERSION}", "site-packages")
    m.show(sysconfig.get_path("purelib"), library)
    m.python = f"{sys.base_prefix}/bin/python{VERSION}"


def unreadable(m: Machine) -> None:
    """Root has installed a package with umask 077."""
    m.move(f"/var/tmp/odd-{os.getpid()}")
    shutil.copytree(ROOT / "course_lib" / "ranks" / "costs", m.scratch / "costs")
    (m.scratch / "costs").chmod(0o700)
    m.show(m.scratch / "costs", f"{m.home}/clone/course_lib/ranks/costs")


def file_in(name: str, text: str) -> Make:
    """PYTHONPATH names a folder with this file in it."""

    def make(m: Machine) -> None:
        (m.scratch / name).write_text(text)
        m.env["PYTHONPATH"] = str(m.scratch)

    return make


def full_disk(m: Machine) -> None:
    """The course folder lies on a small disk without room."""
    need_root()
    disk = m.scratch / "disk"
    disk.mkdir()
    m.mounts = True
    m.before += [
        shlex.join(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(disk)]),
        shlex.join(["cp", "-r", f"{m.course}/.", str(disk)]),
        f"dd if=/dev/zero of={shlex.quote(str(disk / 'full'))} bs=4096 2>/dev/null || true",
    ]
    m.seen = m.scratch / "seen"
    m.after = shlex.join(["cp", "-r", str(disk), str(m.seen)])
    m.course = disk


def small_shared_memory(m: Machine) -> None:
    need_root()
    m.mounts = True
    m.before.append("mount -t tmpfs -o size=64k none /dev/shm")


FORBIDS = """
import ctypes, os, sys
asks, answers = os.pipe(), os.pipe()
if (child := os.fork()):
    os.read(asks[0], 1)  # it is in a user namespace, and gets all users of ours
    for kind in "ug":
        open(f"/proc/{child}/{kind}id_map", "w").write("0 0 65536")
    os.write(answers[1], b"x")
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
if ctypes.CDLL(None).unshare(0x10000000):
    sys.exit("no user namespace")
os.write(asks[1], b"x")
os.read(answers[0], 1)
os.setresuid(0, 0, 0)
open("/proc/sys/user/max_user_namespaces", "w").write("0")  # of those below this one
os.execvp(sys.argv[1], sys.argv[1:])
"""


def without_user_namespaces(m: Machine) -> None:
    """An ordinary user may make no user namespace, because the one around it allows none."""
    need_root()
    m.be_an_ordinary_user()
    m.wrapped = [m.python, "-S", "-c", FORBIDS, *m.wrapped]


def one_uid(m: Machine) -> None:
    need_root()
    m.wrapped = ["unshare", "--user", "--map-root-user"]


def need_root() -> None:
    if not AS_ROOT:
        pytest.skip("only root can make this machine")


JUMPS = """
import itertools, time
time.time = lambda now=time.time, jump=itertools.cycle([0, 86400, -86400, 1e9]): now() + next(jump)
"""

MACHINES: dict[str, tuple[Make, str]] = {
    # What is well together is tried together: each command takes half a minute.
    "below /tmp, small shared memory": (both(at("/tmp"), small_shared_memory), RIGHT),
    "an ordinary user, few processes": (both(ordinary_user, limited(nproc=300)), RIGHT),
    "packages read only, few open files": (both(packages_read_only, limited(nofile=64)), RIGHT),
    "no virtual environment, a clock that jumps": (
        both(without_virtual_environment, file_in("sitecustomize.py", JUMPS)),
        RIGHT,
    ),
    "a path with all kinds of letters": (named("a space, quo'te, 中文, line\nend"), RIGHT),
    "an environment with nothing in it": (
        environment(
            *(("TMPDIR", "/no/such/folder"), ("HOME", None), ("LANG", "C"), ("LC_ALL", "C")),
            *(("PYTHONUTF8", "0"), ("PYTHONCOERCECLOCALE", "0")),
        ),
        RIGHT,
    ),
    "the course folder is read only": (course_read_only, "no permission to write the gradebook"),
    "a folder that only root may read": (unreadable, "may not read these files"),
    "a path with '%'": (named("per%20cent"), "nbgrader cannot work in"),
    "a path with '*'": (named("*"), "nbgrader cannot work in"),
    "a path with ':'": (with_a_colon, "contains a ':'"),
    "a full disk": (full_disk, "No space left on device"),
    "no user namespaces": (without_user_namespaces, "user.max_user_namespaces"),
    "one user id": (one_uid, "in a user namespace without the uids"),
    "PYTHONHOME": (
        environment(("PYTHONHOME", "/no/such/folder")),
        "PYTHONHOME = '/no/such/folder'",
    ),
    "a torch.py": (file_in("torch.py", "answer = 42"), "hides the package torch"),
}


@pytest.fixture
def machine(course: Path) -> Iterator[Machine]:
    # Not in pytest's own folder: it shuts that to others whenever it is started.
    with tempfile.TemporaryDirectory(prefix="odd-machines-") as place:
        os.chmod(place, 0o755)
        scratch = Path(place, "scratch")
        scratch.mkdir()
        m = Machine(shutil.copytree(course, Path(place, "course"), symlinks=True), scratch)
        yield m
    for folder in m.leftovers:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.large
@pytest.mark.parametrize("name", MACHINES)
def test_grades_are_right_or_there_are_none(machine: Machine, name: str) -> None:
    make, expected = MACHINES[name]
    make(machine)
    process = machine.start()
    said, _ = process.communicate(timeout=300)
    seen = machine.seen or machine.course
    if expected == RIGHT:
        graded_right(seen, process.returncode, said)
    else:
        refused(seen, process.returncode, said, expected)


def graded_right(course: Path, status: int, said: str) -> None:
    assert status == 0, said
    members = {name: member for name, member in small_class(course).items() if name in NAMES}
    assert unexpected(members, booked(course)) == [], said


def refused(course: Path, status: int, said: str, words: str) -> None:
    assert status != 0 and words in said, said
    assert "Traceback" not in said, said
    assert not list(course.glob("grading/graded/*/*/*.json")), said
    with contextlib.closing(sqlite3.connect(course / "grading" / "gradebook.db")) as book:
        grades = "SELECT count(*) FROM grade WHERE auto_score IS NOT NULL"
        assert book.execute(grades).fetchone() == (0,), said


@pytest.mark.large
def test_two_graders_at_once(course: Path, machine: Machine) -> None:
    """Each has a course of its own, below /tmp; they share the machine's users and cores."""
    other = Machine(shutil.copytree(course, machine.scratch / "other"), machine.scratch)
    running = [(m, m.start()) for m in (machine, other)]
    for m, process in running:
        said, _ = process.communicate(timeout=300)
        graded_right(m.course, process.returncode, said)
