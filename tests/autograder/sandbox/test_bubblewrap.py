"""Student code tries from inside what it may not do; and nothing survives it."""

import compileall
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autograder.sandbox import binary, user
from autograder.sandbox.bubblewrap import HardLimits, Sandbox, SandboxUnavailable, probe
from autograder.sandbox.mounts import Mount, python_mounts
from tests.helpers import ROOT

AS_ROOT = os.geteuid() == 0


@pytest.fixture(autouse=True, scope="module")
def sandbox_works() -> None:
    try:
        probe()
    except SandboxUnavailable as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"no sandbox: {error}")
        pytest.skip(f"no sandbox: {error.reason}")


def run(code: str, *arguments: str, **options: object) -> str:
    """Run Python code in a sandbox and return what it printed; fail unless it ended well."""
    options.setdefault("mounts", python_mounts())
    command = [sys.executable, "-I", "-c", textwrap.dedent(code), *arguments]
    with tempfile.TemporaryFile() as log:
        with Sandbox(command, stderr=log, **options) as sandbox:  # type: ignore[arg-type]
            status = sandbox.wait(300)
        log.seek(0)
        output = log.read().decode()
    assert status == 0, output
    return output


REFUSED = """
    def refused(action, *arguments):
        try:
            result = action(*arguments)
        except OSError as error:
            return error.errno
        raise SystemExit(f"{action}{arguments} gave {result}")
    import os, socket, sys
    """


def test_there_is_no_network_but_its_own_loopback() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as named:
        name = uuid.uuid4().hex
        named.bind(f"\0{name}")
        named.listen()
        run(
            textwrap.dedent(REFUSED)
            + textwrap.dedent("""
            import errno
            out = socket.socket()
            assert refused(out.connect, ("1.1.1.1", 53)) == errno.ENETUNREACH
            assert refused(out.connect, ("127.0.0.1", int(sys.argv[1]))) == errno.ECONNREFUSED
            refused(socket.getaddrinfo, "example.org", 80)
            refused(socket.socket(socket.AF_UNIX).connect, "\\0" + sys.argv[2])
            with socket.create_server(("127.0.0.1", 0)) as mine:
                socket.create_connection(mine.getsockname(), 5).close()
            assert socket.gethostbyname(socket.gethostname()) == "127.0.0.1"
            """),
            str(server.getsockname()[1]),
            name,
        )


def test_only_what_was_mounted_is_visible(tmp_path: Path) -> None:
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
    seen = run(
        "import os, sys; print([p for p in sys.argv[1:] if os.path.lexists(p)])", *map(str, paths)
    )
    assert seen == "[]\n"
    assert run("import os; print(sorted(os.listdir('/etc')))") in (
        "['alternatives', 'group', 'hosts', 'ld.so.cache', 'passwd']\n",
        "['group', 'hosts', 'ld.so.cache', 'passwd']\n",
    )


def test_no_other_process_is_visible() -> None:
    assert (
        run("import os; print([p for p in os.listdir('/proc') if p.isdigit()])") == "['1', '2']\n"
    )


def test_the_system_and_the_packages_are_read_only() -> None:
    run(
        textwrap.dedent(REFUSED)
        + textwrap.dedent("""
        for directory in ["/", "/usr", "/etc", "/dev", "/proc", "/sys", "/root", *sys.argv[1:]]:
            refused(os.mkdir, os.path.join(directory, "new"))
        refused(open, "/etc/passwd", "a")
        refused(open, "/proc/sys/kernel/hostname", "w")
        refused(open, sys.executable, "r+b")
        refused(os.chmod, sys.prefix, 0o777)
        refused(os.unlink, "/usr/bin/env")
        """),
        *(str(m.target) for m in python_mounts()),
    )


def test_nobody_becomes_root_in_a_namespace_of_their_own() -> None:
    printed = run("""
        import ctypes, errno, os
        libc = ctypes.CDLL(None, use_errno=True)
        new_user, new_mounts = 0x10000000, 0x00020000
        for flags in (new_user, new_user | new_mounts, new_mounts):
            assert libc.unshare(flags) == -1
            print(ctypes.get_errno() in (errno.EPERM, errno.ENOSPC))
        try:
            os.chroot("/tmp")
        except PermissionError:
            print("refused")
        try:
            print(os.listdir("/proc/1/root") == os.listdir("/"))
        except PermissionError:
            print(True)
        """)
    assert printed.split() == ["True", "True", "True", "refused", "True"]


def test_nothing_of_our_environment_is_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADER_TOKEN", "secret")
    printed = run("import os; print(sorted(os.environ))", env={"LANG": "C.UTF-8", "MINE": "a b=c"})
    assert printed == "['HOME', 'LANG', 'MINE', 'PATH', 'PWD']\n"
    value = run("import os; print(os.environ['MINE'], os.environ['PWD'])", env={"MINE": "a b=c"})
    assert value == "a b=c /tmp\n"


def mounted_below(directory: str) -> set[str]:
    """Return the entries of `directory` that exist because the course or its Python is below it."""
    targets = [Path(mount.target) for mount in python_mounts()]
    return {t.relative_to(directory).parts[0] for t in targets if t.is_relative_to(directory)}


@pytest.mark.parametrize("directory", ["/tmp", "/dev/shm"])
def test_scratch_space_is_private_and_limited(directory: str, tmp_path: Path) -> None:
    run(
        """
        import errno, os, sys
        os.chdir(sys.argv[1])
        assert set(os.listdir()) <= set(sys.argv[2:])
        open("small", "wb").write(bytes(2**19))
        try:
            open("large", "wb").write(bytes(2**20))
        except OSError as error:
            assert error.errno == errno.ENOSPC
        else:
            raise SystemExit("there is no limit")
        """,
        directory,
        *mounted_below(directory),
        limits=HardLimits(tmp=2**20),
    )


def test_memory_files_and_descriptors_are_limited_for_good() -> None:
    run("import mmap; mmap.mmap(-1, 2**30)")  # is granted where there is no lower limit
    run(
        """
        import errno, os, resource
        try:
            bytearray(2**30)
        except MemoryError:
            pass
        else:
            raise SystemExit("there is no limit on memory")
        for action, expected in [
            (lambda: open("f", "wb").write(bytes(2**21)), errno.EFBIG),
            (lambda: [os.dup(0) for _ in range(100)], errno.EMFILE),
        ]:
            try:
                action()
            except OSError as error:
                assert error.errno == expected, error
            else:
                raise SystemExit("no limit")
        for limit in (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE):
            soft, hard = resource.getrlimit(limit)
            assert soft == hard
            try:
                resource.setrlimit(limit, (hard + 1, hard + 1))
            except ValueError:
                continue
            raise SystemExit("a limit was raised")
        """,
        limits=HardLimits(address_space=2**30, file_size=2**20, open_files=50),
    )


def processes_named(token: str) -> list[int]:
    """Return the live processes with ``token`` on their command line."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if token.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def is_set_up_process_1(pid: int) -> bool:
    """Tell whether it is process 1 of a sandbox that is bound to its parent's life.

    Bubblewrap's process 1 first starts the command, then asks to die with its parent, and then puts
    its filter in force. On a busy machine the command may run for long before that. If an examiner
    is killed in between, the command outlives it: it reads its socket until that is closed.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return False
    values = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    return values["NSpid"].split()[-1] == "1" and values["Seccomp"] == "2"


def eventually(condition: Callable[[], bool], seconds: float = 120) -> bool:
    deadline = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return met


def test_a_fork_bomb_stops_at_the_limit_and_is_cleared_away() -> None:
    token = uuid.uuid4().hex
    bomb = """
        import os
        while True:
            try:
                os.fork()
            except OSError:
                os.write(1, b".")
        """
    command = [sys.executable, "-I", "-c", textwrap.dedent(bomb), token]
    with (
        tempfile.TemporaryFile() as log,
        Sandbox(
            command, mounts=python_mounts(), limits=HardLimits(processes=30), stderr=log
        ) as sandbox,
    ):
        assert eventually(lambda: os.fstat(log.fileno()).st_size > 0)
        # bubblewrap's two, outside the limit where it is root, carry the token as well.
        assert 20 < len(processes_named(token)) <= 32
        assert subprocess.run(["true"]).returncode == 0
        sandbox.close()
    assert processes_named(token) == []


DAEMON = """
    import os, sys
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv("/bin/sh", ["/bin/sh", "-c", "sleep 1000; true", sys.argv[1][::-1]])
        os._exit(0)
    os.wait()
    """


@pytest.mark.parametrize("ends", [True, False], ids=["command ends", "command stays"])
def test_a_daemon_does_not_survive(ends: bool, tmp_path: Path) -> None:
    token = uuid.uuid4().hex
    code = textwrap.dedent(DAEMON) + (
        "import time; time.sleep(5)" if ends else "import time; time.sleep(1000)"
    )
    command = [sys.executable, "-I", "-c", code, token[::-1]]
    with Sandbox(command, mounts=python_mounts()) as sandbox:
        assert eventually(lambda: processes_named(token) != [])
        if ends:
            assert sandbox.wait(300) == 0
            # bubblewrap tells the status a moment before the kernel has ended the namespace.
            assert eventually(lambda: processes_named(token) == [])
    assert processes_named(token) == processes_named(token[::-1]) == []


@pytest.fixture
def helper() -> Iterator[Callable[[str, str], subprocess.Popen[bytes]]]:
    """Start a Python process that opens a sandbox; kill it afterwards if it still lives."""
    started: list[subprocess.Popen[bytes]] = []

    def start(code: str, token: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), token], env=environment
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_the_sandbox_dies_with_a_parent_that_is_killed(
    helper: Callable[[str, str], subprocess.Popen[bytes]],
) -> None:
    token = uuid.uuid4().hex
    parent = helper(
        f"""
        import sys, time
        from autograder.sandbox.mounts import python_mounts
        from autograder.sandbox.bubblewrap import Sandbox
        code = {textwrap.dedent(DAEMON)!r} + "import time; time.sleep(1000)"
        command = [sys.executable, "-I", "-c", code, sys.argv[1][::-1]]
        sandbox = Sandbox(command, mounts=python_mounts())
        time.sleep(1000)
        """,
        token,
    )
    assert eventually(lambda: processes_named(token) not in ([], [parent.pid]))
    assert eventually(lambda: any(map(is_set_up_process_1, processes_named(token[::-1]))))
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert eventually(lambda: processes_named(token) == processes_named(token[::-1]) == [])


def test_a_masked_module_is_not_available() -> None:
    printed = run(
        """
        import course_lib, course_lib.sgd, pathlib
        try:
            import course_lib.sharding
        except ImportError as error:
            print(error)
        package = pathlib.Path(course_lib.__file__).parent
        files = [p for p in package.rglob("*") if "sharding" in p.name]
        print(files == [package / "sharding.py"], len(files[0].read_text().splitlines()))
        """,
        mounts=python_mounts(masked=["course_lib.sharding"]),
    )
    told = "this assignment asks you to write course_lib.sharding, so it is not available"
    assert printed == f"{told} while grading\nTrue 1\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a repository whose ``course_lib`` Python would import."""
    package = tmp_path / "a repository" / "course_lib"
    for path in ("__init__", "answer", "other", "deep/__init__", "deep/answer", "deep/other"):
        file = package / f"{path}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"value = 'the source of {path}'\n")
    (package.parent / "assignments").mkdir()
    compileall.compile_dir(package, quiet=1)
    shutil.copy(next(package.glob("__pycache__/answer.*")), package / "answer.pyc")
    monkeypatch.syspath_prepend(package.parent)
    return package


@pytest.mark.parametrize(
    "masked", ["course_lib.answer", "course_lib.deep.answer", "course_lib.deep"]
)
def test_no_copy_of_a_masked_module_is_left(masked: str, package: Path) -> None:
    printed = run(
        """
        import importlib, pathlib, sys
        sys.path.insert(0, sys.argv[1])
        for name in ("answer", "other", "deep", "deep.answer", "deep.other"):
            name = f"course_lib.{name}"
            try:
                importlib.import_module(name)
            except ImportError as error:
                print(name, error.name)
        masked = "/".join(sys.argv[2].split("."))
        for path in pathlib.Path(sys.argv[1]).rglob("*"):
            if path.is_file() and f"the source of {masked[11:]}".encode() in path.read_bytes():
                print(path)
        print(sorted(p.name for p in pathlib.Path(sys.argv[1]).iterdir()))
        """,
        str(package.parent),
        masked,
        mounts=python_mounts([masked]),
    )
    hit = [
        n
        for n in ("deep", "deep.answer", "deep.other", "answer")
        if f"course_lib.{n}".startswith(masked)
    ]
    lines = sorted(f"course_lib.{name} {masked}" for name in hit)
    assert sorted(printed.splitlines()[:-1]) == lines
    assert printed.splitlines()[-1] == "['course_lib']"


@pytest.mark.parametrize(
    "name", ["course_lib.no_such", "course_lib", "os", "autograder.sandbox.bubblewrap"]
)
def test_a_module_that_does_not_exist_cannot_be_masked(name: str) -> None:
    with pytest.raises(ValueError, match="no such module"):
        python_mounts(masked=[name])


@pytest.mark.skipif(not AS_ROOT, reason="an ordinary user has one uid only")
def test_uids_are_freed_and_run_out_with_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user, "UIDS", range(60706 + 400, 60706 + 402))
    for _ in range(3):
        with Sandbox(["/bin/sleep", "9"]) as first, Sandbox(["/bin/sleep", "9"]) as second:
            assert {first.uid, second.uid} == set(user.UIDS)
            with pytest.raises(SandboxUnavailable, match="2 sandboxes are open"):
                Sandbox(["/bin/sleep", "9"])


def test_only_the_passed_descriptors_are_open() -> None:
    with tempfile.TemporaryFile() as log:
        command = ["/bin/sh", "-c", "ls /proc/self/fd | tr '\\n' ' '; readlink /proc/self/fd/0"]
        with Sandbox(command, mounts=[Mount("/x", text="x")], stderr=log) as sandbox:
            assert sandbox.wait(300) == 0
        log.seek(0)
        assert log.read() == b"0 1 2 3 /dev/null\n"  # 3 is the directory that ls reads


def test_without_bubblewrap_there_is_a_way_out_and_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(binary, "packaged", lambda: None)
    probe.cache_clear()
    with pytest.raises(SandboxUnavailable, match=r"'bwrap' is missing[^~]*apt-get install bubble"):
        probe()
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    with pytest.raises(SandboxUnavailable, match=r"No permissions to create[^~]*apparmor_restrict"):
        probe()
    monkeypatch.undo()
    probe()


@pytest.mark.skipif(not AS_ROOT, reason="this is the ordinary user already")
@pytest.mark.large  # who runs them as one sees it anyway
def test_all_of_this_holds_for_an_ordinary_user(tmp_path: Path) -> None:
    """Run these tests again as another user, who may enter the paths above this Python."""
    needed = {ROOT, *(Path(p).resolve() for p in (sys.prefix, sys.base_prefix))}
    closed = {
        parent
        for path in needed
        for parent in path.parents
        if not parent.stat().st_mode & 0o001 and path.exists()
    }
    arguments = [probe().path, "--dev-bind", "/", "/"]
    for parent in sorted(closed):
        arguments += ["--perms", "0755", "--tmpfs", str(parent)]
    for path in sorted(needed):
        for parent in reversed(path.parents[:-1]):
            arguments += ["--perms", "0755", "--dir", str(parent)]
        arguments += ["--ro-bind", str(path), str(path)]
    base = Path(tempfile.mkdtemp(prefix="sandbox-test-"))
    os.chown(base, 65534, 65534)
    other = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "--inh-caps=-all"]
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "HOME": str(base), "PYTHONDONTWRITEBYTECODE": "1", "CI": "true"}
    try:
        result = subprocess.run(
            [*arguments, "--", *other, "--", *tests, f"--basetemp={base / 'pytest'}"],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
        )
    finally:
        shutil.rmtree(base)
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout
