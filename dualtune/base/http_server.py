"""An HTTP server with limits of its connections and of the time a request may take, and how programs ask it.

A connection that has not sent a whole request in time is closed, or earlier if another one needs its place: slow and
idle clients do not keep others out.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import re
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from email.message import Message
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import monotonic
from typing import TYPE_CHECKING, Any, cast

from dualtune.base.fields import repeated_key

if TYPE_CHECKING:
    from pydantic import ValidationError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_OWN_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?", re.ASCII | re.IGNORECASE)
REQUEST_S = 30.0  # for a whole request, and for an idle connection
MAX_CONNECTIONS = 256
FINISH_S = 2.0


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
        self.max_connections = MAX_CONNECTIONS
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
            is_full = len(self._open) >= self.max_connections
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

    def finish_answers(self) -> None:
        """Wait a moment for the requests in progress."""
        ends = monotonic() + FINISH_S
        while monotonic() < ends and self._open - self._waiting_since.keys():
            time.sleep(0.02)

    def _refuse(self, request: socket.socket) -> None:
        error = {
            "message": f"{self.max_connections} connections are being answered; try again later",
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
class BadRequest(Exception):
    """A request that cannot be answered: the HTTP status, the message, and the key that is wrong."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param = status, param


class ApiServer(LimitedServer):
    """A server of an interface for programs. `key`: what clients must send; `tell` gets a line for each request."""

    def __init__(
        self, host: str, port: int, handler: type[ApiHandler], *, key: str | None, tell: Callable[[str], None]
    ) -> None:
        self.key, self.tell = key, tell
        super().__init__(host, port, handler)


class ApiHandler(BaseHTTPRequestHandler):
    """One connection of an `ApiServer`, whose bodies and answers are JSON unless a subclass says otherwise."""

    server: ApiServer  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "dualtune", ""
    timeout = REQUEST_S
    disable_nagle_algorithm = True  # head and body are written apart, and the second would wait for the client
    body_types: tuple[str, ...] = ("application/json",)

    def client_key(self) -> str:
        """Return the key that the client has sent."""
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ")

    def error_table(self, error: BadRequest) -> Mapping[str, Any]:
        """Return the JSON of an error."""
        raise NotImplementedError

    def answer_with(self, work: Callable[[], str]) -> None:
        """Answer a request by `work`, which returns how that went, for the line of this request."""
        began = time.monotonic()
        try:
            self._check_client()
            outcome = work()
        except BadRequest as error:
            outcome = f"{error.status} {error}"
            with contextlib.suppress(OSError):
                self.fail(error)
        except OSError:
            outcome, self.close_connection = "the client is gone", True
        self.server.tell(f"{self.command} {self.path[:100]}  {outcome}  {time.monotonic() - began:.1f} s")
        self.server.start_waiting(self.connection)  # for the next one

    def _check_client(self) -> None:
        """Refuse pages of other sites that a browser on this machine shows, clients without the key, and doubtful ends.

        A proxy in front that sees another end of the body would take a part of it for the next client's request.
        """
        if not self.server.admits(self.headers):
            raise self.refusal(403, "Host: this server answers its own machine, as localhost")
        if self.server.key and not hmac.compare_digest(self.client_key().encode(), self.server.key.encode()):
            raise self.refusal(401, "Authorization: the key is not that of this server")
        if "Transfer-Encoding" in self.headers:
            raise self.refusal(501, "Transfer-Encoding: is not supported. Send the whole body, with its Content-Length")
        if len(self.headers.get_all("Content-Length", [])) > 1:
            raise self.refusal(400, "Content-Length: is given more than once")

    def refusal(self, status: int, text: str) -> BadRequest:
        """End the connection too: the body has not been read, and would be taken for the next request."""
        self.close_connection = True
        return BadRequest(status, text)

    def read_no_body(self) -> None:
        """Refuse a request with a body, which nothing reads."""
        if self.headers.get("Content-Length", "0") != "0":
            raise self.refusal(400, f"Content-Length: a {self.command} has no body")
        self.server.stop_waiting(self.connection)

    def read_body(self, most: int) -> bytes:
        """Return the body, of `most` bytes at most."""
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            raise self.refusal(411, "Content-Length: is needed")
        if len(length) > 12 or int(length) > most:
            raise self.refusal(413, f"the body has {length[:20]} bytes, allowed: {most}")
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise ConnectionAbortedError
        self.server.stop_waiting(self.connection)
        # A page of another site may send a form or a text without asking first, but not these types.
        if self.headers.get_content_type() not in self.body_types:
            raise BadRequest(415, f"Content-Type: must be {' or '.join(self.body_types)}")
        return body

    def send_table(self, status: int, table: Mapping[str, Any], headers: Iterable[tuple[str, str]] = ()) -> None:
        """Send an answer of JSON."""
        self.send_bytes(status, json.dumps(table).encode(), "application/json", headers)

    def send_bytes(self, status: int, data: bytes, kind: str, headers: Iterable[tuple[str, str]] = ()) -> None:
        """Send a whole answer."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers:
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def fail(self, error: BadRequest) -> None:
        """Send an error."""
        self.send_table(error.status, self.error_table(error))

    def client_is_gone(self) -> bool:
        """Return whether the client has closed the connection. A next request that it may have sent stays unread."""
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        return bool(poll.poll(0)) and not self.connection.recv(1, socket.MSG_PEEK)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse a malformed request, or another method, in JSON like every other error."""
        self.close_connection = True
        if code == HTTPStatus.NOT_IMPLEMENTED:  # only for a method; the library's text names no other
            message = f"{self.command[:20]}: is not a method of this server, which answers {', '.join(self._methods())}"
        with contextlib.suppress(OSError):
            self.fail(BadRequest(code, message or self.responses[HTTPStatus(code)][0]))

    def _methods(self) -> list[str]:
        """Return the HTTP methods that this handler has, sorted."""
        return sorted(name.removeprefix("do_") for name in dir(self) if name.startswith("do_"))

    def log_message(self, format: str, *args: Any) -> None:
        """Do nothing: `answer_with` tells more."""


# ----------------------------------------------------------------------------------------------------------------------
# Bodies of JSON.


def json_object(raw: bytes) -> dict[str, Any]:
    """Return the object in a body. BadRequest for anything else."""
    try:
        body = json.loads(raw, object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:
        raise BadRequest(400, f"body: is not JSON: {error}"[:200]) from None
    if not isinstance(body, dict):
        raise BadRequest(400, "body: must be a JSON object")
    return cast("dict[str, Any]", body)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object. ValueError for a key that is given twice: which one counts, readers disagree on."""
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError(f"'{repeated_key(pairs)[:50]}' is given more than once")
    return table


MOST_SHOWN = 60  # characters of a value that is refused


def invalid_body(error: ValidationError, unknown: Callable[[str], str]) -> BadRequest:
    """Return the refusal for the first fault that pydantic has seen. `unknown`: the texts for keys by name."""
    errors = error.errors(include_url=False)
    places = [[str(x) for x in e["loc"] if not str(x).startswith(("list[", "constrained"))] for e in errors]
    # Of a value that may be a text or a list, there is a fault for each: the one within the list knows more.
    index = max(range(len(errors)), key=lambda i: len(places[i]) if places[i][: len(places[0])] == places[0] else 0)
    first, param = errors[index], ".".join(places[index])[:200]
    if first["type"] == "extra_forbidden":
        text = unknown(param)
    else:
        got = repr(first["input"]) if isinstance(first["input"], str | int | float) else ""
        text = f"{first['msg']}, got {got}" if 0 < len(got) <= MOST_SHOWN else first["msg"]
    return BadRequest(400, f"{param or 'body'}: {text}"[:500], param or None)
