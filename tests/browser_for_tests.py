"""A headless Chromium for tests of pages, driven by its DevTools protocol over two pipes: no port, no other package.

https://chromedevtools.github.io/devtools-protocol/ ; on ``--remote-debugging-pipe`` messages are JSON, each ended by a
zero byte, read from descriptor 3 and written to descriptor 4.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = next((p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None)
LIMIT = 60.0  # seconds for any answer; a first start on a busy machine takes some


class Page:
    """One tab. ``problems``: console errors and warnings, exceptions, blocked contents. ``requests``: all addresses."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back, self._rest, self._last = to, back, b"", 0
        self._session: str | None = None
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._seen: set[str] = set()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + LIMIT
        while True:
            answer = self._read(until, method)
            if answer.get("id") == self._last:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._note(answer)

    def open(self, path: Path, width: int = 1400, height: int = 900, dark: bool = False) -> None:
        """Show the file at ``path``, and wait until it is loaded."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self._seen.clear()
        self.call("Page.navigate", url=path.absolute().as_uri())
        until = time.monotonic() + LIMIT
        while "Page.loadEventFired" not in self._seen:
            self._note(self._read(until, "the page to load"))

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression (a promise is waited for)."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script: str) -> Any:
        """The value of a JavaScript expression as soon as it is true."""
        until = time.monotonic() + LIMIT
        while not (value := self.run(script)):
            assert time.monotonic() < until, f"not true within {LIMIT:g} s: {script}"
            time.sleep(0.05)
        return value

    def click(self, selector: str) -> None:
        """As a mouse does it: at the middle of the element, which must be the one that is there."""
        x, y = self.run(f"""(() => {{
            const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: "center"}});
            const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; }})()""")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def key(self, name: str) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name)

    def screenshot(self, path: Path, whole: bool = True) -> None:
        clip: dict[str, Any] = {}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}
        image = self.call("Page.captureScreenshot", captureBeyondViewport=whole, **clip)["data"]
        path.write_bytes(base64.b64decode(image))

    def _read(self, until: float, what: str) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._back], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"chromium: no answer within {LIMIT:g} s; waited for {what}"
            more = os.read(self._back, 1 << 20)
            assert more, f"chromium ended; waited for {what}"
            self._rest += more
        text, self._rest = self._rest.split(b"\0", 1)
        return json.loads(text)

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method", ""), event.get("params", {})
        self._seen.add(method)
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(" ".join(str(a.get("value", a.get("description"))) for a in params["args"]))
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A tab of a new browser, whose profile is the folder ``profile``; ended with the block."""
    assert CHROMIUM is not None
    (read_to, to), (back, write_back) = os.pipe(), os.pipe()
    # Out of the way of 3 and 4, which the shell fills next.
    theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (read_to, write_back)]
    command = [
        CHROMIUM, "--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--no-first-run",
        "--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update",
        "--force-color-profile=srgb", f"--user-data-dir={profile}", "about:blank",
    ]  # fmt: skip
    shell = ["bash", "-c", f'exec "$@" 3<&{theirs[0]} 4>&{theirs[1]}', "bash", *command]
    process = subprocess.Popen(shell, pass_fds=theirs, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for fd in (read_to, write_back, *theirs):
        os.close(fd)
    try:
        yield Page(to, back)
    finally:
        os.close(to)  # the browser ends when nobody can command it
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(back)
