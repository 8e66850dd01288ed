"""What a page of another site, or a proxy in front, may try on the servers of this machine."""

import socket
import threading

import pytest

from dualtune.show.page_server import PageServer

FOREIGN = (
    ("localhost:80@evil.example",), ("localhost:80@evil.example:80",), ("evil.example",), ("localhost.evil.example",),
    ("evil.example:localhost",), ("localhost", "evil.example"), ("localhost", "localhost"), ("",), (),
    ("localhost:80:80",), ("127.0.0.1:x",), ("[::1",), ("localhost/",), ("user@localhost",),
)  # fmt: skip
OWN = ("localhost", "LOCALHOST:1", "127.0.0.1", "127.0.0.1:65535", "[::1]", "[::1]:80")


@pytest.fixture
def ask(tmp_path):
    """Send bytes to the page's server, and read to the end of the connection."""
    with PageServer(0, tmp_path, lambda: False) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()

        def send(data):
            with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as connection:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                return b"".join(iter(lambda: connection.recv(4096), b""))

        yield send
        server.shutdown()


def get(hosts, more=b""):
    return b"GET / HTTP/1.1\r\n" + "".join(f"Host: {host}\r\n" for host in hosts).encode() + more + b"\r\n"


@pytest.mark.parametrize("hosts", FOREIGN)
def test_the_page_is_not_for_other_hosts(ask, hosts):
    assert ask(get(hosts)).startswith(b"HTTP/1.1 403 ")


@pytest.mark.parametrize("host", OWN)
def test_the_page_is_for_this_machine_by_all_its_names(ask, host):
    assert ask(get([host])).startswith(b"HTTP/1.1 200 ")


ENDS = (b"Content-Length: %d\r\n", b"Transfer-Encoding: chunked\r\n", b"Content-Length: 0\r\nContent-Length: %d\r\n")


@pytest.mark.parametrize("end", ENDS)
def test_a_body_is_not_taken_for_the_next_request(ask, end):
    hidden = get(["localhost"])
    answer = ask(get(["localhost"], end % len(hidden) if b"%" in end else end) + hidden)
    assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1 ") == 1


def test_a_get_that_says_that_it_has_no_body_is_answered(ask):
    answer = ask(get(["localhost"], b"Content-Length: 0\r\n") * 2)
    assert answer.count(b"HTTP/1.1 200 ") == 2
