"""A headless Chromium, driven over its DevTools protocol, and JupyterLab for it to open."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
import websocket  # comes with JupyterLab's server

PROGRAM = next((p for n in ("chromium", "google-chrome") if (p := shutil.which(n))), "")
needs_browser = pytest.mark.skipif(not PROGRAM, reason="there is no chromium or google-chrome")


class Browser:
    """One page of a browser, with its own profile; a context manager."""

    def __init__(self) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True)
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        options += ["--remote-debugging-port=0", "--remote-allow-origins=*", "--no-first-run"]
        options += ["--disable-background-networking", "--disable-component-update"]
        options += ["--window-size=1280,900", "--disable-quic", "--disable-sync"]
        options += [f"--user-data-dir={self._profile.name}"]
        self._process = subprocess.Popen(
            [PROGRAM, *options, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._number = 0
        told = Path(self._profile.name, "DevToolsActivePort")
        self._until(lambda: told.is_file() and len(told.read_text().splitlines()) == 2, 90)
        port, path = told.read_text().splitlines()
        self._socket = websocket.create_connection(f"ws://127.0.0.1:{port}{path}", timeout=300)
        target = self._ask("Target.createTarget", {"url": "about:blank"})["targetId"]
        attach = {"targetId": target, "flatten": True}
        self._session = self._ask("Target.attachToTarget", attach)["sessionId"]

    def _until(self, is_so, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < deadline and self._process.poll() is None, "no browser"
            time.sleep(0.1)

    def _ask(self, method: str, parameters, session: str = ""):
        self._number += 1
        asked = {"id": self._number, "method": method, "params": parameters}
        self._socket.send(json.dumps(asked | ({"sessionId": session} if session else {})))
        while True:
            answer = json.loads(self._socket.recv())
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def narrow(self, width: int) -> None:
        """Be a phone of so many pixels from now on."""
        size = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": True}
        self._ask("Emulation.setDeviceMetricsOverride", size, self._session)

    def open(self, url: str) -> None:
        self._ask("Page.navigate", {"url": url}, self._session)

    def run(self, script: str):
        """Return the value of a JavaScript expression; a promise is waited for."""
        asked = {"expression": script, "awaitPromise": True, "returnByValue": True}
        answer = self._ask("Runtime.evaluate", asked, self._session)
        assert "exceptionDetails" not in answer, f"{script}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def wait_for(self, script: str, seconds: float = 120):
        """Return the value of an expression once it is true; a page that loads has no body."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                if value := self.run(script):
                    return value
                why = ""
            except AssertionError as error:
                why = f": {error}"
            assert time.monotonic() < deadline, f"not so after {seconds:g} s: {script}{why}"
            time.sleep(0.2)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._process.terminate()
        try:
            self._process.wait(300)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._profile.cleanup()


@contextlib.contextmanager
def jupyterlab(command: list[str], folder: Path, home: Path, **settings: str):
    """Run a command that becomes or starts JupyterLab, at home in `home`; return its address."""
    runtime = home / "runtime"
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "JUPYTER_RUNTIME_DIR": str(runtime), "HOME": str(home), **settings},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 180
        while not (found := list(runtime.glob("jpserver-*.json"))):
            assert time.monotonic() < deadline and process.poll() is None, "no JupyterLab"
            time.sleep(0.3)
        time.sleep(0.5)
        yield json.loads(found[0].read_text())["url"]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(300)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
