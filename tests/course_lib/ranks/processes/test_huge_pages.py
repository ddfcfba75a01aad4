"""The fork server's memory in huge pages: the same bytes, in fewer pages."""

import subprocess
import sys

import pytest

from course_lib.ranks.processes import fork_server

PROGRAM = """
import os, runpy
gathered = lambda: int(open("/proc/self/smaps_rollup").read().split("AnonHugePages:")[1].split()[0])
collapse = runpy.run_path({path!r})["collapse"]
pages = [bytearray(b"%08d" % i) * 512 for i in range(16384)]  # 64 MB, each small
before = gathered()
collapse()
assert all(page == bytearray(b"%08d" % i) * 512 for i, page in enumerate(pages))
print(gathered() - before)
collapse()  # again: nothing is left to do
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_memory_is_gathered_and_unchanged() -> None:
    program = PROGRAM.format(path=fork_server.__file__)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stderr == ""
    if int(done.stdout) == 0:
        pytest.skip("this kernel gathers no memory")
    assert int(done.stdout) > 32 << 10
