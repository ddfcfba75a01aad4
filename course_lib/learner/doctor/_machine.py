"""Test the machine: cores, memory, disk, home, GPUs and network, and whether ranks start on it."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

from course_lib.installed import find_course
from course_lib.learner._course import default_desk
from course_lib.learner.doctor._finding import Finding

GIB = 2**30
ENOUGH_MEMORY = 2 * GIB
"""In bytes. Four ranks share PyTorch's own memory, and need about half of this."""
ENOUGH_DISK = GIB // 2
SECONDS = 60.0
"""The time that ranks may take to start and to add up a tensor."""


def memory() -> Finding:
    """Test how much memory processes can still get, and how many cores they may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    free = _available()
    if free is None:
        return Finding("memory", f"free memory is unknown; {cores} cores")
    told = f"{free / GIB:.1f} GiB available, {cores} cores"
    if free < ENOUGH_MEMORY:
        return Finding("memory", told, "close other programs: four ranks need one or two gibibytes")
    return Finding("memory", told)


def _available() -> int | None:
    """Return the bytes that processes can get from the machine and from this control group."""
    found = []
    for line in _text("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            found.append(1024 * int(line.split()[1]))
    limit, used = _text("/sys/fs/cgroup/memory.max"), _text("/sys/fs/cgroup/memory.current")
    if limit.strip().isdigit() and used.strip().isdigit():
        found.append(int(limit) - int(used))
    return min(found, default=None)


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def disk() -> Finding:
    """Test the disk space for copies and temporary files, and whether files can be made."""
    desk = default_desk(find_course())
    there = next(folder for folder in (desk, *desk.parents) if folder.exists())
    said = []
    for name, folder in (("your copies", there), ("temporary files", _temporary())):
        if folder is None:
            advice = "set TMPDIR to a folder that you may write to"
            return Finding("disk", "there is no writable folder for temporary files", advice)
        free = shutil.disk_usage(folder).free
        said.append(f"{free / GIB:.1f} GiB for {name}")
        if not os.access(folder, os.W_OK):
            advice = f"choose another folder for {name}: --desk"
            return Finding("disk", f"{folder} is read-only", advice)
        if free < ENOUGH_DISK:
            told = f"only {free / 2**20:.0f} MiB are free in {folder}, for {name}"
            return Finding("disk", told, f"free some space: half a gibibyte is enough for {name}")
    return Finding("disk", ", ".join(said))


def _temporary() -> Path | None:
    try:
        return Path(tempfile.gettempdir())
    except OSError:
        return None


def home() -> Finding:
    """Test whether JupyterLab and IPython can write their own files."""
    try:
        from jupyter_core.paths import jupyter_runtime_dir
    except ImportError:
        return Finding("home", "jupyter_core is missing", "see packages above")
    folder = Path(jupyter_runtime_dir())
    there = next(each for each in (folder, *folder.parents) if each.exists())
    if not os.access(there, os.W_OK):
        advice = "give JupyterLab another home folder: HOME=/a/folder/of/yours course lab"
        return Finding("home", f"{there} is not writable", advice)
    as_root = "; as root, start it with: make lab ARGS=--allow-root" if os.geteuid() == 0 else ""
    return Finding("home", f"JupyterLab can write to {folder}{as_root}")


def port() -> Finding:
    """Test whether JupyterLab's port is free; if not, JupyterLab takes the next one."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", 8888))
        except OSError:
            return Finding("port", "8888 is taken, so JupyterLab will take the next free one")
    return Finding("port", "8888 is free for JupyterLab")


def host_name() -> Finding:
    """Test whether this machine can resolve its own name; torchrun needs that, our ranks do not."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        advice = f"if you use torchrun without --standalone, add {name!r} to /etc/hosts"
        told = f"{name!r} has no address; the course's ranks do not need it"
        return Finding("host name", told, advice, "nothing")
    return Finding("host name", f"{name!r} has an address")


def loopback() -> Finding:
    """Test whether the network interface that CPU ranks use exists and works."""
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    there = [name for _, name in socket.if_nameindex()]
    names = chosen.split(",") if chosen else ["lo", "lo0"]
    found = [name for name in names if name in there]
    if found and (chosen or _reaches_itself()):
        return Finding("network", f"gloo communicates over {found[0]}")
    if found:
        return Finding("network", f"{found[0]} is down", f"bring it up: ip link set {found[0]} up")
    advice = "bring the loopback interface up: ip link set lo up"
    told = "there is no loopback interface"
    if chosen:
        advice = "unset GLOO_SOCKET_IFNAME"
        told = f"there is no interface {chosen}, which GLOO_SOCKET_IFNAME asks for"
    return Finding("network", f"{told}; the interfaces are {', '.join(there)}", advice)


def _reaches_itself() -> bool:
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=5),
        ):
            return True
    except OSError:
        return False


def gpus() -> Finding:
    """Test the GPUs, NCCL, and whether ranks can share a GPU."""
    try:
        import torch

        from course_lib.ranks.placement import nccl_version, share
    except ImportError:
        return Finding("GPUs", "PyTorch is missing", "see PyTorch above")
    count = torch.cuda.device_count()
    if not count:
        if any(Path("/dev").glob("nvidia[0-9]*")) and torch.version.cuda:
            advice = "update NVIDIA's driver, or correct CUDA_VISIBLE_DEVICES"
            return Finding("GPUs", "the machine has GPUs, but PyTorch sees none", advice, "nothing")
        return Finding("GPUs", "none, and none is needed: ranks run as processes on the CPU")
    names = ", ".join(sorted({torch.cuda.get_device_name(each) for each in range(count)}))
    return Finding("GPUs", f"{count}: {names}; {share(2 * count, count, nccl_version()).why}")


def simulated() -> Finding:
    """Start four simulated ranks."""
    return _try("simulated", "simulated ranks")


def real() -> Finding:
    """Start two processes that communicate over gloo."""
    return _try("cpu", "CPU ranks")


def _try(on: Literal["simulated", "cpu"], name: str) -> Finding:
    try:
        import torch

        from course_lib.ranks import Ranks
        from course_lib.ranks.explain.errors import RanksError
    except ImportError as error:
        return Finding(name, f"{error.name} is missing", "see packages above")
    size = 4 if on == "simulated" else 2
    start = time.monotonic()
    try:
        with Ranks(size, on=on, timeout=SECONDS) as ranks:
            sums = ranks.run(_sum)
    except (RanksError, OSError, RuntimeError) as error:
        told = str(error).strip().splitlines()[0]
        advice = "see memory, disk and network above; the notebooks need working ranks"
        return Finding(name, told, advice)
    if not all(torch.equal(each, torch.full((3,), float(size))) for each in sums):
        return Finding(name, f"the sum was {sums}", "install PyTorch again: its sums are wrong")
    return Finding(
        name, f"{size} ranks started and added up a tensor in {time.monotonic() - start:.1f} s"
    )


def _sum() -> Any:
    import torch
    import torch.distributed as dist

    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    return tensor
