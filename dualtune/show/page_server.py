"""The page of a run that trains, for a browser on this machine, which asks for it again by itself."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from dualtune.base.errors import DualtuneError
from dualtune.base.http_server import REQUEST_S, LimitedServer
from dualtune.show.report.page import make_page
from dualtune.show.report.run_page import run_page

REFRESH_S = 10
REST = 4.0  # a page is remade after this many times the seconds that it took: a long run's takes some


class PageServer(LimitedServer):
    """Serves the page of `dualtune report` for a run directory at /, on this machine only.

    The page loads nothing and sends nothing. While `is_running()`, the browser is told to load it again.
    """

    def __init__(self, port: int, run_dir: Path, is_running: Callable[[], bool]) -> None:
        self.is_running: Callable[[], bool] = is_running
        self._run_dir = run_dir
        self._making = threading.Lock()
        self._page, self._good_until = b"", 0.0
        self._was_running: bool = True
        super().__init__("127.0.0.1", port, PageHandler)

    def page(self) -> bytes:
        """Return the page, made now or a short time ago. One that cannot be made says why."""
        running: bool = self.is_running()
        with self._making:
            if not self._page or running != self._was_running or time.monotonic() >= self._good_until:
                began = time.monotonic()
                self._page, self._was_running = _page_of(self._run_dir).encode(), running
                self._good_until = time.monotonic() + REST * (time.monotonic() - began)
            return self._page


class PageHandler(BaseHTTPRequestHandler):
    """One connection, which may ask for the page and nothing else."""

    server: PageServer  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "dualtune", ""
    timeout = REQUEST_S

    def do_GET(self) -> None:
        """Send the page."""
        self.server.stop_waiting(self.connection)
        if "Transfer-Encoding" in self.headers or {*self.headers.get_all("Content-Length", [])} - {"0"}:
            self.close_connection = True  # the body is not read, and would be taken for the next request
            self._send(400, b"A GET has no body.\n", "text/plain")
        elif not self.server.admits(self.headers):
            self._send(403, b"This server answers its own machine, as localhost.\n", "text/plain")
        elif self.path != "/":
            self._send(404, b"There is only the page at /.\n", "text/plain")
        else:
            self._send(200, self.server.page(), "text/html; charset=utf-8")
        self.server.start_waiting(self.connection)

    def log_message(self, format: str, *args: Any) -> None:
        """Do nothing: the terminal shows the run."""

    def _send(self, status: int, body: bytes, kind: str) -> None:
        with contextlib.suppress(OSError):
            self.send_response(status)
            headers = {"Content-Type": kind, "Content-Length": str(len(body)), "Cache-Control": "no-store"}
            headers |= {"X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY"}
            if status == 200 and self.server.is_running():
                headers["Refresh"] = str(REFRESH_S)
            if self.close_connection:
                headers["Connection"] = "close"
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)


def _page_of(run_dir: Path) -> str:
    try:
        return run_page([run_dir])
    except DualtuneError as error:
        problem = str(error)
    except Exception as error:  # noqa: BLE001  a damaged file must not leave the browser without an answer
        problem = f"the page cannot be made: {type(error).__name__}: {error}"
    return make_page("page.html", run_dir.name, text=problem)
