"""An HTTP server with limits: of connections, and of the time that a request may take to arrive.

A connection that has not sent a whole request in time is closed, or earlier if another one needs its place: slow and
idle clients do not keep others out.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import monotonic
from typing import Any

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
            late = [each for each, since in self._waiting_since.items() if monotonic() - since > REQUEST_S]
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
        """Do nothing: a connection that breaks is no news."""


def _shut(connection: socket.socket) -> None:
    """Close a connection. The thread that serves it sees that and ends."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
