"""A page in a headless Chromium, driven through the DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import itertools
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from processes import running

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

OPTIONS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run", "--disable-dev-shm-usage",
    "--host-resolver-rules=MAP * ~NOTFOUND", "--remote-debugging-port=0",
]  # fmt: skip
SECONDS = 200


class Tab:
    """A tab, with what its page has asked for and which errors it has had."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._socket = socket
        self._numbers = itertools.count(1)
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        return await asyncio.wait_for(reply, SECONDS)

    async def listen(self) -> None:
        async for message in self._socket:
            content = message.json()
            if "id" in content:
                self._replies.pop(content["id"]).set_result(content)
            else:
                self._note(content["method"], content["params"])

    def _note(self, method: str, said: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(said["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(said["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and said["type"] in ("error", "warning"):
            self.errors.append(str(said["args"]))
        elif method == "Log.entryAdded":
            self.errors.append(said["entry"]["text"])

    async def open(
        self, url: str, *, width: int = 1400, height: int = 1000, is_dark: bool = False
    ) -> None:
        """Open a page and wait until its charts are drawn."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[scheme])
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        await self.send("Emulation.setDeviceMetricsOverride", **size)
        await self.send("Page.navigate", url="about:blank")
        await self.send("Page.navigate", url=url)
        await self.wait_for("document.body && document.body.dataset.drawn")

    async def wait_for(self, expression: str) -> None:
        deadline = time.monotonic() + SECONDS
        while not await self.evaluate(f"Boolean({expression})"):
            assert time.monotonic() < deadline, (expression, self.errors)
            await asyncio.sleep(0.05)

    async def evaluate(self, expression: str) -> Any:
        """Return the value of an expression; None if the page is left in this moment."""
        reply = await self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        if "error" in reply:
            return None
        assert "exceptionDetails" not in reply["result"], reply
        return reply["result"]["result"].get("value")

    async def screenshot(self, path: Path, *, is_whole: bool = True) -> None:
        reply = await self.send("Page.captureScreenshot", captureBeyondViewport=is_whole)
        path.write_bytes(base64.b64decode(reply["result"]["data"]))


@asynccontextmanager
async def open_tab(profile: Path) -> AsyncIterator[Tab]:
    """Start a Chromium with a new profile, and end all its processes afterwards."""
    assert CHROMIUM is not None
    options = [*OPTIONS, f"--user-data-dir={profile}"]
    with running([CHROMIUM, *options, "about:blank"], said=profile.with_suffix(".log")):
        port = await _port(profile / "DevToolsActivePort")
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as reply:
                (target, *_) = [one for one in await reply.json() if one["type"] == "page"]
            address = target["webSocketDebuggerUrl"]
            async with session.ws_connect(address, max_msg_size=0) as socket:
                tab = Tab(socket)
                listening = asyncio.create_task(tab.listen())
                for domain in ("Page", "Runtime", "Network", "Log"):
                    await tab.send(f"{domain}.enable")
                yield tab
                listening.cancel()


async def _port(file: Path) -> int:
    deadline = time.monotonic() + SECONDS
    while not (file.exists() and len(file.read_text().splitlines()) > 1):
        assert time.monotonic() < deadline, "Chromium has not started"
        await asyncio.sleep(0.05)
    return int(file.read_text().splitlines()[0])
