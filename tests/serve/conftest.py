"""A server in this process: the engine's thread, the HTTP threads, and a client without a library."""

import contextlib
import http.client
import json
import threading
from dataclasses import dataclass

import pytest

from dualtune.use.chat import load_adapter_set
from dualtune.use.serve import answers as answers_module
from dualtune.use.serve.answers import Answers
from dualtune.use.serve.server import CompletionServer


@dataclass
class Served:
    """A running server."""

    server: CompletionServer
    told: list

    @property
    def port(self):
        return self.server.server_address[1]

    @property
    def engine(self):
        return self.server.answers._adapters.engine

    def ask(self, body, path="/v1/chat/completions", headers=None):
        """POST a body (a table, or bytes as they are). Return the status and the answer, JSON or text."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.request("POST", path, data, {"Content-Type": "application/json"} | (headers or {}))

    def request(self, method, path, body=None, headers=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            text = answer.read().decode()
        return answer.status, json.loads(text) if "json" in answer.headers["Content-Type"] else text


@pytest.fixture
def serve(open_backend, tiny_softmax, monkeypatch):
    """Start a server of a model; the default computes almost nothing."""
    monkeypatch.setattr(answers_module, "POLL_S", 0.01)  # which the end of each server waits for
    with contextlib.ExitStack() as stack:

        def start(backend="numpy", model=tiny_softmax, adapters=None, key=None, template="auto", **limits):
            found = load_adapter_set(open_backend(backend), str(model), adapters or {}, template=template)
            usual = {"max_tokens": 16, "max_prompt": 1000, "max_waiting": 64, "time_limit_s": 60}
            answers, told = Answers(found, **usual | limits), []
            served = Served(CompletionServer("127.0.0.1", 0, answers, key=key, tell=told.append), told)
            ended = threading.Event()

            def compute():
                while not ended.is_set():
                    answers.answer_next()

            threads = [
                threading.Thread(target=compute),
                threading.Thread(target=served.server.serve_forever, args=(0.05,)),
            ]
            for thread in threads:
                thread.start()

            def stop():
                ended.set()
                served.server.shutdown()
                served.server.server_close()
                for thread in threads:
                    thread.join()

            stack.callback(stop)
            return served

        yield start


@pytest.fixture
def hello():
    return {"model": "base", "messages": [{"role": "user", "content": "1 plus 1?"}], "max_tokens": 5, "temperature": 0}
