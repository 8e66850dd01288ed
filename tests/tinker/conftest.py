"""A server of `serve --train` in this process, and a client without a library, which sends JSON."""

import contextlib
import http.client
import json
import threading
from dataclasses import dataclass, field

import pytest

from dualtune.use.tinker.host import TrainingHost
from dualtune.use.tinker.server import TrainingServer
from dualtune.use.tinker.service import TrainingService


class RecordingHost(TrainingHost):
    """A host that notes which runs did what, in order."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.done = []

    def forward_backward(self, run, data, loss, config, is_cancelled=lambda: False):
        self.done.append((run, [len(datum.tokens) for datum in data]))
        return super().forward_backward(run, data, loss, config, is_cancelled)

    def optim_step(self, run, settings):
        self.done.append((run, settings.learning_rate))
        return super().optim_step(run, settings)

    def sample(self, requests, is_cancelled=lambda index: False):
        self.done.append(("sample", [request.num_samples for request in requests]))
        return super().sample(requests, is_cancelled)


@dataclass
class TrainingClient:
    """What a client sends, and the thread that uses the model, which may be halted."""

    server: TrainingServer
    host: RecordingHost
    key: str | None = None
    told: list = field(default_factory=list)
    goes_on: threading.Event = field(default_factory=threading.Event)
    sessions: list = field(default_factory=list)

    @property
    def service(self):
        return self.server.service

    @property
    def port(self):
        return self.server.server_address[1]

    def request(self, method, path, body=None, headers=None, timeout=60):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        with contextlib.closing(connection):
            keys = {"X-API-Key": self.key} if self.key else {}
            connection.request(method, path, body, keys | (headers or {}))
            answer = connection.getresponse()
            data = answer.read()
        kind = answer.headers.get("Content-Type", "")
        return answer.status, json.loads(data) if "json" in kind and data else data

    def post(self, path, body, headers=None):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.request("POST", f"/api/v1/{path}", data, {"Content-Type": "application/json"} | (headers or {}))

    def get(self, path):
        return self.request("GET", f"/api/v1/{path}")

    def send(self, path, /, **body):
        """Send a request that is accepted; return the answer."""
        status, table = self.post(path, body)
        assert status == 200, (status, table)
        return table

    def result(self, asked):
        """Wait for the result of a request, as a client does."""
        for _ in range(20):
            status, table = self.post("retrieve_future", {"request_id": asked["request_id"]})
            if status != 408:
                assert status == 200, (status, table)
                return table
        pytest.fail(f"{asked} has no result")

    def session(self):
        id = self.send("create_session", tags=[], user_metadata={"of": "a test"}, sdk_version="0")["session_id"]
        self.sessions.append(id)
        return id

    def run(self, session=None, number=0, rank=2, seed=1):
        asked = self.send(
            "create_model", session_id=session or self.session(), model_seq_id=number, base_model=self.service.base,
            lora_config={"rank": rank, "seed": seed},
        )  # fmt: skip
        return self.result(asked)["model_id"]


@pytest.fixture(scope="session")
def train_server(open_backend, tiny_softmax, tmp_path_factory):
    """Start a server; the default model computes almost nothing."""

    @contextlib.contextmanager
    def start(backend="numpy", model=tiny_softmax, runs=None, key=None, **limits):
        host = RecordingHost(open_backend(backend), str(model), runs or tmp_path_factory.mktemp("runs"))
        usual = {"max_waiting": 500, "max_tokens": 32, "timeout_s": 600, "say": lambda text: None}
        service, told = TrainingService(host, **usual | limits), []
        client = TrainingClient(TrainingServer("127.0.0.1", 0, service, key=key, tell=told.append), host, key, told)
        client.goes_on.set()
        ended = threading.Event()

        def work():
            while not ended.is_set():
                client.goes_on.wait()
                service.run_next()

        threads = [threading.Thread(target=work), threading.Thread(target=client.server.serve_forever, args=(0.05,))]
        for thread in threads:
            thread.start()
        try:
            yield client
        finally:
            ended.set()
            client.goes_on.set()
            client.server.shutdown()
            client.server.server_close()
            for thread in threads:
                thread.join()
            service.stop()

    return start


@pytest.fixture(scope="module")
def shared(train_server):
    """A server that the tests of a file share."""
    with train_server() as client:
        yield client
