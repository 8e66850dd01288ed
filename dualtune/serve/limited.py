"""An HTTP server with limits: of connections, and of the time that a request may take to arrive.

A connection that has not sent a whole request in time is closed, so that slow clients do not keep others out.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LOOPBACK = ("127.0.0.1", "localhost", "::1")
REQUEST_S = 30.0  # for a whole request, and for an idle connection
MAX_CONNECTIONS = 256


class LimitedServer(ThreadingHTTPServer):
    """A server that serves a bounded number of connections, each in a thread, and closes those that keep it waiting."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.is_local = host in LOOPBACK
        self._reading: dict[socket.socket, float] = {}  # since when a connection has owed a request
        self._connections = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._lock = threading.Lock()
        super().__init__((host, port), handler)

    def admits(self, host: str | None) -> bool:
        """Return whether a request with this Host may be answered: a browser here shows other sites, too."""
        name = (host or "").rpartition(":")[0].strip("[]") or host
        return not self.is_local or name in LOOPBACK

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread, unless there are too many."""
        if not self._connections.acquire(blocking=False):
            with contextlib.suppress(OSError):
                request.sendall(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            self.shutdown_request(request)
            return
        self.owes(request)
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.owes_nothing(request)
            self._connections.release()

    def owes(self, connection: socket.socket) -> None:
        """Note that a connection owes a request from now on."""
        with self._lock:
            self._reading[connection] = time.monotonic()

    def owes_nothing(self, connection: socket.socket) -> None:
        with self._lock:
            self._reading.pop(connection, None)

    def service_actions(self) -> None:
        """Close the connections that have owed a request for too long. Called twice a second."""
        with self._lock:
            late = [each for each, since in self._reading.items() if time.monotonic() - since > REQUEST_S]
        for connection in late:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do nothing: a connection that breaks is no news."""
