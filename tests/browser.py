"""A real browser for tests: headless Chromium, driven through a pipe; nothing to install beside it.

    with Browser() as browser:
        page = browser.open(path)
        page.click("#next")
        page.evaluate("document.title")

The protocol is Chromium's own (JSON, one message after another, each ended by a zero byte).
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
OPTIONS = (
    "--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--mute-audio",
    "--hide-scrollbars", "--window-size=1440,1000", "--disable-background-timer-throttling",
    "--disable-backgrounding-occluded-windows", "--disable-renderer-backgrounding",
    "--allow-pre-commit-input",  # else keys and clicks before the first frame are dropped
)  # fmt: skip
PATIENCE = 40.0  # seconds for one answer


def chromium_path() -> str | None:
    """Where a browser is: HEADWISE_BROWSER, or the first of the usual names."""
    named = os.environ.get("HEADWISE_BROWSER")
    return named or next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One process of Chromium, with a profile that is thrown away."""

    def __enter__(self) -> Browser:
        path = chromium_path()
        assert path is not None, "no browser"
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        ends = *os.pipe(), *os.pipe()
        to_read, self._write, self._read, to_write = (
            fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends
        )
        as_root = ["--no-sandbox"] if os.geteuid() == 0 else []
        command = [path, *OPTIONS, *as_root, f"--user-data-dir={self._profile.name}", "about:blank"]
        quiet = [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_WRONLY, 0) for stream in (1, 2)]
        pipes = [
            (os.POSIX_SPAWN_DUP2, to_read, 3),
            (os.POSIX_SPAWN_DUP2, to_write, 4),
        ]  # where Chromium looks
        self._process = os.posix_spawn(
            path, command, dict(os.environ), file_actions=[*quiet, *pipes], setpgroup=0
        )
        for end in (*ends, to_read, to_write):
            os.close(end)
        os.set_blocking(self._read, False)
        self._pieces, self._number = b"", 0
        self.events: list[dict[str, Any]] = []
        self.pages: list[Page] = []
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.killpg(self._process, signal.SIGKILL)  # a group of its own: its helpers, too
        os.waitpid(self._process, 0)
        os.close(self._write)
        os.close(self._read)
        self._profile.cleanup()

    def ask(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; what happens meanwhile goes to `events`."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            arrived = self._arrived()
            self.events += [event for event in arrived if "id" not in event]
            for answer in arrived:
                if answer.get("id") == self._number:
                    assert "error" not in answer, f"{method}: {answer['error']}"
                    return answer["result"]
        raise TimeoutError(f"{method} was not answered")

    def _arrived(self) -> list[dict[str, Any]]:
        try:
            self._pieces += os.read(self._read, 1 << 20)
        except BlockingIOError:
            time.sleep(0.002)
        *whole, self._pieces = self._pieces.split(b"\0")
        return [json.loads(event) for event in whole]

    def open(
        self,
        path: Path | str,
        *,
        fragment: str = "",
        dark: bool = False,
        size: tuple[int, int] = (1440, 1000),
    ) -> Page:
        """A file, with the network off, or a server's address; waits until it has loaded."""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session, target)
        self.pages.append(page)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.ask(f"{domain}.enable")
        if isinstance(path, Path):
            off = {"latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
            page.ask("Network.emulateNetworkConditions", offline=True, **off)
        page.ask("Emulation.setFocusEmulationEnabled", enabled=True)
        page.resize(*size)
        page.dark(dark)
        url = path.as_uri() if isinstance(path, Path) else path
        page.ask("Page.navigate", url=url + fragment)
        end = time.monotonic() + PATIENCE
        while not any(event.get("method") == "Page.loadEventFired" for event in page.events):
            assert time.monotonic() < end, f"{path} was not loaded"
            page.evaluate("1")
        return page

    def inside(self, page: Page) -> Page:
        """The one frame of a page that is kept apart from it."""
        expected = {
            event["targetId"]
            for event in self.ask("Target.getTargets")["targetInfos"]
            if event["type"] == "iframe"
        }
        (target,) = expected
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        return Page(self, session, target)


class Page:
    """One tab."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self._browser, self._session, self._target = browser, session, target

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        answer = self._browser.ask(method, self._session, **parameters)
        if method.startswith("Input.") and parameters.get("type") not in ("mousePressed", "keyDown"):
            self.settle()
        return answer

    def settle(self) -> None:
        """Wait for what a key or a click leads to: panels out of sight draw a frame or two later."""
        self._browser.ask(
            "Runtime.evaluate",
            self._session,
            expression="Promise.race([new Promise(go => setTimeout(go, 1000)), new Promise(go =>"
            "requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(go))))])",
            awaitPromise=True,
        )

    @property
    def events(self) -> list[dict[str, Any]]:
        return [event for event in self._browser.events if event.get("sessionId") == self._session]

    @property
    def complaints(self) -> list[str]:
        """What the console shows: errors, warnings, exceptions, anything printed."""
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(event["params"])[:400] for event in self.events if event.get("method") in kinds]

    @property
    def requested(self) -> list[str]:
        """The address of everything that was asked for."""
        sent = [
            event["params"] for event in self.events if event.get("method") == "Network.requestWillBeSent"
        ]
        return [event["request"]["url"] for event in sent]

    def evaluate(self, source: str) -> Any:
        answer = self.ask("Runtime.evaluate", expression=source, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, truth: str, seconds: float = 20.0) -> Any:
        """Ask until the answer is true, and return it."""
        end = time.monotonic() + seconds
        while not (answer := self.evaluate(f"(x => x instanceof Node || x)({truth})")):
            assert time.monotonic() < end, f"never true: {truth}; {self.complaints}"
            time.sleep(0.02)
        return answer

    def close(self) -> None:
        """Close the tab and forget what happened in it."""
        self._browser.ask("Target.closeTarget", targetId=self._target)
        self._browser.events = [
            event for event in self._browser.events if event.get("sessionId") != self._session
        ]
        self._browser.pages.remove(self)

    def text(self, selector: str) -> str:
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).textContent")

    def texts(self, selector: str) -> list[str]:
        """Of all that the selector finds."""
        return self.evaluate(
            f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.textContent)"
        )

    def count(self, selector: str) -> int:
        return self.evaluate(f"document.querySelectorAll({json.dumps(selector)}).length")

    def state(self, name: str) -> str | None:
        """What the address says of it."""
        return self.evaluate(f"new URLSearchParams(location.hash.slice(1)).get({name!r})")

    def choose(self, menu: str, value: str) -> None:
        """An entry of a menu."""
        self.evaluate(
            f"(() => {{ const menu = document.querySelector({menu!r}); menu.value = {value!r};"
            "menu.dispatchEvent(new Event('change', {bubbles: true})); })()"
        )
        self.settle()

    def click(self, selector: str, dx: float | None = None, dy: float | None = None) -> None:
        """With the mouse, in the middle of what is there, or dx, dy from its corner."""
        box = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); "
            "e.scrollIntoView({block: 'center', inline: 'center'}); "
            "const b = e.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]; })()"
        )
        x = box[0] + (box[2] / 2 if dx is None else dx)
        y = box[1] + (box[3] / 2 if dy is None else dy)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def resize(self, width: int, height: int, scale: float = 1) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": scale}
        self.ask("Emulation.setDeviceMetricsOverride", mobile=False, **size)

    def dark(self, on: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if on else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path, whole: bool = False) -> None:
        held = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(held["data"]))
