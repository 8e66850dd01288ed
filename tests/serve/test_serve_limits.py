"""A server among bad, slow and many clients: each gets a status with a reason, and the others get their answers."""

import json
import socket
import threading
import time

import psutil
import pytest

from dualtune.base import http_server as module
from dualtune.base.http_server import BadRequest
from dualtune.use.serve.answers import Answers
from dualtune.use.serve.requests import MAX_BODY, read_request

ALONE = {"max_tokens": 4, "max_prompt": 100, "max_waiting": 1, "time_limit_s": 60}
NO_NUMBER = b'{"model": "base", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}'


def send(served, asked):
    """POST a request, and return the connection without reading an answer."""
    body, connection = json.dumps(asked).encode(), socket.create_connection(("127.0.0.1", served.port))
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    return connection


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        (b"{", 400, "body: is not JSON"), (b"[" * 100_000, 400, "body: is not JSON"),
        (b"[]", 400, "body: must be a JSON object"),
        (NO_NUMBER, 400, "temperature: "), ({"messages": None}, 400, "messages: "), ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "messages.0.role: "),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400,
         "messages.0.content.0.type: Input should be 'text', got 'image_url'"),
        ({"n": 2}, 400, "n: "), ({"functions": []}, 400, "functions: is not supported"),
        ({"max_tokens": "5"}, 400, "max_"),
        ({"temperature": -1}, 400, "temperature: "),
        ({"temperature": True}, 400, "temperature: "), ({"temperature": "0.5"}, 400, "temperature: "),
        ({"messages": [{"role": "user", "content": "x", "name": "me"}]}, 400, "messages.0.name: is not supported"),
        ({"top_p": 0}, 400, "top_p: "), ({"logprobs": 1}, 400, "log"),
        ({"stop": ["x"] * 9}, 400, "stop: got 9"), ({"stop": ""}, 400, "stop"), ({"seed": -1}, 400, "seed: "),
        ({"temperature": "hot"}, 400, "temperature: Input should be a valid number, got 'hot'"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, 400, "max_completion_tokens: got 4, and max_tokens: 3"),
        ({"model": "x" * 300}, 404, "model: got 'xxx"), ({"frequency_penalty": 2.5}, 400, "frequency_penalty: "),
    ],
)  # fmt: skip
def test_a_request_that_is_wrong_names_the_key(serve, hello, change, status, message):
    served = serve()
    found, table = served.ask(change if isinstance(change, bytes) else hello | change)
    assert found == status and table["error"]["message"].startswith(message), table
    assert len(table["error"]["message"]) < 700
    assert served.ask(hello)[0] == 200


def test_what_other_clients_send_by_default_is_accepted(serve, hello):
    zeros = {"frequency_penalty": 0, "presence_penalty": 0.0, "n": 1, "logprobs": False, "user": "me", "stream": False,
             "temperature": 1, "top_p": 1, "stop": None, "max_tokens": 3, "max_completion_tokens": 3}  # fmt: skip
    status, table = serve().ask(hello | zeros)
    assert status == 200, table
    assert table["usage"]["completion_tokens"] <= 3


def test_wrong_paths_types_hosts_and_keys_are_refused(serve, hello):
    served = serve(key="secret")
    key = {"Authorization": "Bearer secret"}
    assert served.ask(hello)[0] == 401 and served.ask(hello, headers={"Authorization": "Bearer x\xff"})[0] == 401
    assert served.ask(hello, headers=key)[0] == 200
    assert served.ask(hello, "/v1/embeddings", key)[0] == 404
    assert served.request("GET", "/v1/chat/completions", headers=key)[0] == 404
    assert served.request("GET", "/health", headers=key) == (200, {"status": "ok"})
    assert served.ask(hello, headers=key | {"Content-Type": "text/plain"})[0] == 415
    assert served.ask(hello, headers=key | {"Host": "evil.example:80"})[0] == 403
    assert served.ask(hello, headers=key | {"Host": f"localhost:{served.port}"})[0] == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (b"", b"411"), (b"Content-Length: -1\r\n", b"411"), (b"Content-Length: 1e3\r\n", b"411"),
        (b"Content-Length: %d\r\n" % (MAX_BODY + 1), b"413"), (b"Content-Length: 99999999999999999999\r\n", b"413"),
        (b"Content-Length: 2\r\nContent-Length: 0\r\n", b"400"),
        (b"X: " + b"y" * 70_000 + b"\r\n", b"431"), (b"X: y\r\n" * 200, b"431"),
    ],
)  # fmt: skip
def test_a_body_or_a_head_of_any_size_is_refused(serve, headers, status):
    with socket.create_connection(("127.0.0.1", serve().port), timeout=20) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n" + headers + b"\r\n")
        assert connection.recv(4096).split(b" ", 2)[1] == status


@pytest.fixture
def clock(monkeypatch):
    """The time by which a server judges its connections."""
    now = [1000.0]
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    return now


def connect(served):
    return socket.create_connection(("127.0.0.1", served.port), timeout=20)


def read_to_end(connection):
    return b"".join(iter(lambda: connection.recv(4096), b""))


def until(condition):
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("it has not happened in a minute")


def test_a_slow_client_is_cut_off_and_keeps_nobody_waiting(serve, hello, clock):
    served = serve()
    slow = [connect(served) for _ in range(20)]
    for i, connection in enumerate(slow):
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Le" if i % 2 else b"")
    until(lambda: len(served.server._waiting_since) == len(slow))
    assert served.ask(hello)[0] == 200
    clock[0] += module.REQUEST_S + 1
    assert all(connection.recv(1) == b"" for connection in slow)
    for connection in slow:
        connection.close()
    assert served.ask(hello)[0] == 200


def test_a_slow_second_request_is_cut_off_too(serve, clock):
    """However it comes: a byte now and then, which no time limit of a socket sees."""
    served = serve()
    with connect(served) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = b""
        while not answer.endswith(b'{"status": "ok"}'):
            answer += connection.recv(4096)
        until(lambda: served.server._waiting_since)
        for _ in range(2):
            connection.sendall(b"P")
            clock[0] += 0.6 * module.REQUEST_S
        assert connection.recv(1) == b""


def test_a_new_client_gets_the_place_of_the_one_that_has_been_waited_for_longest(serve, hello, monkeypatch):
    monkeypatch.setattr(module, "MAX_CONNECTIONS", 4)
    served, idle = serve(), []
    for n in range(4):
        idle.append(connect(served))
        until(lambda n=n: len(served.server._waiting_since) == n + 1)
    assert served.ask(hello)[0] == 200
    assert idle[0].recv(1) == b""
    for _ in range(3):  # the place of a connection that has ended is free
        until(lambda: len(served.server._open) == 3)
        assert served.ask(hello)[0] == 200
    idle[1].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert idle[1].recv(4096).startswith(b"HTTP/1.1 200")
    for connection in idle:
        connection.close()


def test_where_all_places_are_taken_by_requests_a_client_is_told_in_json(serve, hello, monkeypatch):
    monkeypatch.setattr(module, "MAX_CONNECTIONS", 2)
    served, gate = serve(), threading.Event()
    rows = served.server.answers._rows
    monkeypatch.setattr(rows, "step", lambda step=rows.step: gate.wait() and step())
    asked = [send(served, hello) for _ in range(2)]
    try:
        until(lambda: len(served.server._open) == 2 and not served.server._waiting_since)
        with connect(served) as refused:
            answer = read_to_end(refused)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503") and "try again later" in json.loads(body)["error"]["message"]
    finally:
        gate.set()
    for connection in asked:
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        connection.close()


@pytest.mark.parametrize("method", ["PUT", "HEAD", "OPTIONS", "DELETE"])
def test_a_method_that_is_none_is_refused_in_json(serve, method):
    with connect(serve()) as connection:
        connection.sendall(f"{method} /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        head, _, body = read_to_end(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 501") and b"Content-Type: application/json" in head
    text = f"{method}: is not a method of this server, which answers GET, POST"
    assert (body == b"") if method == "HEAD" else (json.loads(body)["error"]["message"] == text)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 2\r\n", b"501"),
        (b"GET /health HTTP/1.1\r\nContent-Length: 40\r\n", b"400"),
    ],
)
def test_a_body_whose_end_a_proxy_may_see_elsewhere_ends_the_connection(serve, head, status):
    with connect(serve()) as connection:
        connection.sendall(
            head + b"Content-Type: application/json\r\nHost: localhost\r\n\r\n{}"
            b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        )
        answer = read_to_end(connection)
    assert answer.count(b"HTTP/1.1") == 1 and answer.startswith(b"HTTP/1.1 " + status) and b'{"error"' in answer


def test_the_body_of_a_refused_request_is_not_read_as_the_next_one(serve):
    body = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.create_connection(("127.0.0.1", serve(key="right").port), timeout=20) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
        connection.sendall(head + body)
        answer = read_to_end(connection)
    assert answer.startswith(b"HTTP/1.1 401") and answer.count(b"HTTP/1.1") == 1


def test_more_than_may_wait_are_told_to_come_again(serve, hello):
    served, gate, computing, found = serve(max_waiting=1), threading.Event(), threading.Event(), []
    generate = served.engine.generate

    def waits(*args, **options):
        computing.set()
        gate.wait()
        return generate(*args, **options)

    served.engine.generate = waits
    threads = [threading.Thread(target=lambda: found.append(served.ask(hello)[0])) for _ in range(2)]
    try:
        threads[0].start()
        computing.wait()
        threads[1].start()
        until(served.server.answers._waiting.full)
        assert [served.ask(hello)[0] for _ in range(4)] == [429] * 4
    finally:
        gate.set()
        for thread in threads:
            thread.join()
    assert found == [200, 200]


def test_an_answer_that_fails_is_one_error_and_the_next_one_comes(serve, hello, wording):
    served = serve()
    generate, served.engine.generate = served.engine.generate, lambda *args, **options: 1 / 0
    status, table = served.ask(hello)
    assert status == 500
    wording(table["error"]["message"])
    served.engine.generate = generate
    assert served.ask(hello)[0] == 200


def test_an_error_that_leaves_nothing_to_answer_with_ends_the_engine(serve, hello):
    answers, request = serve().server.answers, read_request(json.dumps(hello).encode(), is_chat=True)
    alone = Answers(answers._adapters, **ALONE, is_fatal=lambda error: True)
    alone._adapters.engine.generate = lambda *args, **options: 1 / 0
    job = alone.submit(request)
    with pytest.raises(ZeroDivisionError):
        alone.answer_next()
    with pytest.raises(BadRequest, match="the server is stopping"):
        next(job.answer(lambda: False))


def test_a_client_that_leaves_while_it_waits_gets_no_answer(serve, hello):
    answers, request = serve().server.answers, read_request(json.dumps(hello).encode(), is_chat=True)
    alone = Answers(answers._adapters, **ALONE)
    job = alone.submit(request)
    job.is_cancelled = True
    alone.answer_next()
    assert job.pieces.empty()


def test_a_client_that_leaves_the_queue_is_seen_before_its_turn(serve, hello):
    served, goes_on, lengths = serve(), threading.Event(), []
    generate = served.engine.generate

    def waits(prompt, **options):
        lengths.append(len(prompt))
        goes_on.wait()
        yield from generate(prompt, **options)

    served.engine.generate = waits
    first = threading.Thread(target=served.ask, args=(hello,))
    first.start()
    try:
        while not lengths:
            time.sleep(0.01)
        send(
            served, hello | {"messages": [{"role": "user", "content": "a longer question than the first one"}]}
        ).close()
        while not any("the client is gone" in line for line in served.told):
            time.sleep(0.01)
    finally:
        goes_on.set()
        first.join()
    assert served.ask(hello)[0] == 200 and len(set(lengths)) == 1


def test_an_error_in_a_stream_is_its_last_event_and_the_connection_is_good_for_the_next_request(serve, hello, wording):
    openai = pytest.importorskip("openai")
    served = serve()
    generate = served.engine.generate

    def fails(*args, **options):
        yield 70
        yield 71
        raise MemoryError

    served.engine.generate = fails
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="x", max_retries=0)
    with pytest.raises(openai.APIError, match="the answer failed: MemoryError"):
        list(client.chat.completions.create(**hello, stream=True))
    served.engine.generate = generate
    assert client.chat.completions.create(**hello).choices[0].message.content
    assert len({line.split()[0] for line in served.told}) == 1
    wording(served.told[0])


def test_a_prompt_that_is_too_long_is_refused_before_it_is_computed(serve, hello, wording):
    served = serve(max_prompt=30)
    status, table = served.ask({"model": "base", "prompt": "a" * 30, "max_tokens": 1}, "/v1/completions")
    assert status == 400
    wording(table["error"]["message"])
    assert served.ask({"model": "base", "prompt": "a" * 29, "max_tokens": 1}, "/v1/completions")[0] == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_stops_its_answer(serve, hello, stream):
    served, read, many = serve(max_tokens=50_000, time_limit_s=1e9), [], {"stream": stream, "max_tokens": 50_000}
    generate = served.engine.generate

    def endless(*args, **options):
        for token in generate(*args, **options | {"choose": lambda logits: 70}):
            read.append(token)
            yield token

    served.engine.generate = endless
    with send(served, hello | many):
        while not read:
            time.sleep(0.01)
    served.engine.generate = generate
    assert served.ask(hello)[0] == 200  # after the other one has ended
    assert 0 < len(read) < 50_000 and any("the client is gone" in line for line in served.told)


@pytest.mark.parametrize("seconds", [0.2, pytest.param(60, marks=pytest.mark.long)])
def test_64_clients_at_once_each_get_their_own_answers(serve, seconds):
    """Each asks for the continuation of a text of its own. Nothing is lost or mixed up, and no thread stays behind."""
    served, process = serve(max_waiting=64), psutil.Process()
    texts, ask = [f"{i}{'abcdefgh'[i % 8]}" for i in range(64)], {"model": "base", "max_tokens": 4, "temperature": 0}
    expected = {t: served.ask(ask | {"prompt": t}, "/v1/completions")[1]["choices"][0]["text"] for t in texts}
    assert len({*expected.values()}) > 1
    counts, wrong = dict.fromkeys(texts, 0), []
    threads_before, files_before, ends = threading.active_count(), process.num_fds(), time.monotonic() + seconds

    def client(text):
        while counts[text] == 0 or time.monotonic() < ends:
            status, found = served.ask(ask | {"prompt": text}, "/v1/completions")
            counts[text] += 1
            if status != 200 or found["choices"][0]["text"] != expected[text]:
                wrong.append((text, status, found))

    clients = [threading.Thread(target=client, args=(text,)) for text in texts]
    for each in clients:
        each.start()
    for each in clients:
        each.join()
    assert not wrong and min(counts.values()) > 0
    while threading.active_count() > threads_before or process.num_fds() > files_before:
        assert time.monotonic() < ends + 60, "threads or connections stay behind"
        time.sleep(0.05)


@pytest.mark.parametrize("hosts", [("localhost:80@evil.example",), ("localhost", "evil.example"), ("localhost",) * 2])
def test_doubtful_hosts_are_refused(serve, hosts):
    with connect(serve()) as connection:
        lines = "".join(f"Host: {host}\r\n" for host in hosts).encode()
        connection.sendall(b"GET /health HTTP/1.1\r\n" + lines + b"\r\n")
        assert read_to_end(connection).startswith(b"HTTP/1.1 403 ")
