"""A headless Chromium, spoken to over a pipe (https://chromedevtools.github.io/devtools-protocol/)."""

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find_browser() -> str | None:
    """The program: that of the variable CHROMIUM, or one that is installed."""
    return os.environ.get("CHROMIUM") or next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One page of a browser of its own."""

    def __init__(self, program: str, profile: Path) -> None:
        """Start `program`, which keeps its files in the folder `profile`."""
        receive, self._send = os.pipe()
        self._receive, send = os.pipe()
        options = "--headless --disable-gpu --no-sandbox --no-first-run --remote-debugging-pipe"
        command = f'exec "$0" {options} --user-data-dir="$1" about:blank 3<&{receive} 4>&{send}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, program, str(profile)],
            pass_fds=(receive, send),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(receive)
        os.close(send)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.complaints: list[Any] = []
        """What the page reported: exceptions, messages on the console, requests that failed."""
        self.requests: list[str] = []
        """Addresses that the page asked for, besides its own and those with their content inside."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait()
        os.close(self._send)
        os.close(self._receive)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and wait for its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            pass
        assert "error" not in answer, (method, answer)
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            read = os.read(self._receive, 1 << 20)
            assert read, "the browser has ended"
            self._buffer += read
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        event, parameters = message.get("method"), message.get("params", {})
        if event in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded", "Network.loadingFailed"):
            self.complaints.append(parameters)
        if event == "Network.requestWillBeSent" and not parameters["request"]["url"].startswith(("data:", "file:")):
            self.requests.append(parameters["request"]["url"])
        return message

    def open(self, page: Path, *, width: int, height: int, dark: bool) -> None:
        """Load a page in a window of that size and wait until it is there."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 700
        )
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[theme])
        self.call("Page.navigate", url=page.absolute().as_uri())
        while self._next().get("method") != "Page.loadEventFired":
            pass

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in JavaScript."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, file: Path) -> None:
        """The whole page as a PNG."""
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(answer["data"]))
