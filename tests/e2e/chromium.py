"""A headless Chromium, controlled over its debugging protocol."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--remote-debugging-port=0",
)  # fmt: skip
PATIENCE_S = 20.0


def find() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[int]:
    """Starts Chromium with an empty profile; yields the port of its debugging protocol."""
    path = find()
    assert path is not None
    command = [path, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        told = profile / "DevToolsActivePort"
        deadline = time.monotonic() + 60
        while not told.exists() or not told.read_text().strip():
            assert process.poll() is None, "Chromium ended before it could be driven"
            assert time.monotonic() < deadline, "Chromium did not say where it can be driven"
            time.sleep(0.05)
        yield int(told.read_text().split()[0])
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Page:
    """One tab. `errors` are exceptions, console errors and policy violations; `asked` are the
    requested URLs."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.errors: list[str] = []
        self.asked: list[str] = []

    async def listen(self) -> None:
        async for message in self._socket:
            found = json.loads(message.data)
            if "id" in found:
                self._waiting.pop(found["id"]).set_result(found)
            else:
                self._enter(found["method"], found["params"])

    def _enter(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:500])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.errors.append(json.dumps(params["args"])[:500])

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        found = await asyncio.wait_for(self._waiting[number], PATIENCE_S)
        assert "error" not in found, found["error"]
        return found["result"]

    async def open(self, url: str) -> None:
        here = await self.look("location.href")
        if here.partition("#")[0] == url.partition("#")[0] and here != url:
            # Same document: the old content stays until the page has handled the new address.
            heard = "new Promise(heard => addEventListener('hashchange', () => heard(), {once: true}))"
            await self.look(f"[{heard}, location.href = {json.dumps(url)}][0]")
        else:
            await self.send("Page.navigate", url=url)
        await self.until(
            "document.querySelector('#content:not([aria-busy]) h1, #content:not([aria-busy]) [role=alert]')"
        )

    async def look(self, expression: str) -> Any:
        """Evaluates an expression in the page."""
        found = await self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def until(self, expression: str) -> None:
        """Waits until an expression is true."""
        deadline = time.monotonic() + PATIENCE_S
        while not await self.look(f"Boolean({expression})"):
            assert time.monotonic() < deadline, f"never held: {expression}; errors: {self.errors}"
            await asyncio.sleep(0.03)

    async def press(self, *keys: str) -> None:
        for key in keys:
            text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
            code = {"Enter": 13, "Tab": 9, "Escape": 27}.get(key, ord(key.upper()) if len(key) == 1 else 0)
            named = {"key": key, "windowsVirtualKeyCode": code}
            await self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **named)
            await self.send("Input.dispatchKeyEvent", type="keyUp", **named)

    async def width(self, width: int, height: int = 1000) -> None:
        await self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    async def prefer(self, scheme: str) -> None:
        feature = {"name": "prefers-color-scheme", "value": scheme}
        await self.send("Emulation.setEmulatedMedia", features=[feature])


@contextlib.asynccontextmanager
async def page(port: int) -> AsyncIterator[Page]:
    """Opens a new tab in the browser at `port`."""
    base = f"http://127.0.0.1:{port}/json"
    request = urllib.request.Request(f"{base}/new?about:blank", method="PUT")
    target = json.load(await asyncio.to_thread(urllib.request.urlopen, request, timeout=PATIENCE_S))
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket,
    ):
        found = Page(socket)
        listening = asyncio.create_task(found.listen())
        for domain in ("Page", "Runtime", "Network", "Log"):
            await found.send(f"{domain}.enable")
        await found.width(1400)
        try:
            yield found
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            await asyncio.to_thread(
                urllib.request.urlopen, f"{base}/close/{target['id']}", timeout=PATIENCE_S
            )
