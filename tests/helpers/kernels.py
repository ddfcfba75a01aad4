"""A real Jupyter kernel for tests: run cells, interrupt them, kill it."""

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil
from jupyter_client.manager import KernelManager

PATIENCE = 300.0


@dataclass
class Outcome:
    """The outputs of one cell."""

    text: str = ""
    bundles: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""


class Kernel:
    """One kernel with its client."""

    def __init__(self, manager: KernelManager) -> None:
        self.manager = manager
        self.client = manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE)

    @property
    def pid(self) -> int:
        return int(self.manager.provisioner.pid)

    def start(self, code: str, watched: bool = False) -> str:
        """Start a cell, as a person does (`watched`) or a program; return the request's id."""
        return str(self.client.execute(code, allow_stdin=watched))

    def finish(self, request: str) -> Outcome:
        """Wait for the end of a cell and return its outputs."""
        outcome = Outcome()
        shown: dict[str, dict[str, Any]] = {}
        while True:
            message = self.client.get_iopub_msg(timeout=PATIENCE)
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                outcome.text += content["text"]
            elif kind in ("display_data", "execute_result"):
                outcome.bundles.append(content["data"])
                if name := content.get("transient", {}).get("display_id"):
                    shown[name] = content["data"]
            elif kind == "update_display_data":
                data = shown[content["transient"]["display_id"]]
                data.clear()
                data.update(content["data"])
            elif kind == "error":
                outcome.error = "\n".join(content["traceback"])
            elif kind == "status" and content["execution_state"] == "idle":
                return outcome

    def run(self, code: str) -> Outcome:
        """Run a cell and return its outputs."""
        return self.finish(self.start(code))

    def wait_for_text(self, request: str, text: str) -> None:
        """Wait until a running cell has printed `text`."""
        seen = ""
        while text not in seen:
            message = self.client.get_iopub_msg(timeout=PATIENCE)
            if message["parent_header"].get("msg_id") == request:
                seen += message["content"].get("text", "")


@contextmanager
def kernel(**options: Any):
    """Start a kernel; end it on leaving, if it still runs. `options` are `start_kernel`'s."""
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(**options)
    made = None
    try:
        made = Kernel(manager)
        yield made
    finally:
        if made is not None:
            made.client.stop_channels()
        if manager.is_alive():
            manager.shutdown_kernel(now=True)
        manager.cleanup_resources()


def alive(pid: int) -> bool:
    """Return whether a process runs; a dead one that its parent has yet to collect does not."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(pids: list[int], seconds: float = 60.0) -> list[int]:
    """Return those of `pids` that still run after `seconds`."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left
