"""The page of a run that trains, for a browser on this machine, which asks for it again by itself."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import monotonic
from typing import Any

from dualtune.base.errors import DualtuneError
from dualtune.show.report.page import make_page
from dualtune.show.report.run_page import run_page

# ----------------------------------------------------------------------------------------------------------------------
# An HTTP server with limits: of connections, and of the time that a request may take to arrive.
#
# A connection that has not sent a whole request in time is closed, or earlier if another one needs its place: slow and
# idle clients do not keep others out.

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_OWN_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?", re.ASCII | re.IGNORECASE)
REQUEST_S = 30.0  # for a whole request, and for an idle connection
MAX_CONNECTIONS = 256


class LimitedServer(ThreadingHTTPServer):
    """A server that serves a bounded number of connections, each in a thread, and closes those that keep it waiting."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.is_local = host in LOOPBACK
        self._open: set[socket.socket] = set()
        self._waiting_since: dict[socket.socket, float] = {}  # whose request has not come
        self._lock = threading.Lock()
        super().__init__((host, port), handler)

    def admits(self, headers: Message) -> bool:
        """Return whether a request with these headers may be answered: a browser here shows other sites, too.

        Their Host is that of this machine, in no other spelling, and there is one: a proxy may believe the other.
        """
        hosts: list[str] = headers.get_all("Host", [])
        if not self.is_local:
            return len(hosts) <= 1
        return len(hosts) == 1 and _OWN_HOST.fullmatch(hosts[0]) is not None

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread. If there are too many, the one that has been waited for longest is closed."""
        with self._lock:
            is_full = len(self._open) >= MAX_CONNECTIONS
            longest = min(self._waiting_since, key=self._waiting_since.__getitem__, default=None) if is_full else None
            if longest is not None:  # its place is free at once; its thread ends a moment later
                self._open.discard(longest)
                del self._waiting_since[longest]
            has_place = longest is not None or not is_full
            if has_place:
                self._open.add(request)
                self._waiting_since[request] = monotonic()
        if longest is not None:
            _shut(longest)
        if has_place:
            super().process_request(request, client_address)
        else:
            self._refuse(request)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection, whose place is free then."""
        with self._lock:
            self._open.discard(request)
            self._waiting_since.pop(request, None)
        super().shutdown_request(request)

    def start_waiting(self, connection: socket.socket) -> None:
        """Note that a connection has to send a request from now on."""
        with self._lock:
            if connection in self._open:
                self._waiting_since[connection] = monotonic()

    def stop_waiting(self, connection: socket.socket) -> None:
        """Note that a connection has sent its request."""
        with self._lock:
            self._waiting_since.pop(connection, None)

    def service_actions(self) -> None:
        """Close the connections that have been waited for too long. Called twice a second."""
        with self._lock:
            late = [waiting for waiting, since in self._waiting_since.items() if monotonic() - since > REQUEST_S]
        for connection in late:
            _shut(connection)

    def _refuse(self, request: socket.socket) -> None:
        error = {
            "message": f"{MAX_CONNECTIONS} connections are being answered; try again later",
            "type": "server_error",
        }
        body = json.dumps({"error": error | {"param": None, "code": None}}).encode()
        head = "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\n"
        with contextlib.suppress(OSError):
            request.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        self.shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do nothing: a connection that breaks is not worth a message."""


def _shut(connection: socket.socket) -> None:
    """Close a connection. The thread that serves it sees that and ends."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


# ----------------------------------------------------------------------------------------------------------------------
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
                self._page, self._was_running = _made(self._run_dir).encode(), running
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


def _made(run_dir: Path) -> str:
    try:
        return run_page([run_dir])
    except DualtuneError as error:
        problem = str(error)
    except Exception as error:  # noqa: BLE001  a damaged file must not leave the browser without an answer
        problem = f"the page cannot be made: {type(error).__name__}: {error}"
    return make_page("page.html", run_dir.name, text=problem)
