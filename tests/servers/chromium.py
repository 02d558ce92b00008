"""A real browser: Debian's Chromium, driven over the W3C WebDriver protocol, which is JSON over HTTP."""

from __future__ import annotations

import base64
import http.client
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.servers.base import LOOPBACK, Server, ServerError

_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
"""The name of the member that holds an element's id, as the standard has it."""


class ChromiumServer(Server):
    """ChromeDriver. Each session is a browser with an empty profile."""

    name = "chromium"
    binaries = ("chromedriver", "chromium")
    packages = ("chromium", "chromium-driver")

    def command(self) -> Sequence[str | Path]:
        return [self.binary("chromedriver"), f"--port={self.port}", "--allowed-ips=127.0.0.1"]

    def ready(self) -> bool:
        try:
            return bool(_ask(self.port, "GET", "/status")["ready"])
        except (OSError, http.client.HTTPException):
            return False

    @contextmanager
    def browser(self, *more: str) -> Iterator[Browser]:
        """A headless browser with one tab, and more flags."""
        flags = [*more, "--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        if os.geteuid() == 0:
            flags.append("--no-sandbox")  # Chromium's sandbox does not run as root
        options = {"binary": str(self.binary("chromium")), "args": flags}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"performance": "ALL", "browser": "ALL"}}
        session = _ask(self.port, "POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        browser = Browser(self.port, session["sessionId"])
        try:
            yield browser
        finally:
            browser.ask("DELETE", "")


class Browser:
    """One session of ChromeDriver."""

    def __init__(self, port: int, session: str) -> None:
        self._port = port
        self._session = session

    def ask(self, method: str, path: str, content: Any = None) -> Any:
        return _ask(self._port, method, f"/session/{self._session}{path}", content)

    def open(self, url: str) -> None:
        self.ask("POST", "/url", {"url": url})

    def reload(self) -> None:
        self.ask("POST", "/refresh", {})

    def back(self) -> None:
        self.ask("POST", "/back", {})

    def run(self, script: str, *arguments: Any) -> Any:
        """Run JavaScript in the page: ``return document.title``. A promise is awaited."""
        return self.ask("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def click(self, selector: str) -> None:
        self._of(selector, "click")

    def type(self, selector: str, text: str) -> None:
        """Replace the text of a field."""
        self._of(selector, "clear")
        self._of(selector, "value", {"text": text})

    def requests(self) -> list[dict[str, Any]]:
        """The requests that the browser has sent since the last look, as DevTools describe them."""
        events = [
            json.loads(line["message"])["message"] for line in self.ask("POST", "/se/log", {"type": "performance"})
        ]
        return [each["params"]["request"] for each in events if each["method"] == "Network.requestWillBeSent"]

    def complaints(self) -> list[str]:
        """The errors and warnings in the browser's console since the last look: of scripts, policies and requests."""
        lines = self.ask("POST", "/se/log", {"type": "browser"})
        return [line["message"] for line in lines if line["level"] in ("SEVERE", "WARNING")]

    def press(self, *keys: str) -> None:
        """Press keys, one after the other, wherever the focus is."""
        strokes = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self.ask("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": strokes}]})

    def look(self, width: int, height: int, scheme: str = "light") -> None:
        """Look as on a screen of this size, to somebody who prefers light or dark colours."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._tell("Emulation.setDeviceMetricsOverride", size)
        self._tell("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})

    def screenshot(self) -> bytes:
        """What is on the screen, as PNG."""
        return base64.b64decode(self.ask("GET", "/screenshot"))

    def _tell(self, command: str, params: dict[str, Any]) -> None:
        self.ask("POST", "/goog/cdp/execute", {"cmd": command, "params": params})

    def _of(self, selector: str, what: str, content: Any = None) -> None:
        element = self.ask("POST", "/element", {"using": "css selector", "value": selector})[_ELEMENT]
        self.ask("POST", f"/element/{element}/{what}", content or {})


def _ask(port: int, method: str, path: str, content: Any = None) -> Any:
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=60)
    try:
        body = None if content is None else json.dumps(content)
        connection.request(method, path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        value = json.loads(answer.read())["value"]
    finally:
        connection.close()
    if answer.status != 200:
        raise ServerError(f"chromium: {method} {path}: {value['error']}: {value['message']}")
    return value
