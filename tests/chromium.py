"""A headless Chromium, driven over the DevTools protocol: what a page shows, and what it complains about.

Without network, so that a page that needs any fails. Debian's package is ``chromium``.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp
import pytest

T = TypeVar("T")

_SECONDS = 120.0


def find_chromium() -> str | None:
    """Path of the program; None if there is none."""
    return next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )


def in_a_browser(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that needs Chromium: `make test-docs` runs it, where there is one."""
    missing = pytest.mark.skipif(find_chromium() is None, reason="there is no Chromium: apt-get install chromium")
    return pytest.mark.docs(missing(test))


@dataclass
class Page:
    """One open page."""

    _socket: aiohttp.ClientWebSocketResponse
    complaints: list[str] = field(default_factory=list)
    """What the console, the page's errors and its security policy said."""
    requests: list[str] = field(default_factory=list)
    """URLs that the page asked for."""
    _session: str = ""
    _numbers: Any = field(default_factory=lambda: itertools.count(1))

    async def open(self) -> None:
        target = await self.call("Target.createTarget", url="about:blank")
        self._session = (await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True))[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        number = next(self._numbers)
        session = {"sessionId": self._session} if self._session else {}
        await self._socket.send_json({"id": number, "method": method, "params": parameters, **session})
        while True:
            answer = await self._socket.receive_json(timeout=_SECONDS)
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._notice(answer)

    def _notice(self, event: dict[str, Any]) -> None:
        method, found = event.get("method"), event.get("params", {})
        if method == "Runtime.consoleAPICalled" and found["type"] in ("error", "warning", "assert"):
            self.complaints.append(" ".join(str(each.get("value", each.get("description"))) for each in found["args"]))
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(found["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.complaints.append(found["entry"]["text"])
        elif method == "Network.requestWillBeSent" and not found["request"]["url"].startswith("data:"):
            self.requests.append(found["request"]["url"])

    async def show(self, file: object, *, width: int, scripts: bool = True) -> None:
        """Load a file (an absolute path) and wait until the page has drawn its charts."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
        )
        await self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        await self.call("Page.navigate", url=f"file://{file}")
        ready = "document.readyState === 'complete'"
        if scripts:
            ready += " && (!window.Bokeh || (Bokeh.documents.length && Bokeh.documents.every(each => each.is_idle)))"
        await self.until(ready)

    async def _resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height}
        await self.call("Emulation.setDeviceMetricsOverride", **size, deviceScaleFactor=1, mobile=False)

    async def until(self, expression: str) -> None:
        """Wait until an expression is true."""
        for _ in range(int(_SECONDS * 20)):
            if await self.evaluate(expression):
                return
            await asyncio.sleep(0.05)
        raise TimeoutError(f"{expression} stays false; the page said {self.complaints}")

    async def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"]))
        return found["result"].get("value")

    async def document_text(self) -> str:
        """The page as markup, also where scripts are disabled."""
        root = await self.call("DOM.getDocument")
        return str((await self.call("DOM.getOuterHTML", nodeId=root["root"]["nodeId"]))["outerHTML"])

    async def point(self, x: float, y: float) -> None:
        """Move the mouse there."""
        await self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    async def screenshot(self, *, height: int | None = None) -> bytes:
        """A PNG of the page: of all of it, or of so many pixels from the top."""
        size = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
        # A window of that height: what lies beyond the window is painted less carefully.
        await self._resize(int(size["width"]), height or int(size["height"]))
        await asyncio.sleep(1)
        found = await self.call("Page.captureScreenshot")
        return base64.b64decode(found["data"])


def visit(work: Callable[[Page], Coroutine[Any, Any, T]]) -> T:
    """Run ``work`` with a page of a Chromium of its own.

    Raises:
        FileNotFoundError: there is no Chromium.
    """
    program = find_chromium()
    if program is None:
        raise FileNotFoundError("there is no Chromium. Remedy: apt-get install chromium")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
             "--force-color-profile=srgb", "--disable-background-networking", "--no-first-run",
             "--proxy-server=http://127.0.0.1:9", "--remote-debugging-port=0", f"--user-data-dir={profile}",
             "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            return asyncio.run(asyncio.wait_for(_drive(_address(process), work), 2 * _SECONDS))
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stderr is not None:
                process.stderr.close()


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        found = re.search(r"DevTools listening on (ws://\S+)", line)
        if found:
            return found[1]
    raise RuntimeError(f"Chromium did not start: {''.join(said)[-2000:]}")


async def _drive(address: str, work: Callable[[Page], Coroutine[Any, Any, T]]) -> T:
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(address, max_msg_size=0, proxy=None) as socket,
    ):
        page = Page(socket)
        await page.open()
        return await work(page)
