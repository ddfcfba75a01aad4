"""Student code tries from inside what it may not do; and nothing survives it."""

import compileall
import os
import shutil
import socket
import sys
import tempfile
import textwrap
import uuid
from pathlib import Path

import pytest

from autograder.errors import SandboxUnavailable
from autograder.examination.submission import Submission
from autograder.sandbox import user
from autograder.sandbox.bubblewrap import HardLimits, SandboxedProcess
from autograder.sandbox.memory import MemoryGroup, descendants
from autograder.sandbox.mounts import python_mounts
from autograder.sandbox.sandbox import Sandbox
from tests.helpers import ROOT


def run(place: Sandbox, code: str, *arguments: str) -> str:
    """Run a cell of a submission, and return what it printed; fail unless it ended well."""
    prelude = f"import sys\nsys.argv[1:] = {arguments!r}\n"
    with Submission(place) as submission:
        outcome = submission.run_cell(prelude + textwrap.dedent(code))
    assert not outcome.error, f"{outcome.error}\n{outcome.trace}"
    return outcome.stdout


REFUSED = """
    import errno, os, socket, sys
    def refused(action, *arguments):
        try:
            result = action(*arguments)
        except (OSError, MemoryError, ValueError) as error:
            return getattr(error, "errno", type(error))
        raise SystemExit(f"{action}{arguments} gave {result}")
    """


def test_there_is_no_network_but_its_own_loopback(place: Sandbox) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as unix_socket,
    ):
        name = uuid.uuid4().hex
        unix_socket.bind(f"\0{name}")
        unix_socket.listen()
        run(
            place,
            f"""{REFUSED}
    out = socket.socket()
    assert refused(out.connect, ("1.1.1.1", 53)) == errno.ENETUNREACH
    assert refused(out.connect, ("127.0.0.1", int(sys.argv[1]))) == errno.ECONNREFUSED
    refused(socket.getaddrinfo, "example.org", 80)
    refused(socket.socket(socket.AF_UNIX).connect, "\\0" + sys.argv[2])
    with socket.create_server(("127.0.0.1", 0)) as mine:
        socket.create_connection(mine.getsockname(), 5).close()
    assert socket.gethostbyname(socket.gethostname()) == "127.0.0.1"
            """,
            str(server.getsockname()[1]),
            name,
        )


def test_only_what_was_mounted_is_visible(place: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("42")
    needed = [ROOT / "course_lib", *(m.target for m in python_mounts())]
    home = Path.home()
    at_home = home.iterdir() if home.is_dir() and not home.is_relative_to("/tmp") else ()
    private = [
        entry
        for entry in (*ROOT.iterdir(), *at_home)
        if not any(Path(path).is_relative_to(entry) for path in needed)
    ]
    assert ROOT / "tests" in private
    paths = [*private, tmp_path, "/etc/shadow", "/var", "/run", "/boot", "/etc/resolv.conf"]
    code = "import os, sys; print([p for p in sys.argv[1:] if os.path.lexists(p)])"
    assert run(place, code, *map(str, paths)) == "[]\n"
    listed = run(place, "import os; print(*sorted({*os.listdir('/etc')} - {'alternatives'}))")
    assert listed == "group hosts ld.so.cache passwd\n"


def test_nothing_of_ours_is_there(place: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADER_TOKEN", "secret")
    output = run(
        place,
        """
        import getpass, os
        print([p for p in os.listdir("/proc") if p.isdigit()])
        files = [f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd")]
        files = {os.readlink(f).partition(":")[0] for f in files if os.path.lexists(f)}
        print(sorted(f for f in files if not f.startswith("/tmp/.ipython/")))
        print("GRADER_TOKEN" in os.environ, os.getcwd(), os.environ["HOME"], getpass.getuser())
        """,
    )
    assert output == "['1']\n['/dev/null', 'socket']\nFalse /tmp /tmp student\n"


FORBIDDEN = {
    "writing to the system and the packages": """
    for directory in ["/", "/usr", "/etc", "/dev", "/proc", "/sys", "/root", *sys.argv[1:]]:
        refused(os.mkdir, os.path.join(directory, "new"))
    refused(open, "/etc/passwd", "a")
    refused(open, "/proc/sys/kernel/hostname", "w")
    refused(open, sys.executable, "r+b")
    refused(os.chmod, sys.prefix, 0o777)
    refused(os.unlink, "/usr/bin/env")
    """,
    "becoming root in a namespace of one's own": """
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    new_user, new_mounts = 0x10000000, 0x00020000
    for flags in (new_user, new_user | new_mounts, new_mounts):
        assert libc.unshare(flags) == -1
        assert ctypes.get_errno() in (errno.EPERM, errno.ENOSPC)
    refused(os.chroot, "/tmp")
    refused(os.setuid, 0)
    """,
}


@pytest.mark.parametrize("code", FORBIDDEN.values(), ids=FORBIDDEN)
def test_nobody_changes_what_cells_share(place: Sandbox, code: str) -> None:
    run(place, REFUSED + code, *(str(m.target) for m in python_mounts()))


def mounted_below(directory: str) -> set[str]:
    """Return the entries of `directory` that exist because the course or its Python is below it."""
    targets = [Path(mount.target) for mount in python_mounts()]
    return {t.relative_to(directory).parts[0] for t in targets if t.is_relative_to(directory)}


def test_files_memory_processes_and_descriptors_are_limited_for_good() -> None:
    limits = HardLimits(tmp=2**20, shm=2**20, file_size=2**21, open_files=64, processes=30)
    with Sandbox(limits=limits) as place:
        forked = run(
            place,
            f"""{REFUSED}
    import resource
    for folder in ("/tmp", "/dev/shm"):
        assert {{*os.listdir(folder)}} <= {{*sys.argv[1:]}}, os.listdir(folder)
        os.chdir(folder)
        open("small", "wb").write(bytes(2**19))
        assert refused(open("large", "wb").write, bytes(2**20)) == errno.ENOSPC
        os.unlink("small"), os.unlink("large")
    assert refused(open("huge", "wb").write, bytes(2**22)) in (errno.EFBIG, errno.ENOSPC)
    assert refused(lambda: [os.dup(0) for _ in range(100)]) == errno.EMFILE
    assert refused(bytearray, 9 * 2**30) is MemoryError
    for limit in (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE):
        soft, hard = resource.getrlimit(limit)
        assert soft == hard
        assert refused(resource.setrlimit, limit, (hard + 1, hard + 1)) is ValueError
    children = 0
    try:
        while True:
            if os.fork() == 0:
                os.execv("/bin/sleep", ["/bin/sleep", "1000"])
            children += 1
    except OSError:
        print(children)
            """,
            *mounted_below("/tmp"),
            *mounted_below("/dev/shm"),
            ".ipython",
        )
        assert 20 < int(forked) <= 30
        assert not sleeping()


HOLDS = {
    "files": """
for path in ("/tmp/a", "/dev/shm/a"):
    with open(path, "wb") as file:
        for _ in range(60): file.write(bytes(2**20))
""",
    "sockets": """
import socket
kept = [s for _ in range(400) for s in socket.socketpair()]
for s in kept:
    s.setblocking(False)
    try:
        while True: s.send(bytes(2**16))
    except BlockingIOError: pass
""",
    "page tables": """
import mmap, os
for _ in range(20):
    if os.fork() == 0:
        m = mmap.mmap(-1, 7 * 2**30, flags=0x4022)  # MAP_NORESERVE; its pages stay unwritten
        sum(m[at] for at in range(0, 7 * 2**30, 2**21)), time.sleep(99)
""",
}


def test_memory_that_no_process_shows_is_limited_without_a_control_group(monkeypatch):
    monkeypatch.setattr(MemoryGroup, "make", lambda *_: None)
    mapped = "import numpy\nx = numpy.memmap('/tmp/a', mode='w+', shape=50 << 20)\nx[:] = 1\n"
    ends = {}
    with Sandbox(limits=HardLimits(memory=80 * 2**20)) as place:
        place.make_ready()
        for name, code in {**HOLDS, "honest": mapped}.items():
            with Submission(place) as submission:
                pause = "time.sleep(2)" if name == "honest" else "time.sleep(25)"
                error = submission.run_cell(f"import time\n{code}{pause}").error
                ends[name] = error.partition(" took more than ")[2]
    assert ends == {**dict.fromkeys(HOLDS, "0.078125 GiB of memory"), "honest": ""}


def sleeping() -> bool:
    """Return whether a process below this one sleeps, as the daemon does."""
    lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in descendants(os.getpid())]
    return any(b"sleep 1000" in line.replace(b"\0", b" ") for line in lines)


def test_a_daemon_does_not_survive(place: Sandbox) -> None:
    with Submission(place) as submission:
        daemon = "import subprocess; subprocess.run(['setsid', 'sh', '-c', 'sleep 1000 & exit'])"
        assert not submission.run_cell(daemon).error
        assert sleeping()
    assert not sleeping()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the ``course_lib`` of a repository, which sandboxes show."""
    package = tmp_path / "a repository" / "course_lib"
    for path in ("__init__", "answer", "other", "deep/__init__", "deep/answer", "deep/other"):
        file = package / f"{path}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"value = 'the source of {path}'\n")
    (package.parent / "assignments").mkdir()
    compileall.compile_dir(package, quiet=1)
    shutil.copy(next(package.glob("__pycache__/answer.*")), package / "answer.pyc")
    monkeypatch.setattr("autograder.sandbox.mounts.course_package", lambda: package)
    return package


LOOKS_FOR_COPIES = """
import importlib, pathlib, sys
sys.path.insert(0, sys.argv[1])
for name in ("answer", "other", "deep", "deep.answer", "deep.other"):
    try:
        importlib.import_module(f"course_lib.{name}")
    except ImportError as error:
        print(name, error.name)
masked = "/".join(sys.argv[2].split("."))
for path in pathlib.Path(sys.argv[1]).rglob("*"):
    if path.is_file() and f"the source of {masked[11:]}".encode() in path.read_bytes():
        print(path)
print(sorted(p.name for p in pathlib.Path(sys.argv[1]).iterdir()))
"""


@pytest.mark.parametrize(
    ("masked", "hidden"),
    [
        ("course_lib.answer", ["answer"]),
        ("course_lib.deep.answer", ["deep.answer"]),
        ("course_lib.deep", ["deep", "deep.answer", "deep.other"]),
    ],
)
def test_no_copy_of_a_masked_module_is_left(masked, hidden, package):
    command = [sys.executable, "-I", "-c", LOOKS_FOR_COPIES, str(package.parent), masked]
    with tempfile.TemporaryFile() as log:
        with SandboxedProcess(command, mounts=python_mounts([masked]), log=log) as process:
            process.wait(300)
        log.seek(0)
        printed = log.read().decode()
    refused = [f"{name} {masked}" for name in hidden]
    assert printed.splitlines() == [*refused, "['course_lib']"]


@pytest.mark.parametrize(
    "name", ["course_lib.no_such", "course_lib", "os", "autograder.sandbox.bubblewrap"]
)
def test_a_module_that_does_not_exist_cannot_be_masked(name: str) -> None:
    with pytest.raises(ValueError, match="no such module"):
        python_mounts(masked=[name])


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user has one uid only")
def test_uids_are_freed_and_run_out_with_a_message(place, monkeypatch):
    monkeypatch.setattr(user, "UIDS", range(60706 + 400, 60706 + 402))
    for _ in range(3):
        with Submission(place) as first, Submission(place) as second:
            uids = {s.run_cell("import os; print(os.getuid())").stdout for s in (first, second)}
            assert uids == {f"{uid}\n" for uid in user.UIDS}
            with (
                pytest.raises(SandboxUnavailable, match="2 student processes run"),
                Submission(place) as third,
            ):
                third.run_cell("1")
